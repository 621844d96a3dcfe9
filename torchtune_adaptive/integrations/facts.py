"""What the integrations rely on in other libraries, where these promise nothing.

Each fact has a test, which runs with the newest versions every week.
"""

from __future__ import annotations

import warnings
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from torchtune_adaptive.common import UsageError

TESTED = {
    "transformers": ("5.16", "5.23"),
    "trl": ("1.9", "1.16"),
    "accelerate": ("1.10", "1.15"),
    "lightning": ("2.6", "2.6"),
    "torchtitan": ("0.3", "0.3"),
}
"""The lowest versions that the tests pass with, and the newest. Below, gradients would silently be others:
transformers 5.4 scales the loss in ``accelerator.backward`` as well, and 5.14 takes a mean of label smoothing
over a batch."""

FACTS = {
    "one backward": "Trainer.training_step calls accelerator.backward once, with the loss",
    "no scaling": "accelerator.backward does not divide the loss by the number of batches",
    "sync_gradients": "the loop sets accelerator.sync_gradients before the last batch of a step, only",
    "mean over batches": "a loss that is a mean is divided by current_gradient_accumulation_steps",
    "sum of batches": "a loss that is scaled by itself is added up as compute_loss gives it",
    "loss alone": "compute_loss gives the loss of a batch without gradients, given num_items_in_batch",
    "own log": "what is logged of training goes through log(), and has a loss; that of evaluations has none",
    "batches of a step": "get_batch_samples takes the batches of a step, once, before training_step",
    "data_collator": "get_train_dataloader collates by self.data_collator, or by a wrapper of that name",
    "is_in_train": "is_in_train is set while train() calls get_train_dataloader, and not before",
    "callback states": "a callback that is an ExportableState is in stateful_callbacks by its class's name",
    "broadcast_buffers": "DistributedDataParallel is made with what accelerator.ddp_handler says",
    "host state": "compute_loss changes no attribute of a trainer but those in `restored`",
    "checkpointing": "a model turns it on and off by two methods, and says whether it is on",
    "gathers": "gather_for_metrics launches by accelerator.gather",
    "evaluation": "evaluation_loop takes the batches of its loader, and calls prediction_step with each",
    "collates in evaluation": "accelerate's loader has torch's as base_dataloader, with its collate_fn",
    "averages": "_metrics has lists for train and eval, to which compute_loss appends a value for each batch",
    "wrapped model": "training_step gets model_wrapped, which get_train_dataloader does not yet have",
    "own batches": "GRPO and RLOO count and time batches in training_step, and generate in _prepare_inputs",
    "own rows": "what their _prepare_inputs gives is tensors with equal rows, and numbers for all",
    "own generation": "_generate_single_turn gets prompts, images and fields, and calls generate() once",
    "own scoring": "_get_per_token_logps_and_entropies gets model, tokens, mask, width and rows at once",
    "own prompts": "_tokenize_prompts gives the tokens of each prompt first",
    "draws": "generate() samples a token of each row by one torch.multinomial over all rows",
    "source of a loader": "fit_loop._data_source.dataloader gives Lightning's loader, after setup",
    "order of a batch": "automatic optimization calls training_step, optimizer_zero_grad and backward once",
    "end of a step": "the optimizer steps with each accumulate_grad_batches-th batch, and with the last",
}

FACTS_OF_TORCHTITAN = {
    "one batch": "train_step takes gradient_accumulation_steps batches, and forward_backward_step each once",
    "one loss": "forward_backward_step calls loss_fn once, and goes backward from what it returns",
    "linear loss": "a loss is divided by global_valid_tokens, whatever number that is, and by nothing else",
    "sum over ranks": "FSDP sums gradients over ranks, and divides them by 1",
    "counted tokens": "forward_backward_step changes no attribute of a trainer but ntokens_seen",
    "own log": "train_step logs by metrics_processor.log, which takes extra_metrics",
    "owner of a config": "build() of a config makes the class in which its class stands, as _owner says",
    "one optimizer": "optimizers.optimizers is a list of torch's own, one for all parameters by default",
    "parts of the data": "dataloader.build makes the loader of a dp_rank of dp_world_size, saved by both",
    "loading": "a checkpoint is loaded by checkpointer.dcp_load, before train() reads dataloader",
    "counted experts": "a mixture of experts is a MoE, which counts tokens in forward",
}


def check_versions(*names: str) -> None:
    """Warn, once, where a library is newer than what has been tested, and refuse one that is too old."""
    for name in names:
        lowest, newest = TESTED[name]
        try:
            installed = Version(version(name))
        except PackageNotFoundError:
            continue
        if installed.release[:2] < Version(lowest).release[:2]:
            raise UsageError(
                f"{name}: {installed} is installed, and {lowest} or newer is needed: before, gradients "
                f"or logs would differ. Upgrade it."
            )
        if installed.release[:2] > Version(newest).release[:2]:
            warnings.warn(
                f"torchtune_adaptive has been tested with {name} {newest}, and {installed} is installed.",
                stacklevel=2,
            )
