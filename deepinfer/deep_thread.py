"""A thread for code that recurses deeply. Knows nothing of what runs in it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Final

STACK_BYTES: Final = 512 << 20
"""Of address space: what is not used takes no memory."""
_changing: Final = threading.Lock()  # two at once would take each other's size for the usual one


def deep_thread(name: str) -> ThreadPoolExecutor:
    """An executor of one thread, which is there when this returns. The process's own stack size stays as it is."""
    executor = ThreadPoolExecutor(1, thread_name_prefix=name)
    with _changing:
        usual = threading.stack_size(STACK_BYTES)
        try:
            executor.submit(int)  # starts it
        finally:
            threading.stack_size(usual)
    return executor
