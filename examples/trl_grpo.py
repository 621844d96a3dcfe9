"""TRL's GRPOTrainer: generating, scoring and training with as many rows as fit. Run it in one of these ways:

python examples/trl_grpo.py
torchrun --nproc_per_node 2 examples/trl_grpo.py
accelerate launch --config_file examples/accelerate_fsdp2.yaml examples/trl_grpo.py

The last one needs GPUs. With --model NAME it trains that model, in place of a tiny one that is made here.
"""

import argparse

import tiny
import torch
from trl import GRPOConfig, GRPOTrainer

from torchtune_adaptive.integrations import Adaptive
from torchtune_adaptive.integrations.transformers import adaptive


def digits(completions: list[str], **_: object) -> list[float]:
    """A reward for completions that are numbers."""
    return [sum(map(str.isdigit, each)) / max(1, len(each)) for each in completions]


parser = argparse.ArgumentParser()
parser.add_argument("--model", help="the name or folder of a model")
name = parser.parse_args().model
on_cpu = not torch.accelerator.is_available()
args = GRPOConfig(
    "demo_output/trl_grpo",
    per_device_train_batch_size=16,  # times 2 are the completions of a step
    gradient_accumulation_steps=2,
    num_generations=8,
    max_completion_length=16,
    max_steps=4,
    learning_rate=1e-3,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    use_cpu=on_cpu,
)
# A CPU has no limit of its own that a search could find.
options = Adaptive(memory_limit="16MiB" if on_cpu and not name else None)
trainer = adaptive(GRPOTrainer, options)(
    name or tiny.llama(),
    digits,
    args=args,
    train_dataset=tiny.sums(512, answered=False),
    processing_class=None if name else tiny.tokenizer(),
)
trainer.train()
