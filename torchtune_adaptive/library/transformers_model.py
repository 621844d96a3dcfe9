"""The model of a step of transformers' trainers: made from its config, with what the trainers add to it.

``transformers_step`` has the settings, and which versions it was checked against; ``trainer_parts`` has what
the trainers add. transformers is imported where it is needed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from torchtune_adaptive.common import NoPrediction, UsageError
from torchtune_adaptive.library.eight_bit import EightBitLinear
from torchtune_adaptive.library.experts import balance_loss, balance_weight
from torchtune_adaptive.library.four_bit import FourBitLinear
from torchtune_adaptive.library.liger import apply_liger, rotate
from torchtune_adaptive.library.private import attends_by_sdpa, layers_of
from torchtune_adaptive.library.quantized import prepare, quantize, quantized_weights
from torchtune_adaptive.library.step_choices import DPO, PLAIN, SFT
from torchtune_adaptive.library.trainer_optimizers import make_optimizer, mark_embeddings
from torchtune_adaptive.library.trainer_parts import (
    Adapters,
    Autocast,
    TiledLogProbs,
    Traceable,
    adapt,
    flat,
    preference_loss,
    without_adapters,
)
from torchtune_adaptive.planner import fake_device

Batch = dict[str, torch.Tensor]
_OF_TRANSFORMERS = ("eager", "grouped_mm", "batched_mm")
"""Ways to compute that a model's config may ask for; others may be the names of code on the Hub."""
_ATTENTION = "planned"
"""The name for transformers of its own attention with our mask."""


class StepModel:
    """What a step does with its model. ``step`` is a ``TransformersStep``, whose module is above this one."""

    def __init__(self, step: Any) -> None:
        self.step = step

    @property
    def half(self) -> torch.dtype | None:
        """The type that mixed precision computes in, if there is any."""
        return self.step.half and getattr(torch, self.step.half)

    def build(self) -> nn.Module:
        """The model as the trainer has prepared it, and its reference."""
        model = self._policy()
        prepared = Prepared(model, self.reference_model())
        if self.step.fsdp:
            self._shard(model)
        elif self.step.ranks > 1:
            return DistributedDataParallel(prepared, broadcast_buffers=False).train()
        return prepared.train()

    def reference_model(self) -> nn.Module | None:
        """DPO's reference, if it is another model."""
        if self.step.trainer != DPO or self.step.lora or self.step.precompute_ref_log_probs:
            return None
        reference: nn.Module = self.made()
        if self.step.use_liger_kernel and (self.step.liger_kernel_config or {}).get("rope", True):
            rotate(reference)  # the function is that of all models of the type
        return reference.requires_grad_(False)

    def _policy(self) -> Any:
        """The model that is trained."""
        model = self.made()
        if self.step.load_in_4bit:
            compute_in = getattr(torch, self.step.computes_4_bits_in)
            storage = getattr(torch, self.step.bnb_4bit_quant_storage)
            double = self.step.bnb_4bit_use_double_quant
            quantize(model, lambda layer: FourBitLinear(layer, compute_in, double, storage))
        elif self.step.load_in_8bit:
            quantize(model, EightBitLinear)
        if self.step.is_quantized and self.step.is_prepared:
            prepare(model)
        if self.step.lora:
            dtype = torch.bfloat16 if self.step.adapters_are_half else torch.float32
            settings = self.step.r, self.step.lora_dropout, dtype, self.step.target_parameters
            adapt(model, Adapters(self.step.target_modules, *settings))
        if self.step.gradient_checkpointing:
            if not model.supports_gradient_checkpointing:
                raise UsageError(
                    f"gradient_checkpointing: {type(model).__name__} does not support it. Set "
                    "gradient_checkpointing=False."
                )
            with warnings.catch_warnings():  # of the new name, which older versions do not have
                warnings.simplefilter("ignore", FutureWarning)
                model.gradient_checkpointing_enable(
                    {"use_reentrant": False, "context_fn": self._when_checkpointed}
                )
            if self.step.lora:
                model.enable_input_require_grads()
        if self.step.use_liger_kernel:
            switches = self.step.liger_kernel_config
            apply_liger(model, switches, self.step.trainer != PLAIN, self.half)
        mark_embeddings(model)
        return model

    def optimizer(self, parameters: Iterator[nn.Parameter]) -> Optimizer:
        """The optimizer of what is trained; without weight decay for vectors, as the trainers have it."""
        trained = [one for one in parameters if one.requires_grad]
        groups = [
            {"params": [one for one in trained if (one.ndim > 1) is decays]}
            for decays in (True, False)
        ]
        groups = [group for group in groups if group["params"]]
        return make_optimizer(self.step.optim, groups)

    def batch(self, rows: int) -> Batch:
        """Rows; of a pair, the chosen and the rejected one."""
        if self.step.in_one_row:
            return self._packed(rows)
        rows *= 1 + self.step.has_pairs
        tokens = torch.zeros(rows, self.step.max_length, dtype=torch.long)
        return {"input_ids": tokens, "labels": tokens.clone(), "attention_mask": tokens.clone()}

    def _packed(self, rows: int) -> Batch:
        """Rows as one, of which samples are told apart by where they begin: as many samples as rows."""
        tokens = torch.zeros(1, rows * self.step.max_length, dtype=torch.long)
        begins = torch.zeros(rows + 1, dtype=torch.int32)
        named = {name: tokens.clone() for name in ("input_ids", "labels", "position_ids")}
        return {**named, "cu_seq_lens": begins, "seq_idx": tokens.int()}

    def forward(self, built: nn.Module, batch: Batch) -> torch.Tensor:
        """The loss of a micro-batch."""
        prepared = prepared_of(built)
        model: Any = prepared.model
        tokens, labels = batch["input_ids"], batch["labels"]
        if self.step.trainer == PLAIN:
            with self.mixed_precision():
                balanced = getattr(model.config.get_text_config(), "output_router_logits", False)
                mask = {"attention_mask": batch["attention_mask"]} if balanced else {}
                found = model(input_ids=tokens, labels=labels, use_cache=False, **mask)
            if self.half and found.logits is not None:
                found.logits = found.logits.float()  # accelerate's, of every output
            loss: torch.Tensor = found.loss
            return loss
        found, balance = model(
            tokens, labels, batch.get("position_ids"), batch.get("attention_mask")
        )
        if self.step.trainer == SFT:
            loss = -found.sum() / found.numel()
        else:
            loss = preference_loss(found, self._reference_log_probs(prepared, tokens, labels))
        return loss if balance is None else loss + balance

    def made(self) -> Any:
        from transformers import AttentionInterface, AttentionMaskInterface

        model = self.from_config()
        if attends_by_sdpa(model):
            attend = AttentionInterface()["sdpa"]
            packed = partial(_attend_apart, attend, self.step.max_length)
            AttentionInterface.register(_ATTENTION, packed if self.step.in_one_row else attend)
            AttentionMaskInterface.register(_ATTENTION, self.mask)
            model.set_attn_implementation(_ATTENTION)
        if self.step.trainer != PLAIN:
            if model.base_model is model:
                raise UsageError(
                    f"trainer: {self.step.trainer} computes log-probabilities from what base_model gives, "
                    f"and {type(model).__name__} has none. Use {PLAIN}."
                )
            model.forward = partial(self.log_probs, model)  # as TRL does
        return model

    def from_config(self) -> Any:
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

        try:
            # Code that comes with a model is not run: from_pretrained would ask for consent.
            config = AutoConfig.from_pretrained(self.step.folder, trust_remote_code=False)
            if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
                dtype = getattr(torch, self.step.dtype)
                self._ask_for_balance(config)
                for name in ("_attn_implementation", "_experts_implementation"):
                    asked = getattr(config, name, None)
                    setattr(config, name, asked if asked in _OF_TRANSFORMERS else None)
                how = self.step.experts_implementation
                options = {"experts_implementation": how} if how else {}
                return AutoModelForCausalLM.from_config(config, dtype=dtype, **options)
            reason = f"it has no causal language model of type {config.model_type}"
        except UsageError:
            raise
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise NoPrediction(
            f"transformers {version('transformers')} cannot make a model from {self.step.folder}: {reason}. "
            "Use a newer transformers, install what it asks for, or give another model."
        )

    def _ask_for_balance(self, config: Any) -> None:
        """Let ``Trainer``'s model add the loss that balances experts, or not, as asked for."""
        if self.step.output_router_logits is None:
            return
        text = config.get_text_config()
        if not hasattr(text, "output_router_logits"):
            raise UsageError(
                f"output_router_logits: {type(text).__name__} has no such setting, so its model adds no loss "
                "that balances experts. Leave it out."
            )
        text.output_router_logits = self.step.output_router_logits

    def mask(
        self, *, batch_size: int, kv_length: int, local_size: int | None = None, **asked: Any
    ) -> torch.Tensor | None:
        """The mask of attention, as transformers makes it where a row has padding, or a layer sees less than
        a row. It looks for padding in values, and there are none here."""
        from transformers import AttentionMaskInterface

        sees_all = local_size is None or kv_length < local_size
        if not self.step.has_masks or (sees_all and not self.step.padded):
            return None
        tokens = torch.ones(batch_size, kv_length, dtype=torch.bool, device=asked["device"])
        asked |= {"attention_mask": tokens, "allow_is_causal_skip": False}
        make = AttentionMaskInterface()["sdpa"]
        found: torch.Tensor = make(batch_size=batch_size, kv_length=kv_length, **asked)
        return found

    def mixed_precision(self) -> AbstractContextManager[Any]:
        if self.half is None:
            return Traceable()
        # DPO's second model is not trained, but the trainer leaves it as if it were.
        return Autocast(self.half, keeps_all=not self.step.lora and not torch.is_grad_enabled())

    def _when_checkpointed(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """The contexts of a layer in the forward pass, and when backward repeats it."""
        return nullcontext(), self._repeating()

    @contextmanager
    def _repeating(self) -> Iterator[None]:
        """The context of what backward repeats."""
        with self.mixed_precision(), fake_device.repeating():
            yield

    def log_probs(
        self,
        model: Any,
        tokens: torch.Tensor,
        labels: torch.Tensor,
        positions: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ) -> Any:
        """The log-probability of each token that is predicted, by TRL's head, and the loss that balances
        experts, if there is one. The reference has none."""
        weight_of_balance = balance_weight(model, self.step.router_aux_loss_coef)
        balanced = bool(weight_of_balance) and torch.is_grad_enabled()
        options = {"output_router_logits": True} if balanced else {}
        with self.mixed_precision():
            found = model.base_model(
                input_ids=tokens, position_ids=positions, use_cache=False, **options
            )
            hidden = found.last_hidden_state[:, :-1]
            weight = model.get_output_embeddings().weight
            if isinstance(weight, DTensor):
                weight = weight.full_tensor()
            compute_in = self.half or hidden.dtype
            log_probs: torch.Tensor = TiledLogProbs.apply(
                flat(hidden), weight, labels[:, 1:].reshape(-1), compute_in
            )
            log_probs = log_probs.view(len(tokens), -1)
            balance = balance_loss(model, found.router_logits, mask) if balanced else None
        return log_probs, balance if balance is None else weight_of_balance * balance

    def _reference_log_probs(
        self, prepared: Prepared, tokens: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        if self.step.precompute_ref_log_probs:
            return torch.zeros_like(labels[:, 1:], dtype=torch.float32)
        with torch.no_grad(), without_adapters(prepared.model):
            found: torch.Tensor = (prepared.reference or prepared.model)(tokens, labels)[0]
            return found

    def _shard(self, model: Any) -> None:
        """Shard a model as accelerate does."""
        options: dict[str, Any] = {}
        if half := self.half:
            for parameter in model.parameters():
                # accelerate's master weights, which it makes of models without 4 bits
                if parameter.requires_grad and not self.step.load_in_4bit:
                    parameter.data = parameter.data.float()
            options["mp_policy"] = MixedPrecisionPolicy(half, half, half)
        if self.step.load_in_4bit and not self.step.shares_4_bits:
            options["ignored_params"] = quantized_weights(model)
        for layer in layers_of(model):
            fully_shard(layer, **options)
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        norm = getattr(model.base_model, "norm", None)
        tail = [head] if norm is None else [norm, head]
        if embedding.weight is head.weight:
            tail.append(embedding)
        else:
            fully_shard(embedding, **options)
        fully_shard(tail, **options, reshard_after_forward=False)
        fully_shard(model, **options)


def _attend_apart(
    attend: Callable[..., tuple[torch.Tensor, Any]],
    length: int,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *others: Any,
    **named: Any,
) -> tuple[torch.Tensor, Any]:
    """Attention in one row of samples of a ``length``, which do not see each other."""

    def apart(heads: torch.Tensor) -> torch.Tensor:
        _, count, tokens, width = heads.shape
        by_token = heads.transpose(1, 2).reshape(tokens // length, length, count, width)
        return by_token.transpose(1, 2)

    found, weights = attend(module, *map(apart, (query, key, value)), *others, **named)
    return found.reshape(1, -1, *found.shape[2:]), weights


class Prepared(nn.Module):
    """The models of a step: the one that is trained, then the reference, if it is another one."""

    def __init__(self, model: nn.Module, reference: nn.Module | None) -> None:
        super().__init__()
        self.model, self.reference = model, reference


def prepared_of(built: nn.Module) -> Prepared:
    """The models of what a step has built."""
    prepared = built.module if isinstance(built, DistributedDataParallel) else built
    assert isinstance(prepared, Prepared)
    return prepared
