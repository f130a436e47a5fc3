"""Steps whose shapes depend on their size alone, as a CUDA graph holds them, against steps of pieces.

Here without a GPU and without quantisation: the numbers are the same within rounding, whatever else is in the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from deepinfer_protocol import SlotSampling
from deepinfer_workers.graphs import Shape
from deepinfer_workers.models.deepseek.generator import write_model
from doubles.deepseek_sequences import DRAFTING, EXACT, Sequences, random_tokens
from doubles.driver import Driver
from doubles.tiny_deepseek import tiny_v4, tiny_v41

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB: Final = 512
WINDOW: Final = 16
PLAIN: Final = DRAFTING._replace(quantizes_activations=False, quantizes_caches=False)
FAMILIES: Final = {"v4.1": (tiny_v41, PLAIN, 256), "v4": (tiny_v4, PLAIN._replace(block_size=128), 384)}
LONGEST_ROW: Final = 6


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Sequences, ...]]:
    """Two of the same model: one is asked in pieces, one flat."""
    config, options, max_len = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp("model")
    write_model(config(vocab_size=VOCAB), folder)
    found = tuple(Sequences(folder, options, max_len=max_len) for _ in range(2))
    yield found
    for sequences in found:
        sequences.close()


def near(found: Tensor, expected: Tensor) -> None:
    assert (found - expected).abs().max() < 1e-4 * expected.std()


@pytest.mark.parametrize("num_prompt", [1, 9, 40, 140])
@pytest.mark.parametrize("is_bounded", [True, False])
def test_flat_steps_say_what_steps_of_pieces_say(
    pair: tuple[Sequences, ...], num_prompt: int, is_bounded: bool
) -> None:
    """Rows of one to six positions, in company, with drafts that are taken back; bounds near and far."""
    pieces, flat = pair
    most = -(-(num_prompt + 70) // 64) * 64 if is_bounded else flat.limits.max_len
    tokens = random_tokens(num_prompt + 60, num_prompt, VOCAB)
    lengths = {0: num_prompt, 1: num_prompt, 2: max(num_prompt // 2, 1)}
    for sequences in pair:
        for slot, length in lengths.items():
            sequences.start(slot, tokens[slot:] + tokens[:slot])
            sequences.run((slot, length))
    for step in range(9):
        counts = {slot: 1 + (step + slot) % LONGEST_ROW for slot in lengths}
        expected = pieces.run(*counts.items())
        found = flat.run(*counts.items(), most_positions=most)
        for one, other in zip(found, expected, strict=True):
            near(one, other)
        for sequences in pair:
            sequences.take_back(step % 3, min(step % 4, counts[step % 3] - 1))
        anchors = [(slot, tokens[slot]) for slot in lengths]
        for mine, its in zip(flat.draft(*anchors), pieces.draft(*anchors), strict=True):
            near(mine.hidden, its.hidden)
    # What flat steps have left, steps of pieces go on with.
    for one, other in zip(flat.run((0, 9), (1, 1)), pieces.run((0, 9), (1, 1)), strict=True):
        near(one, other)


def test_rows_below_a_floor_stay_as_they_are(pair: tuple[Sequences, ...]) -> None:
    """A prefix hit: rows that others may read are computed again in the window's replay, and not written."""
    pieces, flat = pair
    tokens = random_tokens(256, 5, VOCAB)
    size = flat.block_size
    shared = size if size > 100 else 4 * size
    for sequences in pair:
        sequences.start(0, tokens)
        sequences.run((0, shared + 30))
        sequences.start(1, tokens, length=shared - WINDOW, floor=shared, blocks=sequences.blocks(0, shared))
    for _ in range(WINDOW // 4 + 3):
        before = paged_rows(flat, shared)
        found, expected = flat.run((1, 4), most_positions=256)[0], pieces.run((1, 4))[0]
        near(found, expected)
        for rows, kept in zip(paged_rows(flat, shared), before, strict=True):
            assert torch.equal(rows, kept)


def paged_rows(sequences: Sequences, num_tokens: int) -> list[Tensor]:
    """Of the first tokens of slot 0, in all layers."""
    found = []
    for caches in sequences.model._caches.layers:
        if caches.source is not None:
            for paged in filter(None, (caches.source.main, caches.source.index)):
                blocks = sequences.tables[0, : num_tokens // sequences.block_size].long()
                per_block = paged.rows_per_block
                places = (blocks[:, None] * per_block + torch.arange(per_block)).flatten()
                found.append(paged._store[places].clone())
    return found


def test_null_rows_stay_zero(pair: tuple[Sequences, ...]) -> None:
    """Padding completes no rows."""
    _, flat = pair
    flat.start(0, random_tokens(100, 3, VOCAB))
    flat.run((0, 50))
    for _ in range(5):
        flat.run((0, 3), most_positions=128)
    for caches in flat.model._caches.layers:
        if caches.source is not None:
            for paged in filter(None, (caches.source.main, caches.source.index)):
                assert not paged._store[paged.null_row : paged.null_row + paged.rows_per_block].any()


class Shapes(TorchDispatchMode):
    """What was launched, and how large it was."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        shape = tuple(out.shape) if isinstance(out, Tensor) else ()
        self.seen.append((func.overloadpacket.__name__, shape))
        return out


def test_what_is_launched_depends_on_the_size_alone(tmp_path: Path) -> None:
    """But for experts, which a GPU multiplies at once: here they are left out."""
    write_model(tiny_v41(vocab_size=VOCAB), tmp_path)
    sequences = Sequences(tmp_path, EXACT, max_len=256)
    for block in sequences.model._blocks:
        block._sublayers._moe.routed = lambda x, tokens: torch.zeros_like(x)  # type: ignore[method-assign]
    launched = []
    for slot, num_prompt in enumerate((3, 120, 9)):
        sequences.start(slot, random_tokens(200, slot, VOCAB))
        sequences.run((slot, num_prompt))
    for pieces in (((0, 5), (2, 1)), ((1, 1), (0, 1)), ((2, 6),), ((1, 6), (2, 6))):
        forward, seen = sequences.model.forward_flat, Shapes()

        def watched(step, most, forward=forward, seen=seen):  # type: ignore[no-untyped-def]
            with seen:
                return forward(step, most)

        sequences.model.forward_flat = watched  # type: ignore[method-assign]
        sequences.run(*pieces, most_positions=256)
        sequences.model.forward_flat = forward  # type: ignore[method-assign]
        launched.append(seen.seen)
    assert len(launched[0]) > 500 and launched[0] == launched[1] == launched[2] == launched[3]
    assert not {"_local_scalar_dense", "nonzero"} & {name for name, _ in launched[0]}, "something waits"
    sequences.close()


@pytest.mark.gpu
@pytest.mark.parametrize("num_drafts", [0, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_say_what_steps_say(tmp_path: Path, family: str, num_drafts: int) -> None:
    """Greedy and seeded, over lengths that several graphs are for; nearly all of the steps go by graphs."""
    config, options, max_len = FAMILIES[family]
    write_model(config(vocab_size=VOCAB), tmp_path)
    plain = {"quantize_activations": False, "quantize_cache": False, "dtype": "float32", "accelerator": "nvidia"}
    said = []
    for cuda_graphs in (False, True):
        driver = Driver(
            tmp_path,
            **plain,
            block_size=options.block_size,
            max_model_len=max_len,
            num_drafts=num_drafts,
            cuda_graphs=cuda_graphs,
        )
        graphs, num_replayed = driver.runner._graphs, 0
        if graphs is not None:
            replay = graphs.replay

            def counted(shape: Shape, inputs: Tensor, replay: Callable[[Shape, Tensor], Tensor] = replay) -> Tensor:
                nonlocal num_replayed
                num_replayed += 1
                return replay(shape, inputs)

            graphs.replay = counted  # type: ignore[method-assign]
        said.append(
            [
                driver.generate_with(random_tokens(length, length, VOCAB), 40, sampling, slot=slot)
                for slot, (length, sampling) in enumerate(
                    ((3, SlotSampling()), (60, SlotSampling(temperature=0.8, seed=3)), (200, SlotSampling()))
                )
            ]
        )
        assert num_replayed > 100 if cuda_graphs else graphs is None
        driver.close()
    assert said[0] == said[1]
