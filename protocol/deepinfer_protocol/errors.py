"""The one error of this package: bytes or fields that are not a message of the wire."""

from __future__ import annotations


class ProtocolError(Exception):
    """What arrived is no message of this wire: malformed, too large, or out of its bounds."""
