"""How many of Axolotl's example files are planned: ``example_files.py EXAMPLES FOUND [EVERY]``.

A program for an environment that has Axolotl and ours. ``EXAMPLES`` is the folder of its source
distribution; what is found is added to the JSON lines of ``FOUND``, and what is there already is not planned
again. Each file is planned with a stand-in for its model: the config of the same kind, with few layers where
it can have few.
"""

from __future__ import annotations

import json
import math
import os
import re
import select
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ.update({"HF_HUB_OFFLINE": "1", "NUMBA_DISABLE_JIT": "1"})
import torch._dynamo
import torch.distributed.fsdp
import yaml

from torchtune_adaptive.planner import gpus
from torchtune_adaptive.planner.programs.request import Program
from torchtune_adaptive.planner.programs.run import ProgramRun
from torchtune_adaptive.planner.trace.alike_layers import Shortening

SECONDS, FEW = 240, 4
LAYERS = ("num_hidden_layers", "depth", "num_layers", "n_layer", "n_layers", "encoder_layers")
KINDS = """
mixtral|8x22b|8x7b:mixtral ministral-8b:ministral ministral-3|shieldstral|mistral-(small|medium):mistral3
magistral|devstral:mistral3 voxtral:voxtral pixtral|llava:llava mistral:mistral dbrx:dbrx
falcon-h1:falcon_h1 falcon-e:bitnet falcon:falcon llama-4|linearized:llama4 llama-3.2-11b-vision:mllama
gemma-3n:gemma3n gemma-4-12b:gemma4_unified gemma-4:gemma4 gemma-3-(4|12|27):gemma3 gemma-3:gemma3_text
gemma-2:gemma2 gemma:gemma qwen3.8-flash:qwen4_exp qwen3.8:qwen3_5 qwen3.5.*a\\d+b:qwen3_5_moe
qwen3.5:qwen3_5 qwen3-next:qwen3_next qwen3-30b:qwen3_moe qwen2.5-vl:qwen2_5_vl qwen2-vl:qwen2_vl
qwen1.5-moe:qwen2_moe qwen3|plano|skywork:qwen3 qwen2|qwen1.5|deepcoder|cogito-v1-preview-qwen|mimo:qwen2
glm-4.7-flash:glm4_moe_lite glm-4.6v:glm46v glm-4.5:glm4_moe glm-5:glm_moe_dsa glm-4:glm4 gpt-oss:gpt_oss
north-micro:cohere2_vision c4ai:cohere2 stablelm:stablelm jamba:jamba nemotron-3:nemotron_h
nemotron-mini:nemotron paddleocr:paddleocr_vl phi-3:phi3 phi-:phi muse:muse_glimmer
smollm2|llama|xgen|yi-|orpheus:llama smolvlm:smolvlm lfm2-8b:lfm2_moe lfm2-vl:lfm2_vl lfm2:lfm2
apertus:apertus afm-:arcee trinity:afmoe cerebras-gpt:gpt2 gpt-j:gptj mpt:mpt pythia|redpajama:gpt_neox
starcoder2:starcoder2 deepseek-v4:deepseek_v4 deepseek:deepseek_v2 granite:granitemoehybrid
hunyuan:hunyuan_v1_dense internvl:internvl mamba:mamba minimax:minimax_m2 olmo-3:olmo3 seed-oss:seed_oss
"""
"""The kind of each model, by a part of its name."""


def kind_of(model: str) -> str | None:
    pairs = (one.rpartition(":") for one in KINDS.split())
    return next((kind for part, _, kind in pairs if re.search(part, model.lower())), None)


def shortened(config: Any) -> Any:
    """A config whose parts have few layers, of all types."""
    for part in (config, *(one for one in vars(config).values() if hasattr(one, "to_dict"))):
        for key in LAYERS:
            count = getattr(part, key, None)
            if isinstance(count, int) and count > FEW:
                setattr(part, key, FEW)
                for name, each in [*vars(part).items()]:
                    if isinstance(each, list) and len(each) == count:
                        setattr(part, name, each[-FEW:])
    return config


def stand_in(kind: str, folder: Path) -> None:
    """Write the config of a model, with few layers if it can be made so."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto import modeling_auto as known

    config = AutoConfig.for_model(kind)
    try:
        few = shortened(AutoConfig.for_model(kind))
        seen = kind in known.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        with torch.device("meta"):
            (AutoModelForImageTextToText if seen else AutoModelForCausalLM).from_config(few)
        config = few
    except Exception as error:  # whatever a kind has against it
        print(f"{kind}: all layers ({error})", file=sys.stderr)
    names = {
        **known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        **known.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }
    found = names.get(kind)
    config.architectures = [found if isinstance(found, str) else found[0]] if found else None
    config.save_pretrained(folder)


def stand_ins(models: Path) -> None:
    for kind in dict.fromkeys(one.rpartition(":")[2] for one in KINDS.split()):
        try:
            stand_in(kind, models / kind)
        except Exception as error:  # of a kind that this transformers does not have
            print(f"{kind}: none ({error})", file=sys.stderr)


def ranks_of(keys: dict[str, Any]) -> int:
    sizes = ("dp_shard_size", "dp_replicate_size", "tensor_parallel_size", "context_parallel_size")
    shares = any(keys.get(key) for key in ("fsdp", "fsdp_config", "deepspeed"))
    return max(math.prod(keys.get(key) or 1 for key in sizes), 2 if shares else 1)


def planned(path: Path, models: Path) -> str:
    """Plan a file in this process; how it has ended."""
    keys = yaml.safe_load(path.read_text())
    kind = kind_of(keys["base_model"])
    if kind is None or not (models / kind).is_dir():
        return f"no stand-in: {keys['base_model']}"
    for key in ("base_model_config", "tokenizer_config", "lora_model_dir", "revision_of_model"):
        keys.pop(key, None)
    os.chdir(tempfile.mkdtemp())
    Path("file.yaml").write_text(yaml.safe_dump({**keys, "base_model": str(models / kind)}))
    ranks = ranks_of(keys)
    words = ("-m", "axolotl.cli.train", "file.yaml")
    program = Program(words, gpus.gpu("h100"), ranks if ranks > 1 else None, made_up=True)
    try:
        ProgramRun(program).answered(lambda run: run.start(None, Shortening(sys.maxsize))())
    except BaseException as error:
        return f"failed: {error}"
    return "planned"


def in_a_fork(function: Any, *arguments: Any) -> str:
    """What a function gives that may leave this process changed, in time."""
    ours, theirs = os.pipe()
    if not (process := os.fork()):
        os.setpgid(0, 0)
        try:
            os.write(theirs, str(function(*arguments)).encode())
        finally:
            os._exit(0)
    os.close(theirs)
    end, said = time.monotonic() + SECONDS, b""
    while (left := end - time.monotonic()) > 0 and select.select([ours], [], [], left)[0]:
        if not (read := os.read(ours, 1 << 16)):
            break
        said += read
    os.close(ours)
    with suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return said.decode() or "failed: no answer in time"


def main(examples: str, output: str, every: str = "1") -> None:
    models = Path(tempfile.mkdtemp())
    in_a_fork(stand_ins, models)
    log = Path(output)
    lines = log.read_text().splitlines() if log.exists() else []
    found = dict(json.loads(line) for line in lines)
    paths = sorted(path for path in Path(examples).rglob("*.y*ml") if "cloud" not in path.parts)
    for path in paths[:: int(every)]:
        name = str(path.relative_to(examples))
        if name not in found:
            found[name] = in_a_fork(planned, path.resolve(), models)
            with log.open("a") as file:
                print(json.dumps([name, found[name]]), file=file, flush=True)
    print(Counter(one.partition(":")[0] for one in found.values()))


if __name__ == "__main__":
    main(*sys.argv[1:])
