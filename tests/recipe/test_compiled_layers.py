"""What a compiled layer keeps for backward is predicted to the byte, without a GPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchtune import training
from torchtune.models.llama3_1._position_embeddings import Llama3ScaledRoPE
from torchtune.models.llama3_2._component_builders import llama3_2, lora_llama3_2
from torchtune.modules import RMSNorm

from tests.helpers.ranks import run_ranks
from torchtune_adaptive.planner import fake_device
from torchtune_adaptive.planner.private import FakeTensorMode
from torchtune_adaptive.planner.trace.compiled_regions import CompiledRegions
from torchtune_adaptive.planner.trace.recorder import Recorder, Watch
from torchtune_adaptive.recipe.tracing import packed_layer

pytestmark = [pytest.mark.ranks, pytest.mark.alternating]

ROWS, LENGTH, WIDTH = 2, 128, 64
SIZES = {
    "vocab_size": 128,
    "num_layers": 1,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": WIDTH,
    "max_seq_len": LENGTH,
    "intermediate_dim": 192,
}
ADAPTERS = {"apply_lora_to_mlp": True, "lora_rank": 8, "lora_alpha": 16}
Case = tuple[str, bool, bool, bool]
"""Full or LoRA; packed rows; the norm of earlier versions of torchtune; checkpointed."""
CASES: list[Case] = [
    *itertools.product(("full", "lora"), (False, True), (False, True), (False,)),
    ("full", False, False, True),
    ("lora", True, False, True),
]


def a_layer(kind: str) -> nn.Module:
    with training.set_default_dtype(torch.bfloat16):
        if kind == "full":
            return llama3_2(**SIZES).layers[0]
        model = lora_llama3_2(["q_proj", "v_proj", "output_proj"], **ADAPTERS, **SIZES)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return model.layers[0]


def norm_written_out(norm: RMSNorm, x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)).type_as(
        x
    ) * norm.scale


def flash(query: Any, key: Any, value: Any, *_: Any, is_causal: bool = False, **__: Any) -> Any:
    """The kernel of a CPU, on both sides."""
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return attention(query, key, value, 0.0, is_causal)[0]


@torch.compiler.disable(recursive=False)
def flex(query: Any, key: Any, value: Any, **_: Any) -> Any:
    """What the compiler may not enter."""
    return packed_layer._FlexAttention.apply(query, key, value)


def kept(case: Case) -> tuple[int, int]:
    """The bytes that a layer really keeps, and those that are predicted."""
    kind, packed, written_out, checkpointed = case
    fake_device.device()  # before autograd counts devices
    if written_out:
        RMSNorm.forward = norm_written_out  # type: ignore[method-assign]
    layer = a_layer(kind)
    if packed:
        layer.attn._attention_call = flex
    really = kept_by_real(layer, checkpointed)
    torch._dynamo.reset()
    F.scaled_dot_product_attention = flash
    Llama3ScaledRoPE.apply_scaling = lambda _, freqs, *__: freqs
    return really, kept_by_fake(kind, packed, checkpointed)


def kept_by_real(layer: nn.Module, checkpointed: bool) -> int:
    """Dynamo, AOTAutograd and the partitioner split the layer; the halves run on a CPU."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor.compile_fx import partition_fn  # which takes two seconds
    from torch._inductor.decomposition import select_decomp_table

    def as_it_is(graph: Any, _: Any) -> Any:
        return make_boxed_func(graph.forward)

    layer.compile(
        backend=aot_autograd(
            fw_compiler=as_it_is,
            bw_compiler=as_it_is,
            partition_fn=partition_fn,
            decompositions=select_decomp_table(),
            keep_inference_input_mutations=True,
        )
    )
    x = torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    positions = torch.arange(LENGTH).expand(ROWS, LENGTH).contiguous()
    owned = {id_of(t) for t in (*layer.parameters(), *layer.buffers(), x, positions)}
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if id_of(tensor) not in owned:
            found[id_of(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = passed(layer, x, positions, checkpointed)
    found[id_of(output)] = output.untyped_storage().nbytes()
    return sum(found.values())


def kept_by_fake(kind: str, packed: bool, checkpointed: bool) -> int:
    device = fake_device.device()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = Recorder(device)
    regions = CompiledRegions(device, mode)
    with mode, Watch(recorder, mode):
        with device:
            layer = a_layer(kind)
        layer.forward = (
            packed_layer.in_four_regions(layer, regions.region)
            if packed
            else regions.region(layer.forward)
        )
        options: dict[str, Any] = {"device": device, "requires_grad": True}
        x = torch.empty(ROWS, LENGTH, WIDTH, dtype=torch.bfloat16, **options)
        positions = torch.empty(ROWS, LENGTH, dtype=torch.int64, device=device)
        before = recorder.in_use
        output = passed(layer, x, positions, checkpointed)
        found = recorder.in_use - before
        output.sum().backward()
    assert not regions.failed
    return found


def id_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def passed(layer: nn.Module, x: Any, positions: Any, checkpointed: bool) -> torch.Tensor:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return layer(x, input_pos=positions)

    output: torch.Tensor = (
        checkpoint(forward, x, use_reentrant=False) if checkpointed else forward(x)
    )
    return output


@pytest.mark.rotating
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_what_a_compiled_layer_keeps_is_predicted_to_the_byte(case: Case) -> None:
    [(really, predicted)] = run_ranks(kept, 1, case, join=False)
    assert predicted == really > 0
