"""Plans of QLoRA quantize and dequantize a weight of each shape once, which changes nothing else."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from torchtune_adaptive.recipe.tracing.helped_parts import dequantizing_by, quantizing_once
from torchtune_adaptive.recipe.upstream import NF4Tensor, to_nf4


def test_one_of_each_shape_is_quantized() -> None:
    weights = [torch.randn(rows, 256) for rows in (256, 256, 512, 256)]
    expected = [to_nf4(weight) for weight in weights]
    quantize = NF4Tensor.double_quantize_scalers
    with patch.object(NF4Tensor, "double_quantize_scalers", side_effect=quantize) as quantizing:
        with quantizing_once():
            made = [to_nf4(weight) for weight in weights]
        assert quantizing.call_count == 2
        to_nf4(weights[0])
        assert quantizing.call_count == 3, "what torchao does is back"
    assert len({id(one) for one in made}) == 4, "tied weights would be counted once"
    for one, other in zip(made, expected, strict=True):
        (names, context), (same, alike) = one.__tensor_flatten__(), other.__tensor_flatten__()
        assert names == same and context.keys() == alike.keys() and one.shape == other.shape
        for name in names:
            parts = getattr(one, name), getattr(other, name)
            assert parts[0].shape == parts[1].shape and parts[0].dtype == parts[1].dtype


def test_weights_of_one_shape_are_dequantized_as_of_one_kind() -> None:
    weights = [to_nf4(torch.randn(rows, 256)) for rows in (256, 512, 256)]
    expected, kinds = [weight.get_original_weight() for weight in weights], []

    def call(dequantize: Any, kind: Any, parts: list[torch.Tensor]) -> torch.Tensor:
        kinds.append((hash(kind), kind))
        assert len(parts) == 5 and type(parts[0]) is torch.Tensor
        made: torch.Tensor = dequantize()
        return made

    with dequantizing_by(call):
        made = [weight.to(weight.dtype) for weight in weights]
    assert all(map(torch.equal, made, expected))
    assert kinds[0] == kinds[2] != kinds[1]


def test_an_error_restores_them_as_well() -> None:
    before = dict(vars(NF4Tensor))
    with pytest.raises(KeyError), quantizing_once(), dequantizing_by(lambda call, *_: call()):
        raise KeyError
    assert dict(vars(NF4Tensor)) == before
