"""A notebook without Jupyter: cells with `await` at their top, one after another on one loop, in one namespace.

    python tests/doubles/notebook.py SCRIPT_OF_PERCENT_CELLS

As IPython does, it shows the value of a cell's last expression, and an error ends the cell and not the notebook.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any


class Notebook:
    """The names that cells share."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"__name__": "__main__"}

    async def run(self, cell: str) -> BaseException | None:
        """Run one cell; the error that ended it, if any: that of an interrupt too, as in IPython."""
        try:
            for code in _compiled(cell):
                value = eval(code, self.names)
                if code.co_flags & inspect.CO_COROUTINE:
                    await value
        except BaseException as error:
            return error
        return None


def cells_of(script: str) -> list[str]:
    """The cells of a script in percent form."""
    return [cell for cell in re.split(r"^# %%.*\n", script, flags=re.M) if cell.strip()]


def _compiled(cell: str) -> Iterator[CodeType]:
    """The cell's statements, and its last expression by itself, which is shown."""
    body = ast.parse(cell).body
    shown = [body.pop()] if body and isinstance(body[-1], ast.Expr) else []
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    yield compile(ast.Module(body, []), "<cell>", "exec", flags)
    yield compile(ast.Interactive(shown), "<cell>", "single", flags)


async def main(script: str) -> None:
    notebook = Notebook()
    for cell in cells_of(script):
        error = await asyncio.create_task(notebook.run(cell))
        if error is not None:
            raise error


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]).read_text()))
