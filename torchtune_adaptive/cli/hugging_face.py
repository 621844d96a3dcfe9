"""A config for a model that Hugging Face's ``config.json`` describes, from torchtune's builders.

What they lack is built from torchtune's modules (see ``recipe.decoders``). Only what decides memory is taken
over: the shapes of the weights and the longest rows. How positions are scaled does not change memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from torchtune_adaptive.common import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig

Method = Literal["full", "lora", "qlora"]
METHODS: tuple[Method, ...] = get_args(Method)

_SHAPE = {
    "vocab_size": "vocab_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "embed_dim": "hidden_size",
    "intermediate_dim": "intermediate_size",
    "max_seq_len": "max_position_embeddings",
}
"""Arguments of torchtune's builders, and their names in ``config.json``."""

ADAPTERS = {
    "lora_attn_modules": ["q_proj", "v_proj", "output_proj"],
    "apply_lora_to_mlp": True,
    "lora_rank": 8,
    "lora_alpha": 16,
}
"""Adapters that torchtune's own LoRA configs train."""


def config_for(folder: Path, method: Method) -> DictConfig:
    """The config that finetunes the model of a folder, as torchtune's own would; weights are not read.

    Raises:
        ConfigError: there is no such file, or torchtune has no builder for the model.
    """
    from omegaconf import OmegaConf  # the recipes', as this config

    about = read_config(folder)
    module, name, arguments = _model(about, str(folder))
    model: dict[str, Any] = {"_component_": f"{module}.{name}", **arguments}
    if method != "full":
        model |= {"_component_": f"{module}.lora_{name}", **ADAPTERS}
        model |= {"quantize_base": method == "qlora"}
    return OmegaConf.create(
        {
            "output_dir": "/tmp/torchtune_adaptive/plan",
            "model": model,
            "tokenizer": {"_component_": "torchtune.models.llama3.llama3_tokenizer", "path": None},
            "checkpointer": {
                "_component_": "torchtune.training.FullModelHFCheckpointer",
                "output_dir": "${output_dir}",
            },
            "dataset": {"_component_": "torchtune.datasets.alpaca_cleaned_dataset"},
            "metric_logger": {"_component_": "torchtune.training.metric_logging.DiskLogger"},
            "optimizer": {"_component_": "torch.optim.AdamW", "lr": 2e-5, "fused": True},
            "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
            "batch_size": 2,
            "gradient_accumulation_steps": 1,
            "epochs": 1,
            "max_steps_per_epoch": None,
            "clip_grad_norm": None,
            "seed": None,
            "shuffle": True,
            "resume_from_checkpoint": False,
            "device": "cuda",
            "dtype": "bf16",
            "enable_activation_checkpointing": True,
        }
    )


def read_config(folder: Path) -> Mapping[str, Any]:
    """What the ``config.json`` of a folder says.

    Raises:
        ConfigError: there is none, or it makes no sense.
    """
    path = folder / "config.json"
    try:
        about = json.loads(path.read_text())
    except OSError as error:
        reason = f"has no config.json that can be read ({error.strerror})"
        remedy = "Give the folder of a model, or its name on the Hub as ORG/NAME"
        raise ConfigError("--hf", str(path.parent), reason, remedy) from None
    except ValueError as error:
        reason = f"is not JSON ({error})"
        raise ConfigError("--hf", str(path), reason, "Download it again") from None
    if not isinstance(about, dict):
        raise ConfigError("--hf", str(path), "is not a JSON object", "Download it again")
    return about


def _model(about: Mapping[str, Any], folder: str) -> tuple[str, str, dict[str, Any]]:
    """The builder's module and name, and its arguments."""
    (architecture, *_) = about.get("architectures") or ["no architecture"]
    if architecture not in _BUILDERS:
        reason = "is not an architecture that can be planned from config.json"
        remedy = (
            "Add --trainer SFTTrainer, which plans any causal language model (pip install transformers), or "
            f"use one of {', '.join(_BUILDERS)}"
        )
        raise ConfigError("--hf", architecture, reason, remedy)
    if missing := [key for key in _SHAPE.values() if not isinstance(about.get(key), int)]:
        reason = f"has no {', '.join(missing)} in its config.json"
        raise ConfigError("--hf", folder, reason, "Download it again")
    heads = about["num_attention_heads"]
    arguments = {ours: about[theirs] for ours, theirs in _SHAPE.items()}
    arguments["num_kv_heads"] = about.get("num_key_value_heads") or heads
    package, name = _BUILDERS[architecture]
    tied = about.get("tie_word_embeddings", package in _GEMMA)
    for what in ("attention_bias", "mlp_bias"):
        if about.get(what):
            remedy = "Use a torchtune config of a similar model"
            reason = f"has {what}, which torchtune's {package} builder does not support"
            raise ConfigError("--hf", folder, reason, remedy)
    if architecture == "LlamaForCausalLM" and (tied or about.get("rope_scaling")):
        package = name = "llama3_2" if tied else "llama3_1"
    head_dim = about.get("head_dim") or about["hidden_size"] // heads
    unlike = package not in _GEMMA and head_dim * heads != about["hidden_size"]
    if package == "qwen3" or unlike or (tied and package not in _MAY_BE_TIED):
        if package not in _LIKE_LLAMA:
            what = f"head_dim {head_dim}" if unlike else "tied embeddings"
            reason = f"has {what}, which torchtune's {package} builder does not support"
            raise ConfigError("--hf", folder, reason, "Use a torchtune config of a similar model")
        more = {"head_dim": head_dim, "tie_word_embeddings": tied, "qk_norm": package == "qwen3"}
        return "torchtune_adaptive.recipe.decoders", "decoder", {**arguments, **more}
    if package in _GEMMA:
        arguments["head_dim"] = head_dim
    if package == "gemma2":
        arguments["query_pre_attn_scalar"] = about.get("query_pre_attn_scalar")
    if package == "qwen2":
        arguments["tie_word_embeddings"] = tied
    return f"torchtune.models.{package}", name, arguments


_BUILDERS = {
    "LlamaForCausalLM": ("llama2", "llama2"),
    "MistralForCausalLM": ("mistral", "mistral"),
    "Qwen2ForCausalLM": ("qwen2", "qwen2"),
    "Qwen3ForCausalLM": ("qwen3", "qwen3"),
    "GemmaForCausalLM": ("gemma", "gemma"),
    "Gemma2ForCausalLM": ("gemma2", "gemma2"),
    "Phi3ForCausalLM": ("phi3", "phi3"),
}
"""torchtune's package and builder by architecture; Llama's newer ones are told apart in ``_model``."""

_GEMMA = ("gemma", "gemma2")
"""Builders that take a width of heads; their embeddings are tied unless the config says otherwise."""
_LIKE_LLAMA = ("llama2", "llama3_1", "llama3_2", "mistral", "qwen3")
_MAY_BE_TIED = ("llama3_2", "qwen2", *_GEMMA)
