"""Plans of programs on several ranks: one is run, and what it has is what each has."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.programs import PROGRAM, STEP, planned, written
from torchtune_adaptive.planner.programs import ProgramPlan

pytestmark = [pytest.mark.runs, pytest.mark.alternating]

JOINS = """
import os
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("nccl")
assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 4, "nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
"""
DDP = "model = nn.parallel.DistributedDataParallel(model, device_ids=[0])"
FSDP = """
mesh = init_device_mesh("cuda", {shape}, mesh_dim_names={names})
for layer in model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
"""
ALL = FSDP.format(shape="(4,)", names="['all']")
HYBRID = FSDP.format(shape="(2, 2)", names="['copies', 'shards']")
COUNTS = """
count = (labels != -100).sum()
here = count.item()
dist.all_reduce(count)
assert count.item() == 4 * here
found = [None] * 4
dist.all_gather_object(found, {"rank": dist.get_rank()})
assert found == [{"rank": 0}] * 4
own = torch.tensor(3.0, device="cuda")
each = [torch.zeros_like(own) for _ in found]
dist.gather(own, gather_list=each, dst=0)
assert [one.item() for one in each] == [3.0] * 4
"""
LOGS = """
some = next(model.parameters()).detach().norm()
print(some.item(), some.full_tensor().nanmean().item())
"""
JOINS_BY_A_MESH = JOINS.replace('dist.init_process_group("nccl")', 'init_device_mesh("cuda", (4,))')


def program(folder: Path, wraps: str, step: str = STEP, joins: str = JOINS) -> Path:
    begin, _, rest = PROGRAM.partition("device = torch.device")
    rest = rest.partition("\n")[2]
    text = begin + joins.replace("{", "{{").replace("}", "}}") + rest
    return written(folder, step, wraps, text=text)


def part(plan: ProgramPlan, name: str) -> int:
    return plan.answers[0].peak.parts[name]


def test_replicas_have_all_parameters_and_buckets(tmp_path: Path) -> None:
    plan = planned(program(tmp_path, DDP, COUNTS + STEP), ranks=4)
    alone = planned(written(tmp_path))
    parameters = part(alone, "parameters")
    assert part(plan, "parameters") == parameters
    more = plan.answers[0].peak.live - alone.answers[0].peak.live
    assert more == pytest.approx(parameters, abs=1024)  # buckets


def test_shards_have_a_part_of_them(tmp_path: Path) -> None:
    alone = planned(written(tmp_path))
    for wraps, ranks in ((ALL, 4), (HYBRID, 2)):
        plan = planned(program(tmp_path, wraps), ranks=4)
        for name in ("parameters", "optimizer state"):
            assert part(plan, name) == pytest.approx(part(alone, name) / ranks, rel=0.01)
        assert plan.answers[0].peak.allocated < alone.answers[0].peak.allocated


def test_a_mesh_joins_by_itself(tmp_path: Path) -> None:
    whole, by_mesh = (
        planned(program(tmp_path, ALL, LOGS + STEP, joins), ranks=4)
        for joins in (JOINS, JOINS_BY_A_MESH)
    )
    assert by_mesh.answers[0].peak.allocated == whole.answers[0].peak.allocated


FLAT = """
from torch.distributed.fsdp import CPUOffload
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
how = dict(device_id=device, {how})
for number, layer in enumerate(model.layers):
    model.layers[number] = FSDP(layer, **how)
model = FSDP(model, **how)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
"""
OFFLOADED = """
from torch.distributed.fsdp import CPUOffloadPolicy
for layer in model.layers:
    fully_shard(layer, offload_policy=CPUOffloadPolicy())
fully_shard(model, offload_policy=CPUOffloadPolicy())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
"""


def test_flat_parameters_take_what_others_take(tmp_path: Path) -> None:
    whole = planned(program(tmp_path, ALL), ranks=4)
    for how in ("use_orig_params=False", "use_orig_params=True"):
        plan = planned(program(tmp_path, FLAT.format(how=how)), ranks=4)
        for name in ("parameters", "optimizer state"):
            assert part(plan, name) == part(whole, name)
        peak = plan.answers[0].peak.allocated
        assert peak == pytest.approx(whole.answers[0].peak.allocated, rel=0.01)
        assert any("FullyShardedDataParallel: " in line for line in plan.about.notes)


def test_parameters_may_be_on_the_host(tmp_path: Path) -> None:
    there = planned(program(tmp_path, ALL), ranks=4)
    for wraps in (
        OFFLOADED,
        FLAT.format(how="cpu_offload=CPUOffload(True)"),
        FLAT.format(how="cpu_offload=CPUOffload(True), use_orig_params=True"),
    ):
        plan = planned(program(tmp_path, wraps), ranks=4)
        assert not {"parameters", "optimizer state"} & plan.answers[0].peak.parts.keys()
        assert plan.answers[0].peak.allocated < there.answers[0].peak.allocated
        assert any(line.startswith("optimizer: on the host") for line in plan.about.notes)
