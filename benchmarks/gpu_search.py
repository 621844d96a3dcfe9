"""Found sizes on a real device: measured, confirmed by training, and refuted one size further.

    python benchmarks/gpu_search.py 1B                # Llama-3.2 1B or 3B full, or Llama-3.1 8B LoRA
    python benchmarks/gpu_search.py 1B --device cpu   # a small model on the simulated device

Models have their real shapes and random weights, so nothing is downloaded. For each strategy: the size found,
its number of trials, and the peaks of each against the capacity. After the first strategy: 20 training steps
at the size found, which must pass, and one at the next candidate, which must not.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from gpu_facts import tell
from omegaconf import OmegaConf
from torch import nn
from torchtune import modules, training
from torchtune.models import llama2, llama3_1, llama3_2
from torchtune.modules.loss import CEWithChunkedOutputLoss
from torchtune.modules.peft import get_adapter_params, set_trainable_params

from torchtune_adaptive.core.device.accelerator import device_memory
from torchtune_adaptive.core.ranks.agreement import Ranks
from torchtune_adaptive.core.search.probe import Probe
from torchtune_adaptive.core.search.strategies import STRATEGIES, find_largest
from torchtune_adaptive.core.search.trial import SizeTrial
from torchtune_adaptive.core.sizes.split import candidates
from torchtune_adaptive.core.step.objective import NextTokenPrediction
from torchtune_adaptive.core.step.train_step import TrainStep
from torchtune_adaptive.recipe.settings.adaptive import AdaptiveSettings

LORA: dict[str, Any] = {
    "lora_attn_modules": ["q_proj", "v_proj", "output_proj"],
    "apply_lora_to_mlp": True,
    "lora_rank": 8,
    "lora_alpha": 16,
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "1B": llama3_2.llama3_2_1b,
    "3B": llama3_2.llama3_2_3b,
    "8B": lambda: llama3_1.lora_llama3_1_8b(**LORA),
}
SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 64,
    "max_seq_len": 512,
    "intermediate_dim": 160,
}
SMALL_MODELS: dict[str, Callable[[], nn.Module]] = {
    "1B": lambda: llama2.llama2(**SHAPE),
    "3B": lambda: llama2.llama2(**SHAPE),
    "8B": lambda: llama2.lora_llama2(**LORA, **SHAPE),
}
TRAINING_STEPS = 20


def build(name: str, device: torch.device, checkpointing: bool) -> tuple[nn.Module, Any]:
    with training.set_default_dtype(torch.bfloat16), device:
        model = (SMALL_MODELS if device.type == "cpu" else MODELS)[name]()
    if adapters := get_adapter_params(model):
        set_trainable_params(model, adapters)
    if checkpointing:
        training.set_activation_checkpointing(
            model, auto_wrap_policy={modules.TransformerSelfAttentionLayer}
        )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, torch.optim.AdamW(trained, lr=1e-5, fused=device.type != "cpu")


def measure(name: str, asked: argparse.Namespace) -> None:
    device = torch.device(asked.device)
    limit = AdaptiveSettings.from_config(
        OmegaConf.create({"adaptive_batching": {"memory_limit": asked.memory_limit}})
    ).memory_limit
    memory = device_memory(device, limit)
    model, optimizer = build(name, device, asked.checkpointing)
    loss_fn = CEWithChunkedOutputLoss()
    model.set_num_output_chunks(loss_fn.num_output_chunks)  # type: ignore[operator]
    ranks = Ranks()
    step = TrainStep(
        model=model,
        optimizers=[optimizer],
        objective=NextTokenPrediction(loss_fn),
        device=device,
        memory=memory,
        ranks=ranks,
    )

    def batch(rows: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 500, (rows, asked.length))
        return {"tokens": tokens, "labels": tokens}

    sizes = candidates(asked.rounding, asked.ceiling, 0)
    print(f"\nLlama {name}, rows of {asked.length} tokens, {memory.name}\n", flush=True)
    for strategy in STRATEGIES:
        started = time.perf_counter()
        probe = Probe(
            step=step,
            accumulation=lambda size: 1,
            headroom=asked.headroom,
            entering=lambda phase: None,
        )
        with probe:
            if not (first := probe.prime(batch)).fits:
                print(f"not even one row: {first.line()}")
                return

            def trial(size: int, probe: Probe = probe) -> SizeTrial:
                outcome = probe.trial(size, batch)
                print(f"  {outcome.line()}", flush=True)
                return outcome

            result = find_largest(strategy, sizes, trial)
        said = f"{result.size} rows in {len(result.trials)} trials, {time.perf_counter() - started:.1f} s"
        tell(f"found by {strategy}", said)
        print(f"{strategy}: {said}", flush=True)
        if strategy == next(iter(STRATEGIES)):  # what we most want to know
            following = next((s for s in sizes if s > (result.size or 0)), None)
            confirm(step, batch, result.size, following, asked)


def confirm(
    step: TrainStep,
    batch: Callable[[int], dict[str, torch.Tensor]],
    found: int | None,
    following: int | None,
    asked: argparse.Namespace,
) -> None:
    """Train at the size that was found, and fail at the next, under the cap that the trials had."""
    assert found is not None
    memory = step.memory
    memory.release()
    with memory.capped(int(memory.capacity() * (1 - asked.headroom))):
        memory.watch()
        started = time.perf_counter()
        for _ in range(TRAINING_STEPS):
            step.forward_backward(batch(found))
            assert not step.apply().lost, "a size that fitted in its trial did not fit in training"
        if step.device.type != "cpu":
            torch.accelerator.synchronize()  # a step's numbers are read before its optimizer is done
        usage = memory.usage()
        tokens = found * asked.length * TRAINING_STEPS / (time.perf_counter() - started)
        tell("trained as found", f"{TRAINING_STEPS} steps of {found} rows, {usage.retries} retries")
        tell("tokens/s at that size", f"{tokens:,.0f}")
        print(
            f"found = trained: {TRAINING_STEPS} steps of {found} rows: peak "
            f"{usage.peak_bytes / 2**30:.2f} GiB reserved, "
            f"{usage.peak_allocated_bytes / 2**30:.2f} GiB allocated, {usage.retries} retries, "
            f"{tokens:,.0f} tokens/s",
            flush=True,
        )
        if following is not None:
            memory.watch()
            step.forward_backward(batch(following))
            lost, retries = step.apply().lost, memory.usage().retries
            verdict = "out of memory" if lost else f"{retries} retries" if retries else "FITS"
            tell("the next size", f"{following} rows: {verdict}")
            print(f"1 step of {following} rows: {verdict}", flush=True)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("model", choices=MODELS)
    arguments.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    arguments.add_argument("--length", type=int, default=2048)
    arguments.add_argument("--ceiling", type=int, default=4096)
    arguments.add_argument("--rounding", default="power_of_two", choices=["power_of_two", "none"])
    arguments.add_argument("--headroom", type=float, default=0.05)
    arguments.add_argument("--memory_limit", default=None)
    arguments.add_argument("--checkpointing", action="store_true")
    asked = arguments.parse_args()
    if asked.device == "cpu":
        asked.length, asked.ceiling = 32, 64
        asked.memory_limit = asked.memory_limit or "8MiB"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print(f"torch {torch.__version__}, headroom {asked.headroom:.0%}, rounding {asked.rounding}")
    measure(asked.model, asked)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
