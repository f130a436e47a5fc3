"""The one file that reads the environment: which variable sets which field of `EngineConfig`, and what a worker gets.

Knows nothing of what the fields mean (`deepinfer.config`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Final

ENVIRONMENT_NAMES: Final[Mapping[str, str]] = {
    "model": "DEEPINFER_HF_MODEL_DIR",
    "accelerator": "DEEPINFER_ACCELERATOR",
    "dtype": "DEEPINFER_DTYPE",
    "load_format": "DEEPINFER_LOAD_FORMAT",
    "cuda_graphs": "DEEPINFER_CUDA_GRAPHS",
    "overlap": "DEEPINFER_ZERO_OVERHEAD_SCHEDULING",
    "batch_invariant": "DEEPINFER_BATCH_INVARIANT",
    "num_workers": "DEEPINFER_NUM_WORKERS",
    "num_threads": "DEEPINFER_NUM_THREADS",
    "max_model_len": "DEEPINFER_MAX_MODEL_LEN",
    "max_num_seqs": "DEEPINFER_MAX_NUM_SEQS",
    "max_batch_tokens": "DEEPINFER_MAX_BATCH_TOKENS",
    "prefill_chunk": "DEEPINFER_PREFILL_CHUNK",
    "block_size": "DEEPINFER_BLOCK_SIZE",
    "num_blocks": "DEEPINFER_NUM_BLOCKS",
    "kv_cache_bytes": "DEEPINFER_KV_CACHE_BYTES",
    "prefix_cache": "DEEPINFER_PREFIX_CACHE",
    "prefix_hits": "DEEPINFER_PREFIX_HITS",
    "prefill_truncation": "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE",
    "prefill_keep_tokens": "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS",
    "cache_format": "DEEPINFER_CACHE_FORMAT",
    "quantize_activations": "DEEPINFER_QUANTIZE_ACTIVATIONS",
    "quantize_cache": "DEEPINFER_QUANTIZE_CACHE",
    "num_drafts": "DEEPINFER_USE_NEXTN_DECODE",
    "scheduled_drafts": "DEEPINFER_ENABLE_MTP_VARLEN",
    "cost_table": "DEEPINFER_COST_TABLE",
    "max_queued_requests": "DEEPINFER_MAX_QUEUED_REQUESTS",
    "max_queued_tokens": "DEEPINFER_MAX_QUEUED_TOKENS",
    "ageing_s": "DEEPINFER_AGEING_S",
    "max_unread_tokens": "DEEPINFER_MAX_UNREAD_TOKENS",
    "slow_consumer_s": "DEEPINFER_SLOW_CONSUMER_S",
    "step_timeout_s": "DEEPINFER_STEP_TIMEOUT_S",
    "start_timeout_s": "DEEPINFER_START_TIMEOUT_S",
    "seed": "DEEPINFER_SEED",
    "cache_dir": "DEEPINFER_CACHE_DIR",
    "runtime_dir": "DEEPINFER_RUNTIME_DIR",
}
"""Field to variable. The names that DeepSeek's engine has are DeepSeek's."""


def read_settings() -> dict[str, str]:
    """The fields that the environment sets, as text. An empty variable sets nothing."""
    found = {field: os.environ.get(name, "") for field, name in ENVIRONMENT_NAMES.items()}
    return {field: text for field, text in found.items() if text}


def cache_home() -> str | None:
    return os.environ.get("XDG_CACHE_HOME") or None


def runtime_homes() -> list[str]:
    """Folders for sockets, the most private first."""
    return [path for path in (os.environ.get("XDG_RUNTIME_DIR"), os.environ.get("TMPDIR"), "/tmp") if path]


def worker_environment(module_folders: Iterable[str]) -> dict[str, str]:
    """This process's environment for a worker that imports from `module_folders` first."""
    environment = dict(os.environ)
    inherited = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join([*module_folders, *([inherited] if inherited else [])])
    return environment
