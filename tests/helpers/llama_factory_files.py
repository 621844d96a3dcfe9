"""How many of LLaMA-Factory's example files are planned.

``llama_factory_files.py EXAMPLES FOUND [EVERY [FIRST]]``: a program for an environment that has
LLaMA-Factory and ours, as ``example_files`` is for one with Axolotl. ``EXAMPLES`` is the folder of its source
distribution.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

import yaml

from tests.helpers.example_files import in_a_fork, stand_in
from torchtune_adaptive.planner import gpus
from torchtune_adaptive.planner.programs.request import Program
from torchtune_adaptive.planner.programs.run import ProgramRun
from torchtune_adaptive.planner.trace.alike_layers import Shortening

KINDS = """
qwen3-vl:qwen3_vl qwen2.5-vl:qwen2_5_vl qwen3.5-397:qwen3_5_moe qwen3-(30|235)b:qwen3_moe qwen3.5:qwen3_5
qwen3:qwen3 qwen2:qwen2 llama:llama deepseek-v2:deepseek_v2 deepseek-v3:deepseek_v3
"""
"""The kind of each model, by a part of its name."""
ALTERED = {
    "8b-pro": {"num_hidden_layers": 8},
    **{
        method: {"quantization_config": {"quant_method": method, "bits": 4}}
        for method in ("awq", "gptq", "aqlm")
    },
}
"""What the configs of some have besides, by a part of the name."""
FOLDERS = ("train_full", "train_lora", "train_qlora", "extras", "ktransformers")
RANKS = {"deepspeed": 2, "fsdp": 2}


def kind_of(model: str) -> str:
    pairs = (one.rpartition(":") for one in KINDS.split())
    return next(kind for part, _, kind in pairs if re.search(part, model.lower()))


def trains(path: Path) -> bool:
    return "do_train: true" in path.read_text()


def model_of(name: str, models: Path) -> Path:
    """The folder of a stand-in for a model."""
    kind = kind_of(name)
    folder = models / kind
    if not folder.is_dir():
        stand_in(kind, folder)
    for part in ALTERED:
        if part in name.lower():
            config = json.loads((folder / "config.json").read_text()) | ALTERED[part]
            folder = models / part
            folder.mkdir(exist_ok=True)
            (folder / "config.json").write_text(json.dumps(config))
    return folder


def planned(path: Path, examples: Path, models: Path) -> str:
    """Plan a file in this process; how it has ended."""
    keys = yaml.safe_load(path.read_text())
    ranks = max((RANKS[key] for key in RANKS if keys.get(key)), default=None)
    os.chdir(tempfile.mkdtemp())
    os.symlink(examples, "examples")  # of which files name others
    keys |= {"model_name_or_path": str(model_of(keys["model_name_or_path"], models))}
    Path("file.yaml").write_text(yaml.safe_dump(keys))
    words = ("-m", "llamafactory.cli", "train", "file.yaml")
    program = Program(words, gpus.gpu("h100"), ranks, made_up=True)
    try:
        ProgramRun(program).answered(lambda run: run.start(None, Shortening(sys.maxsize))())
    except BaseException as error:
        return f"failed: {error}"
    return "planned"


def main(examples: str, output: str, every: str = "1", first: str = "0") -> None:
    models, root, log = Path(tempfile.mkdtemp()), Path(examples).resolve(), Path(output)
    lines = log.read_text().splitlines() if log.exists() else []
    found = dict(json.loads(line) for line in lines)
    paths = sorted(path for one in FOLDERS for path in (root / one).rglob("*.yaml") if trains(path))
    for path in paths[int(first) :: int(every)]:
        name = str(path.relative_to(root))
        if name not in found:
            found[name] = in_a_fork(planned, path, root, models)
            with log.open("a") as file:
                print(json.dumps([name, found[name]]), file=file, flush=True)
    print(Counter(one.partition(":")[0] for one in found.values()))


if __name__ == "__main__":
    main(*sys.argv[1:])
