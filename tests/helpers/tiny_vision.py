"""A tiny Llama 3.2 Vision, with everything that a large one comes with, as ``tiny`` is a tiny Llama.

Its rows are pictures of one color and questions about them. torchtune's vision models need torchvision, which
is imported only where they are built.
"""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchtune_adaptive.recipe.tiny import made_once, save_checkpoint

CONFIGS = Path(__file__).parents[1] / "data"
"""The folder with ``full_vision.yaml`` and ``lora_vision.yaml``."""
TILE = 28  # pixels; a patch has 14, as in the large models
_EDITION = 1
_ROWS = 160
_SPECIAL_TOKENS = [
    *("begin_of_text", "end_of_text", "finetune_right_pad_id", "step_id", "start_header_id"),
    *("end_header_id", "eom_id", "eot_id", "python_tag"),
]
_VOCABULARY = 256 + len(_SPECIAL_TOKENS) + 7
_COLORS = {
    "red": (200, 30, 30),
    "green": (30, 160, 60),
    "blue": (40, 60, 200),
    "yellow": (230, 210, 40),
    "violet": (140, 40, 190),
    "black": (10, 10, 10),
}
_CROSS_ATTENTION_LAYERS = [1, 4]  # as Hugging Face counts them
_ASPECT_RATIOS = [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]]

_ENCODER: dict[str, Any] = dict(
    patch_size=14, num_heads=4, clip_embed_dim=32, clip_num_layers=2, clip_hidden_states=[1],
    num_layers_projection=1, decoder_embed_dim=64, tile_size=TILE, max_num_tiles=4,
)  # fmt: skip
_DECODER: dict[str, Any] = dict(
    vocab_size=_VOCABULARY, num_layers=4, fusion_interval=2, num_special_tokens=8, num_heads=4,
    num_kv_heads=2, embed_dim=64, max_seq_len=512, encoder_max_seq_len=512, intermediate_dim=128,
)  # fmt: skip


def tiny_vision(
    decoder_trainable: bool = False, encoder_trainable: bool = True, fusion_trainable: bool = True
) -> nn.Module:
    """The model, of which some parts are trained; the arguments are those of ``llama3_2_vision_11b``."""
    from torchtune.models.llama3_2_vision import llama3_2_vision_decoder, llama3_2_vision_encoder
    from torchtune.modules.model_fusion import DeepFusionModel

    return DeepFusionModel(
        encoder=llama3_2_vision_encoder(**_ENCODER),
        decoder=llama3_2_vision_decoder(**_DECODER),
        encoder_trainable=encoder_trainable,
        decoder_trainable=decoder_trainable,
        fusion_trainable=fusion_trainable,
    )


def lora_tiny_vision(
    lora_attn_modules: list[str],
    decoder_trainable: str = "frozen",
    encoder_trainable: str = "lora",
    fusion_trainable: str = "lora",
    **lora: Any,
) -> nn.Module:
    """The model with adapters; the arguments are those of ``lora_llama3_2_vision_11b``."""
    from torchtune.models.llama3_2_vision import (
        lora_llama3_2_vision_decoder,
        lora_llama3_2_vision_encoder,
    )
    from torchtune.modules.model_fusion import DeepFusionModel

    lora["lora_attn_modules"] = lora_attn_modules
    fusion = fusion_trainable == "lora"
    return DeepFusionModel(
        encoder=lora_llama3_2_vision_encoder(
            encoder_lora=encoder_trainable == "lora", fusion_lora=fusion, **lora, **_ENCODER
        ),
        decoder=lora_llama3_2_vision_decoder(
            decoder_lora=decoder_trainable == "lora", fusion_lora=fusion, **lora, **_DECODER
        ),
        encoder_trainable=encoder_trainable == "lora",
        decoder_trainable=decoder_trainable == "lora",
        fusion_trainable=fusion,
    )


def assets() -> Path:
    """The folder with the tokenizer, ``data.parquet``, ``config.json`` and the weights."""
    return made_once(f"tiny_vision_{_EDITION}", make)


def make(folder: Path) -> None:
    """Make everything in ``folder``; the same everywhere."""
    _make_tokenizer(folder)
    _make_data(folder)
    _make_checkpoint(folder)


def _make_tokenizer(folder: Path) -> None:
    """One token for each byte, and those of Llama 3; an image's is the first beyond the vocabulary."""
    lines = [f"{base64.b64encode(bytes([byte])).decode()} {byte}" for byte in range(256)]
    (folder / "tokenizer.model").write_text("\n".join(lines) + "\n")
    special = {name: 256 + number for number, name in enumerate(_SPECIAL_TOKENS)}
    added = [
        {"content": f"<|{name}|>", "id": number}
        for name, number in {**special, "image": _VOCABULARY}.items()
    ]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))


def _make_data(folder: Path) -> None:
    from datasets import Dataset, Features, Image, Sequence, Value

    rows = [_row(random.Random(number)) for number in range(_ROWS)]
    texts = {"user": Value("string"), "assistant": Value("string")}
    features = Features({"images": Sequence(Image()), "texts": [texts]})
    Dataset.from_list(rows, features=features).to_parquet(folder / "data.parquet")


def _row(choose: random.Random) -> dict[str, Any]:
    """One picture or two, of different sizes, and what there is to see; a few answers are long."""
    from PIL import Image

    colors = choose.sample(sorted(_COLORS), 2 if choose.random() < 0.2 else 1)
    images = []
    for color in colors:
        size = (choose.randrange(10, 2 * TILE), choose.randrange(10, 2 * TILE))
        images.append(Image.new("RGB", size, _COLORS[color]))
    answer = " and ".join(colors) * min(6, int(choose.paretovariate(1.5)))
    return {"images": images, "texts": [{"user": "Which color?", "assistant": answer}]}


def _make_checkpoint(folder: Path) -> None:
    from torchtune.models.llama3_2_vision._convert_weights import llama3_vision_tune_to_hf

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = tiny_vision()
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.05)
            elif (
                parameter.numel() == 1
            ):  # a gate; behind a closed one, as new models have it, nothing learns
                nn.init.constant_(parameter, 0.5)
            else:
                nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
    dim, heads, kv_heads = (_DECODER[key] for key in ("embed_dim", "num_heads", "num_kv_heads"))
    weights = llama3_vision_tune_to_hf(
        model.state_dict(),
        num_heads=heads,
        num_kv_heads=kv_heads,
        dim=dim,
        vocab_size=_VOCABULARY,
        cross_attention_layers=_CROSS_ATTENTION_LAYERS,
        encoder_dim=_ENCODER["clip_embed_dim"],
        tile_size=TILE,
        num_tiles=_ENCODER["max_num_tiles"],
        supported_aspect_ratios=_ASPECT_RATIOS,
    )
    text = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": dim,
        "vocab_size": _VOCABULARY,
        "cross_attention_layers": _CROSS_ATTENTION_LAYERS,
    }
    vision = {
        "hidden_size": _ENCODER["clip_embed_dim"],
        "image_size": TILE,
        "max_num_tiles": _ENCODER["max_num_tiles"],
        "supported_aspect_ratios": _ASPECT_RATIOS,
    }
    save_checkpoint(folder, weights, {"text_config": text, "vision_config": vision})
