"""Tasks of transformers' example scripts, on small models with random weights: what each trains with."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tests.integrations.real.models import BERT, COUNT, SMALL, Collating, model_of, rows_for
from tests.integrations.real.trainers import WORDS, tokenizer

AUDIO = SMALL | {
    "conv_dim": (16, 16),
    "conv_kernel": (5, 3),
    "conv_stride": (5, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": 12,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
    "classifier_proj_size": 16,
}
AUDIO |= {
    f"{name}_dropout": 0.0 for name in ("attention", "activation", "hidden", "feat_proj", "final")
}


def made(name: str, config: dict[str, Any]) -> Any:
    """A model of a class, with random weights."""
    import transformers

    torch.manual_seed(0)
    kind = getattr(transformers, name)
    return kind(kind.config_class(**config))


def masking_words() -> Any:
    words = tokenizer()
    words.add_special_tokens({"mask_token": WORDS[-1], "cls_token": "<eos>", "sep_token": "<eos>"})
    return words


def texts(even: bool = False) -> list[dict[str, Any]]:
    draw = random.Random(0)
    rows = []
    for _ in range(64):
        length = draw.randrange(4, 24)
        rows.append(
            {"input_ids": [draw.randrange(3, COUNT - 1) for _ in range(length + even * length % 2)]}
        )
    return rows


def masked() -> dict[str, Any]:
    """run_mlm.py: the collator masks at random."""
    from transformers import DataCollatorForLanguageModeling

    return {
        "model": made("BertForMaskedLM", BERT),
        "data": texts(),
        "data_collator": lambda: DataCollatorForLanguageModeling(masking_words(), seed=None),
    }


def masked_by_seed() -> dict[str, Any]:
    """The same, with a generator of the collator's own."""
    from transformers import DataCollatorForLanguageModeling

    return masked() | {
        "data_collator": lambda: DataCollatorForLanguageModeling(masking_words(), seed=7)
    }


def permuted() -> dict[str, Any]:
    """run_plm.py: the collator permutes at random."""
    from transformers import DataCollatorForPermutationLanguageModeling

    config = {
        "vocab_size": COUNT,
        "d_model": 32,
        "n_layer": 2,
        "n_head": 2,
        "d_inner": 64,
        "dropout": 0.0,
    }
    even = [{"input_ids": row["input_ids"][:1] * 2 + row["input_ids"] * 2} for row in texts()]
    return {
        "model": made("XLNetLMHeadModel", config),
        "data": [{"input_ids": row["input_ids"][:8]} for row in even],
        "data_collator": lambda: DataCollatorForPermutationLanguageModeling(masking_words()),
    }


class Sounds:
    """Pads waves, and gives one label to each, or several."""

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        waves = torch.nn.utils.rnn.pad_sequence([row["wave"] for row in rows], batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence(
            [torch.ones(len(row["wave"])) for row in rows], batch_first=True
        )
        labels = [torch.tensor(row["labels"]) for row in rows]
        if labels[0].ndim:
            padded = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
            return {"input_values": waves, "attention_mask": mask.long(), "labels": padded}
        return {"input_values": waves, "labels": torch.stack(labels)}


def waves(label: Callable[[random.Random], Any]) -> list[dict[str, Any]]:
    draw, generator = random.Random(0), torch.Generator().manual_seed(0)
    return [
        {"wave": torch.randn(draw.randrange(200, 500), generator=generator), "labels": label(draw)}
        for _ in range(64)
    ]


def _transcript(draw: random.Random) -> list[int]:
    return [draw.randrange(1, 12) for _ in range(draw.randrange(2, 7))]


def transcribed(norm: str = "group") -> dict[str, Any]:
    """run_speech_recognition_ctc.py: a group norm sees how rows are padded."""
    config = AUDIO | {"feat_extract_norm": norm, "ctc_loss_reduction": "mean", "pad_token_id": 0}
    return {
        "model": made("Wav2Vec2ForCTC", config),
        "data": waves(_transcript),
        "data_collator": Sounds,
    }


def heard() -> dict[str, Any]:
    """run_audio_classification.py, with waves of unequal length."""
    config = AUDIO | {"feat_extract_norm": "group"}
    rows = waves(lambda draw: draw.randrange(3))
    model = made("Wav2Vec2ForSequenceClassification", config)
    return {"model": model, "data": rows, "data_collator": Sounds}


class Stacking:
    """Stacks what has the same shape, and lists what has not, as transformers' examples do."""

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            name: torch.stack([row[name] for row in rows])
            if isinstance(rows[0][name], torch.Tensor)
            and name not in ("mask_labels", "class_labels")
            else [row[name] for row in rows]
            for name in rows[0]
        }


def pictures(
    number: int = 64, **more: Callable[[int, torch.Generator], Any]
) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "pixel_values": torch.randn(3, 32, 32, generator=generator),
            **{name: label(at, generator) for name, label in more.items()},
        }
        for at in range(number)
    ]


def _map_of_labels(at: int, generator: torch.Generator) -> torch.Tensor:
    labels = torch.randint(0, 4, (32, 32), generator=generator)
    labels[: 2 + at % 20] = 255  # reduced labels: the background does not count
    return labels


def segmented(norms: bool = False) -> dict[str, Any]:
    """run_semantic_segmentation.py: what is ignored is 255."""
    config = {
        "num_encoder_blocks": 2,
        "depths": [1, 1],
        "sr_ratios": [2, 1],
        "hidden_sizes": [16, 16],
        "patch_sizes": [7, 3],
        "strides": [4, 2],
        "num_attention_heads": [1, 2],
        "mlp_ratios": [2, 2],
        "decoder_hidden_size": 16,
        "num_labels": 4,
        "drop_path_rate": 0.0,
        "classifier_dropout_prob": 0.0,
    }
    model = made("SegformerForSemanticSegmentation", config)
    model.decode_head.classifier.weight.data *= 30  # or all rows have the same loss at first
    if not norms:
        model.decode_head.batch_norm = torch.nn.Identity()
    return {"model": model, "data": pictures(labels=_map_of_labels), "data_collator": Stacking}


def _boxes(at: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    count = 1 + at % 3
    boxes = 0.2 + 0.3 * torch.rand(count, 4, generator=generator)
    return {"class_labels": torch.arange(count) % 3, "boxes": boxes}


def detected() -> dict[str, Any]:
    """run_object_detection.py: its loss is divided by the boxes of a batch."""
    config = SMALL | {"image_size": [32, 32], "patch_size": 8, "num_detection_tokens": 5}
    model = made("YolosForObjectDetection", config)
    return {"model": model, "data": pictures(labels=_boxes), "data_collator": Stacking}


def _masks(at: int, generator: torch.Generator) -> torch.Tensor:
    return (torch.rand(1 + at % 3, 32, 32, generator=generator) > 0.5).float()


def segmented_by_object() -> dict[str, Any]:
    """run_instance_segmentation.py: its loss draws points, and is divided by the masks of a batch."""
    from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation, SwinConfig

    torch.manual_seed(0)
    stages = ["stage1", "stage2", "stage3", "stage4"]
    swin = {
        "image_size": 32,
        "patch_size": 2,
        "embed_dim": 8,
        "depths": [1] * 4,
        "num_heads": [1] * 4,
    }
    backbone = SwinConfig(**swin, window_size=2, drop_path_rate=0.0, out_features=stages)
    config = Mask2FormerConfig(
        backbone_config=backbone,
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=32,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=2,
        dim_feedforward=32,
        num_queries=5,
        train_num_points=64,
        num_labels=3,
    )
    labels = lambda at, _: torch.arange(1 + at % 3) % 3  # noqa: E731
    rows = pictures(mask_labels=_masks, class_labels=labels)
    model = Mask2FormerForUniversalSegmentation(config)
    return {"model": model, "data": rows, "data_collator": Stacking}


def compared() -> dict[str, Any]:
    """run_clip.py: each row is compared with those of its batch."""
    text = {"vocab_size": COUNT, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 2, "eos_token_id": 1, "projection_dim": 16, "bos_token_id": 0}
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    vision |= {"image_size": 32, "patch_size": 8, "projection_dim": 16}
    model = made("CLIPModel", {"text_config": text, "vision_config": vision, "projection_dim": 16})
    words = lambda at, generator: torch.randint(3, COUNT, (8,), generator=generator)  # noqa: E731
    rows = pictures(input_ids=words)
    return {
        "model": model,
        "data": [row | {"return_loss": True} for row in rows],
        "data_collator": Compared,
    }


class Compared(Stacking):
    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        return super().__call__(rows) | {"return_loss": True}


def smoothed(name: str = "T5ForConditionalGeneration") -> dict[str, Any]:
    """run_summarization.py with label smoothing."""
    from transformers import DataCollatorForSeq2Seq

    model = model_of(name)
    return {
        "model": model,
        "data": rows_for(name),
        "data_collator": lambda: DataCollatorForSeq2Seq(tokenizer(), model),
        "label_smoothing_factor": 0.1,
    }


def written(name: str) -> dict[str, Any]:
    return {"model": model_of(name), "data": rows_for(name), "data_collator": Collating}


OF_MODELS = {
    "LlamaForCausalLM": "next words",
    "BertForSequenceClassification": "classes of texts",
    "BertForTokenClassification": "classes of words",
    "T5ForConditionalGeneration": "summaries, T5",
    "BartForConditionalGeneration": "translations, BART",
    "ViTForImageClassification": "classes of images",
}
TASKS: dict[str, Callable[[], dict[str, Any]]] = {
    **{name: partial(written, model) for model, name in OF_MODELS.items()},
    "masked words": masked,
    "masked words, seeded": masked_by_seed,
    "permuted words": permuted,
    "transcripts, group norm": transcribed,
    "transcripts, layer norm": lambda: transcribed("layer"),
    "sounds of unequal length": heard,
    "segmentation": segmented,
    "segmentation, BatchNorm": lambda: segmented(norms=True),
    "segmentation by object": segmented_by_object,
    "object detection": detected,
    "CLIP": compared,
    "T5, smoothed labels": smoothed,
}
