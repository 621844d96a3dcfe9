"""What is predicted is what happens: traces of fake ranks against real ranks on the simulated device."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf

from tests.helpers.ranks import run_ranks
from torchtune_adaptive.common import ConfigError, launcher
from torchtune_adaptive.core import TrainStep
from torchtune_adaptive.core.ranks import recording
from torchtune_adaptive.core.step.knobs import CHECKPOINT, OFFLOADING, Choice
from torchtune_adaptive.planner import private
from torchtune_adaptive.planner.memory.recorded_step import Bilinear, MemoryEvent, RecordedStep
from torchtune_adaptive.planner.speed.operations import COLLECTIVE, Operation
from torchtune_adaptive.planner.trace import compiled_regions
from torchtune_adaptive.recipe.data.packed import collate_packed
from torchtune_adaptive.recipe.plan.query import planned_rank
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.tracing.self_check import SMALL_RUN, measured_peaks, traced_peaks
from torchtune_adaptive.recipe.tracing.tracer import Tracer

pytestmark = [pytest.mark.ranks, pytest.mark.alternating]

CORNERS = [(2, 64), (3, 64), (2, 128), (3, 128)]
HELD_OUT = (5, 256)
SIZES = [(1, 64), *CORNERS, HELD_OUT, (9, 32)]
FEW_SIZES = [HELD_OUT, (9, 32)]
DPO = {"_component_": "torchtune.rlhf.loss.DPOLoss"}
QUANTIZER = {
    "_component_": "torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer",
    "groupsize": 32,
}
ONE_BY_ONE = (("foreach", False), ("fused", True))
KL = {"_component_": "torchtune.modules.loss.ForwardKLWithChunkedOutputLoss"}


def a_config(kind: str, checkpointing: bool, accumulation: int, vocabulary: int) -> DictConfig:
    adapters = "lora" in kind or kind in ("dora", "kd")
    lora = {"lora_attn_modules": ["q_proj", "v_proj"], "apply_lora_to_mlp": True}
    lora |= {"lora_rank": 4, "lora_alpha": 8, "use_dora": kind == "dora"}
    if kind == "qlora":  # whose blocks must come out even
        lora |= {
            "quantize_base": True,
            "embed_dim": 256,
            "intermediate_dim": 256,
            "num_kv_heads": 4,
        }
    changes = {
        "model": {
            "_component_": f"torchtune.models.llama2.{'lora_' if adapters else ''}llama2",
            "vocab_size": vocabulary,
            **(lora if adapters else {}),
        },
        **({"loss": DPO} if "dpo" in kind else {}),
        **({"quantizer": QUANTIZER} if "qat" in kind else {}),
        **(a_teacher(vocabulary) if kind == "kd" else {}),
        "enable_activation_checkpointing": checkpointing,
        "gradient_accumulation_steps": accumulation,
    }
    merged = OmegaConf.merge(SMALL_RUN, changes)
    assert isinstance(merged, DictConfig)
    return merged


def a_teacher(vocabulary: int) -> dict[str, Any]:
    size = {"vocab_size": vocabulary, "num_layers": 3}
    return {
        "kd_loss": KL,
        "teacher_model": OmegaConf.merge(OmegaConf.create(SMALL_RUN)["model"], size),
    }


def measured(
    configs: list[DictConfig], sizes: list[tuple[int, int]]
) -> list[dict[tuple[int, int], int]]:
    return [measured_peaks(Asked.of(cfg), sizes) for cfg in configs]


def predicted(
    configs: list[DictConfig], sizes: list[tuple[int, int]], ranks: int, rank: int
) -> list[dict[tuple[int, int], int]]:
    """By a trace of each size; one that is held out is also worked out of the others."""
    found = []
    for cfg in configs:
        tracer = Tracer(Asked.of(cfg), ranks, rank)
        found.append(traced_peaks(tracer, sizes))
        steps = {size: tracer.take_step(*size).renumbered() for size in (*CORNERS, HELD_OUT)}
        between = Bilinear({size: steps[size] for size in CORNERS})
        assert between.step(*HELD_OUT).events == steps[HELD_OUT].events, cfg
    return found


@pytest.mark.rotating
@pytest.mark.parametrize("ranks", [1, 2])
def test_predicted_peaks_are_measured_peaks(ranks: int, exhaustive: bool, shard: int) -> None:
    grid = [
        (kind, checkpointing, accumulation, (512, 2000)[(checkpointing + accumulation) % 2])
        for kind in ("full", "lora")
        for checkpointing in (False, True)
        for accumulation in (1, 2)
    ]
    grid += [("dora", True, 1, 512), ("qlora", True, 1, 512)]
    grid += [("full_dpo", True, 2, 512), ("lora_dpo", False, 1, 2000)]
    grid += [("kd", True, 2, 512), ("kd", False, 1, 2000)]
    grid += [("qat", False, 2, 512), ("qat_lora", True, 1, 2000)]
    configs = [a_config(*case) for case in grid]
    for changes in (
        {"ac_mode": "selective", "ac_option": 2},
        {"optimizer_in_bwd": True, "clip_grad_norm": None},
        {"fsdp_reshard_after_forward": False, "optimizer.fused": True},
    ):
        changed = a_config("full", False, 1, 512)
        for key, value in changes.items():
            OmegaConf.update(changed, key, value, force_add=True)
        configs.append(changed)
    sizes = SIZES if exhaustive else FEW_SIZES
    every = 2 if exhaustive else len(configs)  # another in each shard
    configs = configs[shard % every :: every]
    for at in range(0, len(configs), 5):
        portion = configs[at : at + 5]
        measurements = run_ranks(measured, ranks, portion, sizes)[0]
        [predictions] = run_ranks(predicted, 1, portion, sizes, ranks, 0, join=False)
        for cfg, prediction, measurement in zip(portion, predictions, measurements, strict=True):
            assert prediction == measurement, cfg  # to the byte


def batch_of_packs(documents: int, rows: int, length: int) -> dict[str, Any]:
    """Packed rows of so many documents, of one length each."""
    tokens, positions = torch.randint(0, 512, (length,)), torch.arange(length)
    lengths = torch.tensor([length // documents] * documents)
    row = {"tokens": tokens, "labels": tokens, "input_pos": positions, "seq_lens": lengths}
    return collate_packed([row] * rows)


def measured_of_packs(cfg: DictConfig) -> list[dict[tuple[int, int], int]]:
    makers = [partial(batch_of_packs, documents) for documents in (1, 4)]
    return [measured_peaks(Asked.of(cfg), FEW_SIZES, maker) for maker in makers]


def predicted_directly(cfg: DictConfig) -> dict[tuple[int, int], int]:
    return traced_peaks(Tracer(Asked.of(cfg), ranks=1), FEW_SIZES)


@pytest.mark.exhaustive
def test_packed_rows_are_predicted_with_their_mask() -> None:
    cfg = OmegaConf.merge(a_config("full", True, 1, 512), {"dataset": {"packed": True}})
    [measurements] = run_ranks(measured_of_packs, 1, cfg)
    [prediction] = run_ranks(predicted_directly, 1, cfg, join=False)
    assert measurements == [prediction] * 2


def test_dropout_by_sample_is_predicted() -> None:
    """On a GPU it keeps no mask, as predicted, where torch's keeps a byte for each element."""
    cfg = a_config("lora", False, 1, 512)
    changes = {"adaptive_batching.dropout": "sample", "model.lora_dropout": 0.1}
    for key, value in changes.items():
        OmegaConf.update(cfg, key, value, force_add=True)
    [[measurement]] = run_ranks(measured, 1, [cfg], FEW_SIZES)
    [prediction] = run_ranks(predicted_directly, 1, cfg, join=False)
    assert prediction == measurement
    cfg.device = "cuda"
    [ours] = run_ranks(predicted_directly, 1, cfg, join=False)
    cfg.adaptive_batching.dropout = "torch"
    [torchs] = run_ranks(predicted_directly, 1, cfg, join=False)
    cfg.model.lora_dropout = 0.0
    [none] = run_ranks(predicted_directly, 1, cfg, join=False)
    for size in FEW_SIZES:
        assert none[size] < ours[size] < torchs[size]


@pytest.mark.exhaustive
def test_ranks_with_other_shares_have_other_peaks() -> None:
    config = a_config("full", False, 1, 515)
    measurements = [peaks for [peaks] in run_ranks(measured, 3, [config], SIZES)]
    assert measurements[0] != measurements[2]
    for rank in (0, 2):
        [[prediction]] = run_ranks(predicted, 1, [config], SIZES, 3, rank, join=False)
        assert prediction == measurements[rank]


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_copies_of_shards_are_predicted(kind: str) -> None:
    config = a_config(kind, False, 2, 512)
    OmegaConf.update(config, "data_parallel_replicate_dim", 2, force_add=True)
    [measurement] = run_ranks(measured, 4, [config], SIZES)[0]
    [[prediction]] = run_ranks(predicted, 1, [config], SIZES, 4, 0, join=False)
    assert prediction == measurement


def split_over(tensors: int, *config: Any, **changes: Any) -> DictConfig:
    """A config whose layers are split over so many ranks, by torchtune's plan."""
    cfg = a_config("full", *config)
    plan = {"_component_": "torchtune.models.llama3.base_llama_tp_plan"}
    split = {"tensor_parallel_dim": tensors, "tensor_parallel_plan": plan}
    merged = OmegaConf.merge(cfg, split, changes)
    assert isinstance(merged, DictConfig)
    return merged


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_layers_that_are_split_over_ranks_are_predicted(ranks: int, exhaustive: bool) -> None:
    """Alone, and together with FSDP. Where parts are uneven, the plan is for the rank that needs most."""
    configs = [split_over(2, False, 2, 512)]
    if exhaustive:
        whole = {"loss": {"_component_": "torch.nn.CrossEntropyLoss"}}
        configs.append(split_over(2, True, 1, 515 if ranks == 2 else 2000, **whole))
    measurements = run_ranks(measured, ranks, configs, FEW_SIZES)
    rank = planned_rank(Asked.of(configs[0]))
    [found] = run_ranks(predicted, 1, configs, FEW_SIZES, ranks, rank, join=False)
    assert found[0] == measurements[rank][0]
    for at, prediction in enumerate(found):
        for size in FEW_SIZES:
            most = max(peaks[at][size] for peaks in measurements)
            assert prediction[size] == pytest.approx(most, rel=1e-3)


@pytest.mark.exhaustive
def test_copies_of_shards_of_split_layers_are_predicted() -> None:
    config = split_over(2, False, 1, 512, data_parallel_replicate_dim=2)
    [measurement] = run_ranks(measured, 8, [config], FEW_SIZES)[0]
    [[prediction]] = run_ranks(predicted, 1, [config], FEW_SIZES, 8, 0, join=False)
    assert prediction == measurement


def refusals(configs: list[DictConfig], ranks: int) -> list[str]:
    found = []
    for cfg in configs:
        with pytest.raises(ConfigError) as refused:
            Tracer(Asked.of(cfg), ranks)
        found.append(str(refused.value))
    return found


def test_what_cannot_be_split_is_refused_as_a_run_refuses_it() -> None:
    """By name, before weights are loaded: heads, and parts that are split once more by FSDP."""
    configs = [split_over(4, False, 1, 512), split_over(2, False, 1, 514)]
    [(heads, parts)] = run_ranks(refusals, 1, configs, 4, join=False)
    assert "tensor_parallel_dim: 4" in heads and "KV heads (2)" in heads
    assert "tensor_parallel_dim: 2" in parts and "tok_embeddings.weight" in parts and "514" in parts


class Launches(private.TorchDispatchMode):
    """Notes each collective that a step launches: what, among which ranks, with which tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = (torch.Tensor, torch.nn.Parameter, private.FakeTensor)
        if not all(kind in plain for kind in types):
            return NotImplemented
        if recording._is_launch(func):
            given = private.tree_leaves((args, kwargs or {}))
            group = recording._group_of(given)
            if group.group_desc != launcher.OWN_GROUP:  # ranks that are real agree on what is new
                shapes = [tuple(each.shape) for each in given if isinstance(each, torch.Tensor)]
                self.seen.append((str(func), *dist.get_process_group_ranks(group), *shapes))
        return func(*args, **(kwargs or {}))


def launches_of_steps(cfg: DictConfig, ranks: int, rank: int | None = None) -> list[Any]:
    """What each step launches: on a rank that is real, or else on a fake one."""
    steps: list[Any] = []

    def seen(part: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            with Launches() as launches:
                result = part(*arguments, **named)
            steps.append(launches.seen)
            return result

        return run

    with (
        mock.patch.object(TrainStep, "forward_backward", seen(TrainStep.forward_backward)),
        mock.patch.object(TrainStep, "apply", seen(TrainStep.apply)),
    ):
        if rank is None:
            measured_peaks(Asked.of(cfg), [(3, 24)])
        else:
            traced_peaks(Tracer(Asked.of(cfg), ranks, rank), [(3, 24)])
    return steps[-(Asked.of(cfg).accumulation + 1) :]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_a_fake_rank_launches_what_a_real_one_does(ranks: int, exhaustive: bool) -> None:
    """Among the same ranks, with the same sizes: of tensor parallelism, of FSDP, of the update."""
    cfg = split_over(2, True, 2, 512)
    real = run_ranks(launches_of_steps, ranks, cfg, ranks)
    for rank in (0, ranks - 1) if exhaustive else (0,):
        [fake] = run_ranks(launches_of_steps, 1, cfg, ranks, rank, join=False)
        assert fake == real[rank]
    assert len(fake) == 3 and all(map(len, fake))


def collectives_in_time(cfg: DictConfig, ranks: int) -> list[Operation]:
    """The collectives of a step as the time model has them."""
    tracer = Tracer(Asked.of(cfg), ranks)
    operations = [tracer.take_step(2, 64) for _ in range(2)][1].operations
    assert operations is not None
    return [one for one in operations.all() if one.kind == COLLECTIVE]


def test_collectives_of_split_layers_block_the_computation() -> None:
    """They are on the stream that computes, among the ranks of their own group; FSDP's are not."""
    cfg = OmegaConf.merge(split_over(2, True, 1, 512), {"device": "cuda"})
    [found] = run_ranks(collectives_in_time, 1, cfg, 4, join=False)
    of_tensors = [one for one in found if one.shape == (2, 1)]
    of_fsdp = [one for one in found if one.shape == (2, 2)]
    assert {one.stream for one in of_tensors} == {0} and 0 not in {one.stream for one in of_fsdp}
    assert sum(one.phase == "forward" for one in of_tensors) >= 2 * cfg.model.num_layers
    assert any(one.repeats for one in of_tensors), (
        "a layer that is computed again launches them again"
    )
    of_all = [one for one in found if one not in of_tensors + of_fsdp]
    assert {one.shape for one in of_all} == {(4, 1)} and len(of_all) == 1, "the one of each step"


def traced(cfg: DictConfig) -> list[int]:
    """The allocations of three steps on the fake device, and what they leave behind."""
    tracer = Tracer(Asked.of(cfg), ranks=1)
    steps = [tracer.take_step(2, 64) for _ in range(3)]
    return [len(step.events) for step in steps] + [tracer.recorder.in_use]


def test_an_8_bit_optimizer_in_backward_is_traced() -> None:
    cfg = a_config("full", True, 1, 2000)
    changes = {
        "optimizer": {"_component_": "torchao.optim.AdamW8bit"},
        "optimizer_in_bwd": True,
        "clip_grad_norm": None,
        "device": "cuda",
    }
    eight_bit = OmegaConf.merge(cfg, changes)
    plain = OmegaConf.merge(eight_bit, {"optimizer": {"_component_": "torch.optim.AdamW"}})
    [(first, *later, less)] = run_ranks(traced, 1, eight_bit, join=False)
    [(_, *_, more)] = run_ranks(traced, 1, plain, join=False)
    assert later[0] == later[1] < first  # which creates the state
    assert less < more


def second_steps(
    configs: list[DictConfig], fault: str
) -> list[tuple[list[MemoryEvent], list[MemoryEvent], str]]:
    """The events of steps as they are taken, and as they are noted; and why something is as written.

    Of four rows, so that activations, which a compiler changes, take more than gradients.
    """
    if fault == "another backend":
        os.environ["TORCH_COMPILE_BACKEND"] = "aot_eager"
    elif fault == "inductor allocates otherwise":
        compiled_regions._reinterpreted = lambda tensor, *_: tensor.clone()
    elif fault == "inductor has changed":
        private._of_inductor = lambda _: iter([(torch, "a name that is gone", None)])
    found = []
    for cfg in configs:
        tracer = Tracer(Asked.of(cfg), ranks=1)
        tracer.take_step(4, 64)
        taken, written = (tracer.take_step(4, 64, as_written=how) for how in (False, True))
        events = (taken.renumbered().events, written.renumbered().events)
        found.append((*events, tracer.as_written))
    return found


@pytest.mark.rotating
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_compiled_step_takes_less_than_the_same_as_it_is_written(kind: str) -> None:
    eager = OmegaConf.merge(a_config(kind, False, 1, 512), {"device": "cuda"})
    compiled = OmegaConf.merge(eager, {"compile": True})
    [[(one, same, _), (other, as_written, why)]] = run_ranks(
        second_steps, 1, [eager, compiled], "", join=False
    )
    assert one == same == as_written and why == ""
    most = [RecordedStep(events, {}).most_in_use() for events in (one, other)]
    assert most[1] < 0.9 * most[0]


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("another backend", "its backend is aot_eager"),
        ("inductor allocates otherwise", "bytes instead of"),
        ("inductor has changed", "AttributeError"),
    ],
)
def test_where_the_compiler_cannot_be_followed_the_step_is_an_upper_bound(
    fault: str, reason: str
) -> None:
    eager = OmegaConf.merge(a_config("full", False, 1, 512), {"device": "cuda"})
    compiled = OmegaConf.merge(eager, {"compile": True})
    [[(one, _, _), (other, _, why)]] = run_ranks(
        second_steps, 1, [eager, compiled], fault, join=False
    )
    assert one == other and reason in why


def bytes_of_roots(configs: list[DictConfig]) -> tuple[int, list[int]]:
    """The bytes of all parameters, and those of roots that each optimizer takes of all tensors at once."""
    found = []
    for cfg in configs:
        tracer = Tracer(Asked.of(cfg), ranks=1)
        step = [tracer.take_step(2, 64) for _ in range(2)][1]
        operations = {block: label.operation for block, label in step.labels.items()}
        at_once = (e for e in step.events if "_foreach_sqrt" in operations.get(e.block, ""))
        found.append(sum(max(0, event.nbytes) for event in at_once))
    return sum(p.nbytes for p in tracer.step.model.parameters()), found


def test_on_one_gpu_adamw_takes_temporaries_of_the_size_of_all_parameters() -> None:
    """torch updates all of them at once there, though fake tensors would have it update one by one."""
    cfg = OmegaConf.merge(a_config("full", True, 1, 512), {"device": "cuda"})
    others = [OmegaConf.merge(cfg, {"optimizer": {key: value}}) for key, value in ONE_BY_ONE]
    [(parameters, found)] = run_ranks(bytes_of_roots, 1, [cfg, *others], join=False)
    assert found == [parameters, 0, 0]


def steps_that_offload(configured: DictConfig) -> list[list[tuple[int, int]]]:
    """Blocks and bytes of a step where the config asks for offloading, and of one where it is switched on."""
    choice = Choice({OFFLOADING: True})
    tracers = [
        Tracer(Asked.of(cfg), 1) for cfg in (OmegaConf.merge(configured, dict(choice)), configured)
    ]
    steps = [[t.take_step(2, 64, choice) for _ in range(2)][1].renumbered() for t in tracers]
    return [[(event.block, event.nbytes) for event in step.events] for step in steps]


def test_offloading_that_is_switched_on_is_traced_as_if_it_were_configured() -> None:
    """In fp32 the norm of a layer keeps the very tensor that was offloaded."""
    changes = {"device": "cuda", "dtype": "fp32", "enable_activation_checkpointing": True}
    cfg = OmegaConf.merge(a_config("full", True, 1, 512), changes)
    [(one, other)] = run_ranks(steps_that_offload, 1, cfg, join=False)
    assert one == other and len(one) > 100


def steps_of_qlora(cfg: DictConfig, ranks: int, checkpoint: str) -> list[RecordedStep]:
    """A step in which the events of dequantizing are repeated, and one in which each weight's are traced."""
    choice, found = Choice({CHECKPOINT: checkpoint}), []
    tracer = Tracer(Asked.of(cfg), ranks)
    for call in (tracer._known_events.call, lambda dequantize, *_: dequantize()):
        tracer._known_events.call = call  # type: ignore[method-assign]
        found.append([tracer.take_step(2, 64, choice) for _ in range(2)][1].renumbered())
    return found


@pytest.mark.rotating
@pytest.mark.parametrize("checkpoint", ["all", "none", "operations"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_repeated_events_of_dequantizing_are_those_of_each_weight(
    ranks: int, checkpoint: str
) -> None:
    cfg = OmegaConf.merge(a_config("qlora", True, 2, 512), {"device": "cuda", "dtype": "bf16"})
    [(repeated, traced_each)] = run_ranks(steps_of_qlora, 1, cfg, ranks, checkpoint, join=False)
    assert repeated == traced_each and len(repeated.events) > 1000


def backward_passes_of_log_softmax(cfg: DictConfig) -> int:
    step = Tracer(Asked.of(cfg), ranks=1).take_step(2, 64)
    return sum("_log_softmax_backward" in label.operation for label in step.labels.values())


def test_the_divergence_from_a_teacher_is_traced_with_its_backward_pass() -> None:
    """It asks whether there is any label: without one, it would be a constant."""
    cfg = OmegaConf.merge(a_config("kd", True, 1, 512), {"device": "cuda"})
    without = OmegaConf.merge(a_config("lora", True, 1, 512), {"device": "cuda"})
    [more] = run_ranks(backward_passes_of_log_softmax, 1, cfg, join=False)
    [fewer] = run_ranks(backward_passes_of_log_softmax, 1, without, join=False)
    assert more == 2 * fewer > 0
