"""A Llama so small that it trains in seconds on a laptop, with everything that a large one comes with.

Its tokenizer, its checkpoint in Hugging Face's format and its instruction data are made here and then
loaded like any other: by torchtune's tokenizer, checkpointer and dataset. The demo and the tests run on them.
torch is only imported when something is made: a plan needs the names of these files, and no torch.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchtune_adaptive.common import atomically, user_cache

_EDITION = 4  # of what is made here: another edition is made beside an older one
_ROWS = 640
_PAIRS = 240
VOCABULARY = 512

_SIZE = dict(num_layers=4, num_heads=4, num_kv_heads=2, embed_dim=64, intermediate_dim=160)

_LANGUAGE = """
river stone cloud garden window silver morning paper bridge yellow market winter orange candle
forest harbor letter mirror pencil rabbit saddle ticket violin wagon anchor basket cotton
dragon engine feather ginger hammer island jacket kettle lantern meadow needle onion pepper
"""
_WORDS = _LANGUAGE.split()


def assets() -> Path:
    """The folder with ``tokenizer.model``, two kinds of data, ``config.json`` and the weights; a larger
    model in ``teacher``, and a reward model in ``reward``."""
    return made_once(f"tiny_{_EDITION}", make)


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """A folder in the user's cache or, where that cannot be written, in the folder for temporary files."""
    temporary = Path(tempfile.gettempdir()) / f"torchtune_adaptive_{os.getuid()}"
    try:
        return _made_at((user_cache() or temporary) / name, make)
    except OSError:
        return _made_at(temporary / name, make)


def _made_at(folder: Path, make: Callable[[Path], None]) -> Path:
    if not folder.exists():
        try:
            with atomically(folder) as making:  # every rank may be here at once
                making.mkdir()
                make(making)
        except OSError:
            if not folder.exists():
                raise
    return folder


def make(folder: Path, size: dict[str, int] = _SIZE) -> None:
    """Make everything in ``folder``, for a model of the size given; the same everywhere."""
    rows = [_row(random.Random(number)) for number in range(_ROWS)]
    (folder / "data.json").write_text(json.dumps(rows))
    pairs = [_pair(row, random.Random(number)) for number, row in enumerate(rows[:_PAIRS])]
    (folder / "preferences.json").write_text(json.dumps(pairs))
    _make_tokenizer(folder, rows)
    _make_checkpoint(folder, size)
    _make_checkpoint(folder / "teacher", {**_SIZE, "num_layers": 6}, seed=1)
    _make_checkpoint(folder / "reward", {**size, "num_layers": 2}, seed=2, rewards=True)


def _row(choose: random.Random) -> dict[str, str]:
    """An instruction and its answer, in a language with few surprises; a few rows are long."""
    words = choose.sample(_WORDS, min(len(_WORDS), 2 + int(choose.paretovariate(1.3))))
    task = choose.randrange(4)
    if task == 0:
        asked, answer = f"Repeat these words: {' '.join(words)}.", " ".join(words)
    elif task == 1:
        asked, answer = f"Say these words backwards: {' '.join(words)}.", " ".join(reversed(words))
    elif task == 2:
        asked, answer = f"Sort these words: {' '.join(words)}.", " ".join(sorted(words))
    else:
        asked, answer = (
            f"How many words are these: {' '.join(words)}?",
            f"These are {len(words)} words.",
        )
    return {"input": asked, "output": answer}


def _pair(row: dict[str, str], choose: random.Random) -> dict[str, list[dict[str, str]]]:
    """The right answer, which is preferred to one with wrong words in it."""
    wrong = [choose.choice([word, choose.choice(_WORDS)]) for word in row["output"].split()]
    asked = {"role": "user", "content": row["input"]}
    right, other = (
        {"role": "assistant", "content": text} for text in (row["output"], " ".join(wrong))
    )
    return {"chosen": [asked, right], "rejected": [asked, other]}


def _make_tokenizer(folder: Path, rows: list[dict[str, str]]) -> None:
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([f"{row['input']} {row['output']}" for row in rows]),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=VOCABULARY,
        hard_vocab_limit=False,
        byte_fallback=True,
        minloglevel=2,
        num_threads=1,
    )


def _make_checkpoint(
    folder: Path, size: dict[str, int], seed: int = 0, rewards: bool = False
) -> None:
    import torch
    from torchtune.models import convert_weights
    from torchtune.models.llama2 import llama2, llama2_classifier
    from torchtune.rlhf.utils import reward_tune_to_hf

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        given = {**size, "vocab_size": VOCABULARY, "max_seq_len": 512}
        model = llama2_classifier(num_classes=1, **given) if rewards else llama2(**given)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.05)
    heads, kv_heads, dim = size["num_heads"], size["num_kv_heads"], size["embed_dim"]
    convert = reward_tune_to_hf if rewards else convert_weights.tune_to_hf
    weights = convert(model.state_dict(), heads, kv_heads, dim)
    config = {"hidden_size": dim, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    save_checkpoint(folder, weights, config)


def save_checkpoint(folder: Path, weights: dict[str, Any], config: dict[str, Any]) -> None:
    """Save a model as Hugging Face does, in a folder that need not be there yet."""
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    weights = {name: weight.contiguous() for name, weight in weights.items()}
    save_file(weights, folder / "model-00001-of-00001.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


def two_more_rows(epoch: int, current_batch_size: int) -> int:
    """A ``batch_increase_function``: in every epoch but the first, two rows more."""
    return 2 if epoch > 0 else 0


def vowels(completion_ids: object, completions: list[str], answers: list[str]) -> list[float]:
    """A reward function: the share of vowels among the characters of a response."""
    return [sum(c in "aeiou" for c in text) / max(1, len(text)) for text in completions]
