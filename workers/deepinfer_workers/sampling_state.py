"""How every slot is sampled: parameters come with an admission, tokens and log probabilities come out.

Parameters are columns by slot, and small tensors by slot, on the device; which features a slot uses is known on the
host, so that a batch pays only for what some row of it uses. Penalties and bad words are made of the slot's own tokens
each time: there is no state that a preemption or a step that is taken back could leave wrong. Belongs to the device
thread; the math is in `sampler`. Knows nothing of plans and forwards.

Legend: `N` slots, `R` rows, `V` vocabulary, `E` entries of several rows one after another, `k` logprobs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntFlag
from math import inf, log
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepinfer_kernels import Draw
from deepinfer_protocol import LogitShaping, ProtocolError, SlotSampling, split_words
from deepinfer_workers import sampler
from deepinfer_workers.batch import Admission, Ints
from deepinfer_workers.sampler import (
    ROWS_AT_ONCE,
    BestLogprobs,
    TopRows,
    best_logprobs,
    choose,
    unpack_masks,
    warm_scores,
)
from deepinfer_workers.upload import to_device


class Feature(IntFlag):
    """What sampling a slot takes."""

    WARM = 1
    """Has a temperature."""
    TOP_FEW = 2
    """Keeps at most `NUM_CANDIDATES` tokens, by top-k."""
    TOP_MANY = 4
    """Keeps as many as its top-p, or a large top-k, say."""
    MIN_P = 8
    PENALTIES = 16
    BIAS = 32
    ALLOWED = 64
    MIN_LENGTH = 128
    BAD_WORDS = 256
    REJECTS = 512
    """Drafts are accepted by rejection sampling."""


STATIC: Final = Feature.BIAS | Feature.ALLOWED
PASSING: Final = Feature.MIN_LENGTH | Feature.BAD_WORDS
"""Bans that come and go with the output."""
SHAPED: Final = STATIC | PASSING | Feature.PENALTIES
"""Changes logits before the temperature."""
PLAIN: Final = Feature.WARM | Feature.REJECTS
"""A device may draw it in one launch for all rows."""
PLAIN_DRAFTS: Final = PLAIN | PASSING | Feature.PENALTIES
"""So it may drafts, which know nothing of the output."""


_NO_SHAPING: Final = LogitShaping()


@dataclass(frozen=True)
class Logprobs:
    """Of `R` tokens: each token's id and then the best ids, with their log probabilities. Still on the device."""

    ids: Tensor
    """[R, 1 + k] int64"""
    values: Tensor
    """[R, 1 + k] float32"""
    ranks: Tensor
    """[R] int64: each token's own."""
    counts: list[int]
    """[R]: how many of the best each row asked for."""
    rows: Ints
    """[R], on the host: which of the tokens that were given these are."""

    def only(self, is_wanted: npt.NDArray[np.bool_]) -> Logprobs:
        """Of those among the given tokens that `is_wanted` says. The tensors are on the host."""
        kept = is_wanted[self.rows]
        if kept.all():
            return self
        at = torch.from_numpy(np.flatnonzero(kept))
        counts = [count for count, is_kept in zip(self.counts, kept, strict=True) if is_kept]
        return Logprobs(self.ids[at], self.values[at], self.ranks[at], counts, self.rows[kept])

    def to_bytes(self) -> tuple[bytes, bytes, bytes]:
        """The columns `logprob_ids`, `logprobs` and `logprob_ranks` of a `StepResult`. The tensors are on the host."""
        ids, values = self.ids.numpy(), self.values.numpy()
        is_asked = np.arange(ids.shape[1]) <= np.array(self.counts)[:, None]
        ranks = self.ranks.numpy().astype("<i4").tobytes()
        return ids[is_asked].astype("<i4").tobytes(), values[is_asked].astype("<f4").tobytes(), ranks


class PromptPositions(NamedTuple):
    """Computed positions whose next token is in a prompt that wants log probabilities."""

    packed: Ints
    """[P]: their places among the positions of the step."""
    slots: Ints
    """[P]"""
    nexts: Ints
    """[P]: where the next token is stored."""
    counts: list[int]
    """[P]: how many of the best are asked for."""


class SlotTables(NamedTuple):
    """Token ids that one slot names, on the device."""

    stop_ids: Tensor
    bias_ids: Tensor
    word_tokens: Tensor
    """Of all bad words, all tokens but the last of each."""
    word_offsets: Tensor
    """How far each of them is from the end of the output: 1 is its last token."""
    word_of: Tensor
    """Which word each of them is of."""
    word_ends: Tensor
    """The last token of each word."""
    bias_values: Tensor
    """float32"""
    allowed: Tensor
    """[V] bool, or [0]"""


class _Columns:
    """Numbers by slot, on the device: one store, so that admissions are one upload and one copy."""

    INTS: Final = ("top_k", "seed", "min_length", "num_prompt", "rejects")
    FLOATS: Final = ("temperature", "top_p", "log_min_p", "repetition", "presence", "frequency")

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._ints = torch.zeros(len(self.INTS + self.FLOATS), num_slots, dtype=torch.int64, device=device)
        self._floats = self._ints.view(torch.float64)

    def write(self, slots: Ints, samplings: Sequence[SlotSampling]) -> None:
        packed = np.zeros((1 + len(self.INTS + self.FLOATS), len(slots)), np.int64)
        packed[0] = slots
        for index, sampling in enumerate(samplings):
            shaping = sampling.shaping or _NO_SHAPING
            packed[1 : 1 + len(self.INTS), index] = (
                sampling.top_k, sampling.seed, sampling.min_length, sampling.num_prompt, sampling.rejects,
            )  # fmt: skip
            packed.view(np.float64)[1 + len(self.INTS) :, index] = (
                sampling.temperature, sampling.top_p, _log(sampling.min_p),
                shaping.repetition_penalty, shaping.presence_penalty, shaping.frequency_penalty,
            )  # fmt: skip
        on_device = to_device(packed, self._ints.device)
        self._ints.index_copy_(1, on_device[0], on_device[1:])

    def ints(self, name: str, slots: Tensor) -> Tensor:
        return self._ints[self.INTS.index(name)].index_select(0, slots)

    def floats(self, name: str, slots: Tensor) -> Tensor:
        return self._floats[len(self.INTS) + self.FLOATS.index(name)].index_select(0, slots)


class SamplingState:
    """Parameters by slot. Nothing here waits for the device."""

    def __init__(self, tokens: Tensor, vocab_size: int, draw: Draw | None = None) -> None:
        """`tokens` [N + 1, positions] int32: what every slot holds, on the device; only read.

        `draw`: how the device draws rows of plain sampling at once, if it can.
        """
        num_slots = tokens.shape[0]
        self._tokens = tokens
        self._vocab_size = vocab_size
        self._draw = draw
        self._columns = _Columns(num_slots, tokens.device)
        self._features = np.zeros(num_slots, np.int64)
        self._top_k = np.zeros(num_slots, np.int64)
        self._num_logprobs = np.full(num_slots, -1, np.int64)
        self._num_prompt_logprobs = np.full(num_slots, -1, np.int64)
        self._num_prompt = np.zeros(num_slots, np.int64)
        self._tables: dict[int, SlotTables] = {}

    def prepare(self) -> None:
        """Compile what draws plain rows at once, before somebody waits."""
        if self._draw is not None:
            nothing = torch.zeros(1, dtype=torch.int64, device=self._tokens.device)
            self.sample_plain(nothing.new_zeros(1, self._vocab_size, dtype=torch.float32), nothing, nothing)

    def retire(self, slots: Ints) -> None:
        self._num_prompt_logprobs[slots] = -1
        for slot in slots.tolist():
            self._tables.pop(slot, None)

    def admit(self, admissions: Sequence[Admission]) -> None:
        """How the admitted slots are sampled. Raises `ProtocolError` for tokens that the model does not have."""
        if not admissions:
            return
        for admission in admissions:
            slot, sampling = admission.slot, admission.sampling
            self._features[slot] = features = _features(sampling)
            self._top_k[slot] = sampling.top_k
            self._num_logprobs[slot] = sampling.num_logprobs
            self._num_prompt_logprobs[slot] = sampling.num_prompt_logprobs
            self._num_prompt[slot] = sampling.num_prompt
            if features & (STATIC | PASSING):
                self._tables[slot] = _tables(admission, self._vocab_size, self._tokens.device)
        slots = np.array([admission.slot for admission in admissions])
        self._columns.write(slots, [admission.sampling for admission in admissions])

    # ---- tokens

    def sample(self, logits: Tensor, slots: Ints, positions: Tensor, allowed: Tensor | None, num_known: Ints) -> Tensor:
        """A token for each row of `logits` [R, V] of the slot `slots` [R], to be stored at `positions` [R]: [R] int64.

        `allowed` [R, V] bool masks tokens out. `num_known` [R] are bounds, known on the host, of `positions`: penalties
        look no further.
        """
        features = self._features[slots]
        if allowed is None and not (features & (SHAPED | Feature.WARM)).any():
            return logits.argmax(-1)  # the first of equals
        others = np.flatnonzero(features & ~PLAIN)
        if self._draw is None or allowed is not None or len(others) == len(slots):
            return self._sample_by_parts(logits, slots, positions, allowed, num_known)
        tokens = self.sample_plain(logits, to_device(slots, logits.device), positions)
        if others.size:
            [index] = _upload([others], logits.device)
            found = self._sample_by_parts(
                logits.index_select(0, index),
                slots[others],
                positions.index_select(0, index),
                None,
                num_known[others],
            )
            tokens.index_copy_(0, index, found)
        return tokens

    def sample_plain(self, logits: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """As `sample`, of `slots` [R] of plain sampling, by a device that draws them at once."""
        assert self._draw is not None
        temperatures, seeds, _ = self.plain_columns(slots)
        tokens, _ = self._draw(logits, temperatures, seeds, positions)
        return tokens

    def _sample_by_parts(
        self, logits: Tensor, slots: Ints, positions: Tensor, allowed: Tensor | None, num_known: Ints
    ) -> Tensor:
        parts = []
        for start in range(0, len(slots), ROWS_AT_ONCE):  # a row's bits are the same in any company
            at = slice(start, start + ROWS_AT_ONCE)
            some = None if allowed is None else allowed[at]
            parts.append(self._sample_some(logits[at], slots[at], positions[at], some, num_known[at]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _sample_some(
        self, logits: Tensor, slots: Ints, positions: Tensor, allowed: Tensor | None, num_known: Ints
    ) -> Tensor:
        features = self._features[slots]
        if allowed is not None or (features & SHAPED).any():
            logits = self._shape(logits, slots, features, positions, allowed, num_known)
        warm = np.flatnonzero(features & Feature.WARM)
        if not warm.size:
            return logits.argmax(-1)
        if len(warm) == len(slots):
            return self._sample_warm(logits, slots, features, positions)
        [index] = _upload([warm], logits.device)
        chosen = self._sample_warm(
            logits.index_select(0, index), slots[warm], features[warm], positions.index_select(0, index)
        )
        return logits.argmax(-1).index_copy_(0, index, chosen)

    def _sample_warm(self, logits: Tensor, slots: Ints, features: Ints, positions: Tensor) -> Tensor:
        scores = self._warm_scores(logits, slots, features)
        return choose(scores, self.seeds(slots), positions)

    def _warm_scores(self, logits: Tensor, slots: Ints, features: Ints) -> Tensor:
        few, many = (np.flatnonzero(features & feature) for feature in (Feature.TOP_FEW, Feature.TOP_MANY))
        at, few_rows, many_rows = _upload([slots, few, many], logits.device)
        max_few = int(self._top_k[slots[few]].max(initial=0))
        groups = [(few_rows, max_few)] * bool(few.size) + [(many_rows, None)] * bool(many.size)
        top_rows = [
            TopRows(rows, self._columns.ints("top_k", at[rows]), self._columns.floats("top_p", at[rows]), most)
            for rows, most in groups
        ]
        return warm_scores(
            logits,
            self._columns.floats("temperature", at),
            log_min_p=self._columns.floats("log_min_p", at) if (features & Feature.MIN_P).any() else None,
            top_rows=tuple(top_rows),
        )

    # ---- what drafts need

    def seeds(self, slots: Ints) -> Tensor:
        """[R]"""
        return self._columns.ints("seed", to_device(slots, self._tokens.device))

    def plain_columns(self, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of `slots` [R] on the device: temperatures float64, seeds, and 1 for those that reject, [R] each."""
        return (
            self._columns.floats("temperature", slots),
            self._columns.ints("seed", slots),
            self._columns.ints("rejects", slots),
        )

    def are_plain(self, slots: Ints) -> npt.NDArray[np.bool_]:
        """[R], on the host: those with nothing but a temperature."""
        are_plain: npt.NDArray[np.bool_] = (self._features[slots] & ~PLAIN) == 0
        return are_plain

    def have_plain_drafts(self, slots: Ints) -> npt.NDArray[np.bool_]:
        """[R], on the host: those whose drafts depend on nothing but a temperature."""
        are_plain: npt.NDArray[np.bool_] = (self._features[slots] & ~PLAIN_DRAFTS) == 0
        return are_plain

    def has_logprobs(self, slots: Ints) -> bool:
        """Whether `logprobs` has something for any of `slots` [R]."""
        return bool((self._num_logprobs[slots] >= 0).any())

    def is_warm(self, slots: Ints) -> npt.NDArray[np.bool_]:
        """[R], on the host: those with a temperature."""
        is_warm: npt.NDArray[np.bool_] = (self._features[slots] & Feature.WARM) != 0
        return is_warm

    def rejects(self, slots: Ints) -> npt.NDArray[np.bool_]:
        """[R], on the host: those whose drafts are accepted by rejection sampling."""
        rejects: npt.NDArray[np.bool_] = (self._features[slots] & Feature.REJECTS) != 0
        return rejects

    def scores(
        self, logits: Tensor, slots: Ints, positions: Tensor, num_known: Ints, allowed: Tensor | None = None
    ) -> Tensor:
        """[R, V] float64, of slots with a temperature: their softmax is what `sample` draws from. As `sample` has it.

        For `ROWS_AT_ONCE` rows, about: there are several temporaries of the result's size.
        """
        features = self._features[slots]
        if allowed is not None or (features & SHAPED).any():
            logits = self._shape(logits, slots, features, positions, allowed, num_known)
        return self._warm_scores(logits, slots, features)

    def draft_logits(self, logits: Tensor, slots: Ints) -> Tensor:
        """`logits` [R, V] of a draft stage with what its slots always ask for: biases and allowed tokens."""
        rows = np.flatnonzero(self._features[slots] & STATIC)
        if not rows.size:
            return logits
        [index] = _upload([rows], logits.device)
        some = logits.index_select(0, index)
        shaped = some.clone()
        features = self._features[slots[rows]]
        self._restrict(shaped, slots[rows], np.flatnonzero(features & Feature.ALLOWED))
        self._add_bias(shaped, slots[rows], np.flatnonzero(features & Feature.BIAS))
        return logits.index_copy(0, index, sampler.or_else(shaped, some))

    def draft_scores(self, logits: Tensor, slots: Ints) -> Tensor:
        """[R, V] float64 of `draft_logits`, of slots with a temperature: drafts are drawn from their softmax."""
        return self._warm_scores(logits, slots, self._features[slots])

    # ---- logits before the temperature

    def _shape(
        self,
        logits: Tensor,
        slots: Ints,
        features: Ints,
        positions: Tensor,
        allowed: Tensor | None,
        num_known: Ints,
    ) -> Tensor:
        """New logits, of all rows: restricted, biased, penalised; those that came stay as they are."""
        if allowed is not None:
            logits = logits.masked_fill(~allowed, -torch.inf)
        rows = np.flatnonzero(features & SHAPED)
        if not rows.size:
            return logits
        [index] = _upload([rows], logits.device)
        masked = logits.index_select(0, index).float()
        shaped = self._shape_some(
            masked, slots[rows], features[rows], positions.index_select(0, index), num_known[rows]
        )
        if (features & STATIC).any():  # where a mask, the model and the slot leave nothing, the slot gives way
            shaped = sampler.or_else(shaped, masked)
        return shaped if len(rows) == len(slots) else logits.float().index_copy(0, index, shaped)

    def _shape_some(self, logits: Tensor, slots: Ints, features: Ints, positions: Tensor, num_known: Ints) -> Tensor:
        logits = logits.clone()
        self._restrict(logits, slots, np.flatnonzero(features & Feature.ALLOWED))
        self._add_bias(logits, slots, np.flatnonzero(features & Feature.BIAS))
        rows = np.flatnonzero(features & Feature.PENALTIES)
        if rows.size:
            self._penalise(logits, slots, rows, positions, num_known)
        if not (features & PASSING).any():
            return logits
        passing = logits.clone()
        self._ban_stops(passing, slots, np.flatnonzero(features & Feature.MIN_LENGTH), positions)
        self._ban_words(passing, slots, np.flatnonzero(features & Feature.BAD_WORDS), positions)
        return sampler.or_else(passing, logits)  # where what is allowed leaves nothing else, such bans give way

    def _restrict(self, logits: Tensor, slots: Ints, rows: Ints) -> None:
        if rows.size:
            [index] = _upload([rows], logits.device)
            allowed = torch.stack([self._tables[slot].allowed for slot in slots[rows].tolist()])
            logits.index_copy_(0, index, logits.index_select(0, index).masked_fill_(~allowed, -torch.inf))

    def _add_bias(self, logits: Tensor, slots: Ints, rows: Ints) -> None:
        if rows.size:
            tables = [self._tables[slot] for slot in slots[rows].tolist()]
            [row_of] = _upload([_repeat(rows, [table.bias_ids for table in tables])], logits.device)
            tokens = torch.cat([table.bias_ids for table in tables])
            sampler.add_bias(logits, row_of, tokens, torch.cat([table.bias_values for table in tables]))

    def _penalise(self, logits: Tensor, slots: Ints, rows: Ints, positions: Tensor, num_known: Ints) -> None:
        width = int(num_known[rows].max())
        index, at = _upload([rows, slots[rows]], logits.device)
        some = logits.index_select(0, index)
        sampler.penalise(
            some,
            self._tokens[:, :width].index_select(0, at),
            positions.index_select(0, index),
            self._columns.ints("num_prompt", at),
            repetition=self._columns.floats("repetition", at).float(),
            presence=self._columns.floats("presence", at).float(),
            frequency=self._columns.floats("frequency", at).float(),
        )
        logits.index_copy_(0, index, some)

    def _ban_stops(self, logits: Tensor, slots: Ints, rows: Ints, positions: Tensor) -> None:
        if rows.size:
            stop_ids = [self._tables[slot].stop_ids for slot in slots[rows].tolist()]
            row_of, slot_of = _upload([_repeat(rows, stop_ids), _repeat(slots[rows], stop_ids)], logits.device)
            min_lengths = self._columns.ints("min_length", slot_of)
            sampler.ban(logits, row_of, torch.cat(stop_ids), positions.index_select(0, row_of) + 1 <= min_lengths)

    def _ban_words(self, logits: Tensor, slots: Ints, rows: Ints, positions: Tensor) -> None:
        """The last token of every bad word, where the output ends with the others."""
        if not rows.size:
            return
        tables = [self._tables[slot] for slot in slots[rows].tolist()]
        tokens, ends = [table.word_tokens for table in tables], [table.word_ends for table in tables]
        firsts = np.cumsum([0, *map(len, ends)])[:-1]
        row_of, slot_of, first_of, row_of_end = _upload(
            [_repeat(rows, tokens), _repeat(slots[rows], tokens), _repeat(firsts, tokens), _repeat(rows, ends)],
            logits.device,
        )
        places = positions.index_select(0, row_of) - torch.cat([table.word_offsets for table in tables])
        is_output = places >= self._columns.ints("num_prompt", slot_of)
        is_equal = self._tokens[slot_of, places.clamp(min=0)] == torch.cat(tokens)
        word_of = torch.cat([table.word_of for table in tables]) + first_of
        num_others = torch.zeros(len(row_of_end), dtype=torch.int32, device=logits.device)
        num_others.index_add_(0, word_of, (~(is_output & is_equal)).to(torch.int32))
        sampler.ban(logits, row_of_end, torch.cat(ends), num_others == 0)

    # ---- log probabilities

    def logprobs(self, logits: Tensor, tokens: Tensor, slots: Ints) -> Logprobs | None:
        """Of `tokens` [R] under `logits` [R, V] as the model gave them, for the rows that asked; `None` if none did."""
        counts = self._num_logprobs[slots]
        wanted = np.flatnonzero(counts >= 0)
        if not wanted.size:
            return None
        [index] = _upload([wanted], logits.device)
        parts = [(logits.index_select(0, rows), tokens.index_select(0, rows)) for rows in index.split(ROWS_AT_ONCE)]
        return _logprobs(parts, counts[wanted].tolist(), wanted)

    def prompt_positions(self, slots: Ints, starts: Ints, counts: Ints) -> PromptPositions | None:
        """Which positions of a step must have logits for the prompts that asked; `None` if there are none.

        The step's rows are of `slots` [S], from `starts` [S] on, `counts` [S] positions each, packed one after another.
        """
        num_wanted = np.minimum(starts + counts, self._num_prompt[slots] - 1) - starts
        num_wanted = np.where(self._num_prompt_logprobs[slots] >= 0, num_wanted, 0).clip(min=0)
        if not num_wanted.any():
            return None
        row_of = np.repeat(np.arange(len(slots)), num_wanted)
        offsets = np.arange(len(row_of)) - (np.cumsum(num_wanted) - num_wanted)[row_of]
        return PromptPositions(
            packed=(np.cumsum(counts) - counts)[row_of] + offsets,
            slots=slots[row_of],
            nexts=starts[row_of] + offsets + 1,
            counts=self._num_prompt_logprobs[slots[row_of]].tolist(),
        )

    def prompt_logprobs(self, logits: Iterable[Tensor], wanted: PromptPositions) -> Logprobs:
        """Of the prompts' own tokens. `logits`: those of the `wanted` positions, `ROWS_AT_ONCE` by `ROWS_AT_ONCE`."""
        slots, nexts = _upload([wanted.slots, wanted.nexts], self._tokens.device)
        tokens = self._tokens[slots, nexts].long().split(ROWS_AT_ONCE)
        return _logprobs(zip(logits, tokens, strict=True), wanted.counts, np.arange(len(wanted.counts)))


def _logprobs(parts: Iterable[tuple[Tensor, Tensor]], counts: list[int], rows: Ints) -> Logprobs:
    """Of all parts together, as many of the best as any row asks for; a part is logits [rows, V] and tokens [rows]."""
    found = [best_logprobs(logits, tokens, max(counts)) for logits, tokens in parts]
    best = found[0] if len(found) == 1 else BestLogprobs(*map(torch.cat, zip(*found, strict=True)))
    return Logprobs(best.ids, best.values, best.ranks, counts, rows)


def _features(sampling: SlotSampling) -> Feature:
    top_few = 0 < sampling.top_k <= sampler.NUM_CANDIDATES
    top_many = not top_few and (sampling.top_k > 0 or sampling.top_p < 1)
    shaping = sampling.shaping or _NO_SHAPING
    penalties = shaping.repetition_penalty, shaping.presence_penalty, shaping.frequency_penalty
    used = {
        Feature.WARM: sampling.temperature > 0,
        Feature.TOP_FEW: top_few,
        Feature.TOP_MANY: top_many,
        Feature.MIN_P: sampling.min_p > 0,
        Feature.PENALTIES: penalties != (1.0, 0.0, 0.0),
        Feature.BIAS: bool(shaping.bias_ids),
        Feature.ALLOWED: bool(shaping.allowed_bits),
        Feature.MIN_LENGTH: sampling.min_length > 0,
        Feature.BAD_WORDS: bool(shaping.bad_words),
        Feature.REJECTS: sampling.rejects and sampling.temperature > 0,
    }
    return Feature(sum(feature for feature, is_used in used.items() if is_used))


def _tables(admission: Admission, vocab_size: int, device: torch.device) -> SlotTables:
    """Raises `ProtocolError`."""
    shaping = admission.sampling.shaping or _NO_SHAPING
    words = split_words(shaping.bad_words)
    lengths = [len(word) - 1 for word in words]
    columns = [
        admission.stop_ids,
        np.frombuffer(shaping.bias_ids, "<i4").astype(np.int64),
        np.array([token for word in words for token in word[:-1]], np.int64),
        np.array([offset for length in lengths for offset in range(length, 0, -1)], np.int64),
        np.repeat(np.arange(len(words)), lengths),
        np.array([word[-1] for word in words], np.int64),
    ]
    where = f"admission to slot {admission.slot}"
    for name, ids in (("bias", columns[1]), ("bad word", columns[2]), ("bad word", columns[5])):
        if ids.size and ids.max() >= vocab_size:
            raise ProtocolError(f"{where}: {name}: token {ids.max()} came, 0 to {vocab_size - 1} is allowed")
    num_bytes = 4 * -(-vocab_size // 32)
    if len(shaping.allowed_bits) not in (0, num_bytes):
        raise ProtocolError(f"{where}: {len(shaping.allowed_bits)} bytes of allowed tokens, {num_bytes} were expected")
    allowed = torch.empty(0, dtype=torch.bool, device=device)
    if shaping.allowed_bits:
        [allowed] = unpack_masks(shaping.allowed_bits, 1, vocab_size, device)
    stop_ids, bias_ids, word_tokens, word_offsets, word_of, word_ends = _upload(columns, device)
    return SlotTables(
        stop_ids=stop_ids,
        bias_ids=bias_ids,
        word_tokens=word_tokens,
        word_offsets=word_offsets,
        word_of=word_of,
        word_ends=word_ends,
        bias_values=to_device(np.frombuffer(shaping.bias_values, "<f4").copy(), device),
        allowed=allowed,
    )


def _upload(arrays: Sequence[Ints], device: torch.device) -> Sequence[Tensor]:
    """Int64 arrays as tensors on the device: one copy for all of them."""
    return torch.split_with_sizes(to_device(np.concatenate(arrays), device), [len(array) for array in arrays])


def _repeat(values: Ints, tensors: Sequence[Tensor]) -> Ints:
    """Each of `values` once for every element of its tensor."""
    return np.repeat(values, [len(tensor) for tensor in tensors])


def _log(value: float) -> float:
    return log(value) if value else -inf
