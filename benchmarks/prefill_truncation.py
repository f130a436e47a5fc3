"""What truncating a prompt's decoder half saves: FLOPs a prompt token, counted where they are done, and time.

    python benchmarks/prefill_truncation.py --json

A random checkpoint has V4.1-Flash's 40 layers, sources and window at small widths. Its prompts run through
`ModelRunner`, `--chunk` positions a step, with `prefill_truncation` `off` and `compact` (140 positions kept). FLOPs are
those of every matrix product that torch is asked for: with weights (`products`), of queries, keys and values
(`pairs`: attention and index scores). Rows are the model's own counts. Time is the median of `--runs`, both modes in
turn, without counting. Rows are not padded to tiles (`batch_invariant` off): on the row-invariant path a product of few
rows costs that of 16.

The figures of Flash itself are by formula: its shapes, and rows as they were counted here. A layer that computed every
position of the shortest and of the longest prompt does so of any, and one that computed as many of both stays at that.

`agreement` is the share of random prompts behind which both modes have the same most likely token. Nothing was ever
learned here, so it says that the two are alike, and nothing about the released model.

Expected, before it was measured. Encoder layers, and the compressed rows of the decoder's first layer, take every
position of a prompt, the other parts of the decoder 140, the head one. So `products` of `compact` are 0.575 of those of
`off` at 1,000 tokens and 0.523 at 4,000, exactly as the formula has them. `pairs` are above their formula, for
keys come in whole tiles, and a step scores for all of its positions the rows that the last of them sees. Flash: 30.9
GFLOP of products a token fall to 15.8 and the part of what is kept: to 0.58 at 1,000 tokens, 0.51 at 128,000, and with
attention and scores within a hundredth of that. Time falls by less: starting an operation takes as long for few rows.

Measured (2 x86-64 cores with AVX512, shared with other work, torch 2.13, `--threads 1 --runs 1 --prompts 16`,
2026-11-30): products as expected, 0.5745 and 0.5226, each count equal to its formula; with pairs 0.561 and 0.483; Flash
0.579 to 0.511, and in all 0.574 to 0.504. CPU time of single runs fell to 0.61 at 1,000 tokens, by less than FLOPs, but
to 0.41 at 4,000, by more: of eight index sources the decoder half has five, over every token in place of every other,
and what is done to scores is no product. Agreement: 13 of 16. Below 258 tokens counted products are under the formula:
where a position may choose every row it sees, index queries are not made.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from deepinfer_protocol import RowFlag, SlotAdmit, SlotSampling, StepPlan, WorkerConfig, pack_int32, unpack_int32
from deepinfer_workers.model_runner import ModelRunner
from deepinfer_workers.models.deepseek.config import DeepseekConfig
from deepinfer_workers.models.deepseek.generator import write_model
from deepinfer_workers.models.deepseek.model import Deepseek, RowCounts

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]  # where nothing is installed, what lies beside is found too

from benchmarks.deepseek_configs import v41_flash, v41_small  # noqa: E402
from benchmarks.deepseek_flops import Flops, prompt_flops  # noqa: E402

Mode = Literal["off", "compact"]
MODES: Final[tuple[Mode, ...]] = ("off", "compact")
KEEP_TOKENS: Final = 140
BLOCK_SIZE: Final = 16
FLASH_LENGTHS: Final = (1_000, 16_000, 128_000)
AGREEMENT_LENGTHS: Final = (150, 500)
SEED: Final = 0


class Counted(NamedTuple):
    """One prompt as it was computed."""

    token: int
    """The most likely one behind it."""
    products: int
    """FLOPs with weights."""
    pairs: int
    """FLOPs of attention and index scores."""
    rows: RowCounts


class Seconds(NamedTuple):
    wall: float
    cpu: float
    """Of all threads: on a machine that others use it says more."""


class ProductCounter(TorchDispatchMode):
    """FLOPs by operation, by torch's own formulas and one for constant weights.

    What torch's `FlopCounterMode` would take apart to look for products is refused if it holds one, and else left
    alone: that takes half the time.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops: Counter[Any] = Counter()
        self._formulas = {**flop_registry, torch.ops.aten.linear: _linear_flops}
        if hasattr(torch.ops.mkldnn, "_linear_pointwise"):  # else no weight is packed
            self._formulas[torch.ops.mkldnn._linear_pointwise] = _linear_flops

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func._overloadpacket
        if packet in _COMPOSITE:
            raise NotImplementedError(f"{packet} holds products that are not counted")
        out = func(*args, **(kwargs or {}))
        if packet in self._formulas:
            self.flops[packet] += self._formulas[packet](*args, **(kwargs or {}), out_val=out)
        return out


_COMPOSITE: Final = frozenset({torch.ops.aten.matmul, torch.ops.aten.einsum})


def _linear_flops(x: Tensor, weight: Tensor, *_: object, **__: object) -> int:
    """Of `x` [..., C] with a weight [F, C], packed or not."""
    return 2 * x.numel() * weight.shape[0]


class Prompts:
    """A model in one mode, that computes prompts one after another and forgets them."""

    def __init__(self, folder: Path, mode: Mode, max_len: int, chunk: int, keep_tokens: int = KEEP_TOKENS) -> None:
        self._chunk = chunk
        self._runner = ModelRunner(
            WorkerConfig(
                endpoint="", epoch=1, rank=0, num_ranks=1, runner="model", model=str(folder), accelerator="cpu",
                num_slots=1, block_size=BLOCK_SIZE, kv_cache_bytes=0, num_blocks=-(-max_len // BLOCK_SIZE),
                max_model_len=max_len, max_batch_positions=chunk, batch_invariant=False,
                num_threads=torch.get_num_threads(), dtype="float32", prefill_truncation=mode,
                prefill_keep_tokens=keep_tokens, num_drafts=0,
            )
        )  # fmt: skip
        self._runner.load(lambda done, total: None)
        self._generation = 0

    def run(self, tokens: Sequence[int]) -> int:
        """The most likely token behind `tokens`."""
        self._generation += 1
        for plan in self._plans(tokens):
            output, _ = self._runner.launch(self._runner.build(plan), _no_masks).wait()
        return int(unpack_int32(output.tokens)[0])

    def time(self, tokens: Sequence[int]) -> Seconds:
        wall, cpu = time.perf_counter(), time.process_time()
        self.run(tokens)
        return Seconds(time.perf_counter() - wall, time.process_time() - cpu)

    def count(self, tokens: Sequence[int]) -> Counted:
        before = _copy(self._counts)
        with ProductCounter() as counter:
            token = self.run(tokens)
        pairs = counter.flops.pop(torch.ops.aten.bmm, 0)
        after = self._counts
        rows = RowCounts(
            after.through_layer - before.through_layer, after.into_rows - before.into_rows, after.head - before.head
        )
        return Counted(token, sum(counter.flops.values()), pairs, rows)

    def _plans(self, tokens: Sequence[int]) -> Iterator[StepPlan]:
        """Admission with the first chunk, a sample with the last; the sequence before makes room."""
        blocks = pack_int32(list(range(-(-len(tokens) // BLOCK_SIZE))))
        sampling = SlotSampling(num_prompt=len(tokens))
        admit = SlotAdmit(0, self._generation, 0, 0, pack_int32(list(tokens)), blocks, sampling)
        for start in range(0, len(tokens), self._chunk):
            count = min(self._chunk, len(tokens) - start)
            flags = int(RowFlag.SAMPLE) if start + count == len(tokens) else 0
            yield StepPlan(
                epoch=1, step_id=1, rank=0, padded_positions=count,
                retired=pack_int32([0] if self._generation > 1 and not start else []),
                admits=[] if start else [admit], appends=b"", rows=pack_int32([0, self._generation, count, flags]),
            )  # fmt: skip

    @property
    def _counts(self) -> RowCounts:
        model = self._runner._model
        assert isinstance(model, Deepseek)
        return model.counts


def _no_masks() -> NoReturn:
    raise AssertionError("no row waits for a mask")


def _copy(counts: RowCounts) -> RowCounts:
    return replace(counts, through_layer=counts.through_layer.copy(), into_rows=counts.into_rows.copy())


def rows_of_length(num_tokens: int, short: tuple[int, RowCounts], long: tuple[int, RowCounts]) -> RowCounts:
    """Rows of a prompt of `num_tokens`, from two prompts that were counted: (tokens, rows) each.

    Along a line through both. Raises `ValueError` for a line that is neither level nor rises with the prompt.
    """
    (short_tokens, few), (long_tokens, many) = short, long

    def along(first: Any, second: Any) -> Any:
        slope = (second - first) / (long_tokens - short_tokens)
        if not np.isin(slope, (0.0, 1.0)).all():
            raise ValueError(f"rows {first} of {short_tokens} tokens and {second} of {long_tokens} follow no rule")
        return np.int64(first + slope * (num_tokens - short_tokens))

    return RowCounts(
        along(few.through_layer, many.through_layer), along(few.into_rows, many.into_rows), along(few.head, many.head)
    )


def random_prompt(length: int, vocab_size: int, seed: int) -> list[int]:
    tokens: list[int] = np.random.default_rng([SEED, seed]).integers(3, vocab_size, length).tolist()
    return tokens


def measure_length(
    models: dict[Mode, Prompts], config: DeepseekConfig, length: int, num_runs: int
) -> tuple[list[dict[str, Any]], dict[Mode, Counted]]:
    """The lines of one length, and what was counted."""
    prompt = random_prompt(length, config.vocab_size, length)
    counted = {mode: model.count(prompt) for mode, model in models.items()}
    runs: dict[Mode, list[Seconds]] = {mode: [] for mode in models}
    for _ in range(num_runs):
        for mode, model in models.items():
            runs[mode].append(model.time(prompt))
    seconds = {mode: Seconds(*map(statistics.median, zip(*runs[mode], strict=True))) for mode in models}
    lines = [_line(config, length, mode, counted[mode], seconds[mode]) for mode in models]
    off, compact = (counted[mode] for mode in MODES)
    ratio = {
        "model": "small",
        "prompt_tokens": length,
        "compact_to_off": "counted",
        "products": compact.products / off.products,
        "flops": (compact.products + compact.pairs) / (off.products + off.pairs),
        "time": seconds["compact"].wall / seconds["off"].wall,
        "cpu_time": seconds["compact"].cpu / seconds["off"].cpu,
    }
    return [*lines, ratio], counted


def _line(config: DeepseekConfig, length: int, mode: Mode, counted: Counted, seconds: Seconds) -> dict[str, Any]:
    rows = counted.rows
    start = config.decoder_start
    formula = prompt_flops(config, rows, length)
    return {
        "model": "small",
        "prompt_tokens": length,
        "mode": mode,
        "rows_encoder": _same(rows.through_layer[:start]),
        "rows_compressed": _same(rows.into_rows[list(config.kv_sources)]),
        "rows_decoder": _same(rows.through_layer[start:]),
        "rows_head": rows.head,
        "mflop_per_token": (counted.products + counted.pairs) / length / 1e6,
        "mflop_per_token_products": counted.products / length / 1e6,
        "mflop_per_token_pairs": counted.pairs / length / 1e6,
        "formula_mflop_per_token_products": formula.products / length / 1e6,
        "formula_mflop_per_token_pairs": (formula.attention + formula.scores) / length / 1e6,
        "prefill_s": seconds.wall,
        "prefill_cpu_s": seconds.cpu,
    }


def _same(rows: np.ndarray[Any, np.dtype[np.int64]]) -> int:
    """What all layers have computed."""
    assert (rows == rows[0]).all(), rows
    return int(rows[0])


def flash_lines(
    short: tuple[int, dict[Mode, Counted]], long: tuple[int, dict[Mode, Counted]]
) -> Iterator[dict[str, Any]]:
    """V4.1-Flash by formula, from rows counted at two lengths."""
    config = DeepseekConfig.read(v41_flash(), "config.json")
    for length in FLASH_LENGTHS:
        flops: dict[Mode, Flops] = {}
        for mode in MODES:
            rows = rows_of_length(length, *((tokens, counted[mode].rows) for tokens, counted in (short, long)))
            flops[mode] = prompt_flops(config, rows, length).per_token(length)
            yield {
                "model": "V4.1-Flash, by formula",
                "prompt_tokens": length,
                "mode": mode,
                "gflop_per_token": flops[mode].total / 1e9,
                **{f"gflop_per_token_{part}": value / 1e9 for part, value in flops[mode]._asdict().items()},
            }
        yield {
            "model": "V4.1-Flash, by formula",
            "prompt_tokens": length,
            "compact_to_off": "by formula",
            "products": flops["compact"].products / flops["off"].products,
            "flops": flops["compact"].total / flops["off"].total,
        }


def agreement(models: dict[Mode, Prompts], vocab_size: int, num_prompts: int) -> dict[str, Any]:
    lengths = np.random.default_rng(SEED).integers(*AGREEMENT_LENGTHS, num_prompts).tolist()
    prompts = [random_prompt(length, vocab_size, 10_000 + index) for index, length in enumerate(lengths)]
    off, compact = ([models[mode].run(prompt) for prompt in prompts] for mode in MODES)
    same = [first == second for first, second in zip(off, compact, strict=True)]
    return {"model": "small", "agreement": sum(same) / num_prompts, "prompts": num_prompts}


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    yield {
        "benchmark": "prefill_truncation",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "keep_tokens": KEEP_TOKENS,
        "chunk": arguments.chunk,
        "runs": arguments.runs,
    }
    lengths = sorted(set(arguments.lengths))
    with tempfile.TemporaryDirectory() as name:
        config = write_model(v41_small(), Path(name))
        max_len = max(*lengths, *AGREEMENT_LENGTHS) + 1
        models = {mode: Prompts(Path(name), mode, max_len, arguments.chunk) for mode in MODES}
        counted: dict[int, dict[Mode, Counted]] = {}
        for length in lengths:
            lines, counted[length] = measure_length(models, config, length, arguments.runs)
            yield from lines
        yield agreement(models, config.vocab_size, arguments.prompts)
    yield from flash_lines((lengths[0], counted[lengths[0]]), (lengths[-1], counted[lengths[-1]]))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="a JSON object a line, as they are measured")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1_000, 4_000], help="of prompts, two at least")
    parser.add_argument("--chunk", type=int, default=512, help="positions of a step, at most")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=32, help="for the agreement")
    parser.add_argument("--threads", type=int, default=0, help="of the device; 0: torch's choice")
    arguments = parser.parse_args(argv)
    if len(set(arguments.lengths)) < 2 or min(arguments.lengths) <= KEEP_TOKENS:
        parser.error(f"--lengths: two or more, above the {KEEP_TOKENS} positions that are kept")
    for line in measure(arguments):
        rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in line.items()}
        print(json.dumps(rounded) if arguments.json else "  ".join(f"{k}={v}" for k, v in rounded.items()), flush=True)


if __name__ == "__main__":
    main()
