"""Weights of 4 and 8 bits as bitsandbytes has them, for ``real_trainers.py``, which imports it."""

from __future__ import annotations

from typing import Any


def quantized(model: Any, dtype: Any, case: dict[str, Any]) -> Any:
    """The same as transformers loads it with few bits; products allocate what they do on a GPU."""
    from transformers import AutoModelForCausalLM

    config = _four_bits(case) if case.get("load_in_4bit") else _eight_bits()
    model.save_pretrained("weights")
    options = {"dtype": dtype, "quantization_config": config}
    model = AutoModelForCausalLM.from_pretrained("weights", **options)
    for module in model.modules():
        if hasattr(module, "init_8bit_state"):
            _as_plain(module)
    return model


def _as_plain(layer: Any) -> None:
    """Let the weight of a layer be a plain parameter, whose memory can be counted."""
    import torch

    layer.init_8bit_state()
    layer.weight = torch.nn.Parameter(layer.state.CB, requires_grad=False)
    layer.weight.CB = layer.weight.SCB = None


def _four_bits(case: dict[str, Any]) -> Any:
    """Products are as on a GPU, with the whole weight."""
    import bitsandbytes  # noqa: F401 (which has the operations)
    import torch
    from transformers import BitsAndBytesConfig

    operations = torch.ops.bitsandbytes

    def product(a: Any, b: Any, shape: Any, scales: Any, block: int, kind: str, **more: Any) -> Any:
        if (codes := more.get("absmax_8bit")) is not None:
            table = more["absmax_code"]
            centred = operations.dequantize_blockwise(codes, scales, table, 256, torch.float32)
            scales = centred + more["absmax_offset"]
        weight = operations.dequantize_4bit(b, scales, block, kind, shape, a.dtype)
        return torch.nn.functional.linear(a, weight, more.get("bias"))

    operations.gemm_4bit.default = product  # one operation otherwise, in which nothing is seen
    compute_in = case.get("bnb_4bit_compute_dtype") or case["dtype"]
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=getattr(torch, compute_in),
        bnb_4bit_use_double_quant=case.get("bnb_4bit_use_double_quant", False),
        bnb_4bit_quant_storage=case.get("bnb_4bit_quant_storage"),
    )


def _eight_bits() -> Any:
    """Products are those that bitsandbytes has for a GPU. Its kernels for that allocate what they do there,
    and no more that counts."""
    import bitsandbytes
    import torch
    from bitsandbytes.autograd._functions import MatMul8bitLt
    from transformers import BitsAndBytesConfig

    operations = torch.ops.bitsandbytes

    def product(a: Any, b: Any, out: Any = None, state: Any = None, bias: Any = None) -> Any:
        return MatMul8bitLt.apply(a, b, out, bias, state)

    def codes_of(inputs: Any, threshold: float = 0.0) -> Any:
        scales = torch.empty(len(inputs), dtype=torch.float32)
        codes = torch.empty(inputs.shape, dtype=torch.int8)
        columns = None
        if threshold:
            outliers = inputs.abs() >= threshold
            assert not outliers.any()
            columns = torch.empty(0, dtype=torch.int64)
        for few, code, scale in zip(
            *(one.split(16) for one in (inputs, codes, scales)), strict=True
        ):
            scale.copy_(few.float().abs().amax(-1))
            code.copy_((few.float() * (127 / scale.unsqueeze(-1))).round())
        return codes, scales, columns

    def taken_back(sums: Any, rows: Any, columns: Any, dtype: Any, bias: Any) -> Any:
        found = torch.empty_like(sums, dtype=torch.float16)
        torch.mul(sums, rows.unsqueeze(-1) * (1 / 127**2), out=found)
        found.mul_(columns)
        if bias is not None and bias.dtype != torch.float16:
            found.add_(bias)
        return found.to(dtype)

    def mixed(a: Any, codes: Any, weight: Any, rows: Any, columns: Any, _: Any, bias: Any) -> Any:
        empty = torch.empty(0, dtype=a.dtype)
        sums = torch._int_mm(codes, weight.t())
        return taken_back(sums, rows, columns, a.dtype, bias), empty

    bitsandbytes.matmul = product
    bitsandbytes.functional.int8_vectorwise_quant = codes_of
    operations.int8_mixed_scaled_mm = mixed
    return BitsAndBytesConfig(load_in_8bit=True)


def beside_weights(model: Any) -> list[Any]:
    """What bitsandbytes holds for quantized weights."""
    states = [one.quant_state for one in model.parameters() if hasattr(one, "quant_state")]
    inner = [state.state2 for state in states if state.nested]
    found = [
        getattr(one, name) for one in (*states, *inner) for name in ("absmax", "code", "offset")
    ]
    for module in model.modules():
        if hasattr(getattr(module, "state", None), "SCB"):
            found.append(module.state.SCB)
    return [one for one in found if one is not None]
