"""Pages as a browser shows them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

_BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome", "chromium-browser")


def opened(path: Path, script: str = "") -> str:
    """The document as a browser has it after it has opened a page, with nothing else to load it from.

    Args:
        path: the page.
        script: what to do on the page, after its own scripts.
    """
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if browser is None:
        assert not os.environ.get("REQUIRE_BROWSER"), f"none of {_BROWSERS} is installed"
        pytest.skip(f"none of {_BROWSERS} is installed (apt-get install chromium-headless-shell)")
    if script:
        page = path.read_text()
        path = path.with_name(f"used_{path.name}")
        path.write_text(page.replace("</body>", f"<script>{script}</script></body>"))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    profile = f"--user-data-dir={path.parent / 'profile'}"
    done = subprocess.run(
        [browser, *options, profile, "--dump-dom", path.as_uri()],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert "CONSOLE" not in done.stderr, done.stderr  # where it complains of a page
    return done.stdout
