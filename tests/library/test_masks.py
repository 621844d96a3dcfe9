"""The masks of attention are those that transformers makes, for layers that see a window or all of a row."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.hugging_face import about
from tests.helpers.torchvision import without_torchvision
from torchtune_adaptive.common import UsageError
from torchtune_adaptive.library import TransformersStep

LENGTH = 12
SHAPE = (96, 4, 4, 2, 64, 96, 512)
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "Mistral": (about("Mistral", *SHAPE, sliding_window=4, **TOKENS), 4),
    "Phi3": (about("Phi3", *SHAPE, sliding_window=LENGTH, **TOKENS), 4),
    "Qwen2": (
        about("Qwen2", *SHAPE, use_sliding_window=True, sliding_window=4, max_window_layers=3),
        1,
    ),
    "Gemma3": (
        about("Gemma3", *SHAPE, sliding_window=4, sliding_window_pattern=2, **TOKENS)
        | {"model_type": "gemma3_text"},
        2,
    ),
    "wider than a row": (about("Mistral", *SHAPE, sliding_window=LENGTH + 1, **TOKENS), 0),
    "Llama": (about("Llama", *SHAPE), 0),
}
"""Configs, and in how many of four layers attention has a mask."""

Masks = list[torch.Tensor | None]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Masks]:
    """The masks that layers give to sdpa, in order."""
    with without_torchvision():
        from transformers import AttentionInterface

        masks: Masks = []
        attend = AttentionInterface()["sdpa"]

        def watched(module: Any, query: Any, key: Any, value: Any, mask: Any, **named: Any) -> Any:
            masks.append(mask)
            return attend(module, query, key, value, mask, **named)

        monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", watched)
        yield masks


def planned(folder: Path, config: dict[str, Any], seen: Masks, **settings: Any) -> Masks:
    """The masks of a planned step."""
    (folder / "config.json").write_text(json.dumps(config))
    settings = {"trainer": "Trainer", "max_length": LENGTH, **settings}
    step = TransformersStep(folder=str(folder), gradient_checkpointing=False, **settings)
    model = step.model()
    seen.clear()
    model.forward(model.build(), model.batch(2))
    return [*seen]


@pytest.mark.parametrize("name", MODELS)
def test_they_are_those_of_transformers(name: str, tmp_path: Path, seen: Masks) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config, masked = MODELS[name]
    found = planned(tmp_path, config, seen)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    tokens = torch.zeros(2, LENGTH, dtype=torch.long)
    seen.clear()
    model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False)
    assert len(found) == len(seen) == 4
    for ours, theirs in zip(found, seen, strict=True):
        assert (ours is None) is (theirs is None)
        assert ours is None or theirs is None or torch.equal(ours, theirs)
    assert sum(mask is not None for mask in found) == masked


def test_rows_with_padding_have_one_in_each_layer(tmp_path: Path, seen: Masks) -> None:
    for name in ("Llama", "Gemma3"):
        found = planned(tmp_path, MODELS[name][0], seen, padded=True)
        assert [mask is not None and mask.shape for mask in found] == [(2, 1, LENGTH, LENGTH)] * 4


def test_flash_attention_has_none(tmp_path: Path, seen: Masks) -> None:
    config, _ = MODELS["Mistral"]
    one = {"attn_implementation": "flash_attention_2", "padded": True}
    assert planned(tmp_path, config, seen, **one) == [None] * 4
    assert planned(tmp_path, config, seen, trainer="SFTTrainer", packing=True) == [None] * 4


def test_flash_attention_is_refused_where_it_has_no_kernels() -> None:
    one = {"folder": "model", "attn_implementation": "flash_attention_2"}
    with pytest.raises(UsageError, match=r"attn_implementation: FlashAttention has no kernels for"):
        TransformersStep(**one, bf16=False)
    with pytest.raises(UsageError, match="attn_implementation: 'eager' must be one of: 'sdpa', 'f"):
        TransformersStep(folder="model", attn_implementation="eager")
