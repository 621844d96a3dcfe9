"""What differs between torchtune 0.6.1 and its main branch (0.7.0, not released), told apart by feature.

Checked on torchtune 0.6.1 with torchao 0.15, and on the main branch (bd2a0fc) with torchao 0.18.
"""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from importlib.util import find_spec
from inspect import unwrap
from typing import Any

import torch
from torch import nn
from torchtune.modules import attention_utils
from torchtune.modules.loss import CEWithChunkedOutputLoss

from torchtune_adaptive.recipe.private import sft_transform

try:
    from torchao.quantization import NF4Tensor as NF4Tensor
    from torchao.quantization import to_nf4 as to_nf4
except ImportError:  # before torchao 0.18, and torchtune 0.6.1 needs it to be
    from torchao.dtypes.nf4tensor import NF4Tensor as NF4Tensor
    from torchao.dtypes.nf4tensor import to_nf4 as to_nf4

_OURS = {
    "gsm8k_dataset": "torchtune_adaptive.recipe.data.prompts",
    "FormattedMathCorrectnessReward": "torchtune_adaptive.recipe.rewards",
    "ThinkingAnswerFormattingReward": "torchtune_adaptive.recipe.rewards",
    "GRPOLoss": "torchtune_adaptive.recipe.kinds.grpo",
    "GRPOSimpleLoss": "torchtune_adaptive.recipe.kinds.grpo",
    "GRPOWithChunkedOutputLoss": "torchtune_adaptive.recipe.kinds.grpo",
}
"""Parts of reinforcement learning that torchtune has on main only, and where ours of the same name are."""


def component_path(path: str) -> str:
    """The path of a component or, where only torchtune's main branch has it, of ours in its place."""
    module, _, name = path.rpartition(".")
    is_of_main = name in _OURS and module.startswith("torchtune.dev.")
    if is_of_main and find_spec("torchtune.dev") is None:
        return f"{_OURS[name]}.{name}"
    return path


@cache
def labels_are_shifted() -> bool:
    """Whether a dataset's label at a position is the token that comes next, or the token itself.

    On 0.6.1 recipes shift labels. On main datasets do, and a recipe that did it again would learn to predict
    the token after the next.
    """
    transform = sft_transform()(
        model_transform=lambda _: {"tokens": [1, 2], "mask": [False, False]}
    )
    return int(transform({})["labels"][0]) == 2


def has_flex_attention(device: torch.device) -> bool:
    """Whether packed rows go through flex attention on this device; through a dense mask otherwise."""
    return device.type == "cuda" and hasattr(attention_utils, "flex_attention_compiled")


def give_output_to_loss(loss_fn: nn.Module, model: nn.Module) -> None:
    """Make the model's output what the loss takes: logits, logits in chunks, or (on main) hidden states that
    the loss itself multiplies by the output layer."""
    output: Any = getattr(loss_fn, "set_model_output", None)
    if output is not None:
        output(model)
    elif hasattr(loss_fn, "num_output_chunks"):
        model.set_num_output_chunks(loss_fn.num_output_chunks)  # type: ignore[operator]


def is_chunked_cross_entropy(loss_fn: nn.Module) -> bool:
    """Whether a loss is the cross entropy of logits in chunks. On main its class is wrapped in a function."""
    return isinstance(loss_fn, unwrap(CEWithChunkedOutputLoss))


def fake_quantization_for_lora(described: Any) -> Any:
    """How torchao describes fake quantization, as torchtune's LoRA layers take it.

    They insist on a class that torchao has replaced by its parent, so torchtune 0.6.1 stops with 0.15.
    """
    try:
        from torchao.quantization.qat import FakeQuantizeConfig
    except ImportError:
        return described
    if described is None or isinstance(described, FakeQuantizeConfig):
        return described
    return FakeQuantizeConfig(
        **{each.name: getattr(described, each.name) for each in fields(described)}
    )
