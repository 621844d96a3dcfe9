"""Weights and moments of few bits, as bitsandbytes has them, without its library for CUDA.

Layers are replaced by transformers' quantizer, and bitsandbytes' own Python runs: it quantizes fake weights,
and multiplies with them. Checked with bitsandbytes 0.50 and transformers 5.6 and 5.23.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from torchtune_adaptive.common import NoPrediction
from torchtune_adaptive.planner.programs import registered
from torchtune_adaptive.planner.programs.imports import WhenImported, put
from torchtune_adaptive.planner.programs.private import let_subclass
from torchtune_adaptive.planner.programs.unknown import Assumed
from torchtune_adaptive.planner.trace.weights import fill

_METHOD, _OPTION = "bitsandbytes", "quantization_config"


class _Library:
    """What bitsandbytes has in C for CUDA: functions that launch kernels, and memory that CUDA moves."""

    compiled_with_cuda = True

    def __init__(self) -> None:
        self._managed: list[torch.Tensor] = []

    def cget_managed_ptr(self, nbytes: Any) -> int:
        """Memory of the host, which nothing is written to."""
        self._managed.append(torch.empty(nbytes.value, dtype=torch.uint8))
        return self._managed[-1].data_ptr()

    def cprefetch(self, *_: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., int]:
        launch = partial(registered.launched, name)
        setattr(self, name, launch)
        return launch


def follow(imports: WhenImported, assumed: Assumed) -> None:
    """Let bitsandbytes run without a GPU from now on."""

    def kernels(_: Any) -> None:
        name = "bitsandbytes::int8_vectorwise_quant"
        quantize = registered.kernel_of(name)

        def without_outliers(*arguments: Any, **options: Any) -> Any:
            """Columns of large inputs are multiplied by themselves; which these are depends on values."""
            with assumed.otherwise(False):
                return quantize(*arguments, **options)  # type: ignore[misc]

        registered.replace(name, without_outliers)
        product = torch.ops.aten._int_mm.default  # what the library has it for

        def multiplied(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return product(a.flatten(0, -2), b.t()).unflatten(0, a.shape[:-1])

        registered.replace("bitsandbytes::int8_linear_matmul", multiplied)

    let_subclass()
    imports.call("bitsandbytes.cextension", lambda it: put(it, "lib", _Library()))
    imports.call("bitsandbytes.backends.cuda.ops", kernels)


class Quantizer:
    """Makes the weights of a model have few bits as it is loaded, by what transformers has for that."""

    def __init__(self, quantizer: Any) -> None:
        self._quantizer = quantizer
        self._read: dict[int, torch.Size] = {}
        """The shapes of weights in files, by the weights that are made of them."""

    def replace_layers(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Replace the layers of a model on the meta device."""
        shapes = {name: weight.shape for name, weight in model.named_parameters()}
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            self._quantizer.preprocess_model(model=model, dtype=dtype, device_map=None)
        finally:
            torch.set_default_dtype(before)
        self._read = {
            id(weight): shapes[name]
            for name, weight in model.named_parameters()
            if self._quantizer.param_needs_quantization(model, name)
        }

    def load(self, model: nn.Module, device: torch.device) -> None:
        """Allocate the weights of a model on the meta device, of which those are quantized one by one."""
        few_bits = [one for one in model.named_parameters() if id(one[1]) in self._read]
        for name, _ in few_bits:
            _put(model, name, None)
        fill(model, device)
        convert = self._quantizer.get_quantize_ops().convert
        for name, weight in few_bits:
            _put(model, name, weight)
            read = torch.empty(self._read[id(weight)], dtype=weight.dtype, device=device)
            _put(model, name, convert({name: [read]}, full_layer_name=name, model=model)[name])
        self._quantizer.postprocess_model(model)
        model.hf_quantizer = self._quantizer


def quantizer_of(modeling: Any, config: Any, options: dict[str, Any]) -> Quantizer | None:
    """What quantizes a model of this config that is loaded with these options; None if nothing does.

    Raises:
        NoPrediction: it is not bitsandbytes.
    """
    of_files, of_program = vars(config).pop(_OPTION, None), options.get(_OPTION)
    asked = [one for one in (of_files, of_program) if one]
    named = [one if isinstance(one, dict) else vars(one) for one in asked]
    if not asked or any(one.get("dequantize") for one in named):
        return None
    method = named[0].get("quant_method") or _METHOD
    if (method := str(getattr(method, "value", method))) != _METHOD:
        raise NoPrediction(
            f"{_OPTION}: weights quantized by {method} are not planned. Plan the program with weights of "
            "16 bits, or with a BitsAndBytesConfig."
        )
    # Weights that have few bits in files already come to be the same.
    found = modeling.get_hf_quantizer(config, asked[0], options.get("device_map"), None, {})[0]
    if not hasattr(found, "get_quantize_ops"):
        version = importlib.metadata.version("transformers")
        raise NoPrediction(
            f"{_OPTION}: transformers {version} loads weights of few bits in another way than is planned. "
            "Plan the program with transformers 5."
        )
    return Quantizer(found)


def _put(model: nn.Module, name: str, weight: Any) -> None:
    path, _, last = name.rpartition(".")
    setattr(model.get_submodule(path), last, weight)
