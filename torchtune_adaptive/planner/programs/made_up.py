"""Rows that are made up, and a tokenizer where there is none, for what a file of a trainer trains.

A file names datasets of the Hub. What is planned is the worst case that it allows: rows as long as may be,
every token of which has a label, and one that is shorter, so that there is padding. Where a processor makes
numbers of images, each row has one.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any, NamedTuple

from torchtune_adaptive.common import NoPrediction
from torchtune_adaptive.planner.programs import notes
from torchtune_adaptive.planner.programs.imports import WhenImported, put

_STEPS = 6
"""The steps for which there are rows."""
_SHORTER = 8
_TOKEN, _WORD = 5, "a"
_STAGES = {"rm": "PAIRS", "kto": "KL", "ppo": "PPO", "pt": "TEXT"}
"""Stages of LLaMA-Factory with rows of their own kind."""
_PROMPT = 512
"""Tokens of a prompt where nothing says how long it may be."""
_IMAGE = 1024
"""The width and the height of an image where nothing says them."""
_SPECIAL = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
_TEMPLATE = (
    "{% for m in messages %}{% generation %}{{ m['content'] + ' ' }}{% endgeneration %}{% endfor %}"
)


class MadeUpRows:
    """Makes up the rows of a program; ``length``, if given, is that of each."""

    def __init__(self, length: int | None) -> None:
        self._length = length
        self._wanted = _Wanted("", length or _PROMPT, 1)

    def follow(self, imports: WhenImported) -> None:
        """Make them up from now on."""
        os.environ["NUMBA_DISABLE_JIT"] = "1"  # packing so few is faster than compiling how
        imports.call("datasets.load", lambda it: put(it, "load_dataset", self._loaded))
        imports.call("trl.scripts.utils", lambda it: put(it, "get_dataset", self._loaded))
        imports.call("transformers.training_args", self._of_arguments)
        imports.call("axolotl.utils.config", self._of_axolotl)
        imports.call(
            "axolotl.utils.data.shared",
            lambda it: put(it, "load_dataset_with_config", self._of_config),
        )
        imports.call("axolotl.utils.collators.mm_chat", self._of_collator)
        imports.call(
            "llamafactory.data.loader", lambda it: put(it, "get_dataset", self._of_llama_factory)
        )
        for module, kind in (("tokenization", "AutoTokenizer"), ("processing", "AutoProcessor")):
            name = f"transformers.models.auto.{module}_auto"
            imports.call(name, partial(_stand_in, kind))

    def _of_arguments(self, module: Any) -> None:
        """What TRL's scripts are told, before they read rows."""
        begin = module.TrainingArguments.__post_init__

        def begun(arguments: Any) -> None:
            if self._length is not None and hasattr(arguments, "max_length"):
                arguments.max_length = self._length
            kind = type(arguments).__name__.removesuffix("Config").upper()
            length = self._length or getattr(arguments, "max_length", _PROMPT)
            of_step = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
            self._wanted = _Wanted(kind, length, of_step)
            begin(arguments)

        put(module.TrainingArguments, "__post_init__", begun)

    def _of_axolotl(self, module: Any) -> None:
        """What Axolotl is told."""
        normalize = module.normalize_config

        def normalized(config: Any) -> Any:
            config.loss_watchdog_threshold = None  # nothing is planned whose loss explodes
            config.tokenizer_use_mistral_common = None  # rows are of tokens
            config.dataset_exact_deduplication = None  # which are alike
            done = normalize(config)
            of_step = config.micro_batch_size * config.gradient_accumulation_steps
            images = config.processor_type and config.skip_prepare_dataset
            other = "images" if images else "sft"
            kind = config.rl or ("reward" if config.reward_model else other)
            kind = str(getattr(kind, "value", kind))
            if config.ebft and config.ebft.mode == "strided":  # without prompts
                kind = "strided"
            self._wanted = _Wanted(kind.upper(), config.sequence_len, of_step)
            return done

        put(module, "normalize_config", normalized)

    def _of_config(self, config: Any, *_: Any, **options: Any) -> Any:
        """What Axolotl reads for one of its datasets, as it is after that has been prepared."""
        if self._wanted.kind not in ("SFT", "REWARD", "IMAGES"):
            config["type"] = None
        return self._loaded(split="train", **options)

    def _of_collator(self, module: Any) -> None:
        """What Axolotl makes of rows with images, which it does not cut off."""
        kind = module.MultiModalChatDataCollator
        process = kind.process_rows

        def processed(collator: Any, rows: Any) -> Any:
            processor = collator.processing_strategy.processor
            if not hasattr(processor, "image_processor"):
                raise NoPrediction(
                    f"{type(processor).__name__}: makes no numbers of images, and sounds are not made up. "
                    "Give a folder with the model's processor by --hf, or plan the file with its own rows: "
                    "tune-adaptive plan -m axolotl.cli.train FILE."
                )
            batch = process(collator, rows)
            over = batch["input_ids"].shape[1] - (self._wanted.length or 0)
            if over <= 0:
                return batch
            for row in rows:
                said = row["messages"][-1]
                said["content"] = said["content"][: -over * len(f" {_WORD}")] or _WORD
            batch = process(collator, rows)
            if (tokens := batch["input_ids"].shape[1]) > (self._wanted.length or 0):
                notes.note(
                    f"rows: {tokens:,} tokens each, as an image alone has more than rows may have"
                )
            return batch

        put(kind, "process_rows", processed)

    def _of_llama_factory(
        self, template: Any, model: Any, data: Any, training: Any, stage: str, **_: Any
    ) -> dict[str, Any]:
        """What LLaMA-Factory trains on in one of its stages, of which ``rm`` is also that of pairs."""
        of_step = training.per_device_train_batch_size * training.gradient_accumulation_steps
        self._wanted = _Wanted(_STAGES.get(stage, "SFT"), data.cutoff_len, of_step)
        return {"train_dataset": self._loaded(split="train")}

    def _loaded(self, *_: Any, split: Any = None, streaming: bool = False, **__: Any) -> Any:
        """What ``load_dataset`` gives: rows for the trainer of which is known what it is told."""
        kind, length, of_step = self._wanted
        if length is None:
            raise NoPrediction(
                "max_length: null, so nothing says how long rows may be. Give it with --max-length."
            )
        made = rows(kind, length, of_step)
        image = f" with an image of {_IMAGE} x {_IMAGE} pixels" if kind == "IMAGES" else ""
        notes.note(
            f"rows: made up, {length:,} tokens each{image}, one of a padded batch is shorter; the file's "
            "data are not read"
        )
        if streaming:
            made = made.to_iterable_dataset()
        return made if split is not None else _AnySplit(made)


def rows(kind: str, length: int, of_step: int, padded: bool = True) -> Any:
    """A dataset of rows for one of TRL's trainers; ``of_step`` is the rows of a step on each rank."""
    from datasets import Dataset

    shorter = max(2, length - _SHORTER) if padded else length
    made = Dataset.from_list([_row(kind, length), _row(kind, shorter, first=False)])
    return made.select(_order(of_step))


class _Wanted(NamedTuple):
    """The rows that are made up."""

    kind: str
    """What TRL's trainer of such rows is called, without ``Trainer``."""
    length: int | None
    of_step: int
    """The rows of a step on each rank."""


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
    text = f" {_WORD}" * (length - 1)
    pair = {"prompt": _WORD, "chosen": text, "rejected": text, "reference": text}
    row = {"input_ids": tokens, "labels": tokens, "attention_mask": [1] * length}
    said = [{"role": "user", "content": _WORD}, {"role": "assistant", "content": text}]
    talk = {"messages": said}
    media = dict.fromkeys(("images", "videos", "audios"))
    if kind == "IMAGES":
        from PIL import Image

        return talk | {"images": [Image.new("RGB", (_IMAGE, _IMAGE))]}
    by_trainer: dict[str, dict[str, Any]] = {
        "SFT": row,
        "REWARD": {**row, "chosen_ids": tokens, "rejected_ids": tokens},
        "KTO": {"prompt": _WORD, "completion": text, "label": first},
        "PAIRS": {f"{one}_{name}": row[name] for one in ("chosen", "rejected") for name in row}
        | media,
        "KL": {**row, **{f"kl_{name}": row[name] for name in row}, "kto_tags": first, **media},
        **dict.fromkeys(("PPO", "STRIDED"), row),
        "TEXT": {name: row[name] for name in ("input_ids", "attention_mask")},
        "EBFT": {**row, "prompt": _WORD},
        **dict.fromkeys(("GKD", "GOLD", "IWOPD"), talk),
        **dict.fromkeys(("DPO", "IPO", "ORPO", "SIMPO", "CPO", "TPO"), pair),
    }
    asked = [{"role": "user", "content": text}]  # TRL's own rewards are of answers in a talk
    rollout = {"text": text, "prompt": asked, "solution": _WORD, "privileged_context": _WORD}
    return by_trainer.get(kind, rollout)


def _stand_in(kind: str, module: Any) -> None:
    """Let a simple tokenizer stand in for one, or for a processor, that cannot be read."""
    auto = getattr(module, kind)
    read = auto.from_pretrained

    def found(path: Any, *arguments: Any, **options: Any) -> Any:
        try:
            made = read(path, *arguments, **options)
            if not hasattr(made, "get_vocab") or {*made.get_vocab()} - {*made.all_special_tokens}:
                return made  # and not one without words, as of some kinds without files
        except Exception:  # whatever the library raises where files are missing
            pass
        notes.note(f"tokenizer: none is at {path}, so a simple one stands in")
        return simple_tokenizer()

    auto.from_pretrained = found


def simple_tokenizer() -> Any:
    """A tokenizer with a token for each word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate([*_SPECIAL.values(), "-", _WORD])}
    made = Tokenizer(models.WordLevel(words, unk_token=_SPECIAL["unk_token"]))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=_TEMPLATE, **_SPECIAL)
