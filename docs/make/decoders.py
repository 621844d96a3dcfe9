"""``torchtune_adaptive/recipe/plan/decoders.json``: the shapes of torchtune's decoders, by builder.

python docs/make/decoders.py > torchtune_adaptive/recipe/plan/decoders.json

Those of adapters have rows of their own, as some make a table of positions for each layer; what is added to
quantize the weights (``qlora``) changes no shape. What is no decoder of text alone is left out.
"""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from types import ModuleType

import torch
import torchtune.models
from torchtune.models.gemma2._attention import Gemma2Attention
from torchtune.modules import TiedLinear, TransformerDecoder, TransformerSelfAttentionLayer

from torchtune_adaptive.planner.memory.decoder import Decoder


def builders() -> Iterator[str]:
    """The builders of models of one size, as configs name them."""
    for package in pkgutil.iter_modules(torchtune.models.__path__):
        with suppress(ImportError):  # models of images need torchvision
            yield from _of_one_size(import_module(f"torchtune.models.{package.name}"))


def _of_one_size(module: ModuleType) -> Iterator[str]:
    for name in getattr(module, "__all__", ()):
        sized = name.rpartition("_")[2] in ("mini", "instruct", "base") or name[-1:] == "b"
        if sized and not name.startswith("qlora_"):
            yield f"{module.__name__}.{name}"


def decoder_of(builder: str) -> Decoder | None:
    """The shape of what a builder makes; None if an estimate knows nothing about it."""
    module, _, name = builder.rpartition(".")
    adapters = {"lora_attn_modules": ["q_proj"]} if name.startswith("lora_") else {}
    with torch.device("meta"):
        return shape_of(getattr(import_module(module), name)(**adapters))


def shape_of(model: torch.nn.Module) -> Decoder | None:
    """The shape of a model; None if an estimate knows nothing about it."""
    if not isinstance(model, TransformerDecoder):
        return None
    first = model.layers[0]
    head = model.output
    known = isinstance(head, TiedLinear) or getattr(head, "out_features", 0) > 2
    if not known or not all(isinstance(one, TransformerSelfAttentionLayer) for one in model.layers):
        return None
    return Decoder(
        layers=len(model.layers),
        heads=first.attn.num_heads,
        kv_heads=first.attn.num_kv_heads,
        head_dim=first.attn.head_dim,
        embed=first.attn.embed_dim,
        intermediate=first.mlp.w1.weight.shape[0],
        vocabulary=model.tok_embeddings.num_embeddings,
        longest=model.max_seq_len,
        positions=round(
            sum(map(_positions, model.modules())) / model.max_seq_len / first.attn.head_dim
        ),
        tied=isinstance(head, TiedLinear),
        gemma2=isinstance(first.attn, Gemma2Attention),
    )


def _positions(module: torch.nn.Module) -> int:
    """Bytes of a module's table of positions, which Llama 3.1 makes after the weights."""
    if not hasattr(module, "rope_init"):
        return 0
    return sum(one.nbytes for one in module.buffers()) or 4 * module.max_seq_len * module.dim


def table() -> dict[str, dict[str, int]]:
    """The rows of the file."""
    found = {builder: decoder_of(builder) for builder in builders()}
    return {builder: asdict(shape) for builder, shape in found.items() if shape is not None}


if __name__ == "__main__":
    rows = (f" {json.dumps(builder)}: {json.dumps(row)}" for builder, row in table().items())
    print("{\n" + ",\n".join(rows) + "\n}")
