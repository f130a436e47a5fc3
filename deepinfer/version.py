"""The version of this installation."""

from typing import Final

VERSION: Final = "0.1.0"
