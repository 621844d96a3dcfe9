"""What kinds of training take, as planned and with all layers: ``trainer_kinds.py FOUND [NAME...]``.

A program for an environment that has transformers, TRL, PEFT and what their optimizers need. Each kind is
one of TRL's trainers, a method of PEFT, an optimizer, or a way to make batches. It is planned, which runs a
few of the model's layers, and run with all of them; both on an H100 that is not there. What is found is added
to the JSON lines of ``FOUND``: the bytes of tensors at both peaks, or why there are none.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from tests.helpers.example_files import in_a_fork
from torchtune_adaptive.planner import gpus
from torchtune_adaptive.planner.memory.planned import planned_gpu
from torchtune_adaptive.planner.programs.answer import ProgramAnswers
from torchtune_adaptive.planner.programs.kept import Remembered
from torchtune_adaptive.planner.programs.plan import RunSteps, _answer
from torchtune_adaptive.planner.programs.request import Program, of_trainer
from torchtune_adaptive.planner.programs.run import ProgramRun

LAYERS, ROWS, LENGTH, VIRTUAL = 12, 4, 128, 8
SHAPE = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": LAYERS}
SHAPE |= {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 8192}
SHAPE |= {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1, "model_type": "llama"}
SHAPE |= {"architectures": ["LlamaForCausalLM"], "use_cache": False}
WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "checkpointing": {"gradient_checkpointing": True},
    "accumulation": {"gradient_accumulation_steps": 2},
    "packing": {"packing": True, "attn_implementation": "flash_attention_2"},
    "padding-free": {"padding_free": True, "attn_implementation": "flash_attention_2"},
    "NEFTune": {"neftune_noise_alpha": 5.0},
    "4 bits": {"load_in_4bit": True, "lora": True},
    "8 bits": {"load_in_8bit": True, "lora": True},
    "DDP": {"ranks": 2},
    "FSDP2": {"ranks": 2, "fsdp": True},
}
_TEXTS = {"num_generations": 2, "max_completion_length": 64}
_LONGER = {"max_length": 2 * LENGTH, "max_completion_length": LENGTH}
_OF = {
    **dict.fromkeys(("GRPOTrainer", "RLOOTrainer", "GMPOTrainer"), _TEXTS),
    **dict.fromkeys(("SDFTTrainer", "SDPOTrainer"), _TEXTS),
    **dict.fromkeys(("GOLDTrainer", "IWOPDTrainer"), _LONGER),
}
"""What trainers need that generate."""
LORA = {
    "DoRA": {"use_dora": True},
    "rsLoRA": {"use_rslora": True},
    "PiSSA": {"init_lora_weights": "pissa"},
}


def there() -> str:
    """The trainers of TRL, the methods of PEFT and the optimizers that there are, as JSON."""
    import trl
    import trl.experimental
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
    from transformers.training_args import OptimizerNames

    modules = (one.name for one in pkgutil.iter_modules(trl.experimental.__path__))
    owners = (trl, *(importlib.import_module(f"trl.experimental.{name}") for name in modules))
    names = dict.fromkeys(name for owner in owners for name in dir(owner))
    trainers = [name for name in names if name.endswith("Trainer") and name[0] != "_"]
    methods = [kind.value for kind in PEFT_TYPE_TO_CONFIG_MAPPING]
    return json.dumps([trainers, [*LORA, *methods], [one.value for one in OptimizerNames]])


def kinds(folder: Path) -> dict[str, Program]:
    """The programs of all kinds, by their names."""
    gpu = gpus.gpu("h100-80gb")
    trainers, methods, optimizers = json.loads(in_a_fork(there))
    shared = {"folder": str(folder), "per_device_train_batch_size": ROWS, "max_length": LENGTH}
    shared |= {"gradient_checkpointing": False, "dtype": "bfloat16", "bf16": True}

    def of(**settings: Any) -> Program:
        ranks = settings.pop("ranks", None)
        how = {"trainer": "SFTTrainer", **shared, **settings}
        return of_trainer(how, gpu, ranks=ranks, ceiling=ROWS)

    def own(what: str) -> Program:
        words = "-m", "tests.helpers.trainer_kinds", "--train", what, str(folder)
        return Program(words, gpu, ceiling=ROWS)

    found = {f"SFTTrainer, {name}": of(**settings) for name, settings in WAYS.items()}
    found["Trainer, images of Qwen2.5-VL"] = own("images")
    found |= {f"trainer {name}": of(trainer=name, **_OF.get(name, {})) for name in trainers}
    found |= {f"adapters {name}": own(name) for name in methods}
    return found | {f"optimizer {name}": of(optim=name, **_of(name)) for name in optimizers}


def _of(optimizer: str) -> dict[str, Any]:
    """What an optimizer needs besides."""
    if optimizer.startswith(("galore", "apollo")):
        return {"optim_target_modules": "all-linear"}
    return {"dtype": "float32"} if optimizer.startswith("rmsprop_") else {}


def both(program: Program) -> str:
    """The bytes of tensors at the peak of a program's step, as planned and with all layers."""
    os.chdir(tempfile.mkdtemp())
    device, _ = planned_gpu(program.gpu, program.ranks or 1, 0.05)

    def peak(answers: ProgramAnswers) -> int:
        return answers.plan(lambda _: [(device, None)]).answers[0].peak.allocated

    def answer(run: ProgramRun) -> str:
        planned, _ = _answer(run, Remembered(), peak)
        return f"{planned} {peak(ProgramAnswers(program, RunSteps(run, whole=True)))}"

    try:
        return str(ProgramRun(program).answered(answer))
    except Exception as error:
        return f"no plan: {error}"


def train(what: str, folder: str) -> None:
    """Train a kind that needs a script of its own."""
    how = {"per_device_train_batch_size": ROWS, "max_steps": 8, "bf16": True, "report_to": "none"}
    how |= {"save_strategy": "no", "gradient_checkpointing": False}
    if what == "images":
        return train_on_images(how)
    from trl import SFTConfig, SFTTrainer

    from torchtune_adaptive.planner.programs import made_up

    length = LENGTH - VIRTUAL
    how |= {"model_init_kwargs": {"dtype": "bfloat16"}, "max_length": length}
    more = {"processing_class": made_up.simple_tokenizer(), "peft_config": adapters(what)}
    rows = made_up.rows("SFT", length, ROWS)
    SFTTrainer(model=folder, args=SFTConfig("out", **how), train_dataset=rows, **more).train()


def train_on_images(how: dict[str, Any]) -> None:
    """Train a tiny Qwen2.5-VL on rows with an image each."""
    from transformers import AutoConfig, AutoModelForImageTextToText, Trainer, TrainingArguments

    image, side, patch, merged = 5, 8, 14, 2
    text = {
        key: value for key, value in SHAPE.items() if key not in ("model_type", "architectures")
    }
    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
    vision = {"depth": 4, "hidden_size": 128, "intermediate_size": 256, "num_heads": 4}
    vision |= {"out_hidden_size": SHAPE["hidden_size"], "window_size": 56, "patch_size": patch}
    config = AutoConfig.for_model(
        "qwen2_5_vl",
        text_config=text | {"rope_parameters": rope},
        vision_config=vision | {"fullatt_block_indexes": [3]},
        image_token_id=image,
    )
    tokens = torch.tensor([image] * (side // merged) ** 2 + [3] * LENGTH)
    of_image = {
        "pixel_values": torch.zeros(side**2, 3 * 2 * patch**2),
        "image_grid_thw": torch.tensor([[1, side, side]]),
    }
    row = {"input_ids": tokens, "labels": tokens.where(tokens != image, -100)}
    row |= {"attention_mask": torch.ones_like(tokens), "mm_token_type_ids": (tokens == image).int()}

    def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        made = {name: torch.stack([row[name] for row in rows]) for name in row}
        return made | {name: torch.cat([row[name] for row in rows]) for name in of_image}

    model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    arguments = TrainingArguments("out", remove_unused_columns=False, **how)
    rows: Any = [row | of_image] * 64
    Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collate).train()


def adapters(method: str) -> Any:
    """A method's configuration, with its defaults where it has some."""
    from dataclasses import fields

    from peft import LoraConfig
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING as CONFIGS

    if method in LORA:
        return LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", **LORA[method])
    config = CONFIGS[method]
    given = {"target_modules": ["q_proj", "v_proj"], "num_virtual_tokens": VIRTUAL, "total_step": 8}
    given |= {"adapter_len": VIRTUAL, "adapter_layers": LAYERS, "token_indices": [2, 3]}
    given |= {"block_size": 64, "vector_length": 64, "num_tasks": 1}
    if method == "ADAPTION_PROMPT":
        given["target_modules"] = "self_attn"
    known = {one.name for one in fields(config)}
    return config(task_type="CAUSAL_LM", **{name: given[name] for name in given.keys() & known})


def main(output: str, *names: str) -> None:
    log = Path(output)
    lines = log.read_text().splitlines() if log.exists() else []
    found = dict(json.loads(line) for line in lines)
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(SHAPE))
    for name, program in kinds(folder).items():
        if name not in found and (not names or name in names):
            found[name] = in_a_fork(both, program)
            with log.open("a") as file:
                print(json.dumps([name, found[name]]), file=file, flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if sys.argv[1] == "--train":
        train(*sys.argv[2:])
    else:
        main(*sys.argv[1:])
