"""Prompts with their answers: the samples of reinforcement learning.

A row is a dictionary with the ``tokens`` of a prompt and its ``answer``, which only reward functions look at.
torchtune's main branch has such datasets, and any other that gives such rows will do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data import Dataset

GSM8K_PROMPT = (
    "The user asks a question. The assistant first thinks, inside of <think></think> tags, and then answers, "
    "inside of <answer></answer> tags. User: {question} Assistant: <think>"
)


class PromptDataset(Dataset[dict[str, Any]]):
    """Prompts made of the columns of any table: ``prompt: "User: {question} Assistant:"``.

    Args:
        tokenizer: the tokenizer of the model.
        source: what ``datasets.load_dataset`` loads: a name, or ``json`` with ``data_files``.
        prompt: the text of a prompt, with columns in braces.
        answer: the column of the answer, or a function that gives the answer of a row.
        filter_fn: a function of a row and its index that says whether to keep it.
        load_dataset_kwargs: everything else that ``load_dataset`` takes.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        source: str,
        prompt: str,
        answer: str | Callable[[Mapping[str, Any]], str] = "answer",
        filter_fn: Callable[[Mapping[str, Any], int], bool] | None = None,
        **load_dataset_kwargs: Any,
    ) -> None:
        from datasets import load_dataset

        self._tokenizer = tokenizer
        self._prompt = prompt
        self._answer = answer
        self._data = load_dataset(source, **load_dataset_kwargs)
        if filter_fn is not None:
            self._data = self._data.filter(filter_fn, with_indices=True)

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self._data[index]
        text = self._prompt.format(**row)
        answer = row[self._answer] if isinstance(self._answer, str) else self._answer(row)
        tokens = self._tokenizer.encode(text, add_eos=False)
        return {"question": text, "tokens": tokens, "answer": answer}


def gsm8k_dataset(
    tokenizer: Any,
    *,
    source: str = "openai/gsm8k",
    name: str | None = "main",
    split: str = "train",
    partition: str | None = None,
    filter_fn: Callable[[Mapping[str, Any], int], bool] | None = None,
    **load_dataset_kwargs: Any,
) -> PromptDataset:
    """Questions of GSM8K and the numbers that answer them.

    Args:
        tokenizer: the tokenizer of the model.
        source: what ``datasets.load_dataset`` loads.
        name: the configuration of it.
        split: the part of it.
        partition: the rows to keep, as ``first-last/parts``: with ``1-9/10``, nine out of ten.
        filter_fn: a function of a row and its index that says whether to keep it, instead.
        load_dataset_kwargs: everything else that ``load_dataset`` takes.
    """
    if filter_fn is None and partition is not None:
        filter_fn = _in_partition(partition)
    return PromptDataset(
        tokenizer,
        source=source,
        prompt=GSM8K_PROMPT,
        answer=lambda row: str(row["answer"]).rpartition("#### ")[2],
        filter_fn=filter_fn,
        name=name,
        split=split,
        **load_dataset_kwargs,
    )


def _in_partition(partition: str) -> Callable[[Mapping[str, Any], int], bool]:
    found = re.fullmatch(r"(\d+)-(\d+)/(\d+)", partition)
    if found is None or int(found[3]) == 0:
        raise ValueError(f"partition {partition!r} is not first-last/parts, such as 1-9/10")
    first, last, parts = map(int, found.groups())
    return lambda _, index: first <= index % parts <= last
