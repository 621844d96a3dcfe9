"""transformers' Trainer: one method is overridden. Run it with

torchrun --nproc_per_node 2 examples/transformers_trainer.py
"""

import tempfile

import torch
import torch.distributed as dist
from common import LLAMA, compare, less_memory, rows, worst_case
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from torchtune_adaptive import AdaptiveStep, find_batch_size


class AdaptiveTrainer(Trainer):
    """Its batches are the rows of a step; our step divides them, and steps the optimizer."""

    step, disturbed = None, False

    def training_step(self, model, inputs, num_items_in_batch=None):
        def forward(batch):  # num_items_in_batch=1: the sum, which the step divides
            loss = model(**batch, num_items_in_batch=1).loss
            return loss, int((batch["labels"][:, 1:] != -100).sum())

        if self.step is None:
            self.step = AdaptiveStep(model, self.optimizer, forward, memory_limit="16MiB")
            batch = lambda n: dict.fromkeys(("input_ids", "labels"), worst_case(n))  # noqa: E731
            self.size, self.losses = find_batch_size(self.step, batch, ceiling=64), []
        samples = [{k: v[i] for k, v in inputs.items()} for i in range(len(inputs["labels"]))]
        low = self.disturbed and self.state.global_step == 1 and dist.get_rank() == 0
        with less_memory(self.step, 5 << 20, low):
            outcome = self.step(samples, self.data_collator, self.size)
        assert outcome.retried or not low
        self.losses.append(outcome.loss)
        return torch.tensor(outcome.loss)  # no gradient is left, so Trainer's own step does nothing


def train(disturbed: bool) -> list[float]:
    data = [{"input_ids": row, "labels": row} for row in rows(512)]
    with tempfile.TemporaryDirectory() as folder:
        settings = {"ddp_broadcast_buffers": False, "report_to": "none", "save_strategy": "no"}
        settings |= {"use_cpu": not torch.cuda.is_available(), "disable_tqdm": True}
        settings |= {"per_device_train_batch_size": 64, "max_grad_norm": 0, "num_train_epochs": 1}
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**LLAMA))
        trainer = AdaptiveTrainer(model, TrainingArguments(folder, **settings), train_dataset=data)
        trainer.disturbed = disturbed
        trainer.train()
    return trainer.losses


if __name__ == "__main__":
    losses, undisturbed = train(disturbed=True), train(disturbed=False)
    compare(losses, undisturbed, dist.get_rank())
    dist.destroy_process_group()
