"""Settings of trainers that cannot be kept are refused by name; stand-ins for the trainers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader

from torchtune_adaptive import UsageError
from torchtune_adaptive.integrations import Adaptive, lightning, refusals


def trainer(config: Any = None, **settings: Any) -> Any:
    of_loading = {"dispatch_batches": None, "even_batches": True}
    loading = {key: settings.pop(key, value) for key, value in of_loading.items()}
    plugin = settings.pop("fsdp_plugin", None)
    own = {"model": SimpleNamespace(config=config), "adaptive": Adaptive()}
    own |= {name: settings.pop(name) for name in (*own, "padding_free") if name in settings}
    processes = settings.pop("processes", 2)
    return SimpleNamespace(
        args=SimpleNamespace(
            **{"n_gpu": 1, "accelerator_config": SimpleNamespace(**loading)} | settings
        ),
        accelerator=SimpleNamespace(
            state=SimpleNamespace(fsdp_plugin=plugin), num_processes=processes
        ),
        is_deepspeed_enabled=False,
        **own,
    )


BY_SAMPLE = Adaptive(dropout="sample")
MISTAKES: dict[str, dict[str, Any]] = {
    "auto_find_batch_size: True is not": {"auto_find_batch_size": True},
    "torch_compile_mode: 'reduce-overhead'": {"torch_compile_mode": "reduce-overhead"},
    "torch_compile_mode: 'max-autotune'": {"torch_compile_mode": "max-autotune"},
    "deepspeed: {} is not": {"deepspeed": {"stage": 3}},
    "parallelism_config: ": {"parallelism_config": object()},
    "ddp_broadcast_buffers: True": {"ddp_broadcast_buffers": True},
    "ddp_static_graph: True": {"ddp_static_graph": True},
    "optim: 'adalomo'": {"optim": "adalomo"},
    "optim: 'galore_adamw_layerwise'": {"optim": "galore_adamw_layerwise"},
    "activation_offloading: True": {"activation_offloading": True},
    "n_gpu: 2 devices": {"n_gpu": 2},
    "fsdp: version 1": {"fsdp_plugin": SimpleNamespace(fsdp_version=1)},
    "even_batches must be on": {"even_batches": False},
    "train_sampling_strategy: with batch_rebalance": {"train_sampling_strategy": "batch_rebalance"},
    "accelerator_config: with dispatch_batches": {"dispatch_batches": True},
    "use_transformers_continuous_batching: True": {"use_transformers_continuous_batching": True},
    "use_transformers_paged: True": {"use_transformers_paged": True},
    "dropout: by sample, but neftune_noise_alpha": {
        "adaptive": BY_SAMPLE,
        "neftune_noise_alpha": 5.0,
    },
    "dropout: by sample, but with padding_free": {"adaptive": BY_SAMPLE, "padding_free": True},
    "dropout: by sample, but 0.dropout: its random numbers": {
        "adaptive": BY_SAMPLE,
        "model": nn.Sequential(nn.MultiheadAttention(4, 2, dropout=0.1)),
    },
}


@pytest.mark.parametrize("message", MISTAKES)
def test_a_setting_is_refused_by_name(message: str) -> None:
    refusals.require_supported(trainer())
    with pytest.raises(UsageError) as error:
        refusals.require_supported(trainer(**MISTAKES[message]))
    assert message.replace("{}", "{'stage': 3}") in str(error.value)
    assert "\n" not in str(error.value)


def test_what_does_nothing_on_one_process_is_allowed_there() -> None:
    for setting in (
        {"even_batches": False},
        {"dispatch_batches": True},
        {"train_sampling_strategy": "batch_rebalance"},
    ):
        refusals.require_supported(trainer(processes=1, **setting))


def lightning_module(**of_trainer: Any) -> Any:
    own = {"automatic_optimization": of_trainer.pop("automatic_optimization", True)}
    attributes = ("adaptive", "num_items", "adaptive_num_items")
    own |= {name: of_trainer.pop(name) for name in attributes if name in of_trainer}
    precision = SimpleNamespace(scaler=of_trainer.pop("scaler", None))
    strategy = SimpleNamespace(handles_gradient_accumulation=of_trainer.pop("handles", False))
    trainer = SimpleNamespace(precision_plugin=precision, strategy=strategy, **of_trainer)
    return SimpleNamespace(trainer=trainer, **own)


def of_batch(batch: Any) -> None: ...


def of_iterator(dataloader_iter: Any) -> None: ...


class LightningModule:
    def backward(self, loss: Any) -> None: ...


OF_LIGHTNING: dict[str, tuple[dict[str, Any], Any]] = {
    "automatic_optimization: False": ({"automatic_optimization": False}, of_batch),
    "training_step: takes dataloader_iter": ({}, of_iterator),
    "precision: the trainer's gradient scaler": ({"scaler": object()}, of_batch),
    "dropout: by sample, but Lightning's": ({"adaptive": BY_SAMPLE}, of_batch),
    "strategy: a SimpleNamespace takes the step itself": ({"handles": True}, of_batch),
    "num_items: what counts the terms": ({"num_items": len}, of_batch),
}


@pytest.mark.parametrize("message", OF_LIGHTNING)
def test_a_setting_of_lightning_is_refused_by_name(message: str) -> None:
    own_number = lightning_module(num_items=96)
    lightning._require_supported(own_number, of_batch, LightningModule.backward)
    settings, training_step = OF_LIGHTNING[message]
    module = lightning_module(**settings)
    with pytest.raises(UsageError) as error:
        lightning._require_supported(module, training_step, LightningModule.backward)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_backward_and_a_function_of_the_module_of_lightning() -> None:
    with pytest.raises(UsageError, match=r"^backward: of_batch would not be called"):
        lightning._require_supported(lightning_module(), of_batch, of_batch)
    own = lightning_module(num_items=len, adaptive_num_items=None)  # which is something else
    lightning._require_supported(own, of_batch, LightningModule.backward)


def test_a_loader_of_lightning_is_kept_as_it_was() -> None:
    loader = DataLoader([1, 2])
    keeping = lightning._keeping_rows(loader)
    assert [batch.rows for batch in keeping] == [[1], [2]]
    assert [batch.tolist() for batch in loader] == [[1], [2]]
    assert lightning._keeping_rows(keeping) is keeping
    with pytest.raises(UsageError, match=r"train_dataloader: a dict is not a .*DataLoader"):
        lightning._keeping_rows({"one": loader})


def test_a_trainer_of_trl_that_nobody_has_tried_is_refused() -> None:
    base = type("_BaseTrainer", (), {"__module__": "trl.trainer.base_trainer"})
    known = type("SFTTrainer", (base,), {"__module__": "trl.trainer.sft_trainer"})
    unknown = type(
        "DistillationTrainer", (base,), {"__module__": "trl.trainer.distillation_trainer"}
    )
    refusals.require_known_trainer(type("Mine", (known,), {}))
    refusals.require_known_trainer(type("Other", (), {}))
    with pytest.raises(UsageError, match="DistillationTrainer: of TRL's trainers, "):
        refusals.require_known_trainer(type("Mine", (unknown,), {}))


def test_each_trainer_needs_its_mixin() -> None:
    base = type("_BaseTrainer", (), {"__module__": "trl.trainer.base_trainer"})
    generating = type("GRPOTrainer", (base,), {"__module__": "trl.trainer.grpo_trainer"})
    other = type("SFTTrainer", (base,), {"__module__": "trl.trainer.sft_trainer"})
    assert refusals.generates(type("Mine", (generating,), {})) and not refusals.generates(other)
    refusals.require_known_trainer(generating, of_rollouts=True)
    with pytest.raises(UsageError, match=r"GRPOTrainer: inherit from .*trl\.AdaptiveRolloutMixin"):
        refusals.require_known_trainer(generating)
    with pytest.raises(UsageError, match=r"SFTTrainer: inherit from .*AdaptiveTrainerMixin"):
        refusals.require_known_trainer(other, of_rollouts=True)


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "memory_limit": ({"memory_limit": "lots"}, "memory_limit: 'lots' is not valid. Must be "),
    "nothing": ({"memory_limit": 0}, "memory_limit: 0 is not valid"),
    "ceiling": ({"ceiling": 0}, "ceiling: 0 must be a whole number, 1 or more"),
    "headroom": ({"headroom": 1.5}, "headroom: 1.5 must be a share"),
    "grow_back_after": ({"grow_back_after": 0}, "grow_back_after: 0 must be a whole number"),
    "search": (
        {"search": "no"},
        "search: 'no' must be one of: 'extrapolate', 'bisect', 'halve', False",
    ),
    "token_budget": ({"token_budget": 4096}, "token_budget: 4096 must be one of: True, False"),
    "dropout": ({"dropout": 0.1}, "dropout: 0.1 must be one of: 'torch', 'sample'"),
    "wait_for_memory": ({"wait_for_memory": -1}, "wait_for_memory: -1 must be a number of seconds"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_is_refused_when_it_is_made(name: str) -> None:
    Adaptive(memory_limit="24GiB", ceiling=8, headroom=0, grow_back_after="never", search=False)
    options, message = OPTIONS[name]
    with pytest.raises(UsageError) as error:
        Adaptive(**options)
    assert str(error.value).startswith(message)


def generating(**own: Any) -> Any:
    args = {"loss_type": "dapo", "use_liger_kernel": False} | own.pop("args", {})
    with_defaults = {"reward_funcs": [len], "tools": [], "adaptive": Adaptive()} | own
    state = SimpleNamespace(fsdp_plugin=with_defaults.pop("fsdp_plugin", None))
    accelerator = SimpleNamespace(state=state)
    return SimpleNamespace(args=SimpleNamespace(**args), accelerator=accelerator, **with_defaults)


def sharded() -> nn.Module:
    """A model of the class that ``fully_shard`` gives it."""
    model = nn.Linear(1, 1)
    model.__class__ = type("FSDPLinear", (FSDPModule, nn.Linear), {})
    return model


OF_ROLLOUTS: dict[str, dict[str, Any]] = {
    "tools: not supported": {"tools": [len]},
    "rollout_func: not supported": {"rollout_func": len},
    "environment_factory: not supported": {"environment_factory": dict},
    "processing_class: a processor of images": {"_is_vlm": True},
    "reward_funcs: a model that FSDP shards": {"reward_funcs": [len, sharded()]},
    "use_liger_kernel: in this version of TRL": {
        "args": {"use_liger_kernel": True},
        "compute_liger_loss": len,
    },
    "dropout: by sample, but prompts are padded in front": {"adaptive": BY_SAMPLE},
    "token_budget: completions that were generated together": {
        "adaptive": Adaptive(token_budget=True)
    },
}


@pytest.mark.parametrize("message", OF_ROLLOUTS)
def test_what_a_trainer_that_generates_cannot_keep_is_refused(message: str) -> None:
    refusals.require_supported_rollouts(generating())
    with pytest.raises(UsageError) as error:
        refusals.require_supported_rollouts(generating(**OF_ROLLOUTS[message]))
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_generating_with_fsdp_needs_an_accelerate_that_keeps_what_is_gathered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sharded = generating(fsdp_plugin=SimpleNamespace(fsdp_version=2))
    monkeypatch.setattr(refusals, "version", lambda name: "1.15.0")
    refusals.require_supported_rollouts(sharded)
    monkeypatch.setattr(refusals, "version", lambda name: "1.13.0")
    refusals.require_supported_rollouts(generating())
    with pytest.raises(
        UsageError, match=r"fsdp: with accelerate 1\.13\.0, .* Use accelerate 1\.15 or newer"
    ):
        refusals.require_supported_rollouts(sharded)
