"""torchtitan's trainer on a tiny Llama: logs, weights and checkpoints are those of the plain one."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.integrations.real.titan import (
    AS_CONFIGURED,
    SEARCHING,
    Loss,
    Random,
    Result,
    config,
    train,
)
from torchtune_adaptive import UsageError
from torchtune_adaptive.integrations import Adaptive
from torchtune_adaptive.integrations.torchtitan import AdaptiveTrainerMixin, adaptive

pytestmark = [pytest.mark.exhaustive, pytest.mark.ranks]
CLOSE = 1e-6


def on_ranks(function: Callable[..., Any], count: int, folder: Path, *arguments: Any) -> list[Any]:
    return run_ranks(function, count, str(folder), *arguments)


def compare(folder: str, lost: list[Loss], settings: dict[str, Any]) -> dict[str, Any]:
    def once(options: Adaptive | None = None, loss: Loss | None = None) -> Result:
        return train(config(folder, **settings), options, loss)

    plain = once()
    configured, searched, *others = (
        once(AS_CONFIGURED),
        once(SEARCHING),
        *(once(AS_CONFIGURED, each) for each in lost),
    )
    return {
        "equal": configured.logs == plain.logs and torch.equal(configured.weights, plain.weights),
        "far": [each.far(plain) for each in (configured, searched, *others)],
        "weights": [
            float((each.weights - plain.weights).abs().max())
            for each in (configured, searched, *others)
        ],
        "sizes": [configured.sizes, searched.sizes, *(each.sizes for each in others)],
        "logs": plain.logs,
    }


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "the default backend": {"backend": "spmd_types"},
    "one batch in a step": {"training__local_batch_size": 8},
    "loss in chunks": {"chunks": 4},
    "no clipping": {"training__max_norm": 1e9},
    "logged each second step": {"metrics__log_freq": 2},
    "validated": {"validator__enable": True, "validator__freq": 2},
    "compiled": {"compile__enable": True, "compile__backend": "eager"},
    "bf16": {"training__mixed_precision_param": "bfloat16"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_one_process(name: str, tmp_path: Path) -> None:
    settings = SETTINGS[name]
    where = "head" if name == "compiled" else "layer"  # whose hooks are not compiled with it
    lost = [Loss(where=where), Loss(3, where="head")]
    [seen] = on_ranks(compare, 1, tmp_path, lost, settings)
    loose = 3e-3 if name == "bf16" else CLOSE
    size = settings.get("training__local_batch_size", 4)
    assert seen["equal"], seen
    assert max(seen["far"]) <= loose and max(seen["weights"]) <= 10 * loose, seen
    configured, searched, *rest = seen["sizes"]
    assert configured == (size, size) and searched[0] == 8, seen
    assert rest == [(size, size // 4)] * 2, seen
    assert any("validation" in entry for entry in seen["logs"]) == (name == "validated")


ON_RANKS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp": (2, {}),
    "fsdp, loss in chunks": (2, {"chunks": 4}),
    "fsdp, resharded never": (2, {"parallelism__fsdp_reshard_after_forward": "never"}),
    "hsdp": (4, {"parallelism__data_parallel_replicate_degree": 2}),
    "tensor parallel": (2, {"parallelism__tensor_parallel_degree": 2}),
    "tensor parallel, fsdp": (4, {"parallelism__tensor_parallel_degree": 2}),
}


@pytest.mark.parametrize("name", ON_RANKS)
def test_on_ranks(name: str, tmp_path: Path) -> None:
    ranks, settings = ON_RANKS[name]
    lost = [Loss(), Loss(3, rank=ranks - 1, times=1), Loss(rank=1, where="head")]
    for seen in on_ranks(compare, ranks, tmp_path, lost, settings):
        assert max(seen["far"]) <= CLOSE and max(seen["weights"]) <= 1e-5, seen
        configured, searched, *rest = seen["sizes"]
        assert configured == (4, 4) and searched[0] == 8, seen
        assert rest == [(4, 1), (4, 2), (4, 1)], seen


def limited(folder: str) -> dict[str, Any]:
    """Trainings with memory for half of the rows of a step."""
    made = {"chunks": 4, "training__global_batch_size": 16}
    plain = train(config(folder, **made))
    with redirect_stderr(io.StringIO()) as said:
        searched = train(config(folder, **made), Adaptive(memory_limit="48MiB"))
    return {
        "far": searched.far(plain),
        "sizes": searched.sizes,
        "logged": searched.more["adaptive"],
        "said": said.getvalue().splitlines(),
        "same": torch.equal(searched.weights, plain.weights),
    }


def test_the_size_that_fits_is_found_and_the_search_leaves_no_trace(tmp_path: Path) -> None:
    [seen] = on_ranks(limited, 1, tmp_path)
    assert seen["sizes"] == (4, 4), seen  # as configured, so equal to the bit
    assert seen["far"] == 0 and seen["same"], seen
    assert seen["logged"] == [{"adaptive/micro_batch": 4, "adaptive/retried_steps": 0}] * 4, seen
    assert "= 4 x micro-batch 4 (8 rows: out of memory in " in seen["said"][-1], seen


def resumed(folder: str) -> dict[str, Any]:
    saved = {
        "checkpoint__enable": True,
        "checkpoint__interval": 2,
        "checkpoint__last_save_model_only": False,
    }
    whole = train(config(folder, **saved), SEARCHING, Loss(times=1))
    rest = replace(whole, logs=whole.logs[2:])
    ends = []
    for options in (SEARCHING, None):
        ends.append(train(config(folder, **saved, checkpoint__load_step=2), options))
    return {
        "far": [each.far(rest) for each in ends],
        "weights": [float((each.weights - whole.weights).abs().max()) for each in ends],
        "sizes": [whole.sizes, ends[0].sizes],
    }


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_run_is_the_uninterrupted_one_with_either_trainer(
    ranks: int, tmp_path: Path
) -> None:
    for seen in on_ranks(resumed, ranks, tmp_path):
        assert max(seen["far"]) <= CLOSE and max(seen["weights"]) <= 1e-5, seen
        assert seen["sizes"] == [(8, 4), (8, 8)], seen


def exhausted(folder: str) -> list[int]:
    """The steps of runs whose data ends in the middle of the third."""
    return [
        len(train(config(folder, dataloader=Random.Config(batches=5)), options).logs)
        for options in (None, AS_CONFIGURED)
    ]


def test_a_step_without_all_of_its_batches_is_not_taken(tmp_path: Path) -> None:
    assert on_ranks(exhausted, 1, tmp_path) == [[2, 2]]


REFUSED: dict[str, dict[str, Any]] = {
    "parallelism.pipeline_parallel_degree: 2": {"parallelism__pipeline_parallel_degree": 2},
    "parallelism.context_parallel_degree: 2": {"parallelism__context_parallel_degree": 2},
    "parallelism.expert_parallel_degree: 2": {"parallelism__expert_parallel_degree": 2},
    "parallelism.enable_fsdp_symm_mem: True": {"parallelism__enable_fsdp_symm_mem": True},
    "parallelism.spmd_backend: 'spmd_types'": {"backend": "spmd_types"},
    "parallelism.data_parallel_shard_degree: 1": {"parallelism__data_parallel_replicate_degree": 2},
    "compile.enable_async_tensor_parallel: True": {"compile__enable_async_tensor_parallel": True},
    "compile.enable: ": {
        "compile__enable": True,
        "parallelism__tensor_parallel_degree": 2,
    },
    "training.disable_cuda_graphs: False": {"training__disable_cuda_graphs": False},
    "training.mixed_precision_param: 'float16'": {"training__mixed_precision_param": "float16"},
    "debug.spmd_typechecking: True": {"debug__spmd_typechecking": True},
    "comm.mode: 'torchcomms'": {"comm__mode": "torchcomms"},
    "optimizer.param_groups: 2 optimizers": {"optimizer": "two"},
    "model_spec: a mixture of experts": {"model_spec": "experts"},
    "dataloader: pixels is a tensor of [7]": {"dataloader": Random.Config(more=True)},
    "token_budget: ": {"options": replace(AS_CONFIGURED, token_budget=True)},
    "dropout: ": {"options": replace(AS_CONFIGURED, dropout="sample")},
}


def refusals(folder: str) -> list[str]:
    said = []
    for settings in REFUSED.values():
        settings = dict(settings)
        options = settings.pop("options", AS_CONFIGURED)
        if settings.get("optimizer") == "two":
            settings["optimizer"] = _two_optimizers(config(folder))
        if settings.get("model_spec") == "experts":
            settings["model_spec"] = _experts()
        try:
            train(config(folder, **settings), options)
            said.append("")
        except UsageError as error:
            said.append(str(error))
    return said


def _two_optimizers(made: Any) -> Any:
    [group] = made.optimizer.param_groups
    first = replace(group, pattern="layers", optimizer_name="Adam")
    return replace(made.optimizer, param_groups=[first, group])


def _experts() -> Any:
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.deepseek_v3 import model_registry

    spec = model_registry("debugmodel")
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return spec


def test_what_cannot_be_kept_is_refused_by_name_on_all_ranks(tmp_path: Path) -> None:
    for said in on_ranks(refusals, 2, tmp_path):
        for name, sentence in zip(REFUSED, said, strict=True):
            assert sentence.startswith(name) and "\n" not in sentence, (name, sentence)


def refused_classes(folder: str) -> list[str]:
    from torchtitan.trainer import Trainer

    class Own(Trainer):  # type: ignore[misc]
        def forward_backward_step(self, **named: Any) -> Any:
            return super().forward_backward_step(**named)

    class Adapted(AdaptiveTrainerMixin, Own):  # type: ignore[misc]
        pass

    said = []
    for attempt in (lambda: Adapted(config(folder)), lambda: adaptive(object())):
        with pytest.raises(UsageError) as refused:
            attempt()
        said.append(str(refused.value))
    return said


def test_a_trainer_with_a_step_of_its_own_is_refused(tmp_path: Path) -> None:
    [(own, other)] = on_ranks(refused_classes, 1, tmp_path)
    assert own.startswith("forward_backward_step: ") and "Own.forward_backward_step" in own
    assert other.startswith("adaptive: ")
