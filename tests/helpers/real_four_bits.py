"""Weights of 4 bits as bitsandbytes has them, for ``real_trainers.py``, which imports it."""

from __future__ import annotations

from typing import Any


def quantized(model: Any, dtype: Any, case: dict[str, Any]) -> Any:
    """The same as transformers loads it with 4 bits; products are as on a GPU, with the whole weight."""
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    compute_in = case.get("bnb_4bit_compute_dtype") or case["dtype"]
    double = case.get("bnb_4bit_use_double_quant", False)
    model.save_pretrained("weights")
    model = AutoModelForCausalLM.from_pretrained(
        "weights",
        dtype=dtype,
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=getattr(torch, compute_in),
            bnb_4bit_use_double_quant=double,
            bnb_4bit_quant_storage=case.get("bnb_4bit_quant_storage"),
        ),
    )
    operations = torch.ops.bitsandbytes

    def product(a: Any, b: Any, shape: Any, scales: Any, block: int, kind: str, **more: Any) -> Any:
        if (codes := more.get("absmax_8bit")) is not None:
            table = more["absmax_code"]
            centred = operations.dequantize_blockwise(codes, scales, table, 256, torch.float32)
            scales = centred + more["absmax_offset"]
        weight = operations.dequantize_4bit(b, scales, block, kind, shape, a.dtype)
        return torch.nn.functional.linear(a, weight, more.get("bias"))

    operations.gemm_4bit.default = product  # one operation otherwise, in which nothing is seen
    return model


def beside_weights(model: Any) -> list[Any]:
    """What bitsandbytes holds for weights of 4 bits."""
    states = [one.quant_state for one in model.parameters() if hasattr(one, "quant_state")]
    inner = [state.state2 for state in states if state.nested]
    found = [
        getattr(one, name) for one in (*states, *inner) for name in ("absmax", "code", "offset")
    ]
    return [one for one in found if one is not None]
