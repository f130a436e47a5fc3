"""One request's answers: the engine's chunks in, events or a whole response out, as its API has them.

Pure and synchronous. Knows nothing of HTTP, engines or time-outs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from deepinfer.http.codec import CHAT, RESPONSES, Asked, Codec
from deepinfer.http.fault import HttpFault, anthropic_error, ended_early, openai_error
from deepinfer.stream import PromptLogprobs, Source, TokenChunk, TokenLogprob

if TYPE_CHECKING:
    from deepseek_recipe import StreamProcessor


class Event(NamedTuple):
    """One of a stream."""

    data: str
    """JSON."""
    name: str | None = None


class Usage(NamedTuple):
    """What is known of a prompt when its first token is there."""

    num_prompt_tokens: int
    num_cached_tokens: int
    source: Source | None
    prompt_logprobs: PromptLogprobs | None = None
    """Where they were asked for."""


class Exchange(Protocol):
    """Between one stream of the engine and one response."""

    done: str | None
    """What a stream of events ends with."""
    names: Mapping[str, str]
    """What its API calls fields of the engine."""
    num_samples: int

    @property
    def is_finished(self) -> bool:
        """Nothing more is wanted of the engine."""

    def begin(self, usage: Usage) -> list[Event]:
        """Before the first chunk."""

    def push(self, chunk: TokenChunk) -> list[Event]:
        """Raises `HttpFault` for an end that is no answer."""

    def failure(self, fault: HttpFault) -> Event:
        """The last event of a stream that had begun."""

    def whole(self) -> bytes:
        """The response, once it is finished."""


class ConversationExchange:
    """Chat Completions, Responses or Messages, as deepseek-recipe writes them.

    It also finds stop strings, in answers and not in reasoning. Samples beyond the first are ours: the recipe has one.
    """

    def __init__(self, codec: Codec, asked: Asked, response_id: str) -> None:
        self._codec = codec
        self._asked = asked
        self._id = response_id
        self._model = asked.converted.fields.model
        self._is_stream = bool(asked.converted.fields.stream)
        self._kind = getattr(codec.recipe, asked.api.response)
        self.done: str | None = self._kind.sse_done_data()
        self.names = asked.names
        self.num_samples = asked.params.n
        self._processors = [self._processor() for _ in range(asked.params.n)]
        self._responses: list[Any] = []
        self._is_finished = [False] * asked.params.n
        self._usage = Usage(0, 0, None)
        self._num_completion_tokens = 0
        self._num_events = 0
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in self._processors]

    def _processor(self) -> StreamProcessor:
        recipe, asked = self._codec.recipe, self._asked
        converted = asked.converted
        generator = getattr(recipe, asked.api.request).chunk_generator(converted.request, self._id, self._model)
        if asked.api is RESPONSES:
            if converted.echo is not None:
                generator = generator.with_echo(converted.echo)
            if converted.namespaces is not None:
                generator = generator.with_namespace_tool_map(converted.namespaces)
        options = converted.request.parsing_options
        tokenizer = None if self._codec.deepseek is None else self._codec.deepseek.tokenizer
        processor: StreamProcessor = recipe.StreamProcessor(generator, options, tokenizer)
        return processor

    @property
    def is_finished(self) -> bool:
        return all(self._is_finished)

    def begin(self, usage: Usage) -> list[Event]:
        self._usage = usage
        recipe = self._codec.recipe
        now, counts = int(time.time()), (usage.num_prompt_tokens, usage.num_cached_tokens)
        self._responses = [self._kind(self._id, self._model, now, *counts) for _ in self._processors]
        prompt = recipe.PromptUsage(prompt_tokens=counts[0], prompt_cache_hit_tokens=counts[1])
        ready = recipe.InferenceChunk.ready(prompt_usage=prompt)
        return [
            event
            for index, processor in enumerate(self._processors)
            for event in self._events(index, processor.push(ready))
        ]

    def push(self, chunk: TokenChunk) -> list[Event]:
        index, reason = chunk.sample_index, chunk.finish_reason
        if self._is_finished[index]:
            return []
        if reason not in (None, "stop", "length"):
            raise ended_early(reason)
        events = self._events(index, self._push_tokens(index, chunk))
        if reason is not None and not self._processors[index].finished:
            events += self._finish(index, reason)
        self._is_finished[index] = reason is not None or self._processors[index].finished
        return events

    def _push_tokens(self, index: int, chunk: TokenChunk) -> Sequence[Any]:
        """The token that has ended a sample is no part of its answer: the recipe would spell it out."""
        ids = chunk.token_ids[:-1] if chunk.finish_reason == "stop" else chunk.token_ids
        self._num_completion_tokens += len(ids)
        known = None if chunk.logprobs is None else chunk.logprobs[: len(ids)]
        chunks, processor = self._codec.recipe.InferenceChunk, self._processors[index]
        if self._codec.deepseek is None:
            self._logprobs[index] += known or ()
            return processor.push(chunks.text(chunk.text, len(ids))) if ids or chunk.text else ()
        logprobs = None if known is None else [(entry.logprob, list(map(tuple, entry.top))) for entry in known]
        return processor.push(chunks.tokens(ids, logprobs)) if ids else ()

    def _finish(self, index: int, reason: str) -> list[Event]:
        reasons, processor = self._codec.recipe.InferenceFinishReason, self._processors[index]
        finish = self._codec.recipe.InferenceChunk.finish(reasons.Stop if reason == "stop" else reasons.Length)
        events = list(processor.push(finish))
        return self._events(index, events + processor.finish())

    def _events(self, index: int, chunks: Sequence[Any]) -> list[Event]:
        """For a stream as JSON; for a whole response nothing, they go into it."""
        if not self._is_stream:
            for chunk in chunks:
                self._responses[index].accumulate(chunk)
            return []
        self._num_events += len(chunks)
        return [Event(self._json(index, chunk.to_json()), self._kind.sse_event_name(chunk)) for chunk in chunks]

    def _json(self, index: int, text: str) -> str:
        """What the recipe writes, with what it cannot know of several samples, and of tokens that it has not seen."""
        is_plain = len(self._processors) == 1 and not self._logprobs[index]
        if is_plain or self._asked.api is not CHAT:
            return text
        chunk = msgspec.json.decode(text)
        for choice in chunk["choices"]:
            choice["index"] = index
            if self._logprobs[index] and choice["delta"].get("content") is not None:
                choice["logprobs"] = self._spelt(index)
        if chunk.get("usage"):
            chunk["usage"] = self._sum(chunk["usage"]) if sum(self._is_finished) == len(self._processors) - 1 else None
        return msgspec.json.encode(chunk).decode()

    def _spelt(self, index: int) -> dict[str, Any]:
        """Log probabilities that have come since the last time, as Chat Completions has them."""
        entries, self._logprobs[index] = self._logprobs[index], []
        return {"content": [self._entry(entry) for entry in entries], "refusal": None}

    def _entry(self, entry: TokenLogprob) -> dict[str, Any]:
        top = [self._token(token_id, logprob) for token_id, logprob in entry.top]
        return {**self._token(entry.token_id, entry.logprob), "top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = spelling(self._usage.source, token_id)
        return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}

    def _sum(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Of all samples; the prompt counts once."""
        num_completion = self._num_completion_tokens
        totals = {
            "completion_tokens": num_completion,
            "total_tokens": self._usage.num_prompt_tokens + num_completion,
        }
        return {name: value for name, value in (usage | totals).items() if name != "completion_tokens_details"}

    def failure(self, fault: HttpFault) -> Event:
        if self._asked.api is CHAT:
            return _json_event(openai_error(fault))
        if self._asked.api is RESPONSES:
            error = {"code": fault.code, "message": fault.message, "param": fault.field}
            return _json_event({"type": "error", **error, "sequence_number": self._num_events}, "error")
        return _json_event(anthropic_error(fault), "error")

    def whole(self) -> bytes:
        text: str = self._responses[0].to_json()
        if self._asked.api is not CHAT or (len(self._responses) == 1 and not self._logprobs[0]):
            return text.encode()
        response = msgspec.json.decode(text)
        response["choices"] = [self._choice(index) for index in range(len(self._responses))]
        if len(self._responses) > 1:
            response["usage"] = self._sum(response["usage"])
        return msgspec.json.encode(response)

    def _choice(self, index: int) -> dict[str, Any]:
        choice: dict[str, Any] = msgspec.json.decode(self._responses[index].to_json())["choices"][0]
        choice["index"] = index
        if self._logprobs[index]:
            choice["logprobs"] = self._spelt(index)
        return choice


def spelling(source: Source | None, token_id: int) -> str:
    """A token by itself, or its number where there is no tokenizer."""
    return f"token_id:{token_id}" if source is None or source.spell is None else source.spell(token_id)


def _json_event(content: dict[str, Any], name: str | None = None) -> Event:
    return Event(msgspec.json.encode(content).decode(), name)
