"""A worker's configuration for tests: of a fake one, unless they say otherwise."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from deepinfer_protocol import WorkerConfig

_FAKE: Final = WorkerConfig(
    endpoint="ipc://nowhere",
    epoch=0,
    rank=0,
    num_ranks=1,
    runner="fake",
    model="",
    accelerator="cpu",
    num_slots=4,
    block_size=16,
    kv_cache_bytes=0,
    num_blocks=32,
    max_model_len=0,
    max_batch_positions=1 << 20,
    batch_invariant=True,
    num_threads=0,
    fake_vocab_size=97,
)


def worker_config(**changes: Any) -> WorkerConfig:
    """Small, on a CPU, one rank; with `changes`."""
    return msgspec.structs.replace(_FAKE, **changes)
