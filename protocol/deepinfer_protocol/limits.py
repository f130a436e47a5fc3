"""Bounds of the worker wire. A frame or a field beyond them is refused before anything is allocated for it."""

from __future__ import annotations

from typing import Final

MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
MAX_CONFIG_BYTES: Final = 64 * 1024
MAX_RANKS: Final = 1024
MAX_ROWS: Final = 65_536
MAX_SLOTS: Final = 1 << 20
MAX_BLOCKS: Final = 1 << 30
MAX_LENGTH: Final = 1 << 24
"""Longest sequence, in tokens."""
MAX_LOGPROBS: Final = 20
MAX_DRAFTS: Final = 64
"""Tokens of a draft block."""
MAX_COSTS: Final = 1024
"""Measured sizes of a step."""
MAX_STOP_IDS: Final = 1024
MAX_BIAS_IDS: Final = 2048
"""Tokens of a slot with a bias or a ban of their own."""
MAX_BIAS: Final = 100.0
MAX_BAD_WORD_IDS: Final = 8192
"""Token ids of all bad words of a slot, their lengths included."""
MAX_MASK_BYTES: Final = 1 << 20
"""One bit a token."""
MAX_TEXT_CHARACTERS: Final = 4096
INT32_MAX: Final = 2**31 - 1
INT64_MAX: Final = 2**63 - 1
