"""Models by Hugging Face's config.json: as many parameters as published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torchtune import config

from tests.helpers.hugging_face import LLAMA_1B, PUBLISHED, written
from torchtune_adaptive.cli.hugging_face import METHODS, config_for
from torchtune_adaptive.common.errors import ConfigError
from torchtune_adaptive.recipe.plan.request import plan_request
from torchtune_adaptive.recipe.settings.kind_table import kind_of


@pytest.mark.parametrize("name", PUBLISHED)
def test_as_many_parameters_as_published(name: str, tmp_path: Path) -> None:
    found, parameters = PUBLISHED[name]
    cfg = config_for(written(tmp_path, found), "full")
    with torch.device("meta"):
        model = config.instantiate(cfg.model)
    assert sum(one.numel() for one in model.parameters()) == parameters  # each tied one once
    assert model.max_seq_len == found["max_position_embeddings"]


@pytest.mark.parametrize("found", [LLAMA_1B, PUBLISHED["Qwen3-8B"][0]], ids=["Llama", "Qwen3"])
@pytest.mark.parametrize("method", METHODS)
def test_each_method_is_a_config_that_can_be_planned(
    method: Any, found: dict[str, Any], tmp_path: Path
) -> None:
    plan = plan_request(config_for(written(tmp_path, found), method), 2)
    assert kind_of(plan.cfg).adapters is (method != "full")
    assert bool(plan.cfg.model.get("quantize_base")) is (method == "qlora")
    small = {**plan.cfg.model, "num_layers": 1}
    if method == "qlora":
        small["quantize_base"] = False  # quantising needs values
    with torch.device("meta"):
        config.instantiate(OmegaConf.create(small))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"architectures": ["Qwen9ForCausalLM"]},
            "'Qwen9ForCausalLM' is not an architecture .* --trainer SFTTrainer",
        ),
        ({"architectures": None}, "'no architecture' is not an architecture"),
        (
            {"architectures": ["Phi3ForCausalLM"]},
            "has tied embeddings, which torchtune's phi3 builder does not support",
        ),
        ({"attention_bias": True}, "has attention_bias"),
        ({"hidden_size": None, "vocab_size": "x"}, "has no vocab_size, hidden_size"),
    ],
)
def test_what_torchtune_cannot_build_is_refused_by_name(
    changes: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        config_for(written(tmp_path, {**LLAMA_1B, **changes}), "full")


@pytest.mark.parametrize(("text", "complaint"), [("{", "is not JSON"), ("[]", "JSON object")])
def test_a_file_that_makes_no_sense(text: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        config_for(tmp_path, "full")
