"""A program that trains with a trainer of TRL: ``program_trl.py FOLDER TRAINER``."""

from __future__ import annotations

import sys
from typing import Any

OF_TRL = ("SFT", "DPO", "KTO", "Reward", "Distillation", "GRPO", "RLOO")
EXPERIMENTAL = {
    "CPO": "cpo",
    "ORPO": "orpo",
    "TPO": "tpo",
    "GKD": "gkd",
    "GOLD": "gold",
    "A2PO": "a2po",
    "GMPO": "gmpo",
    "IWOPD": "iw_opd",
    "OnlineDPO": "online_dpo",
    "SDFT": "sdft",
    "SDPO": "sdpo",
}
WITH_TEACHER = ("Distillation", "GKD", "GOLD", "IWOPD")
ROWS = 2


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", "word"])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def main(folder: str, name: str) -> None:
    import importlib

    from datasets import Dataset

    module = importlib.import_module(
        f"trl.experimental.{EXPERIMENTAL[name]}" if name in EXPERIMENTAL else "trl"
    )
    kind, config = getattr(module, f"{name}Trainer"), getattr(module, f"{name}Config")
    said = " ".join(["word"] * 60)
    talk = [{"role": "user", "content": said}, {"role": "assistant", "content": said}]
    pair = {"prompt": said, "chosen": said, "rejected": said}
    rows: Any = {
        "SFT": {"text": said},
        "Reward": pair,
        "KTO": {"prompt": said, "completion": said, "label": True},
        "TPO": {**pair, "reference": said},
        **{kind: pair for kind in ("DPO", "CPO", "ORPO")},
        **{kind: {"messages": talk} for kind in ("GKD", "GOLD", "IWOPD")},
        "SDFT": {"prompt": said, "privileged_context": said},
        "SDPO": {"prompt": said, "privileged_context": said},
    }.get(name, {"prompt": said})
    rows = [dict(rows) for _ in range(16)]
    for number, row in enumerate(rows):
        if name == "KTO":
            row["label"] = bool(number % 2)
    words = tokenizer()
    words.chat_template = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
    arguments: dict[str, Any] = {"per_device_train_batch_size": ROWS, "max_steps": 4}
    arguments |= {"save_strategy": "no", "report_to": "none"}
    arguments |= {key: eval(value) for key, _, value in (w.partition("=") for w in sys.argv[3:])}
    if hasattr(config, "num_generations"):
        arguments["num_generations"] = 2
    more: dict[str, Any] = {"teacher_model": folder} if name in WITH_TEACHER else {}
    if name in ("GRPO", "RLOO", "A2PO", "GMPO", "OnlineDPO", "SDPO"):
        more["reward_funcs"] = lambda completions, **_: [1.0] * len(completions)
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    if name == "Reward":
        model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder)
    trainer = kind(
        model=model,
        args=config("out", **arguments),
        train_dataset=Dataset.from_list(rows),
        processing_class=words,
        **more,
    )
    trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:3])
