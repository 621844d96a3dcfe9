"""Models that take images, on rows with one and on rows with none: what is logged is the plain trainer's."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.integrations.real.trainers import (
    AS_CONFIGURED,
    LLAMA,
    NAMES,
    SEARCHING,
    WORDS,
    Loss,
    distance,
    fsdp2_on_cpu,
    on_ranks,
    tokenizer,
    trained,
)
from tests.integrations.real.ways import WAYS

Image = pytest.importorskip("PIL.Image")
pytestmark = [pytest.mark.exhaustive, pytest.mark.ranks]
CLOSE = 1e-6
SIDE, PATCH = 8, 4


def processor() -> Any:
    from transformers import LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    words = tokenizer()
    words.add_special_tokens({"additional_special_tokens": ["<image>"]})
    size = {"height": SIDE, "width": SIDE}
    images = CLIPImageProcessorPil(size=size, do_center_crop=False)
    features = {"vision_feature_select_strategy": "full", "num_additional_image_tokens": 1}
    return LlavaProcessor(images, words, patch_size=PATCH, **features)


def llava() -> Any:
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=SIDE,
        patch_size=PATCH,
        projection_dim=32,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=LlamaConfig(**LLAMA | {"vocab_size": len(WORDS) + 1}),
        image_token_index=len(WORDS),
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
        image_seq_length=(SIDE // PATCH) ** 2 + 1,
    )
    torch.manual_seed(0)
    return LlavaForConditionalGeneration(config)


def pictures(names: tuple[str, ...], share: float) -> Any:
    """Rows of text, of which a share begins with an image of one color."""
    import datasets

    draw = random.Random(0)
    rows: list[dict[str, Any]] = []
    for _ in range(64):
        color = tuple(draw.randrange(256) for _ in range(3))
        images = [Image.new("RGB", (SIDE, SIDE), color)] * (draw.random() < share)
        row: dict[str, Any] = {"images": images}
        for number, name in enumerate(names):
            words = " ".join(draw.choice(WORDS[3:]) for _ in range(draw.randrange(3, 16)))
            row[name] = " ".join(["<image>"] * (len(images) if number == 0 else 0) + ["", words])
        rows.append(row)
    texts = {name: datasets.Value("string") for name in names}
    features = datasets.Features({"images": datasets.Sequence(datasets.Image()), **texts})
    return datasets.Dataset.from_list(rows, features=features)


def compare(kind: str, share: float, ranks: int, way: str) -> dict[str, Any]:
    if way == "fsdp2":
        fsdp2_on_cpu()
    names = ("prompt", "completion") if kind == "sft" else NAMES[kind]
    lost = [Loss(1 + on, on) for on in range(ranks)]

    def training(*options: Any) -> Any:
        more = {"ref_model": llava()} if kind != "sft" else {}
        more |= {"model": llava(), "processing_class": processor(), "data": pictures(names, share)}
        return trained(kind, *options, max_length=None, **more, **WAYS[way])

    plain, equal, searched = training(None), training(AS_CONFIGURED), training(SEARCHING)
    lost_ones = [training(AS_CONFIGURED, each) for each in lost]
    return {
        "far": [distance(one, plain) for one in (equal, searched, *lost_ones)],
        "weights": float((equal.weights - plain.weights).abs().max()),
        "found": searched.sizes[0],  # type: ignore[index]
        "sizes": [one.sizes for one in lost_ones],
    }


@pytest.mark.parametrize(
    ("kind", "share", "ranks", "way"),
    [
        ("sft", 1.0, 1, "ddp"),
        ("sft", 0.1, 2, "ddp"),
        ("sft", 1.0, 2, "fsdp2"),
        ("dpo", 0.5, 2, "ddp"),
        ("kto", 0.5, 1, "ddp"),
    ],
)
def test_with_images(kind: str, share: float, ranks: int, way: str) -> None:
    for seen in on_ranks(compare, ranks, kind, share, ranks, way):
        assert max(seen["far"]) <= CLOSE and seen["weights"] <= 1e-4, (
            seen
        )  # a step moves them by 1e-2
        assert seen["found"] == 8 and all(each == (4, 2) for each in seen["sizes"]), seen
