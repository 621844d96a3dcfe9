"""A tokenizer and rows without a file, and weights made here: for a machine that can read nothing else."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from torch.utils.data import Dataset
from torchtune.datasets import PackedDataset

from tests.helpers.recipes import tiny_config
from torchtune_adaptive.recipe import tiny


class Characters:
    """A tokenizer of characters."""

    pad_id, bos_id, eos_id = 0, 1, 2

    def __init__(self, max_seq_len: int | None = None) -> None:
        self.max_seq_len = max_seq_len

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        return [self.bos_id] * add_bos + [*map(ord, text)] + [self.eos_id] * add_eos

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(token) for token in tokens if token > self.eos_id)


class Sums(Dataset[dict[str, Any]]):
    """Sums of numbers, as rows to train on and as prompts with an answer."""

    def __init__(self, tokenizer: Characters, rows: int = 48) -> None:
        choose = random.Random(0)
        self._rows = []
        for _ in range(rows):
            numbers = [choose.randrange(100) for _ in range(choose.randrange(2, 6))]
            asked, answer = " + ".join(map(str, numbers)) + " = ", str(sum(numbers))
            prompt = tokenizer.encode(asked, add_eos=False)
            tokens = tokenizer.encode(asked + answer)
            labels = [-100] * len(prompt) + tokens[len(prompt) :]
            self._rows.append(
                {"tokens": tokens, "labels": labels, "question": asked, "answer": answer}
            )

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {key: self._rows[index][key] for key in ("tokens", "labels")}


class Prompts(Sums):
    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self._rows[index]
        prompt = Characters().encode(row["question"], add_eos=False)
        return {"question": row["question"], "tokens": prompt, "answer": row["answer"]}


def rows(tokenizer: Characters, packed: bool = False) -> Dataset[dict[str, Any]]:
    data = Sums(tokenizer)
    return PackedDataset(data, max_seq_len=tokenizer.max_seq_len or 64) if packed else data


def config(kind: str, folder: Path, device: str, **changes: Any) -> DictConfig:
    """The tiny config of a kind, with nothing that is read from elsewhere."""
    assets = folder / "assets"
    if not assets.exists():
        assets.mkdir(parents=True)
        tiny._make_checkpoint(assets, tiny._SIZE)
    of_rollouts = kind in ("grpo", "grpo_lora")
    made = {
        "assets": str(assets),
        "device": device,
        "tokenizer": {"_component_": f"{__name__}.Characters", "max_seq_len": 64},
        "dataset": {"_component_": f"{__name__}.{'Prompts' if of_rollouts else 'rows'}"},
    }
    return tiny_config(kind, folder / "output", **{**made, **changes})
