"""Keys of prefix blocks: a SHA-256 chain, so that a key stands for every token before it.

There are two chains for the same tokens: of blocks as a run without any hit computes them, and, *marked*, of blocks
that were computed behind a bounded replay (`deepinfer.rank`). A key of one never is a key of the other.

Knows nothing of which block holds a prefix (`deepinfer.blocks`). A cryptographic hash, because a prefix hit hands one
user's KV rows to another: a collision that someone can construct would be a leak.
"""

from __future__ import annotations

import hashlib
from array import array


def chain_root(weights_version: str, *, is_marked: bool = False) -> bytes:
    """Parent of every first block. Another version of the weights never matches, nor does the other chain."""
    name = b"deepinfer prefix behind a bounded replay\0" if is_marked else b"deepinfer prefix\0"
    return hashlib.sha256(name + weights_version.encode()).digest()


def extend_chain(hashes: list[bytes], root: bytes, tokens: array[int], block_size: int, num_blocks: int) -> None:
    """Append to `hashes` until it has the keys of the first `num_blocks` blocks of `tokens`."""
    parent = hashes[-1] if hashes else root
    for index in range(len(hashes), num_blocks):
        block = tokens[index * block_size : (index + 1) * block_size]
        parent = hashlib.sha256(parent + block.tobytes()).digest()
        hashes.append(parent)
