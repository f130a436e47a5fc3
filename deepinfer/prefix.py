"""Keys of prefix blocks: a SHA-256 chain, so that a key stands for every token before it.

Knows nothing of which block holds a prefix (`deepinfer.blocks`). A cryptographic hash, because a prefix hit hands one
user's KV rows to another: a collision that someone can construct would be a leak.
"""

from __future__ import annotations

import hashlib
from array import array


def chain_root(weights_version: str) -> bytes:
    """Parent of every first block. Another version of the weights never matches."""
    return hashlib.sha256(b"deepinfer prefix\0" + weights_version.encode()).digest()


def extend_chain(hashes: list[bytes], root: bytes, tokens: array[int], block_size: int, num_blocks: int) -> None:
    """Append to `hashes` until it has the keys of the first `num_blocks` blocks of `tokens`."""
    parent = hashes[-1] if hashes else root
    for index in range(len(hashes), num_blocks):
        block = tokens[index * block_size : (index + 1) * block_size]
        parent = hashlib.sha256(parent + block.tobytes()).digest()
        hashes.append(parent)
