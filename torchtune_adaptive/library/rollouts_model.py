"""The model of a step of TRL's GRPOTrainer and RLOOTrainer, with what precedes the step.

``transformers_rollouts`` has the settings, and which version it was checked against.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchtune_adaptive.library.longest_generation import (
    Sampling,
    generate_longest,
    without_checkpointing,
)
from torchtune_adaptive.library.phase_planning import Label
from torchtune_adaptive.library.rollout_parts import (
    gathered,
    numbers_in_weights,
    send_weights,
    shard,
)
from torchtune_adaptive.library.trainer_parts import (
    TiledLogProbs,
    Traceable,
    flat,
    policy_loss,
    without_adapters,
)
from torchtune_adaptive.library.transformers_model import Batch, Prepared, StepModel, prepared_of

_GATHERED, _ACTIVATIONS = "gathered parameters", "activations"


class RolloutsModel(StepModel):
    """What a step and the phases before it do with their model."""

    # --- the model ------------------------------------------------------------------------------------

    def reference_model(self) -> nn.Module | None:
        if not self.step.has_reference or self.step.lora:
            return None
        reference: nn.Module = self.made()
        reference.requires_grad_(False)
        if self.step.fsdp:
            shard(reference, self.step.ranks)
        return reference

    def log_probs(
        self,
        model: Any,
        tokens: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        **to_generate: Any,
    ) -> Any:
        """The log-probability of each token of completions, by TRL's head; without labels, logits."""
        if labels is None:
            return type(model).forward(model, position_ids=positions, **to_generate)
        with self.mixed_precision():
            found = model.base_model(input_ids=tokens, position_ids=positions, use_cache=False)
            hidden = found.last_hidden_state[:, :-1]
            weight = model.get_output_embeddings().weight
            if isinstance(weight, DTensor):
                weight = weight.full_tensor()
            compute_in = self.half or hidden.dtype
            last = self.step.max_completion_length
            labels = labels[:, 1:] if hidden.device.type == "cpu" else labels[:, -last:]
            log_probs: torch.Tensor = TiledLogProbs.apply(
                flat(hidden, last), weight, labels.reshape(-1), compute_in
            )
        return log_probs.view(len(hidden), -1)[:, -last:]

    # --- rows -----------------------------------------------------------------------------------------

    def batch(self, rows: int) -> Batch:
        """A micro-batch among all that were generated together, which stay in memory: tokens and masks, and
        numbers of 32 bits for each token of a completion."""
        numbers = self.step.scores + self.step.has_reference + 2 * self.step.use_vllm
        width = 2 * self.step.max_length + math.ceil(numbers * self.step.max_completion_length / 2)
        generated = torch.zeros(rows * self.step.generated_together, width, dtype=torch.long)
        return {"generated": generated, "advantages": torch.zeros(rows)}

    def prompts(self, rows: int) -> Batch:
        tokens = torch.zeros(rows, self.step.max_prompt_length, dtype=torch.long)
        return {"input_ids": tokens, "attention_mask": tokens.clone()}

    def _tokens(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens and the labels of a micro-batch; its mask has been made and is not kept."""
        some = batch["generated"][: len(batch["advantages"]), : self.step.max_length]
        return some.clone(), some.clone()

    # --- phases ---------------------------------------------------------------------------------------

    def forward(self, built: nn.Module, batch: Batch) -> torch.Tensor:
        """The loss of a micro-batch."""
        tokens, labels = self._tokens(batch)
        found = prepared_of(built).model(tokens, labels)
        return policy_loss(found, batch["advantages"], with_reference=self.step.has_reference)

    def generate(self, built: nn.Module, batch: Batch, label: Label) -> None:
        model: Any = prepared_of(built).model
        # PEFT generates by the model inside, which accelerate has not wrapped.
        half = None if self.step.lora else self.half

        def logits(**inputs: Any) -> Any:
            with Traceable() if half is None else self.mixed_precision():
                found = model(positions=inputs.pop("position_ids", None), **inputs)
            if half is not None:
                found.logits = found.logits.float()  # accelerate's, of every output
            return found

        sampling = Sampling(self.step.temperature != 1.0, self.step.top_p < 1.0)
        longest = batch["input_ids"], self.step.max_completion_length
        with without_checkpointing(model):
            generate_longest(logits, model.config, *longest, sampling, label)

    def send_weights(self, built: nn.Module, batch: Batch, label: Label) -> None:
        send_weights(prepared_of(built).model)

    def score(self, built: nn.Module, batch: Batch, label: Label) -> None:
        self._scored(prepared_of(built).model, batch)

    def score_by_reference(self, built: nn.Module, batch: Batch, label: Label) -> None:
        prepared: Prepared = prepared_of(built)
        reference = prepared.reference or prepared.model
        with without_adapters(prepared.model):
            if not self.step.fsdp or self.step.lora:
                return self._scored(reference, batch)
            label(_GATHERED)
            with gathered(reference, self.half):
                label(_ACTIVATIONS)
                self._scored(reference, batch)

    def _scored(self, model: nn.Module, batch: Batch) -> None:
        tokens, labels = self._tokens(batch)
        with torch.no_grad(), without_checkpointing(model):
            model(tokens, labels)

    def nothing(self, rows: int) -> Batch:
        """The batch of a phase that takes no rows."""
        return {"rows": torch.zeros(rows)}

    def no_work(self, *_: Any) -> None:
        """Training is a step, and traced as such."""

    def numbers(self, built: nn.Module) -> int:
        """The numbers in the weights of the model that is trained."""
        return numbers_in_weights(prepared_of(built).model)
