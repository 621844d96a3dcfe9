"""Steps of torchtitan's trainer, with stand-ins for it; the real one is in ``real/test_torchtitan.py``."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from torchtune_adaptive import UsageError
from torchtune_adaptive.integrations import Adaptive, titan_refusals
from torchtune_adaptive.integrations.titan_rows import Batch, merged
from torchtune_adaptive.integrations.titan_step import TitanStep
from torchtune_adaptive.integrations.torchtitan import adaptive


class Trainer:
    """What a step needs of a trainer; its model loses memory in the forward passes that are told."""

    def __init__(self, lost: frozenset[int] = frozenset()) -> None:
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        self.passes = 0
        self.model_parts, self.lost = [model], lost
        self.optimizers = SimpleNamespace(optimizers=[torch.optim.SGD(model.parameters())])
        self.parallel_dims = SimpleNamespace(dp_replicate=1, dp_shard=1, world_size=1)
        self.config = SimpleNamespace(training=SimpleNamespace(local_batch_size=4))
        self.adaptive, self.dataloader, self.device = Adaptive(), None, torch.device("cpu")
        self.ntokens_seen = 0
        self.loss_fn: Callable[..., Any] = lambda predicted, labels, terms: (
            (predicted - labels).square().sum() / terms,
            {},
        )

    def forward_backward_step(
        self, *, input_dict: Any, labels: Any, global_valid_tokens: Any
    ) -> torch.Tensor:
        self.passes += 1
        self.ntokens_seen += labels.numel()
        if self.passes in self.lost:
            raise torch.OutOfMemoryError("CUDA out of memory (injected)")
        predicted = self.model_parts[0](input_dict["input"])
        loss, _ = self.loss_fn(predicted, labels, global_valid_tokens)
        loss.backward()
        return loss  # type: ignore[no-any-return]


def rows(count: int) -> Batch:
    draw = torch.Generator().manual_seed(1)
    return {"input": torch.randn(count, 3, generator=draw)}, torch.ones(count, 3)


def test_a_step_is_that_of_the_trainer_also_when_memory_runs_out() -> None:
    inputs, labels = rows(8)
    terms = torch.tensor(24)
    plain = Trainer()
    whole = plain.forward_backward_step(input_dict=inputs, labels=labels, global_valid_tokens=terms)
    for lost, passes in ((frozenset[int](), 2), (frozenset({2, 3}), 3 + 8)):
        trainer = Trainer(lost)
        step = TitanStep(trainer, trainer.forward_backward_step)
        loss = step.take(inputs, labels, terms)
        assert torch.allclose(loss, whole) and trainer.passes == passes
        assert trainer.ntokens_seen == 24
        pairs = zip(*(each.model_parts[0].parameters() for each in (trainer, plain)), strict=True)
        assert all(torch.allclose(one.grad, two.grad) for one, two in pairs)  # type: ignore[arg-type]


def test_a_loss_that_is_not_gone_backward_from_once_is_refused() -> None:
    trainer = Trainer()
    own = trainer.forward_backward_step

    def twice(**named: Any) -> torch.Tensor:
        own(**named)
        return own(**named)

    with pytest.raises(UsageError, match="it called loss_fn 2 times, and must call it once"):
        TitanStep(trainer, twice).take(*rows(4), torch.tensor(12))


def test_the_rows_of_batches_are_put_together() -> None:
    inputs, labels = merged([rows(2), rows(3)])
    assert len(inputs["input"]) == len(labels) == 5
    assert torch.equal(inputs["input"][2:], rows(3)[0]["input"])


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (({"input": torch.ones(2, 5)}, torch.ones(2, 5)), "have different names or lengths"),
        (({"other": torch.ones(2, 3)}, torch.ones(2, 3)), "have different names or lengths"),
        (({"input": torch.ones(7)}, torch.ones(2, 3)), r"input is a tensor of \[7\]"),
        (({"input": [1, 2]}, torch.ones(2, 3)), "input is a list, and there are 2 rows"),
    ],
)
def test_batches_that_have_no_rows_are_refused(second: Any, said: str) -> None:
    with pytest.raises(UsageError, match=f"dataloader: .*{said}"):
        merged([rows(2), second])


SETTINGS = {
    "parallelism": {
        "pipeline_parallel_degree": 1,
        "context_parallel_degree": 1,
        "expert_parallel_degree": 1,
        "tensor_parallel_degree": 1,
        "enable_fsdp_symm_mem": False,
        "spmd_backend": "partial_dtensor",
    },
    "compile": {"enable": False, "components": ["model"], "enable_async_tensor_parallel": False},
    "training": {"disable_cuda_graphs": True, "mixed_precision_param": "bfloat16"},
    "debug": {"spmd_typechecking": False},
    "comm": {"mode": "default"},
}
OTHER = {
    "training.mixed_precision_param": "float16",
    "comm.mode": "torchcomms",
    "parallelism.spmd_backend": "spmd_types",
    **{name: 2 for name in titan_refusals.REFUSED if name.endswith("_degree")},
}


@pytest.mark.parametrize("name", [*titan_refusals.REFUSED, "parallelism.spmd_backend"])
def test_settings_are_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = SimpleNamespace(**{key: SimpleNamespace(**each) for key, each in SETTINGS.items()})
    titan_refusals.require_supported_config(config, Adaptive())
    owner, last = name.split(".")
    value = OTHER.get(name, not attrgetter(name)(config))
    setattr(getattr(config, owner), last, value)
    with pytest.raises(UsageError, match=f"^{name}: {value!r} ") as refused:
        titan_refusals.require_supported_config(config, Adaptive())
    assert "\n" not in str(refused.value)


def test_what_is_no_config_is_refused() -> None:
    with pytest.raises(UsageError, match="adaptive: 3 is not the config of a trainer"):
        adaptive(3)
