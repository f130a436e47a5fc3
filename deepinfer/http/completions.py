"""/v1/completions: raw text or token ids in, text out, in the form that OpenAI's API had before chats.

Special tokens that the prompt spells out are read as such. Pure: it knows nothing of HTTP, and engines only by their
chunks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import msgspec

from deepinfer.http.exchange import Event, Usage, spelling
from deepinfer.http.fault import HttpFault, ended_early, openai_error, refused
from deepinfer.http.fields import (
    MAX_IDS,
    MAX_VALUES,
    CompletionFields,
    check_served,
    check_values,
    decode_fields,
    decode_object,
)
from deepinfer.stream import TokenChunk, TokenLogprob
from deepinfer_protocol import SamplingParams

DEFAULT_MAX_TOKENS: Final = 16
"""As OpenAI's API has it."""
MAX_ECHOED_LOGPROBS: Final = 1 << 17
"""Of a prompt, the most probable tokens among them: writing more would keep others waiting."""
MAX_SKIPPED: Final = 4096
"""Characters of a prompt in which the next of its tokens is looked for."""


class AskedCompletion(NamedTuple):
    """What a body asks for."""

    prompts: Sequence[str | list[int]]
    params: SamplingParams
    fields: CompletionFields


def ask_completion(body: bytes, max_ids: int) -> AskedCompletion:
    """Raises `HttpFault`, which names the field. The engine checks the values; `max_ids` are its context's."""
    check_values(body, MAX_VALUES + max(max_ids, MAX_IDS))
    fields = decode_fields(body, CompletionFields)
    check_served(decode_object(body), CompletionFields)
    prompts = fields.prompts(max_ids)
    if len(prompts) > 1 and fields.stream:
        raise refused("stream", "stream: several prompts are answered whole only", "unsupported")
    given = {name: value for name in _PASSED if (value := getattr(fields, name)) is not None}
    params = SamplingParams(
        max_tokens=fields.max_tokens or DEFAULT_MAX_TOKENS,
        seq_seed=fields.seed,
        prompt_logprobs=fields.logprobs if fields.echo else None,
        **given,
        **fields.sampling(),
    )
    return AskedCompletion(prompts, params, fields)


_PASSED: Final = (
    "n",
    "temperature",
    "top_p",
    "stop",
    "logprobs",
    "stop_token_ids",
    "skip_special_tokens",
    "include_stop_str_in_output",
)


class CompletionPrompt(NamedTuple):
    """One of those asked for, ready for an engine."""

    token_ids: Sequence[int]
    text: str
    """What `echo` repeats, where it is asked for."""


class _Sample:
    """One choice as it grows."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: str | None = None
        self.num_characters = 0
        """Told so far."""


class CompletionExchange:
    """Of one prompt; its choices are numbered from `first_index` on."""

    done: str | None = "[DONE]"
    names: Mapping[str, str] = MappingProxyType({})

    def __init__(self, asked: AskedCompletion, echo: str, response_id: str, first_index: int = 0) -> None:
        """`echo`: what the text of each begins with."""
        self._fields = asked.fields
        self._first_index = first_index
        self._samples = [_Sample() for _ in range(asked.params.n)]
        self.num_samples = asked.params.n
        self._usage = Usage(0, 0, None)
        self._echo = echo
        self._echoed_logprobs: dict[str, list[Any]] = {}
        self.num_completion_tokens = 0
        head = {"id": response_id, "object": "text_completion", "created": int(time.time())}
        self._head = {**head, "model": asked.fields.model}

    @property
    def is_finished(self) -> bool:
        return all(sample.finish_reason is not None for sample in self._samples)

    @property
    def num_prompt_tokens(self) -> int:
        return self._usage.num_prompt_tokens

    def begin(self, usage: Usage) -> list[Event]:
        self._usage = usage
        if not self._fields.echo:
            return []
        if self._fields.logprobs is not None:
            self._echoed_logprobs = self._of_prompt()
        for sample in self._samples:
            sample.text.append(self._echo)
        echoes = [self._delta(index, self._echo, (), None, is_first=True) for index in range(len(self._samples))]
        return [event for events in echoes for event in events]

    def push(self, chunk: TokenChunk) -> list[Event]:
        if chunk.finish_reason not in (None, "stop", "length"):
            raise ended_early(chunk.finish_reason)
        sample = self._samples[chunk.sample_index]
        sample.finish_reason = chunk.finish_reason
        self.num_completion_tokens += len(chunk.token_ids)
        logprobs = chunk.logprobs or ()
        events = self._delta(chunk.sample_index, chunk.text, logprobs, chunk.finish_reason)
        if not self._fields.stream:
            sample.text.append(chunk.text)
            sample.logprobs += logprobs
        if self.is_finished and self._includes_usage:
            events.append(self._event({**self._head, "choices": [], "usage": self.usage()}))
        return events

    def _delta(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob], reason: str | None, *, is_first: bool = False
    ) -> list[Event]:
        if not self._fields.stream or not (text or logprobs or reason):
            return []
        usage = {"usage": None} if self._includes_usage else {}
        choice = self._choice(index, text, logprobs, reason, is_first=is_first)
        return [self._event({**self._head, "choices": [choice], **usage})]

    @property
    def _includes_usage(self) -> bool:
        options = self._fields.stream_options
        return bool(self._fields.stream and options is not None and options.include_usage)

    def _choice(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob], reason: str | None, *, is_first: bool
    ) -> dict[str, Any]:
        """`is_first`: `text` begins with what is echoed of the prompt, if anything is."""
        sample = self._samples[index]
        known = None
        if self._fields.logprobs is not None:
            known = self._spelt(logprobs, len(self._echo) if is_first else sample.num_characters)
            if is_first and self._echoed_logprobs:
                known = {name: self._echoed_logprobs[name] + found for name, found in known.items()}
        sample.num_characters += len(text)
        return {"index": self._first_index + index, "text": text, "logprobs": known, "finish_reason": reason}

    def _spelt(self, entries: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
        source = self._usage.source
        tokens = [spelling(source, entry.token_id) for entry in entries]
        offsets = list(accumulate(map(len, tokens), initial=offset))[: len(tokens)]
        return {
            "tokens": tokens,
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [{spelling(source, token): logprob for token, logprob in entry.top} for entry in entries],
            "text_offset": offsets,
        }

    def _of_prompt(self) -> dict[str, list[Any]]:
        """As `_spelt`, of the echo; nothing comes before its first token. Raises `HttpFault` for too many."""
        source, known = self._usage.source, self._usage.prompt_logprobs
        assert source is not None and known is not None, "the engine has them before its first token"
        if len(known) * (1 + (self._fields.logprobs or 0)) > MAX_ECHOED_LOGPROBS:
            told = f"at most {MAX_ECHOED_LOGPROBS} log probabilities of a prompt are written"
            raise refused("echo", f"echo: {told}", "unsupported")
        entries = [entry for entry in known if entry is not None]
        first = spelling(source, source.token_ids[0])
        found = self._spelt(entries, 0)
        tokens = [first, *found["tokens"]]
        return {
            "tokens": tokens,
            "token_logprobs": [None, *found["token_logprobs"]],
            "top_logprobs": [None, *found["top_logprobs"]],
            "text_offset": list(_places(tokens, self._echo)),
        }

    def usage(self) -> dict[str, Any]:
        num_prompt, num_new = self._usage.num_prompt_tokens, self.num_completion_tokens
        cached = {"cached_tokens": self._usage.num_cached_tokens}
        return _totals(num_prompt, num_new) | {"prompt_tokens_details": cached}

    def failure(self, fault: HttpFault) -> Event:
        return self._event(openai_error(fault))

    def choices(self) -> list[dict[str, Any]]:
        return [
            self._choice(index, "".join(sample.text), sample.logprobs, sample.finish_reason, is_first=True)
            for index, sample in enumerate(self._samples)
        ]

    def whole(self) -> bytes:
        return msgspec.json.encode({**self._head, "choices": self.choices(), "usage": self.usage()})

    def whole_of(self, exchanges: Sequence[CompletionExchange]) -> bytes:
        """Of several prompts, under the head of this one."""
        choices = [choice for exchange in exchanges for choice in exchange.choices()]
        num_prompt = sum(exchange.num_prompt_tokens for exchange in exchanges)
        num_new = sum(exchange.num_completion_tokens for exchange in exchanges)
        return msgspec.json.encode({**self._head, "choices": choices, "usage": _totals(num_prompt, num_new)})

    @staticmethod
    def _event(content: dict[str, Any]) -> Event:
        return Event(msgspec.json.encode(content).decode())


def _totals(num_prompt: int, num_new: int) -> dict[str, Any]:
    return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}


def _places(tokens: Sequence[str], text: str) -> Iterator[int]:
    """Where each of `tokens` begins in `text`.

    Parts of a character, and tokens that `text` leaves out, have the place behind the last one that was found.
    """
    place = num_skipped = 0
    for token in tokens:
        end = place + min(num_skipped, MAX_SKIPPED) + 1 + len(token)
        found = text.find(token, place, end) if token else place
        yield place if found < 0 else found
        if found < 0:
            num_skipped += len(token)
        else:
            place, num_skipped = found + len(token), 0
