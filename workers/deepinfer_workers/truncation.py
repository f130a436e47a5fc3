"""What a truncated prompt needs of its end: whether the kept positions rebuild all that decoding reads.

In `compact` the decoder half of a model runs over the last positions of a prompt only. Knows nothing of layers.
"""

from __future__ import annotations

from deepinfer_protocol import WorkerConfig
from deepinfer_workers.runner import WorkerFault


def check_keep(config: WorkerConfig, window: int, num_drafts: int = 0) -> None:
    """Refuse to keep less than a window, what a drafter may take back, and the position that is sampled.

    Raises `WorkerFault` with the sum. `window` and `num_drafts` are in positions.
    """
    least = window + num_drafts + 1
    if config.prefill_truncation == "compact" and config.prefill_keep_tokens < least:
        words = f"{config.prefill_keep_tokens} is below window + drafts + 1 = {window} + {num_drafts} + 1 = {least}"
        raise WorkerFault("setting", f"prefill_keep_tokens: {words}")
