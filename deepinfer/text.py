"""Between text and token ids, for one engine: prompts and messages in, the text of samples out.

Knows nothing of requests' lives. Everything here may run in a thread: it holds no state of a request.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepinfer.chat import ChatTemplate
from deepinfer.detokenizer import DetokenizerFactory
from deepinfer.output import OutputText
from deepinfer.stops import StopMatcher
from deepinfer.tokenizer import Tokenizer
from deepinfer_protocol import SamplingParams


class TextPipeline:
    """A model's tokenizer, chat template and detokenizer tables."""

    def __init__(self, path: Path) -> None:
        """Reads the tokenizer of the model at `path`. Raises `ModelError`."""
        self.tokenizer = Tokenizer.from_model(path)
        self.has_chat_template = self.tokenizer.chat_template is not None
        self._template = ChatTemplate(
            self.tokenizer.chat_template,
            bos_token=self.tokenizer.bos_token,
            eos_token=self.tokenizer.eos_token,
        )
        self._detokenizers = DetokenizerFactory(self.tokenizer)
        ids = range(self.tokenizer.vocab_size)
        self.max_token_characters = max((len(self.tokenizer.token(token_id) or "") for token_id in ids), default=1)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The model's own chat format, ready for an answer. Raises `InvalidRequest`."""
        return self._template.render(messages)

    def output(self, params: SamplingParams, prompt: array[int], stops: Sequence[str]) -> OutputText | None:
        """What turns one sample's tokens into text; `None` when nobody asked for text."""
        if not params.detokenize:
            return None
        detokenizer = self._detokenizers.create(prompt, skip_special_tokens=params.skip_special_tokens)
        return OutputText(detokenizer, StopMatcher(tuple(stops)) if stops else None, params.min_tokens)
