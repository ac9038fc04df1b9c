"""A browser that has no network, pages of a demo, and what a page asked for and said."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.browsing import CHROMIUM, PLAYWRIGHT, STEPS, Open, Watched, stop_outside

collect_ignore_glob = [] if PLAYWRIGHT and CHROMIUM else ["test_*.py"]  # `make test-browser` brings both


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    with importlib.import_module("playwright.sync_api").sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])  # no sandbox: the tests may run as root
        yield started
        started.close()


@pytest.fixture
def watched(browser: Any) -> Iterator[Open]:
    """Return a function that gives a watched page; whatever it asked for outside the folder of the demo has failed the test by its end."""
    contexts: list[Any] = []
    pages: list[Watched] = []

    def make(width: int = 1280, scheme: str = "light") -> Watched:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        stop_outside(context)
        contexts.append(context)
        pages.append(Watched(context))
        return pages[-1]

    yield make
    for context in contexts:
        context.close()
    outside = [address for page in pages for address in page.requests if not address.startswith(("file:", "data:"))]
    assert outside == []
    assert [text for page in pages for text in page.said] == []


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a demo of a few steps."""
    folder = tmp_path_factory.mktemp("browser") / "demo"
    command = [sys.executable, "-m", "mpbackend.cli.main", "demo", "--steps", str(STEPS), "--out", str(folder)]
    subprocess.run(command, check=True, capture_output=True, timeout=300, env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"})
    return folder


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where screenshots go: the folder named by MPBACKEND_SCREENSHOTS, or one that is thrown away."""
    named = os.environ.get("MPBACKEND_SCREENSHOTS")
    folder = Path(named) if named else tmp_path_factory.mktemp("pictures")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
