"""A tiny Llama on a mesh, whose device runs out of memory where it is told to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from tests.helpers import context_parallel
from tests.helpers.decoder import (
    ChunkedCrossEntropy,
    Decoder,
    batch,
    local_values,
    same_bits,
    train_step,
)
from tests.helpers.faults import FailingMemory, fail_at_each, record_anew, survivable
from tests.helpers.samples import Sample
from torchtune_adaptive.core.private import launches_of, unfinished_works
from torchtune_adaptive.core.ranks.agreement import Ranks
from torchtune_adaptive.core.step.exchange import StepOutcome
from torchtune_adaptive.core.step.objective import NextTokenPrediction
from torchtune_adaptive.core.step.snapshot import Snapshot
from torchtune_adaptive.core.step.train_step import TrainStep

ROWS = 2
DECLARED = {*context_parallel.WAYS} - {"undeclared ring"}


def whole_model(layers: int = 1) -> Decoder:
    torch.manual_seed(0)
    return Decoder(layers, width=16, heads=4, hidden=24)


def tensor_plan() -> dict[str, ParallelStyle]:
    """Projections are split; activations between layers and logits are whole."""
    return {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate()),
        "output": ColwiseParallel(output_layouts=Replicate()),
        "layers.*.attn.q_proj": ColwiseParallel(),
        "layers.*.attn.k_proj": ColwiseParallel(),
        "layers.*.attn.v_proj": ColwiseParallel(),
        "layers.*.attn.output_proj": RowwiseParallel(),
        "layers.*.mlp.w1": ColwiseParallel(),
        "layers.*.mlp.w2": RowwiseParallel(),
        "layers.*.mlp.w3": ColwiseParallel(),
    }


def wait_for(tensor: torch.Tensor) -> None:
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor.trigger_wait()


def sequence_plan(loss: bool) -> dict[str, ParallelStyle]:
    """Activations between layers are split along the sequence; with ``loss``, logits over the vocabulary."""
    split, whole = Shard(1), Replicate()
    logits = Shard(-1) if loss else whole
    return {
        "tok_embeddings": RowwiseParallel(input_layouts=whole, output_layouts=split),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(
            input_layouts=split, output_layouts=logits, use_local_output=not loss
        ),
        "layers.*.attn": PrepareModuleInput(
            input_layouts=(split, split), desired_input_layouts=(whole, whole)
        ),
        "layers.*.mlp": PrepareModuleInput(input_layouts=(split,), desired_input_layouts=(whole,)),
        "layers.*.sa_norm": SequenceParallel(),
        "layers.*.mlp_norm": SequenceParallel(),
        "layers.*.attn.q_proj": ColwiseParallel(),
        "layers.*.attn.k_proj": ColwiseParallel(),
        "layers.*.attn.v_proj": ColwiseParallel(),
        "layers.*.attn.output_proj": RowwiseParallel(output_layouts=split),
        "layers.*.mlp.w1": ColwiseParallel(),
        "layers.*.mlp.w2": RowwiseParallel(output_layouts=split),
        "layers.*.mlp.w3": ColwiseParallel(),
    }


def mesh_of(replicas: int, dp: int, tp: int) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, dp, tp), mesh_dim_names=("copies", "dp", "tp"))


def spread(way: str, mesh: DeviceMesh, chunks: int = 2) -> Decoder:
    """The model on this rank: ``tensor``, ``sequence`` or ``loss`` parallel; ``gathering`` is the first.
    Or one of the ways of context parallelism, whose ranks share the parameters."""
    model, tp = whole_model(), mesh["tp"]
    if way in context_parallel.WAYS:
        context_parallel.spread_context(way, model, tp.get_group())
        model.chunks = 0
        for module in (*model.layers, model):
            fully_shard(module, mesh=mesh["dp", "tp"]._flatten("dp_cp"))
        return model
    if tp.size() > 1:
        of_tensors = way in ("tensor", "gathering")
        plan = tensor_plan() if of_tensors else sequence_plan(way == "loss")
        parallelize_module(model, tp, plan)
        # torch waits for logits by itself, except for a chunk of one token of one row.
        model.output.register_forward_hook(lambda module, inputs, logits: wait_for(logits))
    if mesh.size() > tp.size():
        shards = mesh["copies", "dp"] if mesh["copies"].size() > 1 else mesh["dp"]
        for module in (*model.layers, model):
            fully_shard(module, mesh=shards, reshard_after_forward=True)
    model.chunks = chunks if way in ("tensor", "gathering") else 0
    return model


class _WholeOutput(NextTokenPrediction):
    """The loss of logits that are not in chunks, and may be split over the vocabulary."""

    def summed_loss(self, forward: Any, batch: Any, weight: int) -> torch.Tensor:
        logits, labels = forward(**self._inputs(batch)), self._labels(batch, weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100) * weight


class _Gathers(NextTokenPrediction):
    """The loss of logits in chunks, and collectives of its own for metrics, of any size: two, then one."""

    step: TrainStep

    def summed_loss(self, forward: Any, batch: Any, weight: int) -> torch.Tensor:
        for sizes in ((weight, 1), (3,)):
            self.step.collectives.together(partial(_sum_zeros, sizes))
        return super().summed_loss(forward, batch, weight)


def _sum_zeros(sizes: tuple[int, ...]) -> None:
    for size in sizes:
        dist.all_reduce(torch.zeros(size))


def objective_of(way: str, chunks: int = 2) -> NextTokenPrediction:
    if way in ("tensor", "gathering"):
        kind = _Gathers if way == "gathering" else NextTokenPrediction
        return kind(ChunkedCrossEntropy(chunks))
    loss = nn.CrossEntropyLoss(ignore_index=-100)
    if way in context_parallel.WAYS:
        return NextTokenPrediction(loss, shifted=True)
    return _WholeOutput(loss)


def context_of(way: str, shape: tuple[int, int, int]) -> AbstractContextManager[Any]:
    if way == context_parallel.TORCHS:
        return context_parallel.torchs_context(mesh_of(*shape)["tp"])
    return loss_parallel() if way == "loss" else nullcontext()


class OnMesh:
    """A run of such a model; ranks of one tensor-parallel group have the same rows."""

    def __init__(
        self,
        way: str,
        shape: tuple[int, int, int],
        chunks: int = 2,
        timeout: float = 200,
        **options: Any,
    ) -> None:
        self.ranks, self.mesh = Ranks(timeout=timeout), mesh_of(*shape)
        self.model = spread(way, self.mesh, chunks)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=False)
        self.memory = FailingMemory()
        objective = objective_of(way, chunks)
        self.step = train_step(
            self.model,
            [self.optimizer],
            objective=objective,
            memory=self.memory,
            ranks=self.ranks,
            context_group=self.mesh["tp"].get_group() if way in DECLARED else None,
            **{"clip_grad_norm": 1.0, **options},
        )
        if isinstance(objective, _Gathers):
            objective.step = self.step
        self.place = self.ranks.rank // shape[2]
        self._way, self._part = way, (self.ranks.rank % shape[2], shape[2])
        self.rows = self.part_of(batch(ROWS, seed=self.place))
        groups = (self.mesh.get_group(dim) for dim in range(3))
        self.groups = [group for group in groups if group.size() > 1]

    def part_of(self, rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What this rank gets of rows: all, except with context parallelism."""
        if self._way not in context_parallel.WAYS:
            return rows
        return context_parallel.part_of(self._way, rows, *self._part)

    def take(self, size: int, rows: dict[str, torch.Tensor] | None = None) -> StepOutcome:
        rows = rows or self.rows
        for start in range(0, len(rows["tokens"]), size):
            part = {name: value[start : start + size] for name, value in rows.items()}
            self.step.forward_backward(part)
        return self.step.apply()

    def launched(self) -> bool:
        """Whether each group has launched as many collectives on each of its ranks."""
        members = [(dist.get_process_group_ranks(g), launches_of(g)) for g in self.groups]
        counts: dict[tuple[int, ...], set[int | None]] = {}
        for each in self.ranks.gather(members):
            for ranks, number in each:
                counts.setdefault(tuple(ranks), set()).add(number)
        return all(len(numbers) == 1 for numbers in counts.values())


WHO = {
    "one rank": lambda rank, victim: rank == victim,
    "two of a group": lambda rank, victim: rank // 2 == victim // 2,
    "all ranks": lambda rank, victim: True,
}


def fail_on_mesh(
    way: str,
    shape: tuple[int, int, int],
    known: str,
    who: str,
    sample: Sample,
    only_launches: bool = False,
) -> Counter[str]:
    """Fail at operations of a step; it is retried in micro-batches of half the rows.

    Args:
        way: how tensors are split.
        shape: of the mesh.
        known: what is recorded: ``everything``, all but the ``shape``, or ``nothing``.
        who: fails.
        sample: of operations.
        only_launches: whether those are what comes before and after launches.
    """
    with context_of(way, shape):
        run = OnMesh(way, shape)
        for size in (ROWS, ROWS, ROWS, 1, 1):
            run.take(size)
        snapshot = Snapshot(run.model, [run.optimizer], torch.device("cpu"))
        run.take(1)
        expected = local_values(run.model)
        snapshot.restore()
        last, launches = survivable(run.memory, run.step, lambda: run.take(ROWS))
        snapshot.restore()
        every = [at for at in launches if at <= last] if only_launches else range(1, last + 1)
        counts: Counter[str] = Counter()
        operations = [every[number - 1] for number in sample.of(len(every))]
        for operation, victim, _ in fail_at_each(operations, run.memory, run.ranks):
            if known != "everything":
                record_anew(run.step.collectives, of_any_shape=known == "nothing")
            here = WHO[who](run.ranks.rank, victim)
            # A second one fails a little later.
            later = 7 if who == "two of a group" and run.ranks.rank != victim else 0
            unfinished = unfinished_works()
            with run.memory.fail_at(operation + later if here else None) as fault:
                outcome = run.take(ROWS)
            counts["tried"] += 1
            counts["lost"] += outcome.lost
            counts["unequal"] += not run.launched()
            counts["unfinished"] += unfinished_works() != unfinished
            failed = sum(map(bool, run.ranks.gather(str(fault.failed or ""))))
            counts["blamed"] += outcome.lost and 1 <= sum(map(bool, outcome.failures)) <= failed
            if outcome.lost:
                run.take(1)
                counts["wrong"] += not same_bits(local_values(run.model), expected)
            snapshot.restore()
        return counts


def lengths_of(steps: int, seed: int) -> Iterator[int]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield int(torch.randint(2, 9, (), generator=generator)) * 4
