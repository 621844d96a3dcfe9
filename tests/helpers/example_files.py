"""How many of Axolotl's example files are planned: ``example_files.py EXAMPLES FOUND [FILE ...]``.

A program for an environment that has Axolotl and ours. ``EXAMPLES`` is the folder of its source
distribution, and files are all in there if none is named; what is found is added to the JSON lines of
``FOUND``, and what is there already is not planned again. Each file is planned with a stand-in for its model:
the config of the same kind, with few layers where it can have few, and a processor where it takes images.
"""

from __future__ import annotations

import importlib
import inspect
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
from collections.abc import Iterable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.update({"HF_HUB_OFFLINE": "1", "NUMBA_DISABLE_JIT": "1"})
import torch._dynamo
import torch.distributed.fsdp
import yaml

from torchtune_adaptive.planner import gpus
from torchtune_adaptive.planner.programs import made_up
from torchtune_adaptive.planner.programs.request import Program
from torchtune_adaptive.planner.programs.run import ProgramRun
from torchtune_adaptive.planner.trace.alike_layers import Shortening

SECONDS, FEW = 240, 4
KEPT: list[torch.library.Library] = []
LAYERS = ("num_hidden_layers", "depth", "num_layers", "n_layer", "n_layers", "encoder_layers")
KINDS = """
mixtral|8x22b|8x7b:mixtral ministral-8b:ministral ministral-3|shieldstral|mistral-(small|medium):mistral3
magistral|devstral:mistral3 voxtral:voxtral pixtral|llava:llava mistral:mistral dbrx:dbrx
falcon-h1:falcon_h1 falcon-e:llama falcon:falcon llama-4|linearized:llama4 llama-3.2-11b-vision:mllama
gemma-3n:gemma3n gemma-4-12b:gemma4_unified gemma-4:gemma4 gemma-3-(4|12|27)b:gemma3 gemma-3:gemma3_text
gemma-2:gemma2 gemma:gemma qwen3\\.8-flash:qwen4_exp qwen3\\.8:qwen3_5 qwen3\\.5.*a\\d+b:qwen3_5_moe
qwen3\\.5:qwen3_5 qwen3-next:qwen3_next qwen3-30b:qwen3_moe qwen2.5-vl:qwen2_5_vl qwen2-vl:qwen2_vl
qwen1.5-moe:qwen2_moe qwen3|plano|skywork:qwen3 qwen2|qwen1.5|deepcoder|cogito-v1-preview-qwen|mimo:qwen2
glm-4.7-flash:glm4_moe_lite glm-4.6v:glm46v glm-4.5:glm4_moe glm-5:glm_moe_dsa glm-4:glm4 gpt-oss:gpt_oss
north-micro:cohere_compass c4ai:cohere2 stablelm:stablelm jamba:jamba nemotron-3:nemotron_h
nemotron-mini:nemotron paddleocr:paddleocr_vl phi-3:phi3 phi-:phi muse:muse_glimmer
smollm2|llama|xgen|yi-|orpheus:llama smolvlm:smolvlm lfm2-8b:lfm2_moe lfm2-vl:lfm2_vl lfm2:lfm2
apertus:apertus afm-:arcee trinity:afmoe cerebras-gpt:gpt2 gpt-j:gptj mpt:mpt pythia|redpajama:gpt_neox
starcoder2:starcoder2 deepseek-v4:deepseek_v4 deepseek:deepseek_v2 granite:granitemoehybrid
hunyuan:hunyuan_v1_dense internvl:internvl mamba:mamba minimax:minimax_m2 olmo-3:olmo3 seed-oss:seed_oss
"""
"""The kind of each model, by a part of its name."""
MARKS = {
    "gemma3": "boi=<start_of_image> eoi=<end_of_image> image=<image_soft_token>",
    "gemma3n": "boi=<start_of_image> eoi=<end_of_image> image=<image_soft_token> "
    "boa=<start_of_audio> eoa=<end_of_audio> audio=<audio_soft_token>",
    "gemma4": "boi=<|image> eoi=<image|> image=<|image|> boa=<|audio> eoa=<audio|> audio=<|audio|>",
    "internvl": "start_image=<img> end_image=</img> context_image=<IMG_CONTEXT> video=<video>",
    "paddleocr_vl": "image=<|IMAGE_PLACEHOLDER|>",
    "cohere2_vision": "boi=<|START_OF_IMG|> eoi=<|END_OF_IMG|> image=<|IMG_PATCH|> "
    "img_line_break=<|IMG_LINE_BREAK|>",
}
MARKS["gemma4_unified"] = MARKS["gemma4"]
"""Tokens that processors find by their names in a tokenizer."""
SECTIONS = [
    {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": section}
    for section in ([8, 12, 12], [16, 24, 24])
]
ROPE_OF_TYPES = {
    name: {"rope_type": "default", "rope_theta": 10000.0}
    for name in ("full_attention", "sliding_attention")
}
PARTS: dict[str, dict[str, Any]] = {
    "gemma3": {"vision_config": {"image_size": 896, "patch_size": 14}},
    "gemma3n": {"text_config": {"num_hidden_layers": 10, "num_kv_shared_layers": 5}},
    "gemma4": {"vision_config": {}, "text_config": {"num_hidden_layers": 6}},
    "gemma4_unified": {"vision_config": {}, "text_config": {"num_hidden_layers": 6}},
    "ministral": {"head_dim": 128},
    "hunyuan_v1_dense": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_hidden_layers": 4},
    "cohere_compass": {"text_config": {"rope_parameters": ROPE_OF_TYPES}},
    "glm46v": {"text_config": {"rope_parameters": {"partial_rotary_factor": 0.5, **SECTIONS[0]}}},
    "paddleocr_vl": {"text_config": {"rope_parameters": SECTIONS[1]}},
    "smolvlm": {"pad_token_id": 0},
    "deepseek_v2": {"num_experts_per_tok": 6},
}
"""What a config by itself does not have, or has wrong."""
TEMPLATE = (
    "{% for one in messages %}{{ one['role'] + ' ' }}{% for part in one['content'] %}"
    "{{ 'IMAGE' if part['type'] == 'image' else part['text'] + ' ' }}{% endfor %}{% endfor %}"
)


def kind_of(model: str) -> str | None:
    pairs = (one.rpartition(":") for one in KINDS.split())
    return next((kind for part, _, kind in pairs if re.search(part, model.lower())), None)


def kind_of_file(path: Path) -> str | None:
    return kind_of(yaml.safe_load(path.read_text())["base_model"])


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


def write_processor(kind: str, config: Any, folder: Path) -> None:
    """Write the processor of a model of images, of parts as they are by themselves and of the sizes that the
    config says, and a tokenizer that has few words, and the tokens that these write."""
    import axolotl.processing_strategies
    import transformers
    from transformers.models.auto import auto_mappings, image_processing_auto, processing_auto

    made = getattr(transformers, processing_auto.PROCESSOR_MAPPING_NAMES[kind])
    texts = [
        Path(inspect.getfile(one)).read_text() for one in (made, axolotl.processing_strategies)
    ]
    found = re.findall(r"<\|[\w ]+\|>|<[\w/-]+>|\[[A-Z_]+\]", " ".join(texts))
    named = dict(one.split("=") for one in MARKS.get(kind, "").split())
    words = made_up.simple_tokenizer()
    words.add_tokens(["user", "assistant", "model", "system"])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words.backend_tokenizer,
        extra_special_tokens=[*dict.fromkeys([*found, *named.values()])],
        model_specific_special_tokens={f"{name}_token": mark for name, mark in named.items()},
        **{name: str(value) for name, value in words.special_tokens_map.items()},
    )
    said = {"num_additional_image_tokens": 1}  # the class token of CLIP
    said |= vars(getattr(config, "vision_config", config)) | vars(config)
    names = {
        "image_processor": image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES,
        "video_processor": auto_mappings.VIDEO_PROCESSOR_MAPPING_NAMES,
        "feature_extractor": auto_mappings.FEATURE_EXTRACTOR_MAPPING_NAMES,
    }
    parts: dict[str, Any] = {"tokenizer": tokenizer}
    for name in inspect.signature(made.__init__).parameters:
        if name in names:
            part = names[name][kind]
            if isinstance(part, dict):
                part = part["torchvision" if find_spec("torchvision") else "pil"]
            part = getattr(transformers, part)
            parts[name] = part(**sizes_of(part, said))
        elif name in said:
            parts[name] = said[name]
    processor = made(**parts)
    mark = getattr(tokenizer, "image_token", None) or processor.image_token
    written = processor.image_token
    processor.chat_template = tokenizer.chat_template = TEMPLATE.replace("IMAGE", written)
    mark = getattr(processor, "patch_token", mark)
    for name in ("image_token_id", "image_token_index"):
        if hasattr(config, name):
            setattr(config, name, tokenizer.convert_tokens_to_ids(mark))
    processor.save_pretrained(folder)


def sizes_of(part: Any, said: dict[str, Any]) -> dict[str, Any]:
    """The sizes of images and of patches that a processor makes, where these are not its own."""
    found = {
        name: said[name]
        for name in ("patch_size", "merge_size")
        if name in said and hasattr(part, name)
    }
    size, image = getattr(part, "size", None), said.get("image_size")
    if isinstance(size, dict) and isinstance(image, int) and "longest_edge" not in size:
        found["size"] = dict.fromkeys(size, image)
        if getattr(part, "crop_size", None):
            found["crop_size"] = image
    return found


def stand_in(kind: str, folder: Path) -> None:
    """Write the config of a model, with few layers if it can be made so."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto import modeling_auto as known

    config = AutoConfig.for_model(kind, **PARTS.get(kind, {}))
    try:
        shortened(AutoConfig.for_model(kind, **PARTS.get(kind, {}))).save_pretrained(folder)
        few = AutoConfig.from_pretrained(folder)
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
    if hasattr(seen := getattr(config, "vision_config", None), "out_hidden_size"):
        seen.out_hidden_size = config.get_text_config().hidden_size
    found = names.get(kind)
    if found and kind in known.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        try:
            write_processor(kind, config, folder)
        except Exception as error:
            print(f"{kind}: no processor ({error!r})", file=sys.stderr)
    config.architectures = [found if isinstance(found, str) else found[0]] if found else None
    config.dtype = torch.bfloat16  # as those of models are
    config.save_pretrained(folder)


def stand_ins(models: Path, kinds: Iterable[str | None]) -> None:
    for kind in dict.fromkeys(filter(None, kinds)):
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


def have_torchvision() -> None:
    """Let torchvision be imported, if it is there, whose kernels may be for another torch: none is used."""
    if find_spec("torchvision") is None:
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    KEPT.append(library)
    import torchvision  # noqa: F401


def import_what_asks_nothing() -> None:
    """Import packages that each plan needs, and to which it makes no difference where they run."""
    for name in (
        "aiohttp",
        "httpx",
        "numba",
        "pandas",
        "PIL.Image",
        "pyarrow",
        "pydantic",
        "scipy.stats",
    ):
        with suppress(ImportError):
            importlib.import_module(name)


OUTCOMES = {
    "planned": "^planned",
    "refused: a program of this sort is not planned": (
        "flex_attention: is|splits over ranks|flash_attn_gpu|not made up|"
        "code of the Hub|kernels, which are"
    ),
    "asks for a value of the weights, which `--assume` gives": r"asks for (the|a) ",
    "asks for a package that was not there": (
        "ImportError|ModuleNotFoundError|DeepSpeed is not|ring_flash_attn|requires Mamba2 kernels"
    ),
    "Axolotl's own validation refuses the file": "ValidationError|DeprecationWarning",
    "Axolotl freezes all parameters, or has too few rows": "ended after",
    "Axolotl rewrites attention for adapters, and does not find its text or class": (
        r"Original (QKV|O) code|could not import attention class"
    ),
    "no answer in time": "no answer in time",
    "no config of that kind in transformers": "^no stand-in",
    "another error of Axolotl or a library, with this stand-in or on the fake device": "",
}
"""The sorts of outcomes, and how what was said of such begins, or what it has; the first that does."""


def outcome(said: str) -> str:
    return next(name for name, part in OUTCOMES.items() if re.search(part, said))


def main(examples: str, output: str, *named: str) -> None:
    models = Path(tempfile.mkdtemp(prefix="models-"))  # a name with "mpt" is a kind to Axolotl
    import_what_asks_nothing()
    have_torchvision()
    log = Path(output)
    lines = log.read_text().splitlines() if log.exists() else []
    found = dict(json.loads(line) for line in lines)
    every = sorted(path for path in Path(examples).rglob("*.y*ml") if "cloud" not in path.parts)
    paths = [Path(examples, name) for name in named] or every
    in_a_fork(stand_ins, models, map(kind_of_file, paths))
    for path in paths:
        name = str(path.relative_to(examples))
        if name not in found:
            found[name] = in_a_fork(planned, path.resolve(), models)
            with log.open("a") as file:
                print(json.dumps([name, found[name]]), file=file, flush=True)
    print(Counter(map(outcome, found.values())))


if __name__ == "__main__":
    main(*sys.argv[1:])
