"""Sampling by slot: batches that mix every parameter against the definition, and each row as if it were alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deepinfer_protocol import LogitShaping, ProtocolError, SlotSampling, pack_float32, pack_int32
from deepinfer_workers.batch import Admission
from deepinfer_workers.sampler import ROWS_AT_ONCE, best_logprobs
from deepinfer_workers.sampling_state import SamplingState
from doubles.sampling import Floats, OneRow, sample, state_of, token_by_definition
from doubles.waiting import NoWaiting, no_waits

VOCAB: Final = 301
NONE: Final = np.array([], np.int64)


def bits(tokens: Sequence[int], vocab: int = VOCAB) -> bytes:
    return sum(1 << token for token in set(tokens)).to_bytes(4 * -(-vocab // 32), "little")


def words(*tokens: Sequence[int]) -> bytes:
    return pack_int32([number for word in tokens for number in (len(word), *word)])


def bias(**values: float) -> dict[str, Any]:
    """`t5=1.0`: of token 5."""
    ids = sorted(int(name[1:]) for name in values)
    return {"bias_ids": pack_int32(ids), "bias_values": pack_float32([values[f"t{token}"] for token in ids])}


def shaped(
    history: Sequence[int] = (), num_prompt: int = 0, sampling: dict[str, Any] | None = None, **shaping: Any
) -> OneRow:
    params = SlotSampling(num_prompt=num_prompt, shaping=LogitShaping(**shaping), **sampling or {})
    return OneRow(params, len(history), history)


def plain_logits(*best: float) -> torch.Tensor:
    """[1, VOCAB]: the first tokens as given, the others far below."""
    return torch.tensor([[*best, *[-50.0] * (VOCAB - len(best))]])


# ---- one parameter at a time, by hand


def test_the_repetition_penalty_is_of_prompt_and_output() -> None:
    logits = plain_logits(4.0, 3.0, 2.5, -1.0)
    for history, num_prompt in (([0, 9], 2), ([9, 0], 1), ([0, 0, 0], 0)):  # how often does not matter
        assert sample(logits, [shaped(history, num_prompt, repetition_penalty=1.5)]).item() == 1
    assert sample(logits, [shaped([0, 1], 1, repetition_penalty=1.7)]).item() == 2
    negative = plain_logits(-1.0, -1.5)
    assert sample(negative, [shaped([0], 1, repetition_penalty=2.0)]).item() == 1  # -1 becomes -2
    assert sample(logits, [shaped([1], 1, repetition_penalty=0.5)]).item() == 1  # below 1 it favours: 3 becomes 6


def test_presence_and_frequency_penalties_are_of_the_output_alone() -> None:
    logits = plain_logits(4.0, 3.0, 2.0)
    assert sample(logits, [shaped([0, 0], 2, presence_penalty=2.0, frequency_penalty=2.0)]).item() == 0
    assert sample(logits, [shaped([5, 0], 1, presence_penalty=1.5)]).item() == 1
    assert sample(logits, [shaped([0, 0, 0], 0, presence_penalty=0.9)]).item() == 0  # once, however often
    assert sample(logits, [shaped([0, 0, 0], 0, frequency_penalty=0.4)]).item() == 1  # three times 0.4
    assert sample(logits, [shaped([0, 1, 0], 0, frequency_penalty=2.0)]).item() == 2
    assert sample(logits, [shaped([2, 2], 0, frequency_penalty=-2.0)]).item() == 2


def test_a_bias_is_added_and_minus_infinity_bans() -> None:
    logits = plain_logits(4.0, 3.0, 2.0)
    assert sample(logits, [shaped(**bias(t2=2.5))]).item() == 2
    assert sample(logits, [shaped(**bias(t0=-np.inf, t1=-100.0))]).item() == 2
    logits[0, 7] = torch.inf  # a ban holds whatever the logit is
    assert sample(logits, [shaped(**bias(t7=-np.inf))]).item() == 0


def test_only_allowed_tokens_are_sampled() -> None:
    logits = plain_logits(4.0, 3.0, 2.0)
    assert sample(logits, [shaped(allowed_bits=bits([2, 300]))]).item() == 2
    warm = {"temperature": 100.0}
    rows = [shaped([0] * p, sampling=warm | {"seed": p}, allowed_bits=bits([1, 200, 300])) for p in range(60)]
    assert set(sample(logits.expand(60, -1), rows).tolist()) == {1, 200, 300}


def test_a_bad_word_is_never_completed_in_the_output() -> None:
    logits = plain_logits(4.0, 3.0, 2.0)
    word: dict[str, Any] = {"bad_words": words([7, 8, 0])}
    assert sample(logits, [shaped([9, 7, 8], 1, **word)]).item() == 1
    assert sample(logits, [shaped([7, 8], 1, **word)]).item() == 0  # its start is in the prompt
    assert sample(logits, [shaped([8], 0, **word)]).item() == 0  # and here it is cut off
    assert sample(logits, [shaped([7, 8, 7], 0, **word)]).item() == 0
    both: dict[str, Any] = {"bad_words": words([8, 0], [0], [8, 1], [3, 8, 0])}
    assert sample(logits, [shaped([8], 0, **both)]).item() == 2


def test_bans_that_come_and_go_give_way_where_nothing_else_is_allowed() -> None:
    logits = plain_logits(4.0, 3.0, 2.0)
    stop = {"stop_ids": pack_int32([2]), "min_length": 9}
    assert sample(logits, [shaped(sampling=stop, allowed_bits=bits([2]))]).item() == 2
    assert sample(logits, [shaped([8], allowed_bits=bits([1]), bad_words=words([8, 1]))]).item() == 1
    assert sample(logits, [shaped(sampling=stop, allowed_bits=bits([2, 9]))]).item() == 9


def test_a_mask_decides_where_it_and_the_allowed_tokens_leave_nothing() -> None:
    mask = torch.zeros(1, VOCAB, dtype=torch.bool)
    mask[0, [1, 2]] = True
    logits = plain_logits(4.0, 3.0, 5.0)
    assert sample(logits, [shaped(allowed_bits=bits([1, 9]))], mask).item() == 1
    assert sample(logits, [shaped(allowed_bits=bits([9]))], mask).item() == 2


def test_min_p_is_of_the_most_probable_token() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.1, 0.06, 0.04, *[1e-9] * (VOCAB - 5)]]))
    for min_p, wanted in ((0.05, 5), (0.09, 4), (0.15, 3), (0.5, 2), (0.9, 1), (1.0, 1)):
        rows = [OneRow(SlotSampling(temperature=1.0, seed=p, min_p=min_p), p) for p in range(200)]
        assert set(sample(logits.expand(200, -1), rows).tolist()) == set(range(wanted)), min_p


# ---- all of them at once


def random_row(rng: random.Random) -> OneRow:
    """Any mixture of parameters; words and biases of few tokens, so that they meet."""
    few = range(12)
    num_prompt, num_output = rng.randint(1, 9), rng.randint(0, 9)
    history = [rng.choice(few) if rng.random() < 0.8 else rng.randrange(VOCAB) for _ in range(num_prompt + num_output)]

    def maybe(value: Any, nothing: Any) -> Any:
        return value if rng.random() < 0.4 else nothing

    bias_ids = maybe(sorted(rng.sample(range(VOCAB), rng.randint(1, 40))), [])
    bad_words = maybe([rng.choices(few, k=rng.randint(1, 3)) for _ in range(rng.randint(1, 6))], [])
    shaping = LogitShaping(
        repetition_penalty=maybe(rng.uniform(0.3, 3.0), 1.0),
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        bias_ids=pack_int32(bias_ids),
        bias_values=pack_float32([rng.choice((-np.inf, rng.uniform(-9, 9))) for _ in bias_ids]),
        allowed_bits=maybe(bits(rng.sample(range(VOCAB), rng.choice((1, 3, 200)))), b""),
        bad_words=words(*bad_words),
    )
    sampling = SlotSampling(
        temperature=rng.choice((0.0, 0.3, 1.0, 3.0)),
        top_p=maybe(rng.uniform(0.05, 1.0), 1.0),
        top_k=maybe(rng.choice((1, 2, 20, 290, 5000)), 0),
        seed=rng.getrandbits(63),
        min_length=maybe(len(history) + rng.randint(-2, 3), 0),
        stop_ids=pack_int32(rng.sample(few, 4)),
        num_prompt=num_prompt,
        min_p=maybe(rng.choice((1e-6, 0.05, 0.5, 1.0)), 0.0),
        shaping=maybe(shaping, None),
    )
    return OneRow(sampling, len(history), history)


def random_logits(rng: np.random.Generator, num_rows: int) -> Floats:
    """Rows of several kinds: plain, with many equals, with infinities, huge, tiny."""
    logits = rng.standard_normal((num_rows, VOCAB)).astype(np.float32) * 3
    logits[1::5] = logits[1::5].round()
    logits[2::5][rng.random(logits[2::5].shape) < 0.7] = -np.inf
    logits[3::5] *= np.float32(1e6)
    logits[4::5] *= np.float32(1e-6)
    logits[:, 300] = 0.0  # something finite is left in each row
    return logits


@pytest.mark.parametrize("seed", range(12))
def test_mixed_batches_are_sampled_by_the_definition(seed: int) -> None:
    rng = random.Random(seed)
    rows = [random_row(rng) for _ in range(40)]
    logits = random_logits(np.random.default_rng(seed), len(rows))
    mask = np.random.default_rng(seed).random(logits.shape) < 0.7 if seed % 3 == 0 else None
    before = logits.copy()
    allowed = None if mask is None else torch.from_numpy(mask)
    wanted = [token_by_definition(logits[i], rows[i], None if mask is None else mask[i]) for i in range(len(rows))]
    found = sample(torch.from_numpy(logits), rows, allowed).tolist()
    for index, (token, expected) in enumerate(zip(found, wanted, strict=True)):
        assert token == expected, rows[index]
    assert (logits == before).all(), "the model's logits stay as they are"


@pytest.mark.parametrize("seed", range(4))
def test_a_row_gets_its_token_in_any_company(seed: int) -> None:
    """Alone, in one batch, in its reverse, in a batch of some."""
    rng = random.Random(100 + seed)
    rows = [random_row(rng) for _ in range(24)]
    logits = torch.from_numpy(random_logits(np.random.default_rng(seed), len(rows)))
    together = sample(logits, rows).tolist()
    assert [sample(logits[i : i + 1], [rows[i]]).item() for i in range(24)] == together
    assert sample(logits.flip(0), rows[::-1]).tolist() == together[::-1]
    some = rng.sample(range(24), 9)
    assert sample(logits[some], [rows[i] for i in some]).tolist() == [together[i] for i in some]


@pytest.mark.parametrize("seed", range(4))
def test_a_sequence_goes_on_alike_after_a_preemption(seed: int) -> None:
    """Admitted with what it had generated: the counts are those of a slot that never gave way."""
    rng = random.Random(200 + seed)
    row = random_row(rng)
    tokens: list[int] = list(row.history)
    logits = torch.from_numpy(random_logits(np.random.default_rng(seed), 12))
    width = len(tokens) + 20
    stayed = torch.zeros(2, width, dtype=torch.int32)
    stayed[0, : len(tokens)] = torch.tensor(tokens)
    state = SamplingState(stayed, VOCAB)
    admission = Admission(
        0, 1, 0, 0, NONE, NONE, row.sampling, np.frombuffer(row.sampling.stop_ids, "<i4").astype(np.int64)
    )
    state.admit([admission])
    for step in range(12):
        position = np.array([len(tokens)])
        token = state.sample(logits[step : step + 1], np.array([0]), torch.from_numpy(position), None, position)
        again = sample(logits[step : step + 1], [OneRow(row.sampling, len(tokens), tokens)])
        assert token.item() == again.item()
        stayed[0, len(tokens)] = token.item()
        tokens.append(int(token.item()))


def test_bounds_of_a_history_may_be_loose() -> None:
    rows = [shaped([0, 0, 5], 1, frequency_penalty=1.5), shaped([1] * 9, 0, repetition_penalty=9.0)]
    logits = plain_logits(4.0, 3.0, 2.0).expand(2, -1)
    state, positions = state_of(rows, VOCAB)
    at = np.arange(2)
    exact = state.sample(logits, at, torch.from_numpy(positions), None, positions).tolist()
    assert exact == [1, 0]
    assert state.sample(logits, at, torch.from_numpy(positions), None, positions + 2).tolist() == exact


class Largest(TorchDispatchMode):
    """The most elements that an operation gave out."""

    num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        sizes = [part.numel() for part in tree_leaves(found) if isinstance(part, torch.Tensor)]
        self.num_elements = max(self.num_elements, *sizes, 0)
        return found


def test_temporaries_do_not_grow_with_the_batch() -> None:
    """However many rows are sampled, with log probabilities of each; and the tokens are those of each row alone."""
    rng = random.Random(31)
    rows = [random_row(rng) for _ in range(2 * ROWS_AT_ONCE + 9)]
    rows = [one._replace(sampling=msgspec.structs.replace(one.sampling, num_logprobs=2)) for one in rows]
    logits = torch.from_numpy(random_logits(np.random.default_rng(31), len(rows)))
    alone = [sample(logits[i : i + 1], [rows[i]]).item() for i in range(len(rows))]
    state, at = state_of(rows, VOCAB)
    slots = np.arange(len(rows))
    with Largest() as largest:  # type: ignore[no-untyped-call]
        tokens = state.sample(logits, slots, torch.from_numpy(at), None, at)
        logprobs = state.logprobs(logits, tokens, slots)
    assert tokens.tolist() == alone
    assert logprobs is not None
    assert logprobs.ids.tolist() == best_logprobs(logits, tokens, 2).ids.tolist()
    assert 0 < largest.num_elements <= ROWS_AT_ONCE * VOCAB


def test_a_slot_forgets_its_last_owner() -> None:
    state, positions = state_of([shaped(allowed_bits=bits([2]), sampling={"num_logprobs": 1})], VOCAB)
    state.retire(np.array([0]))
    state.admit([Admission(0, 2, 0, 0, NONE, NONE, SlotSampling(), NONE)])
    logits = plain_logits(4.0, 3.0, 2.0)
    at = np.array([0])
    assert state.sample(logits, at, torch.from_numpy(positions), None, positions).item() == 0
    assert state.logprobs(logits, torch.tensor([0]), at) is None


@pytest.mark.parametrize(
    ("shaping", "complaint"),
    [
        ({"bias_ids": pack_int32([VOCAB]), "bias_values": pack_float32([1.0])}, f"bias: token {VOCAB} came"),
        ({"bad_words": words([1, VOCAB])}, f"bad word: token {VOCAB} came"),
        ({"bad_words": words([VOCAB + 1, 2])}, f"bad word: token {VOCAB + 1} came"),
        ({"allowed_bits": bytes(36)}, "36 bytes of allowed tokens, 40 were expected"),
    ],
)
def test_a_token_that_the_model_does_not_have_is_refused(shaping: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ProtocolError, match=f"admission to slot 0: {complaint}"):
        state_of([shaped(**shaping)], VOCAB)


# ---- nothing waits for the device


def test_the_watch_finds_what_waits() -> None:
    values = torch.arange(3)
    waiting: list[Callable[[], object]] = [
        lambda: values.sum().item(),
        lambda: bool(values.any()),
        lambda: values[values > 1],
        lambda: values.nonzero(),
        lambda: torch.repeat_interleave(values, values),
    ]
    for work in waiting:
        with pytest.raises(AssertionError, match="waits"), NoWaiting():  # type: ignore[no-untyped-call]
            work()


@pytest.mark.parametrize("seed", range(4))
def test_nothing_waits_for_the_device(seed: int) -> None:
    """On a CPU, with a vocabulary so small that it takes the way of every device."""
    rng = random.Random(seed)
    rows = [random_row(rng) for _ in range(40)]
    samplings = [msgspec.structs.replace(one.sampling, num_logprobs=rng.randint(-1, 3)) for one in rows]
    rows = [one._replace(sampling=sampling) for one, sampling in zip(rows, samplings, strict=True)]
    logits = torch.from_numpy(random_logits(np.random.default_rng(seed), len(rows)))
    mask = torch.from_numpy(np.random.default_rng(seed).random(logits.shape) < 0.7)
    slots = np.arange(len(rows))
    with NoWaiting():  # type: ignore[no-untyped-call]
        state, at = state_of(rows, VOCAB)
        positions = torch.from_numpy(at)
        tokens = state.sample(logits, slots, positions, mask, at)
        assert state.logprobs(logits, tokens, slots) is not None
        wanted = state.prompt_positions(slots, np.zeros_like(slots), at)
        assert wanted is None
        state.retire(slots)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("vocab", [VOCAB, 5000])
def test_a_gpu_samples_what_a_cpu_does_and_is_not_waited_for(seed: int, vocab: int) -> None:
    rng = random.Random(seed)
    rows = [random_row(rng) for _ in range(40)]
    rows = [one._replace(sampling=msgspec.structs.replace(one.sampling, num_logprobs=3)) for one in rows]
    if vocab != VOCAB:  # bits are of one vocabulary
        plain = [msgspec.structs.replace(one.sampling, shaping=None) for one in rows]
        rows = [one._replace(sampling=sampling) for one, sampling in zip(rows, plain, strict=True)]
    logits = torch.randn(40, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    wanted = sample(logits, rows).tolist()
    state, at = state_of(rows, vocab, torch.device("cuda"))
    slots, on_gpu, positions = np.arange(40), logits.cuda(), torch.from_numpy(at).cuda()
    state.sample(on_gpu, slots, positions, None, at)  # kernels are loaded at their first use
    with no_waits():
        tokens = state.sample(on_gpu, slots, positions, None, at)
        logprobs = state.logprobs(on_gpu, tokens, slots)
    assert tokens.tolist() == wanted and logprobs is not None
    best = best_logprobs(logits, torch.tensor(wanted), 3)
    assert logprobs.ids.tolist() == best.ids.tolist() and logprobs.ranks.tolist() == best.ranks.tolist()
    torch.testing.assert_close(logprobs.values.cpu(), best.values, atol=1e-4, rtol=0)


# ---- the positions of prompts


def test_prompt_positions_are_those_whose_next_token_is_in_the_prompt() -> None:
    samplings = [SlotSampling(num_prompt=num, num_prompt_logprobs=k) for num, k in ((5, 2), (5, -1), (9, 0), (3, 1))]
    state, _ = state_of([OneRow(sampling, 9) for sampling in samplings], VOCAB)
    starts, counts = np.array([3, 0, 2, 3]), np.array([4, 5, 3, 1])
    wanted = state.prompt_positions(np.arange(4), starts, counts)
    assert wanted is not None
    assert wanted.packed.tolist() == [0, 9, 10, 11]  # slot 0: position 3 alone; slot 2: its three; slot 3 decodes
    assert wanted.slots.tolist() == [0, 2, 2, 2]
    assert wanted.nexts.tolist() == [4, 3, 4, 5]
    assert wanted.counts == [2, 0, 0, 0]
    assert state.prompt_positions(np.array([1, 3]), starts[[1, 3]], counts[[1, 3]]) is None
