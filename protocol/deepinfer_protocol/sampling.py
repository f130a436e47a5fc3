"""What a user may ask of the sampling of one request. Data only: `deepinfer.admission` checks it.

A token is chosen in this order: what the output is forced into (`json_schema`, `regex`, `choice`, `grammar`),
`allowed_token_ids`, `banned_token_ids`, `bad_words` and `min_tokens` take tokens out,
`logit_bias` is added, the penalties are taken off, `temperature` divides, then `min_p`, `top_k` and `top_p` cut, and
what is left is sampled. Log probabilities are those of the model, before all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct


class SamplingParams(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
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
    min_p: float = 0.0
    """Keep the tokens that are at least this times as probable as the most probable one."""
    repetition_penalty: float = 1.0
    """Of tokens in the prompt or the output, positive logits are divided by it and others multiplied."""
    presence_penalty: float = 0.0
    """Taken off the logits of tokens that are in the output; -2 to 2."""
    frequency_penalty: float = 0.0
    """Taken off the logits of tokens in the output, once for each time they are there; -2 to 2."""
    logit_bias: Mapping[Any, float] | None = None
    """Token id (also as text, as JSON has it) to what is added to its logit; -100 to 100."""
    allowed_token_ids: Sequence[int] | None = None
    """No other token is sampled. `None`: all may be."""
    banned_token_ids: Sequence[int] | None = None
    """These tokens are not sampled."""
    bad_words: Sequence[str | Sequence[int]] | None = None
    """Words, as text or as token ids, of which the last token is not sampled where the output ends with the others."""
    json_schema: Mapping[str, Any] | str | bool | None = None
    """The output is a JSON text that this schema (draft 2020-12) accepts, properties in the schema's order. What cannot
    be enforced is refused. One of `json_schema`, `regex`, `choice` and `grammar` may be given; in all of them a sample
    that ends with `stop` is whole, unless a stop string or a stop token of yours has cut it."""
    regex: str | None = None
    """The whole output matches this expression (as Rust's `regex` has it: no look-around, no references back)."""
    choice: Sequence[str] | None = None
    """The output is one of these."""
    grammar: str | None = None
    """The output is of this grammar, in Lark's notation (as llguidance has it)."""
    n: int = 1
    """How many samples of the same prompt; they share the prompt's blocks."""
    stop: str | Sequence[str] | None = ()
    """Text that ends a sample. It is not part of the text, unless `include_stop_str_in_output`."""
    stop_token_ids: Sequence[int] | None = ()
    """Further tokens that end a sample."""
    include_stop_str_in_output: bool = False
    """Keep the stop string, or the text of the token that ended a sample, in the text."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence tokens."""
    logprobs: int | None = None
    """`None`: none. k: the log probability of each token, and the k best alternatives."""
    prompt_logprobs: int | None = None
    """`None`: none. k: the same for each token of the prompt but the first, which has nothing before it."""
    seq_seed: int | None = None
    """Makes the request repeatable: the noise of a token is a function of this seed, the sample and its position."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    skip_reading_prefix_cache: bool | None = False
    """Compute the whole prompt, even where an equal one is in the prefix cache. `None` is `False`."""
    detokenize: bool = True
    """`False` streams token ids only."""
