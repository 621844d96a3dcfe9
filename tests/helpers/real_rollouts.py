"""Peaks of each phase of TRL's GRPOTrainer and RLOOTrainer, planned and measured, as JSON.

A program for an environment that has these libraries, PEFT and ours: ``python real_rollouts.py``, beside
``real_trainers.py``.
"""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

from real_trainers import SHAPE, tokenizer

from torchtune_adaptive import TransformersRollouts

PROMPT, COMPLETION = 48, 80
GRPO = {"trainer": "GRPOTrainer", "per_device_train_batch_size": 4}
HALF = {"dtype": "bfloat16"}
CASES: dict[str, dict[str, Any]] = {
    "GRPO": GRPO,
    "GRPO with a reference": {**GRPO, **HALF, "beta": 0.1},
    "GRPO with accumulation and a temperature": {
        **GRPO,
        **HALF,
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": False,
        "temperature": 0.9,
    },
    "GRPO that is trained on twice": {**GRPO, "num_iterations": 2, "beta": 0.1},
    "GRPO with adapters": {**GRPO, "lora": True, "lora_dropout": 0.1},
    "GRPO with adapters and a reference": {**GRPO, **HALF, "lora": True, "beta": 0.1},
    "RLOO": {**GRPO, **HALF, "trainer": "RLOOTrainer", "beta": 0.05, "top_p": 0.9},
}
OURS = ("trainer", "dtype", "lora", "lora_dropout")
"""Settings that the trainers' own arguments do not have."""


def watched(kind: Any, memory: Any, peaks: dict[str, int]) -> Any:
    """A trainer that notes the peak of each phase of the last step."""

    class Watched(kind):
        def _noted(self, phase: str, work: Any, *args: Any, **named: Any) -> Any:
            gc.collect()
            memory.watch()
            made = work(*args, **named)
            peaks[phase] = max(peaks.get(phase, 0), memory.usage().peak_bytes)
            return made

        def _generate_single_turn(self, *args: Any, **named: Any) -> Any:
            peaks.clear()
            return self._noted("generation", super()._generate_single_turn, *args, **named)

        def _get_per_token_logps_and_entropies(self, *args: Any, **named: Any) -> Any:
            work = super()._get_per_token_logps_and_entropies
            if named.get("compute_entropy"):
                return work(*args, **named)
            return self._noted("scoring", work, *args, **named)

        def _prepare_inputs(self, *args: Any) -> Any:
            made = super()._prepare_inputs(*args)
            if self._step % self.args.gradient_accumulation_steps == 0:
                gc.collect()
                memory.watch()
            return made

    return Watched


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(completion) % 3) for completion in completions]


def measured(case: dict[str, Any]) -> dict[str, int]:
    """The peaks of the third step of the real trainer."""
    import torch
    import transformers
    import trl
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import LlamaConfig, LlamaForCausalLM

    from torchtune_adaptive.core.device.simulated import SimulatedMemory

    memory, peaks = SimulatedMemory(1 << 40), {}
    dtype = getattr(torch, case.get("dtype", "float32"))
    shape = {key: value for key, value in SHAPE.items() if key != "use_cache"}
    LlamaForCausalLM(LlamaConfig(**shape)).to(dtype).save_pretrained(
        "weights"
    )  # the reference's, too
    model = LlamaForCausalLM.from_pretrained("weights", dtype=dtype)
    kinds = {
        "GRPOTrainer": (trl.GRPOTrainer, trl.GRPOConfig),
        "RLOOTrainer": (trl.RLOOTrainer, trl.RLOOConfig),
    }
    kind, config = kinds[case["trainer"]]
    arguments = {key: value for key, value in case.items() if key not in OURS}
    arguments |= {"num_generations": 2, "max_completion_length": COMPLETION, "max_steps": 3}
    arguments |= {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    more: dict[str, Any] = {}
    if case.get("lora"):
        dropout = case.get("lora_dropout", 0.0)
        more["peft_config"] = LoraConfig(lora_dropout=dropout, target_modules="all-linear")

    class End(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            peaks["training"] = memory.usage().peak_bytes

    trainer = watched(kind, memory, peaks)(
        model=model,
        reward_funcs=reward,
        args=config("out", **arguments),
        train_dataset=Dataset.from_list([{"prompt": " ".join(["word"] * PROMPT)}] * 64),
        processing_class=tokenizer(),
        callbacks=[End()],
        **more,
    )
    for each in filter(None, (trainer.model, trainer.ref_model)):
        memory.adopt([*each.parameters(), *each.buffers()])
    with memory.running():
        trainer.train()
    return peaks


def planned(case: dict[str, Any], folder: Path) -> dict[str, int]:
    step = TransformersRollouts(
        folder=str(folder),
        max_prompt_length=PROMPT,
        max_completion_length=COMPLETION,
        num_generations=2,
        **case,
    )
    plan = step.plan(
        gpu="cpu", memory="1TiB", ceiling=step.per_device_train_batch_size, cache=False
    )
    peaks: dict[str, int] = {}
    for phase in plan.phases:
        name = phase.name.partition(" ")[0]  # by the reference as well
        peaks[name] = max(peaks.get(name, 0), phase.peak)
    return peaks


def main() -> None:
    folder = Path("model")
    folder.mkdir()
    about = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SHAPE}
    (folder / "config.json").write_text(json.dumps(about))
    results = {name: (planned(case, folder), measured(case)) for name, case in CASES.items()}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
