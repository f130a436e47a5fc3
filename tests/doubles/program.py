"""Runs a program as a user does, from the root of the checkout, installed or not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

REPO: Final = Path(__file__).resolve().parents[2]
FOLDERS: Final = (".", "protocol", "workers", "kernels", "tests")


def environment(**variables: str) -> dict[str, str]:
    """This process's, with our packages in reach, and `variables`."""
    folders = [str(REPO / folder) for folder in FOLDERS]
    folders += filter(None, [os.environ.get("PYTHONPATH")])
    return os.environ | {"PYTHONPATH": os.pathsep.join(folders)} | variables


def run(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """`python -W error ARGUMENTS`, to its end."""
    command = [sys.executable, "-W", "error", *map(str, arguments)]
    return subprocess.run(command, env=environment(**variables), capture_output=True, text=True, cwd=REPO, timeout=150)
