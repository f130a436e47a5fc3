"""A headless Chromium, where one is installed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
from playwright.sync_api import Browser, sync_playwright

NAMES: Final = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


@contextmanager
def headless_chromium() -> Iterator[Browser]:
    """The system's, or the one that Playwright has installed. Skips the test where there is none."""
    with sync_playwright() as playwright:
        own = playwright.chromium.executable_path
        found = next(filter(None, map(shutil.which, NAMES)), own if Path(own).exists() else None)
        if found is None:
            pytest.skip(f"no browser: none of {', '.join(NAMES)} is here")
        with playwright.chromium.launch(executable_path=found) as browser:
            yield browser
