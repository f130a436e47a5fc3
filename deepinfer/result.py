"""What `Engine.generate` returns: a request's samples, whole. Knows how to grow out of chunks, and nothing else."""

from __future__ import annotations

from msgspec import Struct, field

from deepinfer.request import FinishReason
from deepinfer.stream import TokenChunk, TokenLogprob


class Sample(Struct):
    """One of the `n` samples of a request."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None


class Completion(Struct):
    """Everything that one request brought."""

    request_id: str
    samples: list[Sample] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens that a prefix hit spared."""
    num_preemptions: int = 0
    """How often its samples gave way to others and were computed again."""

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

    def add(self, chunk: TokenChunk) -> None:
        """One more delta."""
        while len(self.samples) <= chunk.sample_index:
            self.samples.append(Sample())
        sample = self.samples[chunk.sample_index]
        sample.text += chunk.text
        sample.token_ids += chunk.token_ids
        sample.finish_reason = chunk.finish_reason
        if chunk.logprobs is not None:
            sample.logprobs = [*(sample.logprobs or ()), *chunk.logprobs]
