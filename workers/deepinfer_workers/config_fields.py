"""Checked access to what a checkpoint says about itself. Knows no architecture.

What is not understood is refused by name: a model that runs with a part of it ignored gives wrong tokens, not errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from deepinfer_workers.checkpoint import bad_file, unsupported
from deepinfer_workers.runner import WorkerFault

MAX_SIZE: Final = 1 << 24
"""More than any size of a real model, the rows of an n-gram table apart."""
REQUIRED: Final = object()
"""As a default: the key has to be there."""


class Fields:
    """The keys of one object. A key whose value is null counts as missing."""

    def __init__(
        self, name: str, fields: Mapping[str, Any], prefix: str = "", spelling: Mapping[str, str] | None = None
    ) -> None:
        """`prefix` stands before every key; `spelling`: how this file writes a key that others write another way."""
        self._name = name
        self._fields = fields
        self._prefix = prefix
        self._spelling = spelling or {}
        self._known: set[str] = set()

    def has(self, key: str) -> bool:
        return self._find(key) is not None

    def know(self, *keys: str) -> None:
        """They mean something, also where nothing reads them."""
        self._known.update(map(self._spelled, keys))

    def size(self, key: str, default: Any = REQUIRED, low: int = 1, high: int = MAX_SIZE) -> int:
        value = self._get(key, default)
        if type(value) is not int or not low <= value <= high:
            raise self.bad(key, f"a number from {low} to {high} expected, {value!r} came")
        return value

    def ascending(self, key: str, high: int) -> tuple[int, ...]:
        """A list of numbers from 0 to `high`, each above the one before."""
        values = self.sizes(key, high=high)
        if list(values) != sorted(set(values)):
            raise self.bad(key, f"numbers in ascending order were expected, {list(values)} came")
        return values

    def sizes(self, key: str, default: Any = REQUIRED, low: int = 0, high: int = MAX_SIZE) -> tuple[int, ...]:
        """A list of numbers."""
        values = self._get(key, default)
        is_list = isinstance(values, list | tuple)
        if not is_list or not all(type(value) is int and low <= value <= high for value in values):
            raise self.bad(key, f"a list of numbers from {low} to {high} expected, {values!r} came")
        return tuple(values)

    def number(self, key: str, default: Any = REQUIRED) -> float:
        value = self._get(key, default)
        if type(value) not in (int, float) or not 0.0 < value < 1e12:
            raise self.bad(key, f"a positive number was expected, {value!r} came")
        return float(value)

    def child(self, key: str) -> Fields | None:
        """The object under `key`, where there is one."""
        value = self._find(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.bad(key, f"an object was expected, {value!r} came")
        return Fields(f"{self._name}: {self._spelled(key)}", value)

    def refuse_unless(self, key: str, *allowed: Any) -> None:
        """The value is one of `allowed`, or missing."""
        value = self._find(key)
        if value is not None and not any(_is_same(value, known) for known in allowed):
            raise unsupported(self._name, f"{self._spelled(key)} = {value!r} is not supported")

    def refuse_others(self, ignored: frozenset[str]) -> None:
        """No key was left unread, but for `ignored` ones and those without a value."""
        for key in sorted(self._fields.keys() - self._known - ignored):
            if self._fields[key] is not None:
                raise unsupported(self._name, f"{key} = {self._fields[key]!r} is not understood")

    def bad(self, key: str, text: str) -> WorkerFault:
        """What `key` says does not fit; `text` says what was expected and what came."""
        return bad_file(self._name, f"{self._spelled(key)}: {text}")

    def _get(self, key: str, default: Any) -> Any:
        value = self._find(key)
        if value is None:
            if default is REQUIRED:
                raise bad_file(self._name, f"{self._spelled(key)} was expected and is missing")
            return default
        return value

    def _find(self, key: str) -> Any:
        spelled = self._spelled(key)
        self._known.add(spelled)
        return self._fields.get(spelled)

    def _spelled(self, key: str) -> str:
        return self._prefix + self._spelling.get(key, key)


def _is_same(value: Any, known: Any) -> bool:
    """1 is 1.0, and no True; an array, as GGUF has them, is nothing."""
    is_plain = isinstance(value, str | int | float | list)
    return is_plain and value == known and isinstance(value, bool) == isinstance(known, bool)
