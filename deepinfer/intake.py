"""From what a caller gave to a request of the core: every check that needs no queue, and the encoding of text.

A request whose text is long, or whose output is forced into something, is known to the core before its text is encoded
and its grammar compiled, in a thread: it has its id, its deadlines and its share of the load, and it can be aborted.
Knows nothing of loops, streams or workers.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from msgspec.structs import replace

from deepinfer.admission import (
    Admitted,
    ModelLimits,
    admit,
    check_characters,
    check_params,
    check_priority,
    check_request_id,
    check_timeout,
    check_token_ids,
    check_traceparent,
    freeze_params,
    is_long,
)
from deepinfer.chat import ChatOptions
from deepinfer.core import EngineCore
from deepinfer.errors import DeepInferError, EngineClosed, InternalError, InvalidRequest
from deepinfer.grammar import GrammarSource, grammar_source
from deepinfer.grammar_compiler import Grammar, GrammarCompiler
from deepinfer.migrating import plain_prompt
from deepinfer.request import Request
from deepinfer.stream import Mailbox, PromptLogprobs, Source
from deepinfer.text import TextPipeline
from deepinfer_protocol import SamplingParams

INLINE_CHARACTERS: Final = 1000
INLINE_STRINGS: Final = 32
"""Text of more characters, or messages of more strings, are encoded in a thread."""
CHARACTERS_PER_TOKEN: Final = 4
"""What text weighs in the queue until it is encoded."""

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a mapping with `prompt` or `prompt_token_ids`."""
Messages = Sequence[Mapping[str, Any]]


class Intake:
    """Makes requests for one loaded model, and hands them to its core."""

    def __init__(
        self,
        limits: ModelLimits,
        text: TextPipeline | None,
        executor: ThreadPoolExecutor,
        grammars: GrammarCompiler,
        grammar_executor: ThreadPoolExecutor,
        core: EngineCore,
        post: Callable[[Callable[[Any], None], Any], None],
        next_seed: Callable[[], int] | None = None,
    ) -> None:
        """`post(action, argument)` runs an action in the core, in the order of the calls, from any thread.

        Text is encoded in `executor`; `grammars` compiles in an executor of its own, which must have one thread: nobody
        waits for the grammars of others. `next_seed` gives the seed of each request that has none of its own; `None`:
        the system's generator does.
        """
        self._next_seed = next_seed
        self._limits = limits
        self._text = text
        self._executor = executor
        self._grammars = grammars
        self._grammar_executor = grammar_executor
        self._core = core
        self._post = post

    def take(
        self,
        mailbox: Mailbox,
        request_id: str,
        prompt: Prompt | None,
        messages: Messages | None,
        params: SamplingParams | None,
        *,
        chat: ChatOptions,
        priority: int,
        queue_timeout_s: float | None,
        timeout_s: float | None,
        traceparent: str | None = None,
    ) -> Request:
        """Check and submit. Raises `InvalidRequest`; what is found later closes the mailbox with it."""
        request_id = check_request_id(request_id)
        params = check_params(params, self._limits)
        source = grammar_source(params)
        now = time.monotonic()
        options: Any = {
            "priority": check_priority(priority),
            "arrival_s": now,
            "queue_deadline_s": now + check_timeout("queue_timeout_s", queue_timeout_s),
            "deadline_s": now + check_timeout("timeout_s", timeout_s),
            "traceparent": check_traceparent(traceparent),
            "skips_prefix_cache": bool(params.skip_reading_prefix_cache),
            "user": mailbox,
        }
        if isinstance(prompt, Mapping):
            prompt = plain_prompt(prompt)
        if (prompt is None) == (messages is None):
            raise InvalidRequest("prompt", "give a prompt or messages, and not both")
        for field, value in chat._asdict().items() if messages is None else ():
            if value is not None:
                raise InvalidRequest(field, "it says how messages become a prompt, and a prompt came")
        mailbox.num_unfinished = params.n
        if params.seq_seed is None and params.temperature and self._next_seed is not None:
            params = replace(params, seq_seed=self._next_seed())  # here, where the order of the calls is known
        is_quick = _is_quick(prompt, messages) and len(chat.tools or b"") <= INLINE_CHARACTERS
        if is_quick and source is None and not is_long(params):
            return self._submit(request_id, prompt, messages, chat, params, options)
        if messages is None and not isinstance(prompt, str):
            prompt = check_token_ids(prompt, self._limits)
        messages, params = _copied(messages), freeze_params(params)  # the caller's own may change meanwhile
        expected = min(_num_expected_tokens(prompt, messages), self._limits.max_length)
        request = Request.unencoded(request_id, params.n, expected, **options)
        self._post(self._core.submit, request)
        executor = self._executor if source is None else self._grammar_executor
        executor.submit(self._encode_later, request, prompt, messages, chat, params, source)
        return request

    def _submit(
        self,
        request_id: str,
        prompt: Prompt | None,
        messages: Messages | None,
        chat: ChatOptions,
        params: SamplingParams,
        options: Any,
    ) -> Request:
        text, ids = self._encode(prompt, messages, chat)
        admitted = self._admit(params, ids)
        ends: Any = {"max_length": admitted.max_length, "stop_ids": admitted.stop_ids}
        request = Request(request_id, ids, admitted.sampling, **ends, **options)
        self._attach_text(request, params, text, ids, admitted)
        self._post(self._core.submit, request)
        return request

    def _encode_later(
        self,
        request: Request,
        prompt: Prompt | None,
        messages: Messages | None,
        chat: ChatOptions,
        params: SamplingParams,
        source: GrammarSource | None,
    ) -> None:
        """In a thread. What goes wrong here is the request's, and told to its reader."""
        if request.num_unfinished == 0 or request.user.is_closed:
            return  # ended meanwhile
        try:
            text, ids = self._encode(prompt, messages, chat)
            admitted = self._admit(params, ids)
            if source is not None:
                self._attach_matchers(request, self._grammars.compile(source), ids, admitted)
            self._attach_text(request, params, text, ids, admitted)
        except DeepInferError as error:
            self._post_late(self._core.refuse, (request, error))
        except BaseException as error:  # a panic of a library is no Exception
            failure = InternalError(f"the prompt could not be encoded: {type(error).__name__}: {error}")
            self._post_late(self._core.refuse, (request, failure))
        else:
            self._post_late(self._core.encode, (request, ids, admitted))

    def _post_late(self, action: Callable[[Any], None], argument: Any) -> None:
        try:
            self._post(action, argument)
        except EngineClosed:
            pass  # which has ended the request

    def _admit(self, params: SamplingParams, prompt: array[int]) -> Admitted:
        bad_words: list[Sequence[int]] = []
        for word in params.bad_words or ():
            if isinstance(word, str):
                assert self._text is not None
                bad_words += self._text.encode_bad_word(word)
            else:
                bad_words.append(word)
        return admit(params, len(prompt), self._limits, bad_words)

    def _attach_text(
        self, request: Request, params: SamplingParams, text: str | None, prompt: array[int], admitted: Admitted
    ) -> None:
        """What turns the tokens of each sample into text, and what the reader can know from the start."""
        mailbox: Mailbox = request.user
        mailbox.num_prompt_tokens = len(prompt)
        mailbox.source = Source(text, prompt, None if self._text is None else self._text.spell)
        mailbox.told_stop_ids = admitted.told_stop_ids
        if params.prompt_logprobs is not None and len(prompt) == 1:
            mailbox.prompt_logprobs = PromptLogprobs(())
        if self._text is not None:
            outputs = self._text.outputs(params, prompt, admitted.stop_strings)
            for seq, output in zip(request.samples, outputs, strict=True):
                seq.user = output

    def _attach_matchers(self, request: Request, grammar: Grammar, prompt: array[int], admitted: Admitted) -> None:
        opening_id = None if self._text is None else self._text.answer_opening(prompt)
        for seq, sampling in zip(request.samples, admitted.sampling, strict=True):
            seq.matcher = grammar.matcher(sampling, opening_id)

    def _encode(
        self, prompt: Prompt | None, messages: Messages | None, chat: ChatOptions
    ) -> tuple[str | None, array[int]]:
        """The prompt as text, if it is text, and as token ids."""
        if messages is None and not isinstance(prompt, str):
            return None, check_token_ids(prompt, self._limits)
        if self._text is None:
            raise InvalidRequest("prompt", "this engine has no tokenizer: give token ids")
        if messages is not None:
            text, encode = self._text.render(messages, chat)
        else:
            assert isinstance(prompt, str)
            text, encode = prompt, partial(self._text.encode, prompt, add_special_tokens=True)
        check_characters("prompt", len(text), self._limits, self._text.max_token_characters)
        return text, check_token_ids(encode(), self._limits)


def _is_quick(prompt: Prompt | None, messages: Messages | None) -> bool:
    """Checking and encoding it keeps the loop for no more than a few milliseconds."""
    if messages is None:
        return not isinstance(prompt, str) or len(prompt) <= INLINE_CHARACTERS
    if not isinstance(messages, (list, tuple)) or len(messages) > INLINE_STRINGS:
        return False
    if not all(isinstance(message, dict) for message in messages):
        return False
    strings = [text for message in messages for text in message.values()]
    if len(strings) > INLINE_STRINGS or not all(isinstance(text, str) for text in strings):
        return False
    return sum(map(len, strings)) <= INLINE_CHARACTERS


def _copied(messages: Messages | None) -> Messages | None:
    """Messages and their lists of parts; what is no list of messages is left for the encoder's thread to refuse."""
    if not isinstance(messages, (list, tuple)):
        return messages
    return [_copied_message(message) if isinstance(message, dict) else message for message in messages]


def _copied_message(message: dict[str, Any]) -> dict[str, Any]:
    copied = message.copy()
    parts = copied.get("content")
    if isinstance(parts, (list, tuple)):
        copied["content"] = [part.copy() if isinstance(part, dict) else part for part in parts]
    return copied


def _num_expected_tokens(prompt: Prompt | None, messages: Messages | None) -> int:
    """A guess at the length of the prompt before it is encoded."""
    if isinstance(prompt, array):
        return len(prompt)
    if isinstance(prompt, str):
        return len(prompt) // CHARACTERS_PER_TOKEN
    if isinstance(messages, (list, tuple)):
        contents = [message.get("content") for message in messages[:INLINE_STRINGS] if isinstance(message, dict)]
        return sum(len(content) for content in contents if isinstance(content, str)) // CHARACTERS_PER_TOKEN
    return 0
