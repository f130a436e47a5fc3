"""What a truncated prompt needs of its end: whether the kept positions rebuild all that decoding reads.

In `compact` the decoder half of a model runs over the last positions of a prompt only. Knows nothing of layers.
"""

from __future__ import annotations

from deepinfer_workers.runner import WorkerFault


def check_keep(keep_tokens: int | None, window: int, num_drafts: int = 0) -> None:
    """Refuse to keep less than a window, what a drafter may take back, and the position that is sampled.

    All in positions; `keep_tokens` `None` keeps everything. Raises `WorkerFault` with the sum.
    """
    least = window + num_drafts + 1
    if keep_tokens is not None and keep_tokens < least:
        words = f"{keep_tokens} is below window + drafts + 1 = {window} + {num_drafts} + 1 = {least}"
        raise WorkerFault("setting", f"prefill_keep_tokens: {words}")
