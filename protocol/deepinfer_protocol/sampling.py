"""What a user may ask of the sampling of one request. Data only: `deepinfer.admission` checks it."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct


class SamplingParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a request's tokens are chosen and when they end.

    Nothing is checked here: `Engine.stream` checks every field against the model before the request exists, and
    refuses with `InvalidRequest`, which names the field and the limit.
    """

    max_tokens: int | None = None
    """Most tokens a sample may have; `None`: until the model's context ends."""
    min_tokens: int = 0
    """Before this many tokens no end-of-sequence token, stop token or stop string ends the sample."""
    temperature: float = 1.0
    """0 takes the most probable token; 1 samples from the model's distribution."""
    top_p: float = 1.0
    """Keep the fewest most probable tokens whose probabilities sum to at least this."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 and -1 keep all."""
    n: int = 1
    """How many samples of the same prompt; they share the prompt's blocks."""
    stop: str | Sequence[str] = ()
    """Text that ends a sample. It is not part of the text."""
    stop_token_ids: Sequence[int] = ()
    """Further tokens that end a sample."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence tokens."""
    logprobs: int | None = None
    """`None`: none. k: the log probability of each token, and the k best alternatives."""
    seq_seed: int | None = None
    """Makes the request repeatable: the noise of a token is a function of this seed, the sample and its position."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    detokenize: bool = True
    """`False` streams token ids only."""
