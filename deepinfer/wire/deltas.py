"""Chunks as the deltas of the client wire, and back. Knows nothing of streams, credits or sockets."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Final

from deepinfer.stream import Logprob, Piece, TokenChunk, TokenLogprob
from deepinfer_protocol import pack_int32, unpack_int32
from deepinfer_protocol.client import Delta
from deepinfer_protocol.client import Logprob as WireLogprob

LOWEST: Final = -3.4028234663852886e38
"""Float32's, in place of minus infinity."""
MAX_KNOWN_TOKENS: Final = 128
"""Tokens with logprobs in one delta: a message has a bounded number of values."""


def deltas_of(chunk: TokenChunk, id: str, seq: int) -> Iterator[Delta]:
    """`chunk` as one delta, or as several where each token brings many values. The last one has the text."""
    tokens, known, first_index = list(chunk.token_ids), chunk.logprobs, chunk.first_index
    while known is not None and len(tokens) > MAX_KNOWN_TOKENS:
        yield Delta(
            id=id,
            seq=seq,
            sample=chunk.sample_index,
            index=first_index,
            token_ids=pack_int32(tokens[:MAX_KNOWN_TOKENS]),
            logprobs=[_to_wire(entry) for entry in known[:MAX_KNOWN_TOKENS]],
        )
        tokens, known = tokens[MAX_KNOWN_TOKENS:], known[MAX_KNOWN_TOKENS:]
        seq, first_index = seq + 1, first_index + MAX_KNOWN_TOKENS
    yield Delta(
        id=id,
        seq=seq,
        sample=chunk.sample_index,
        index=first_index,
        token_ids=pack_int32(tokens),
        text=chunk.text,
        logprobs=None if known is None else [_to_wire(entry) for entry in known],
        reason=chunk.finish_reason,
        stop=chunk.stop_reason,
    )


def pieces_of(delta: Delta) -> Iterator[Piece]:
    """`delta` as a reader's mailbox takes it: a piece a token, the text and the end with the last."""
    token_ids: list[int | None] = list(unpack_int32(delta.token_ids))
    known = [_from_wire(entry) for entry in delta.logprobs or ()]
    last = max(len(token_ids) - 1, 0)
    for place, token_id in enumerate(token_ids or [None]):
        entry = known[place] if known else None
        if place == last:
            yield (delta.sample, token_id, delta.text, entry, delta.reason)
        else:
            yield (delta.sample, token_id, "", entry, None)


def _to_wire(entry: TokenLogprob) -> WireLogprob:
    top = [(best.token_id, _finite(best.logprob)) for best in entry.top]
    return WireLogprob(entry.token_id, _finite(entry.logprob), entry.rank, top)


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST else LOWEST  # `max` would let NaN through


def _from_wire(entry: WireLogprob) -> TokenLogprob:
    top = tuple([Logprob(token_id, _value(logprob)) for token_id, logprob in entry.top])
    return TokenLogprob(entry.token_id, _value(entry.logprob), top, entry.rank)


def _value(logprob: float) -> float:
    return -inf if logprob <= LOWEST else logprob
