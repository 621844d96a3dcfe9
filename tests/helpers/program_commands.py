"""Plans of programs by the command line of an environment that has other packages."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.helpers.beside import ROOT

MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": 8192,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 1,
}


def run(
    python: Path, folder: Path, *words: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    own = {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "HF_HOME": str(folder / "hub")}
    return subprocess.run(
        [python, *words],
        cwd=folder,
        env={**os.environ, **own, "HF_HUB_OFFLINE": "1", **variables},
        capture_output=True,
        text=True,
        timeout=900,
    )


def plan(python: Path, folder: Path, *words: str, **variables: str) -> dict[str, Any]:
    device = () if "--memory" in words else ("--gpu", "h100")
    options = ("-m", "torchtune_adaptive", "plan", *device, "--json")
    done = run(python, folder, *options, *words, **variables)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(done.stdout)  # type: ignore[no-any-return]
