"""Bounds of the client wire. What lies beyond them is refused before anything is allocated for it."""

from __future__ import annotations

from typing import Final

from deepinfer_protocol.limits import INT32_MAX

MAX_FRAME_BYTES: Final = 4 * 1024 * 1024
MAX_HELLO_BYTES: Final = 4096
"""Of a message whose sender has not been welcomed."""
MAX_PARTS: Final = 1
"""Frames of a message."""
MAX_DEPTH: Final = 32
"""Maps and arrays inside each other; the message is the first. Schemas of tools nest."""
MAX_ITEMS: Final = 16_384
"""Values of a message, keys included: what takes time to look at, whatever its size."""
MAX_KEY_BYTES: Final = 256
MAX_ID_CHARACTERS: Final = 64
MAX_NAME_CHARACTERS: Final = 256
MAX_DETAIL_CHARACTERS: Final = 512
MAX_MESSAGES: Final = 4096
MAX_TOOLS: Final = 1024
MAX_SAMPLES: Final = 128
MAX_LOGPROBS: Final = 20
MAX_PRIORITY: Final = 1_000_000
MAX_CREDIT: Final = INT32_MAX
MAX_TIMEOUT_MS: Final = INT32_MAX
MAX_INT: Final = 2**53 - 1
"""What every language can count to."""
