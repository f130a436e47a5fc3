"""The version of this installation, and what both ends of the worker wire must agree on to the letter."""

from __future__ import annotations

from typing import Final

from deepinfer_protocol.messages import WIRE_REVISION

VERSION: Final = "0.1.0"


def wire_version() -> str:
    """Package and wire of this end."""
    return f"{VERSION}+wire{WIRE_REVISION}"
