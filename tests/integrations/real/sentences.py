"""Losses of sentence-transformers on a tiny BERT with random weights: what each trains with."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.integrations.real.models import BERT
from tests.integrations.real.trainers import WORDS

COLUMNS = {
    "pairs": ("a", "b"),
    "scores": ("a", "b", "score"),
    "labels": ("a", "b", "label"),
    "triplets": ("anchor", "positive", "negative"),
    "classes": ("a", "label"),
    "margins": ("query", "positive", "negative", "label"),
    "vectors": ("a", "label"),
    "lists": ("query", "docs", "labels"),
}
"""The columns of the rows of a kind."""


def rows(kind: str, count: int = 64) -> Any:
    import datasets

    draw = random.Random(0)

    def text() -> str:
        return " ".join(draw.choice(WORDS[3:]) for _ in range(draw.randrange(3, 16)))

    values: dict[tuple[str, str], Callable[[], Any]] = {
        ("scores", "score"): draw.random,
        ("labels", "label"): lambda: draw.randrange(2),
        ("classes", "label"): lambda: draw.randrange(3),
        ("margins", "label"): lambda: draw.uniform(-1, 1),
        ("vectors", "label"): lambda: [draw.uniform(-1, 1) for _ in range(32)],
        ("lists", "docs"): lambda: [text() for _ in range(3)],
        ("lists", "labels"): lambda: [draw.randrange(2) for _ in range(3)],
    }
    columns = {name: values.get((kind, name), text) for name in COLUMNS[kind]}
    return datasets.Dataset.from_dict(
        {name: [value() for _ in range(count)] for name, value in columns.items()}
    )


def saved_in(folder: Path, name: str, **more: Any) -> str:
    """A path from which a model of transformers is loaded, with its tokenizer."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    path, special = folder / name, ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = {word: number for number, word in enumerate([*special, *WORDS])}
    inner = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {f"{each[1:-1].lower()}_token": each for each in special}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, model_max_length=32, **names
    ).save_pretrained(path)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        **BERT | {"vocab_size": len(words), "initializer_range": 0.2} | more
    )
    getattr(transformers, name)(config).save_pretrained(path)
    return str(path)


def encoder(folder: Path) -> Any:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer

    return SentenceTransformer(modules=[Transformer(saved_in(folder, "BertModel")), Pooling(32)])


def cross_encoder(folder: Path, labels: int = 1) -> Any:
    from sentence_transformers import CrossEncoder

    return CrossEncoder(saved_in(folder, "BertForSequenceClassification", num_labels=labels))


def sparse_encoder(folder: Path) -> Any:
    from sentence_transformers import SparseEncoder
    from sentence_transformers.sparse_encoder.models import MLMTransformer, SpladePooling

    return SparseEncoder(
        modules=[MLMTransformer(saved_in(folder, "BertForMaskedLM")), SpladePooling()]
    )


def of_pairs(name: str, kind: str, **settings: Any) -> tuple[Any, ...]:
    """A loss of sentence embeddings."""

    def made(model: Any) -> Any:
        from sentence_transformers import losses

        return getattr(losses, name)(model, **settings)

    return "SentenceTransformerTrainer", encoder, made, kind


def nested(name: str, kind: str) -> tuple[Any, ...]:
    def made(model: Any) -> Any:
        from sentence_transformers import losses

        return losses.MatryoshkaLoss(model, getattr(losses, name)(model), [32, 16])

    return "SentenceTransformerTrainer", encoder, made, kind


def of_words(name: str, kind: str) -> tuple[Any, ...]:
    """SPLADE's, whose regularizer a callback raises from 0."""

    def made(model: Any) -> Any:
        from sentence_transformers.sparse_encoder import losses

        inner = getattr(losses, name)(model)
        weights = {"document_regularizer_weight": 3e-3, "query_regularizer_weight": 5e-3}
        return losses.SpladeLoss(model, inner, **weights)

    return "SparseEncoderTrainer", sparse_encoder, made, kind


def of_both(name: str, kind: str, labels: int = 1) -> tuple[Any, ...]:
    """A loss of a cross-encoder."""

    def made(model: Any) -> Any:
        from sentence_transformers.cross_encoder import losses

        return getattr(losses, name)(model)

    return "CrossEncoderTrainer", lambda folder: cross_encoder(folder, labels), made, kind


LOSSES: dict[str, tuple[Any, ...]] = {
    "CosineSimilarity": of_pairs("CosineSimilarityLoss", "scores"),
    "Contrastive": of_pairs("ContrastiveLoss", "labels"),
    "OnlineContrastive": of_pairs("OnlineContrastiveLoss", "labels"),
    "MSE": of_pairs("MSELoss", "vectors"),
    "MarginMSE": of_pairs("MarginMSELoss", "margins"),
    "Triplet": of_pairs("TripletLoss", "triplets"),
    "Softmax": of_pairs("SoftmaxLoss", "labels", sentence_embedding_dimension=32, num_labels=3),
    "MultipleNegativesRanking": of_pairs("MultipleNegativesRankingLoss", "pairs"),
    "MultipleNegativesRanking, triplets": of_pairs("MultipleNegativesRankingLoss", "triplets"),
    "CachedMultipleNegativesRanking": of_pairs(
        "CachedMultipleNegativesRankingLoss", "pairs", mini_batch_size=2
    ),
    "MultipleNegativesSymmetricRanking": of_pairs("MultipleNegativesSymmetricRankingLoss", "pairs"),
    "CoSENT": of_pairs("CoSENTLoss", "scores"),
    "AnglE": of_pairs("AnglELoss", "scores"),
    "BatchHardTriplet": of_pairs("BatchHardTripletLoss", "classes"),
    "BatchAllTriplet": of_pairs("BatchAllTripletLoss", "classes"),
    "MegaBatchMargin": of_pairs("MegaBatchMarginLoss", "pairs", use_mini_batched_version=False),
    "Matryoshka of CosineSimilarity": nested("CosineSimilarityLoss", "scores"),
    "Matryoshka of MultipleNegativesRanking": nested("MultipleNegativesRankingLoss", "pairs"),
    "cross-encoder, BinaryCrossEntropy": of_both("BinaryCrossEntropyLoss", "labels"),
    "cross-encoder, CrossEntropy": of_both("CrossEntropyLoss", "labels", labels=2),
    "cross-encoder, MSE": of_both("MSELoss", "scores"),
    "cross-encoder, ListNet": of_both("ListNetLoss", "lists"),
    "cross-encoder, PListMLE": of_both("PListMLELoss", "lists"),
    "cross-encoder, Lambda": of_both("LambdaLoss", "lists"),
    "cross-encoder, RankNet": of_both("RankNetLoss", "lists"),
    "cross-encoder, MultipleNegativesRanking": of_both("MultipleNegativesRankingLoss", "pairs"),
    "Splade of MultipleNegativesRanking": of_words("SparseMultipleNegativesRankingLoss", "pairs"),
    "Splade of MarginMSE": of_words("SparseMarginMSELoss", "margins"),
}
"""By name: the trainer, function that makes its model, function that makes the loss, and the kind of rows."""


def trainer(name: str, options: Any, folder: str, **settings: Any) -> Any:
    """A trainer with a loss; plain without options."""
    import sentence_transformers

    from tests.integrations.real.trainers import SETTINGS
    from torchtune_adaptive.integrations.transformers import adaptive

    kind, model_in, made, data = LOSSES[name]
    trainer_class = getattr(sentence_transformers, kind)
    arguments_class = getattr(sentence_transformers, f"{kind[:-2]}ingArguments")
    model = model_in(Path(folder))
    torch.manual_seed(1)
    own = {"use_cpu": True, "optim": "sgd", "max_steps": 8}
    if options is not None:
        trainer_class = adaptive(trainer_class, options)
    return trainer_class(
        model=model,
        args=arguments_class(folder, **SETTINGS | own | settings),
        train_dataset=rows(data),
        eval_dataset=rows(data, 8),
        loss=made(model),
    )
