"""Rows that are made up, and a tokenizer where there is none, for what a file of a trainer trains.

A file names datasets of the Hub. What is planned is the worst case that it allows: rows as long as may be,
every token of which has a label, and one that is shorter, so that there is padding.
"""

from __future__ import annotations

import os
from typing import Any

from torchtune_adaptive.common import NoPrediction
from torchtune_adaptive.planner.programs.imports import WhenImported, put

_STEPS = 6
"""The steps for which there are rows."""
_SHORTER = 8
_TOKEN, _WORD = 5, "a"
_PROMPT = 512
"""Tokens of a prompt where nothing says how long it may be."""
_SPECIAL = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
_TEMPLATE = (
    "{% for m in messages %}{% generation %}{{ m['content'] + ' ' }}{% endgeneration %}{% endfor %}"
)
_noted: dict[str, None] = {}


def note(line: str) -> None:
    """Note what is to be said about a plan."""
    _noted[line] = None


def notes() -> tuple[str, ...]:
    """What has been noted."""
    return tuple(_noted)


class MadeUpRows:
    """Makes up the rows of a program; ``length``, if given, is that of each."""

    def __init__(self, length: int | None) -> None:
        self._length = length
        self._arguments: Any = None
        """Those of transformers' Trainer, which a program makes before it reads rows."""

    def follow(self, imports: WhenImported) -> None:
        """Make them up from now on."""
        imports.call("datasets.load", lambda it: put(it, "load_dataset", self._loaded))
        imports.call("trl.scripts.utils", lambda it: put(it, "get_dataset", self._loaded))
        imports.call("transformers.training_args", self._of_arguments)
        imports.call("transformers.models.auto.tokenization_auto", _of_tokenizers)

    def _of_arguments(self, module: Any) -> None:
        made = module.TrainingArguments.__post_init__

        def noted(arguments: Any) -> None:
            if self._length is not None and hasattr(arguments, "max_length"):
                arguments.max_length = self._length
            self._arguments = arguments
            made(arguments)

        put(module.TrainingArguments, "__post_init__", noted)

    def _loaded(self, *_: Any, split: Any = None, streaming: bool = False, **__: Any) -> Any:
        """What ``load_dataset`` gives: rows for the trainer whose arguments are there."""
        from datasets import Dataset

        given = self._arguments
        length = self._length or getattr(given, "max_length", _PROMPT)
        if length is None:
            raise NoPrediction(
                "max_length: null, so nothing says how long rows may be. Give it with --max-length."
            )
        kind = type(given).__name__.removesuffix("Config")
        of_step = (
            given.per_device_train_batch_size * given.gradient_accumulation_steps if given else 1
        )
        rows = [_row(kind, length), _row(kind, max(2, length - _SHORTER), first=False)]
        made = Dataset.from_list(rows).select(_order(of_step))
        _note_rows(length)
        if streaming:
            made = made.to_iterable_dataset()
        return made if split is not None else _AnySplit(made)


def _note_rows(length: int) -> None:
    note(
        f"rows: made up, {length:,} tokens each, one of a batch is shorter; the file's data are not read"
    )


class _AnySplit(dict[str, Any]):
    """A dataset that has each split that it is asked for."""

    def __init__(self, rows: Any) -> None:
        super().__init__(train=rows)

    def __missing__(self, _: str) -> Any:
        return self["train"]


def _order(of_step: int) -> list[int]:
    """The numbers of rows for some steps of this many rows on each rank, the longest first."""
    count = max(of_step, 1) * int(os.environ.get("WORLD_SIZE", 1)) * _STEPS
    return [0, 1, *[0] * count]


def _row(kind: str, length: int, first: bool = True) -> dict[str, Any]:
    """A row for one of TRL's trainers, which cut off what is longer than they allow."""
    tokens = [_TOKEN] * length
    text = f" {_WORD}" * (2 * length if first else length)
    by_trainer: dict[str, dict[str, Any]] = {
        "SFT": {"input_ids": tokens, "labels": tokens},
        "Reward": {"chosen_ids": tokens, "rejected_ids": tokens},
        "DPO": {"prompt": _WORD, "chosen": text, "rejected": text},
        "KTO": {"prompt": _WORD, "completion": text, "label": first},
    }
    return by_trainer.get(kind, {"prompt": " ".join([_WORD] * length), "solution": _WORD})


def _of_tokenizers(auto: Any) -> None:
    read = auto.AutoTokenizer.from_pretrained

    def tokenizer(path: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return read(path, *arguments, **options)
        except Exception:  # whatever the library raises where files are missing
            note(f"tokenizer: none is at {path}, so a simple one stands in")
            return _simple_tokenizer()

    auto.AutoTokenizer.from_pretrained = staticmethod(tokenizer)


def _simple_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate([*_SPECIAL.values(), "-", _WORD])}
    made = Tokenizer(models.WordLevel(words, unk_token=_SPECIAL["unk_token"]))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=_TEMPLATE, **_SPECIAL)
