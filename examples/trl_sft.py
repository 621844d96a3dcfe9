"""TRL's SFTTrainer in micro-batches of the size that fits. Run it in one of these ways:

python examples/trl_sft.py
torchrun --nproc_per_node 2 examples/trl_sft.py
accelerate launch --config_file examples/accelerate_fsdp2.yaml examples/trl_sft.py

The last one needs GPUs. With --model NAME it trains that model, in place of a tiny one that is made here.
"""

import argparse

import tiny
import torch
from trl import SFTConfig, SFTTrainer

from torchtune_adaptive.integrations import Adaptive
from torchtune_adaptive.integrations.transformers import adaptive

parser = argparse.ArgumentParser()
parser.add_argument("--model", help="the name or folder of a model")
name = parser.parse_args().model
on_cpu = not torch.accelerator.is_available()
args = SFTConfig(
    "demo_output/trl_sft",
    per_device_train_batch_size=16,  # times 2 are the rows of a step; how it is split does not count
    gradient_accumulation_steps=2,
    max_steps=4,
    learning_rate=1e-2,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    use_cpu=on_cpu,
)
# A CPU has no limit of its own that a search could find.
options = Adaptive(memory_limit="16MiB" if on_cpu and not name else None)
trainer = adaptive(SFTTrainer, options)(
    name or tiny.llama(),
    args=args,
    train_dataset=tiny.sums(512),
    processing_class=None if name else tiny.tokenizer(),
)
trainer.train()
