"""Between text and token ids, for one engine: prompts and messages in, the text of samples out.

Knows nothing of requests' lives. Everything here may run in a thread: it holds no state of a request.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

from deepinfer.chat import NO_OPTIONS, ChatFormat, ChatOptions, ChatPrompt, ChatTemplate, TemplateFormat
from deepinfer.deepseek_chat import DeepseekFormat, deepseek_family
from deepinfer.detokenizer import DetokenizerFactory
from deepinfer.output import OutputText
from deepinfer.stops import StopMatcher
from deepinfer.tokenizer import Tokenizer
from deepinfer_protocol import SamplingParams

MAX_SPACE_TOKENS: Final = 8
"""Of white space between the mark of thinking and the end of a prompt."""


class TextPipeline:
    """A model's tokenizer, its way with messages, and its detokenizer tables."""

    def __init__(self, path: Path, model: Path | None = None) -> None:
        """Reads the tokenizer at `path`, for the model at `model` (`None`: the same). Raises `ModelError`."""
        self.tokenizer = Tokenizer.from_model(path)
        self.chat = self._chat_format(path, path if model is None else model)
        self.has_chat_template = self.chat.is_known
        self._detokenizers = DetokenizerFactory(self.tokenizer)
        self._reasoning_ids = self.tokenizer.reasoning_ids
        ids = range(self.tokenizer.vocab_size)
        self.max_token_characters = max((len(self.tokenizer.token(token_id) or "") for token_id in ids), default=1)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def encode_bad_word(self, word: str) -> list[list[int]]:
        """The token ids of `word` at the start of a line and, where that is another token, behind a space."""
        bare = self.encode(word.lstrip(), add_special_tokens=False)
        spaced = self.encode(f" {word.lstrip()}", add_special_tokens=False)
        is_other = len(spaced) == len(bare) and spaced[:1] != bare[:1]
        return [ids for ids in (bare, spaced if is_other else []) if ids]

    def spell(self, token_id: int) -> str:
        """A token by itself; bytes that are no whole character come as U+FFFD."""
        return self.tokenizer.decode([token_id], skip_special_tokens=False)

    def answer_opening(self, prompt: array[int]) -> int | None:
        """The token behind which the answer to `prompt` begins, where the prompt lets the model think before it.

        It does where it ends with the mark of thinking, and white space at most: templates write a line break there.
        """
        if self._reasoning_ids is None:
            return None
        opening, closing = self._reasoning_ids
        tail = islice(reversed(prompt), MAX_SPACE_TOKENS + 1)
        last = next((token_id for token_id in tail if token_id == opening or self.spell(token_id).strip()), None)
        return closing if last == opening else None

    def render(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions = NO_OPTIONS) -> ChatPrompt:
        """The model's own chat format, ready for an answer. Raises `InvalidRequest`."""
        return self.chat.render(messages, options)

    def _chat_format(self, path: Path, model: Path) -> ChatFormat:
        if path.is_dir() and (family := deepseek_family(model)) is not None:
            return DeepseekFormat(family, path / "tokenizer.json")
        tokenizer = self.tokenizer
        template = ChatTemplate(tokenizer.chat_template, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
        return TemplateFormat(template, partial(self.encode, add_special_tokens=False))

    def outputs(self, params: SamplingParams, prompt: array[int], stops: Sequence[str]) -> list[OutputText | None]:
        """What turns the tokens of each sample into text; `None` when nobody asked for text."""
        if not params.detokenize:
            return [None] * params.n
        matcher = StopMatcher(tuple(stops)) if stops else None
        return [
            OutputText(
                self._detokenizers.create(prompt, skip_special_tokens=params.skip_special_tokens),
                None if matcher is None else matcher.fresh(),
                params.min_tokens,
                keeps_stop=params.include_stop_str_in_output,
            )
            for _ in range(params.n)
        ]
