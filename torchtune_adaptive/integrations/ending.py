"""The end of a run that has lost memory where a trainer cannot do anything again."""

from __future__ import annotations

import os
import traceback
from typing import Any

from torchtune_adaptive.common import TrainingOutOfMemory

_STAGES = {
    "clip_grad_norm_": "clipping",
    "get_grad_norm": "clipping",
    "_save_checkpoint": "saving a checkpoint",
    "save_model": "saving the model",
}
"""Functions of trainers and of torch, and what they do."""


def lost_outside_of_a_step(trainer: Any, error: BaseException) -> TrainingOutOfMemory:
    """The error that says where memory ran out, and how to go on."""
    said = " ".join(str(error).split())
    return TrainingOutOfMemory(
        f"Out of memory in {_where(error)}, after step {trainer.state.global_step}: what is outside of "
        f"forward, backward and evaluation cannot be done again. {_resume(trainer)}, with more "
        f"headroom, a lower ceiling, or an optim that takes less. ({said})",
        everywhere=False,
    )


def advice(trainer: Any, undivided: str) -> str:
    """How to go on where not even the smallest micro-batch fits, or where ``undivided`` says why it is a
    whole batch."""
    if not undivided:
        return f"{_resume(trainer)}, with shorter rows, or on more processes."
    return (
        f"Batches are not divided ({undivided}). {_resume(trainer)}, with a lower "
        "per_device_train_batch_size and as much more gradient_accumulation_steps, or with shorter rows."
    )


def lost_beside_vllm(trainer: Any, trouble: str, everywhere: bool) -> TrainingOutOfMemory:
    """The error that says how to leave memory for vLLM, or for what gives it weights; ``everywhere`` is
    whether it is raised on all processes."""
    args = trainer.args
    if args.vllm_mode == "server":
        why = "each weight is gathered as a whole before it is sent"
        change = "FSDP over more devices, or an optim that takes less"
    else:
        why = "vLLM takes a fixed share of the device"
        change = f"vllm_gpu_memory_utilization below {args.vllm_gpu_memory_utilization:g}"
        if not args.vllm_enable_sleep_mode:
            change += ", or with vllm_enable_sleep_mode=True"
    return TrainingOutOfMemory(
        f"{trouble[0].upper()}{trouble[1:]}, after step {trainer.state.global_step}: {why}. "
        f"{_resume(trainer)}, with {change}.",
        everywhere,
    )


def _resume(trainer: Any) -> str:
    folder = _last_checkpoint(trainer.args.output_dir)
    return f"Resume from {folder}" if folder else "There is no checkpoint; begin again"


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    for frame in frames:
        if frame.name in _STAGES:
            return _STAGES[frame.name]
        if frame.name == "step" and f"{os.sep}optim" in frame.filename:
            return "the optimizer's step"
    return f"{frames[-1].name}()" if frames else "training"


def _last_checkpoint(folder: str) -> str | None:
    from transformers.trainer_utils import get_last_checkpoint

    found: str | None = get_last_checkpoint(folder) if os.path.isdir(folder) else None
    return found
