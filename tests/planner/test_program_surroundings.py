"""What programs ask of a machine besides a model's step: of its files, its processes and its GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.helpers.programs import H100, PROGRAM, STEP, on_part_of_h100, planned, written
from torchtune_adaptive.planner import gpus
from torchtune_adaptive.planner.programs import Program, plan_program

pytestmark = [pytest.mark.runs, pytest.mark.alternating]

OF_FILES = """
import multiprocessing, os, pathlib, shutil, subprocess
folder = pathlib.Path(sys.argv[1])
(folder / "made" / "deep").mkdir(parents=True)
(folder / "made" / "deep" / "file").write_text("made")
assert sorted(os.listdir(folder)) == ["made", "there"], os.listdir(folder)
assert sorted(one.name for one in folder.rglob("*")) == ["deep", "file", "made", "there"]
os.symlink("made/deep", folder / "link")
assert (folder / "link" / "file").read_text() == "made"
shutil.rmtree(folder / "made")
assert not (folder / "made").exists()
shutil.rmtree(folder)
with multiprocessing.get_context("spawn").Pool(1) as pool:
    pool.map(pathlib.Path.touch, [folder / "spawned"])
assert (folder / "spawned").exists() and os.statvfs(folder)
assert os.system(f"touch {{folder / 'by_shell'}}")
for command in ["nvidia-smi"], ["touch", folder / "by_process"]:
    try:
        subprocess.run(command, check=True)
    except FileNotFoundError as error:
        assert "a plan starts no other program" in str(error)
    else:
        raise AssertionError(command)
"""


def test_what_is_written_is_seen_beside_what_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "there").write_text("there")
    planned(written(tmp_path, before=OF_FILES), str(folder))
    assert {path.name for path in folder.iterdir()} == {"there"}


OF_DEVICE = """
from torch.amp import custom_bwd, custom_fwd
found = torch.cuda.get_device_properties(0)
assert found.name and found.total_memory and found.L2_cache_size
assert torch.cuda.memory_summary() and torch.cuda.memory_stats()["allocated_bytes.all.peak"]
torch.cuda.memory.reset_peak_memory_stats()
torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.benchmark = True
numbers = torch.Generator(device="cuda")
numbers.manual_seed(0)
assert numbers.device.type == "cuda"
assert torch.rand(2, generator=numbers, device="cuda").is_cuda
side, begin, end = torch.cuda.Stream(), *(torch.cuda.Event(enable_timing=True) for _ in range(2))


class Square(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(context, x):
        assert x.dtype == torch.float32
        context.save_for_backward(x)
        return x.square()

    @staticmethod
    @custom_bwd(device_type="cuda")
    def backward(context, gradient):
        return 2 * context.saved_tensors[0] * gradient
"""
USED = """
begin.record()
with torch.cuda.device(0), torch.cuda.stream(side):
    torch.zeros(8, device="cuda").record_stream(side)
torch.cuda.current_stream().wait_stream(side)
with torch.autograd.graph.save_on_cpu(pin_memory=True):
    with torch.autocast("cuda", torch.bfloat16):
        loss = Square.apply(model(tokens)).mean()
ready = torch.tensor([labels.max(), 1], device="cuda")
assert ready.tolist()[1] == 1
optimizer.zero_grad()
loss.backward()
optimizer.step()
end.record()
torch.cuda.synchronize()
assert begin.elapsed_time(end) >= 0
with torch.no_grad():
    assert model(tokens).argmax(-1).cpu().numpy().shape == tokens.shape
"""


def test_what_programs_ask_of_a_gpu(tmp_path: Path) -> None:
    assert planned(written(tmp_path, USED, OF_DEVICE)).answers[0].fits


def test_a_model_may_be_made_on_the_device(tmp_path: Path) -> None:
    moved = planned(written(tmp_path))
    text = PROGRAM.replace("Model().to(device)", "Model()").replace(
        "model = ", "with device:\n    model = "
    )
    made = planned(written(tmp_path, text=text))
    assert made.answers[0].peak.reserved == moved.answers[0].peak.reserved


LAUNCHES = """
import subprocess, sys
subprocess.run([sys.executable, "-u", *sys.argv[1:]], check=True)
"""


@pytest.mark.parametrize("launcher", ["torchrun", "a program"])
def test_launchers_launch_the_program_that_is_planned(tmp_path: Path, launcher: str) -> None:
    path = written(tmp_path, f"assert sys.argv[1:] == ['--rate', '1']\n{STEP}")
    (tmp_path / "launch.py").write_text(LAUNCHES)
    if launcher == "torchrun":
        words = ("-m", "torch.distributed.run", "--nproc_per_node", "1")
    else:
        words = (os.fspath(tmp_path / "launch.py"),)
    program = Program((*words, os.fspath(path), "--rate", "1"), H100)
    found = plan_program(program, on_part_of_h100, timeout=120)
    assert found.answers[0].peak == planned(path, "--rate", "1").answers[0].peak


@pytest.mark.parametrize(("gpu", "processors"), [("h100", 132), ("h100-pcie", 114), ("4090", 128)])
def test_a_gpu_has_its_own_multiprocessors(tmp_path: Path, gpu: str, processors: int) -> None:
    """Some kernels have memory for each."""
    asks = "assert torch.cuda.get_device_properties(0).multi_processor_count == int(sys.argv[1])"
    assert planned(written(tmp_path, before=asks), str(processors), gpu=gpus.gpu(gpu)).about.seen
