"""A Hugging Face Hub of one's own: a server on this machine, and folders as its client keeps them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

REVISION = "0123456789abcdef0123456789abcdef01234567"
REFUSALS = {"GatedRepo": 403, "RepoNotFound": 401, "EntryNotFound": 404, "": 503}
"""The status that goes with the Hub's code for an error."""


@dataclass
class Hub:
    """What the server has, and what it was asked."""

    address: str = ""
    models: dict[str, dict[str, Any] | str] = field(default_factory=dict)
    """The ``config.json`` of each model, or the code of the error in its place; ``silent`` is no answer, and
    ``slow`` a byte now and then."""
    asked: list[str] = field(default_factory=list)
    """Methods and paths."""
    tokens: set[str | None] = field(default_factory=set)
    ended: threading.Event = field(default_factory=threading.Event)


@contextmanager
def hub(**models: dict[str, Any] | str) -> Iterator[Hub]:
    """A Hub that has the models of an organization ``org``."""
    found = Hub(models={f"/org/{name}/": value for name, value in models.items()})

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, with_body: bool) -> None:
            if not self.path.startswith("/org/"):  # the client asks for other things on its own
                self.send_error(404)
                return
            found.asked.append(f"{self.command} {self.path}")
            found.tokens.add(self.headers["Authorization"])
            name, _, file = self.path.partition("resolve/main/")
            model = found.models.get(name, "RepoNotFound")
            if isinstance(model, dict) and file != "config.json":
                model = "EntryNotFound"
            if model == "silent":
                found.ended.wait(60)
            elif isinstance(model, str) and model != "slow":
                self.send_response(REFUSALS[model])
                self.send_header("X-Error-Code", model)
                self.send_header("Content-Length", "0")
                self.end_headers()
            else:
                self._send(json.dumps(model).encode(), with_body, slow=model == "slow")

        def _send(self, body: bytes, with_body: bool, slow: bool) -> None:
            size = 1000 if slow else len(body)
            self.send_response(200)
            self.send_header("X-Repo-Commit", REVISION)
            self.send_header("ETag", '"abc"')
            self.send_header("Content-Length", str(size))
            self.end_headers()
            if with_body and not slow:
                self.wfile.write(body)
            while with_body and slow and not found.ended.wait(0.5):
                self.wfile.write(b" ")
                self.wfile.flush()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    found.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield found
    finally:
        found.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()


def cached(cache: Path, name: str, about: dict[str, Any]) -> Path:
    """Put the ``config.json`` of a model into a cache folder, as huggingface_hub does; returns its folder."""
    model = cache / f"models--{name.replace('/', '--')}"
    snapshot = model / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(about))
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(REVISION)
    return snapshot
