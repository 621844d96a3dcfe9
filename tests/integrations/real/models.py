"""Small models of many kinds, and rows for each."""

from __future__ import annotations

import random
from typing import Any

import torch

from tests.integrations.real.trainers import LLAMA, WORDS, Padding

COUNT = len(WORDS)
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_labels": 3}
SMALL |= {"num_attention_heads": 2, "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
BERT = SMALL | {"vocab_size": COUNT, "max_position_embeddings": 64}
T5 = {"vocab_size": COUNT, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
T5 |= {"dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0}
BART = {
    "vocab_size": COUNT,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "dropout": 0.0,
}
BART |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64}
BART |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_start_token_id": 0}
BART |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "forced_eos_token_id": 1}
OF_LLAMA = LLAMA | {"num_labels": 3, "classifier_dropout": 0.0}
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "BertForMaskedLM": ("BertConfig", BERT, "LABELS"),
    "T5ForConditionalGeneration": ("T5Config", T5, "LABELS"),
    "BartForConditionalGeneration": ("BartConfig", BART, "LABELS"),
    "BertForSequenceClassification": ("BertConfig", BERT, "ROWS"),
    "LlamaForSequenceClassification": ("LlamaConfig", OF_LLAMA, "ROWS"),
    "LlamaForTokenClassification": ("LlamaConfig", OF_LLAMA, "LABELS"),
    "BertForTokenClassification": ("BertConfig", BERT, "LABELS"),
    "ViTForImageClassification": (
        "ViTConfig",
        SMALL | {"image_size": 16, "patch_size": 4},
        "ITEMS",
    ),
    "LlamaForCausalLM": ("LlamaConfig", LLAMA, "ITEMS"),
}
"""Models with their config, and what their loss is a mean of."""


def model_of(name: str, **config: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    kind, own, _ = MODELS[name]
    return getattr(transformers, name)(getattr(transformers, kind)(**own | config))


def rows_for(name: str, count: int = 64) -> list[dict[str, Any]]:
    """Rows of different lengths with labels for a model; of images, with numbers that are tensors."""
    draw, generator = random.Random(0), torch.Generator().manual_seed(0)
    if "Image" in name:
        images = [torch.randn(3, 16, 16, generator=generator) for _ in range(count)]
        return [
            {"pixel_values": image, "labels": torch.tensor(n % 3)} for n, image in enumerate(images)
        ]
    rows = []
    for _ in range(count):
        ids = [draw.randrange(3, COUNT) for _ in range(draw.randrange(4, 24))]
        labels: Any = ids
        if "Sequence" in name:
            labels = ids[0] % 3
        elif "Token" in name:
            labels = [number % 3 for number in ids]
        elif "Masked" in name:  # of some rows none
            labels = [number if draw.random() < 0.2 else -100 for number in ids]
        rows.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels})
    return rows


class Collating(Padding):
    """The same, also for rows with one label, and for images."""

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        if "pixel_values" in rows[0]:
            return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        if isinstance(rows[0]["labels"], list):
            return super().__call__(rows)
        padded = super().__call__([row | {"labels": row["input_ids"]} for row in rows])
        return padded | {"labels": torch.tensor([row["labels"] for row in rows])}


EXPERTS = {
    "Qwen3MoeForCausalLM": {
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "decoder_sparse_step": 1,
    },
    "MixtralForCausalLM": {"num_local_experts": 4},
    "OlmoeForCausalLM": {"num_experts": 4},
    "GptOssForCausalLM": {"num_local_experts": 4, "head_dim": 16, "sliding_window": 8},
}


def experts(name: str, **config: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    kind = getattr(transformers, name)
    small = LLAMA | {
        "num_experts_per_tok": 2,
        "num_key_value_heads": 2,
        "router_aux_loss_coef": 0.1,
    }
    made = kind.config_class(**small | EXPERTS[name] | config)
    made._attn_implementation = "eager"
    return kind(made)


def experts_that_see() -> Any:
    """A model of images and text, whose experts are in its text's config; used with text alone."""
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    torch.manual_seed(0)
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    text = LLAMA | EXPERTS["Qwen3MoeForCausalLM"] | {"num_experts_per_tok": 2, "head_dim": 8}
    text |= {"num_key_value_heads": 2, "router_aux_loss_coef": 0.1}
    text |= {"rope_parameters": rope | {"rope_theta": 1e4}}
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "patch_size": 4,
    }
    vision |= {"out_hidden_size": 32, "deepstack_visual_indexes": [0]}
    config = Qwen3VLMoeConfig(text_config=text, vision_config=vision)
    return Qwen3VLMoeForConditionalGeneration(config)


def of_experts(trainer: str, name: str) -> dict[str, Any]:
    """What a trainer is made with, so that its loss balances experts."""
    import transformers

    if trainer == "trainer":
        return {"model": experts(name, output_router_logits=True)}
    if trainer == "reward":
        config = experts(name, num_labels=1).config
        torch.manual_seed(0)
        return {
            "model": getattr(transformers, name.replace("CausalLM", "SequenceClassification"))(
                config
            )
        }
    made = {"model": experts(name)}
    return made | ({"ref_model": experts(name)} if trainer in ("dpo", "kto") else {})
