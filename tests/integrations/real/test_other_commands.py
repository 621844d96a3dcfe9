"""LLaMA-Factory and ms-swift, started by their own commands beneath ``torchtune_adaptive.adapt``.

They ask for other versions of transformers and TRL than the other tests: each runs where it is installed.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.real.trainers import WORDS

pytestmark = [pytest.mark.exhaustive, pytest.mark.runs]
ROOT = Path(__file__).parents[3]
STEPS = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": 0.01,
    "optim": "sgd",
    "lr_scheduler_type": "constant",
    "max_steps": 5,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
}
LOST = """
import runpy
import sys
import torch
from transformers import Qwen2ForCausalLM, Trainer

steps, left = 0, 2
take, forward = Trainer.get_batch_samples, Qwen2ForCausalLM.forward


def counted(*args, **named):
    global steps
    steps += 1
    return take(*args, **named)


def lost(*args, **named):
    global left
    made = forward(*args, **named)
    if steps == 3 and left and torch.is_grad_enabled():
        left -= 1
        raise torch.OutOfMemoryError("CUDA out of memory (injected)")
    return made


Trainer.get_batch_samples, Qwen2ForCausalLM.forward = counted, lost
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
"""Runs a module in which memory is lost twice, in the forward passes of the third step."""


def model_in(folder: Path) -> str:
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<unk>",
        "system",
        "user",
        "assistant",
    ]
    # Qwen2's own tokenizer, by which they are loaded, takes bytes, for which these stand.
    letters = [*map(chr, range(ord("0"), ord("z") + 1)), "Ġ", "Ċ"]
    words = {word: number for number, word in enumerate([*special, *letters])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"eos_token": special[2], "pad_token": special[0], "unk_token": special[3]}
    names["additional_special_tokens"] = special[1:2]
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **names)
    turns = "{% for m in messages %}<|im_start|>{{ m['role'] }} {{ m['content'] }}<|im_end|>{% endfor %}"
    tokenizer.chat_template = turns
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    ends = {"pad_token_id": 0, "eos_token_id": 2, "bos_token_id": None}
    config = transformers.Qwen2Config(vocab_size=len(words) + 8, **sizes, **heads, **ends)
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    return str(folder / "model")


def texts(count: int) -> list[list[str]]:
    draw = random.Random(0)
    text = lambda: " ".join(draw.choice(WORDS[3:]) for _ in range(draw.randrange(2, 7)))  # noqa: E731
    return [[text() for _ in range(3)] for _ in range(count)]


def llama_factory(folder: Path, method: str) -> tuple[str, list[str]]:
    """The module and the arguments of a training by LLaMA-Factory."""
    pairs = method == "dpo"
    rows = [
        {
            "instruction": ask,
            "input": "",
            **({"chosen": a, "rejected": b} if pairs else {"output": a}),
        }
        for ask, a, b in texts(64)
    ]
    (folder / "rows.json").write_text(json.dumps(rows))
    columns = {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"}
    entry = {"file_name": "rows.json"} | ({"ranking": True, "columns": columns} if pairs else {})
    (folder / "dataset_info.json").write_text(json.dumps({"rows": entry}))
    settings: dict[str, Any] = STEPS | {
        "model_name_or_path": model_in(folder),
        "stage": "dpo" if pairs else "sft",
        "do_train": True,
        "finetuning_type": "lora" if method == "lora" else "full",
        "lora_target": "q_proj,v_proj",
        "dataset": "rows",
        "dataset_dir": str(folder),
        "template": "qwen",
        "cutoff_len": 64,
        "output_dir": str(folder / "out"),
        "overwrite_output_dir": True,
        "use_cpu": True,
    }
    (folder / "train.yaml").write_text(json.dumps(settings))  # which is YAML, too
    return "llamafactory.cli", ["train", str(folder / "train.yaml")]


def swift(folder: Path, method: str) -> tuple[str, list[str]]:
    """The same by ms-swift."""
    rows = [
        {
            "messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": a}],
            **({"rejected_response": b} if method == "dpo" else {}),
        }
        for ask, a, b in texts(64)
    ]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    settings = STEPS | {
        "model": model_in(folder),
        "model_type": "qwen2",
        "template": "chatml",
        "dataset": folder / "rows.jsonl",
        "tuner_type": "full",
        "torch_dtype": "float32",
        "output_dir": folder / "out",
        "add_version": "false",
        "split_dataset_ratio": 0,
        **({"rlhf_type": "dpo"} if method == "dpo" else {}),
    }
    given = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    return f"swift.cli.{'rlhf' if method == 'dpo' else 'sft'}", given


def trained(folder: Path, *command: str) -> tuple[list[tuple[float, ...]], str]:
    """The losses and gradient norms of each step, and what was said."""
    own = {
        "PYTHONPATH": f"{ROOT}:{folder}",
        "HF_HUB_OFFLINE": "1",
        "USE_HF": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    out = folder / "out"
    if (state := out / "trainer_state.json").exists():
        logged = json.loads(state.read_text())["log_history"]
    else:
        logged = [*map(json.loads, (out / "logging.jsonl").read_text().splitlines())]
        (out / "logging.jsonl").unlink()  # the next run would add to it
    rows = [row for row in logged if "loss" in row]
    return [(float(row["loss"]), float(row["grad_norm"])) for row in rows], done.stderr


@pytest.mark.parametrize(
    ("library", "method"),
    [
        *(("llamafactory", method) for method in ("sft", "lora", "dpo")),
        *(("swift", method) for method in ("sft", "dpo")),
    ],
)
def test_their_commands_train_as_they_do(library: str, method: str, tmp_path: Path) -> None:
    if not find_spec(library):
        pytest.skip(f"{library} is not installed")
    module, arguments = {"llamafactory": llama_factory, "swift": swift}[library](tmp_path, method)
    plain, _ = trained(tmp_path, "-m", module, *arguments)
    assert len(plain) == STEPS["max_steps"]
    limit = ("--memory-limit", "4GiB", "--ceiling", "2")
    (tmp_path / "lost.py").write_text(LOST)
    ways: list[tuple[Sequence[str], str]] = [
        ((*limit, "-m", module), "4 x micro-batch 2"),
        (("lost.py", module), "out of memory in forward"),
    ]
    for way, said in ways:
        ours, text = trained(tmp_path, "-m", "torchtune_adaptive.adapt", *way, *arguments)
        assert said in text, text[-3000:]
        assert ours == [pytest.approx(row, rel=1e-4) for row in plain]


def test_a_command_that_starts_another_process_says_so_before_that(tmp_path: Path) -> None:
    if not find_spec("swift"):
        pytest.skip("ms-swift is not installed")
    _, arguments = swift(tmp_path, "sft")
    _, said = trained(
        tmp_path, "-m", "torchtune_adaptive.adapt", "-m", "swift.cli.main", "sft", *arguments
    )
    assert "sft.py, whose trainers are not adaptive" in said
