"""What the sampler must say, in plain numpy, a row at a time: every parameter by its definition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from deepinfer_protocol import LogitShaping, SlotSampling, split_words, unpack_float32, unpack_int32
from deepinfer_workers.batch import Admission
from deepinfer_workers.noise import gumbel_noise
from deepinfer_workers.sampling_state import SamplingState

Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]


class OneRow(NamedTuple):
    """How one row is sampled: a slot of its own, and the tokens in it."""

    sampling: SlotSampling
    position: int
    history: Sequence[int] = ()
    """Up to `position`; missing ones are 0."""

    @property
    def known(self) -> list[int]:
        return [*self.history, *[0] * self.position][: self.position]

    @property
    def output(self) -> list[int]:
        return self.known[self.sampling.num_prompt :]


def sample(logits: torch.Tensor, rows: Sequence[OneRow], allowed: torch.Tensor | None = None) -> torch.Tensor:
    """A token for each of `rows`, each in a slot of its own; what a slot holds beyond its position is junk."""
    state, positions = state_of(rows, logits.shape[1])
    return state.sample(logits, np.arange(len(rows)), torch.from_numpy(positions), allowed, positions)


def state_of(
    rows: Sequence[OneRow], vocab_size: int, device: torch.device | None = None
) -> tuple[SamplingState, npt.NDArray[np.int64]]:
    """The rows admitted to a slot each, and where their tokens will be stored."""
    tokens = torch.full((len(rows) + 1, max(one.position for one in rows) + 3), vocab_size - 1, dtype=torch.int32)
    for slot, one in enumerate(rows):
        tokens[slot, : one.position] = torch.tensor(one.known, dtype=torch.int32)
    state = SamplingState(tokens.to(device or "cpu"), vocab_size)
    none = np.array([], np.int64)
    stop_ids = [np.frombuffer(one.sampling.stop_ids, "<i4").astype(np.int64) for one in rows]
    state.admit([Admission(i, 1, 0, 0, none, none, one.sampling, stop_ids[i]) for i, one in enumerate(rows)])
    return state, np.array([one.position for one in rows])


def token_by_definition(logits: Floats, one: OneRow, allowed: Bools | None = None) -> int:
    """The token of one row of `logits` [V]."""
    params = one.sampling
    values = shaped_by_definition(logits, one, allowed)
    if params.temperature == 0:
        return int(values.argmax())
    scores = (values.astype(np.float64) - values.max()) / params.temperature
    scores[~kept_by_definition(scores, params)] = -np.inf
    noise = gumbel_noise(torch.tensor([params.seed]), torch.tensor([one.position]), len(values))[0].numpy()
    return int((scores + noise).argmax())


def shaped_by_definition(logits: Floats, one: OneRow, allowed: Bools | None) -> Floats:
    shaping = one.sampling.shaping or LogitShaping()
    masked = logits if allowed is None else np.where(allowed, logits, np.float32(-np.inf))
    values = masked.copy()
    if shaping.allowed_bits:
        bits = np.unpackbits(np.frombuffer(shaping.allowed_bits, np.uint8), bitorder="little")[: len(values)]
        values[bits == 0] = -np.inf
    for token, bias in zip(unpack_int32(shaping.bias_ids), unpack_float32(shaping.bias_values), strict=True):
        values[token] += np.float32(bias)
    for token in set(one.known):
        scale = np.float32(shaping.repetition_penalty)
        values[token] = values[token] / scale if values[token] > 0 else values[token] * scale
    for token in set(one.output):
        values[token] -= np.float32(shaping.frequency_penalty) * np.float32(one.output.count(token))
        values[token] -= np.float32(shaping.presence_penalty)
    passing = values.copy()
    for token in banned_for_now(one, shaping):
        passing[token] = -np.inf
    found = next((some for some in (passing, values) if some.max() > -np.inf), masked)
    return found


def banned_for_now(one: OneRow, shaping: LogitShaping) -> set[int]:
    """Stop tokens before the minimum length, and the ends of bad words that the output has begun."""
    banned = set(unpack_int32(one.sampling.stop_ids)) if one.position + 1 <= one.sampling.min_length else set()
    for word in split_words(shaping.bad_words):
        *others, last = word
        if others == one.output[len(one.output) - len(others) :] and len(others) <= len(one.output):
            banned.add(last)
    return banned


def kept_by_definition(scores: npt.NDArray[np.float64], params: SlotSampling) -> Bools:
    """Of `scores` [V], logits over temperature: what min-p, then top-k, then top-p keep; of equals the lower ids."""
    probs = np.exp(scores - scores.max())
    likely = np.flatnonzero(probs >= params.min_p)
    order = likely[np.argsort(-scores[likely], kind="stable")][: params.top_k or None]
    sums = np.cumsum(probs[order] / probs[order].sum())
    num_kept = len(order) if params.top_p == 1 else int(np.searchsorted(sums, params.top_p)) + 1
    kept = np.zeros(len(scores), bool)
    kept[order[:num_kept]] = True
    return kept
