"""Plans of QLoRA quantize a weight of each shape once, which changes nothing about what is built."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from torchtune_adaptive.recipe.tracing.fake_quantization import quantizing_once
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


def test_an_error_restores_it_as_well() -> None:
    before = vars(NF4Tensor)["from_tensor"]
    with pytest.raises(KeyError), quantizing_once():
        raise KeyError
    assert vars(NF4Tensor)["from_tensor"] is before
