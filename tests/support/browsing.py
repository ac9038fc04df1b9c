"""A page in a browser without a network, and what it asked for and said."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHROMIUM = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
PLAYWRIGHT = importlib.util.find_spec("playwright") is not None
WIDTHS = (360, 1600)
SCHEMES = ("light", "dark")
STEPS = 6


class Watched:
    """A page, with the addresses that it asked for and what it wrote to the console.

    Attributes:
        page: the page of playwright.
        requests: addresses, those that were stopped included.
        said: messages of the console, and errors that nobody caught.
    """

    def __init__(self, context: Any) -> None:
        self.page = context.new_page()
        self.requests: list[str] = []
        self.said: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))

    def open(self, path: Path, fragment: str = "") -> Any:
        """Open a file and return the page."""
        self.page.goto(path.as_uri() + fragment)
        return self.page


Open = Callable[..., Watched]
"""Makes a watched page: of a width, 1280 if omitted, in a scheme, light if omitted."""


def stop_outside(context: Any) -> None:
    """Let a context of playwright load files and nothing else."""
    context.route("**/*", lambda route: route.continue_() if route.request.url.startswith("file:") else route.abort())
