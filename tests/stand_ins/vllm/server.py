"""What ``vllm serve`` answers, in a thread; vLLM has its server elsewhere."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue
from typing import Any

import torch

from vllm.engine import LLM, Call, SamplingParams, calls

sent: Queue[torch.Tensor] = Queue()
"""Weights on their way to the server: what NCCL carries."""


@contextmanager
def serving(model: str) -> Iterator[int]:
    """A context in which a server answers on loopback; gives its port."""
    engine = LLM(model)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(_asked(self.path.partition("?")[0]))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self._answer(_told(engine, self.path, json.loads(body or "{}")))

        def _answer(self, answer: dict[str, Any]) -> None:
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


def _asked(path: str) -> dict[str, Any]:
    config = {
        "weight_transfer_config": {"backend": "nccl"},
        "model_config": {"logprobs_mode": "processed_logprobs"},
    }
    return {
        "/health": {},
        "/v1/models": {"data": [{"id": "model"}]},
        "/server_info": {"vllm_config": config},
        "/get_world_size": {"world_size": 1},
    }[path]


def _told(engine: LLM, path: str, body: dict[str, Any]) -> dict[str, Any]:
    if path == "/v1/completions":
        return {"choices": _choices(engine, body)}
    if path == "/update_weights":
        info = body["update_info"]
        for name, shape in zip(info["names"], info["shapes"], strict=True):
            weight = sent.get(timeout=60)
            assert list(weight.shape) == shape, name
            engine.load([(name, weight)])
    elif path == "/reset_prefix_cache":
        engine.reset_prefix_cache()
        return {"success": True}
    else:
        calls.append(Call(path.removeprefix("/")))
    return {}


def _choices(engine: LLM, body: dict[str, Any]) -> list[dict[str, Any]]:
    known = {each.name for each in fields(SamplingParams)}
    sampling = SamplingParams(**{name: value for name, value in body.items() if name in known})
    prompts = [{"prompt_token_ids": ids} for ids in body["prompt"]]
    return [
        {
            "prompt_token_ids": request.prompt_token_ids,
            "token_ids": output.token_ids,
            "logprobs": {
                "tokens": [f"token_id:{token}" for token in output.token_ids],
                "token_logprobs": [
                    one.logprob for each in output.logprobs for one in each.values()
                ],
                "top_logprobs": [None] * len(output.token_ids),
            },
        }
        for request in engine.generate(prompts, sampling)
        for output in request.outputs
    ]
