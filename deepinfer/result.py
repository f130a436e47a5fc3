"""What `Engine.generate` returns: a request's samples, whole, and the same in the words that vLLM has for it.

Knows how to grow out of chunks, and nothing of where they come from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from msgspec import Struct, field

from deepinfer.draft_counts import DraftCounts
from deepinfer.request import FinishReason
from deepinfer.stream import Source, StopReason, TokenChunk, TokenLogprob


class Sample(Struct):
    """One of the `n` samples of a request."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: StopReason = None
    """With the finish reason `stop`: the stop string or stop token that ended it; `None` for the model's own end."""

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of its tokens' log probabilities, if they were asked for."""
        return None if self.logprobs is None else sum(entry.logprob for entry in self.logprobs)


class Completion(Struct, dict=True):
    """Everything that one request brought."""

    request_id: str
    samples: list[Sample] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens that a prefix hit spared."""
    num_preemptions: int = 0
    """How often its samples gave way to others and were computed again."""
    drafts: DraftCounts = field(default_factory=DraftCounts)
    """What became of the drafts of its samples."""
    prompt_token_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """One entry a token of the prompt, the first `None`, if they were asked for."""

    def attach(self, source: Source | None) -> None:
        """What the samples go on from: the request's own, not a copy. It is no field: it is not compared or encoded."""
        self.__dict__["source"] = source

    @property
    def text(self) -> str:
        """Of the first sample."""
        return self.samples[0].text

    @property
    def token_ids(self) -> list[int]:
        """Of the first sample."""
        return self.samples[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        """Of the first sample."""
        return self.samples[0].finish_reason

    @property
    def num_generated_tokens(self) -> int:
        return sum(len(sample.token_ids) for sample in self.samples)

    def add(self, *chunks: TokenChunk) -> None:
        """Further deltas. A text grows once a call: many at once cost less than one by one."""
        texts: dict[int, list[str]] = {}
        for chunk in chunks:
            self._add_tokens(chunk)
            texts.setdefault(chunk.sample_index, []).append(chunk.text)
        for index, parts in texts.items():
            self.samples[index].text += "".join(parts)

    def _add_tokens(self, chunk: TokenChunk) -> None:
        while len(self.samples) <= chunk.sample_index:
            self.samples.append(Sample())
        sample = self.samples[chunk.sample_index]
        sample.token_ids += chunk.token_ids
        sample.finish_reason = chunk.finish_reason
        sample.stop_reason = chunk.stop_reason
        if chunk.logprobs is not None:
            if sample.logprobs is None:
                sample.logprobs = []
            sample.logprobs += chunk.logprobs

    # ---- as vLLM's RequestOutput has it

    @property
    def source(self) -> Source | None:
        """The prompt as it was given and as token ids; `None` if the completion did not come from `generate`."""
        found: Source | None = self.__dict__.get("source")
        return found

    @property
    def prompt(self) -> str | None:
        """Its text, after the chat template; `None` where token ids were given."""
        return None if self.source is None else self.source.text

    @property
    def prompt_token_ids(self) -> list[int]:
        return [] if self.source is None else self.source.token_ids.tolist()

    @property
    def outputs(self) -> list[SampleView]:
        """The samples, as vLLM's CompletionOutput has them."""
        spell = None if self.source is None else self.source.spell
        return [SampleView(index, sample, spell) for index, sample in enumerate(self.samples)]

    @property
    def prompt_logprobs(self) -> list[Mapping[int, LogprobView] | None] | None:
        """For each token of the prompt but the first a mapping, as `SampleView.logprobs`."""
        spell = None if self.source is None else self.source.spell
        entries = self.prompt_token_logprobs
        return None if entries is None else [None if entry is None else _by_token(entry, spell) for entry in entries]

    @property
    def finished(self) -> bool:
        """Have all samples ended?"""
        return all(sample.finish_reason is not None for sample in self.samples)


class LogprobView(NamedTuple):
    """A token's log probability, as vLLM's Logprob has it."""

    logprob: float
    rank: int
    decoded_token: str | None
    """`None` without a tokenizer."""


class SampleView(Struct, frozen=True):
    """A sample, as vLLM's CompletionOutput has it."""

    index: int
    sample: Sample
    spell: Callable[[int], str] | None

    @property
    def text(self) -> str:
        return self.sample.text

    @property
    def token_ids(self) -> list[int]:
        return self.sample.token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.sample.finish_reason

    @property
    def stop_reason(self) -> StopReason:
        return self.sample.stop_reason

    @property
    def cumulative_logprob(self) -> float | None:
        return self.sample.cumulative_logprob

    @property
    def logprobs(self) -> list[Mapping[int, LogprobView]] | None:
        """For each token a mapping: of itself and of the best, by id."""
        entries = self.sample.logprobs
        return None if entries is None else [_by_token(entry, self.spell) for entry in entries]


def _by_token(entry: TokenLogprob, spell: Callable[[int], str] | None) -> dict[int, LogprobView]:
    def view(token_id: int, logprob: float, rank: int) -> LogprobView:
        return LogprobView(logprob, rank, None if spell is None else spell(token_id))

    views = {entry.token_id: view(entry.token_id, entry.logprob, entry.rank)}
    for place, best in enumerate(entry.top):
        views.setdefault(best.token_id, view(best.token_id, best.logprob, 1 + place))
    return views
