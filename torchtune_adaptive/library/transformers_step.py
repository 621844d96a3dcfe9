"""The step of transformers' Trainer, and of TRL's SFTTrainer and DPOTrainer, to be planned.

The model is transformers' own, made from its config; ``trainer_parts`` has what the trainers add to it.
Checked against transformers 5.23, TRL 1.16, PEFT 0.21 and accelerate 1.15, none of which but transformers has
to be installed. That one is imported where it is needed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from torchtune_adaptive.common import NoPrediction, UsageError, arguments
from torchtune_adaptive.library.experts import IMPLEMENTATIONS, balance_loss, balance_weight
from torchtune_adaptive.library.four_bit import prepare, quantize
from torchtune_adaptive.library.model_types import about_kernels, refuse_loops
from torchtune_adaptive.library.planning import Plan, StepQuestion, answered, step_question
from torchtune_adaptive.library.private import attends_by_sdpa, layers_of
from torchtune_adaptive.library.trainer_optimizers import (
    OPTIMIZERS,
    UNSHARDED,
    about_optimizer,
    make_optimizer,
    mark_embeddings,
)
from torchtune_adaptive.library.trainer_parts import (
    ALL_LINEAR,
    Adapters,
    Autocast,
    TiledLogProbs,
    Traceable,
    adapt,
    flat,
    preference_loss,
    without_adapters,
)

Batch = dict[str, torch.Tensor]
SFT, DPO, PLAIN = "SFTTrainer", "DPOTrainer", "Trainer"
_ATTENTION = "planned"
"""The name for transformers of its own attention with our mask."""
_STEPS = {
    SFT: "SFTTrainer as of TRL 1.16, whose head computes log-probabilities in tiles, never all logits",
    DPO: "DPOTrainer as of TRL 1.16, whose head computes log-probabilities in tiles, never all logits",
    PLAIN: "transformers' Trainer: all logits, in float32 for the loss",
}
_TYPES = ("float32", "bfloat16", "float16")
_CHOICES: dict[str, tuple[Any, ...]] = {
    "dtype": _TYPES,
    "bf16": (None, True, False),
    "bnb_4bit_compute_dtype": (None, *_TYPES),
    "prepare_for_kbit_training": (None, True, False),
    "optim": OPTIMIZERS,
    "experts_implementation": (None, *IMPLEMENTATIONS),
    "output_router_logits": (None, True, False),
    **dict.fromkeys(
        (
            *("padded", "packing", "fp16", "gradient_checkpointing", "lora", "load_in_4bit"),
            *("bnb_4bit_use_double_quant", "precompute_ref_log_probs", "fsdp"),
        ),
        (True, False),
    ),
}
_NUMBERS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "max_length",
    "r",
    "ranks",
)


@dataclass(frozen=True, kw_only=True)
class TransformersStep:
    """A training step of transformers' Trainer, or of TRL's SFTTrainer or DPOTrainer, to be planned.

    Its settings have the names of the trainers' own arguments; the defaults are those of SFTTrainer and
    DPOTrainer.

        step = TransformersStep(folder="Qwen3-8B", per_device_train_batch_size=4, lora=True)
        print(step.plan(gpu="a100-80gb").largest)
    """

    folder: str
    """The folder that has the ``config.json``; weights are not read."""
    trainer: str = SFT
    """``Trainer``, ``SFTTrainer`` or ``DPOTrainer``."""
    per_device_train_batch_size: int = 8
    """Rows in a micro-batch; for DPO, pairs."""
    gradient_accumulation_steps: int = 1
    """Micro-batches in a step."""
    max_length: int = 1024
    """Tokens in a row; all rows are as long."""
    padded: bool = False
    """Whether some rows of a micro-batch are shorter, so that attention needs a mask."""
    packing: bool = False
    """Whether samples are packed into rows of ``max_length``, and all rows of a micro-batch into one row
    without padding, as SFTTrainer does."""
    dtype: str = "float32"
    """The type of the weights: ``float32``, ``bfloat16`` or ``float16``."""
    bf16: bool | None = None
    """Whether the model computes in bfloat16 whatever its weights are; by default, unless ``fp16``."""
    fp16: bool = False
    """Whether it computes in float16 instead, with scaled gradients."""
    gradient_checkpointing: bool = True
    """Whether backward computes each layer again."""
    optim: str = OPTIMIZERS[0]
    """``adamw_torch_fused``, ``adamw_torch``, ``adafactor``, ``sgd``, or bitsandbytes' ``adamw_8bit``
    (also ``adamw_bnb_8bit``), ``paged_adamw_8bit`` or ``paged_adamw_32bit``."""
    max_grad_norm: float = 1.0
    """The norm above which gradients are scaled down; 0 leaves them."""
    lora: bool = False
    """Whether adapters are trained instead of the model."""
    r: int = 8
    """The rank of the adapters."""
    lora_dropout: float = 0.0
    """The share of an adapter's inputs that is dropped."""
    target_modules: str | Sequence[str] = ALL_LINEAR
    """The linear layers that get adapters, by name, or ``all-linear``. As with PEFT, those that experts had
    in transformers 4 stand for the tensors that they have now. ``linear-layers`` are those of today only, as
    Axolotl and LLaMA-Factory list them."""
    target_parameters: Sequence[str] = ()
    """Parameters that get adapters, by the ends of their names, such as ``experts.down_proj``."""
    load_in_4bit: bool = False
    """Whether linear layers are loaded with 4 bits (bitsandbytes, QLoRA)."""
    bnb_4bit_compute_dtype: str | None = None
    """The type in which these layers compute; None is ``dtype``, as TRL's own command has it."""
    bnb_4bit_use_double_quant: bool = False
    """Whether the scales of their weights are quantized as well."""
    prepare_for_kbit_training: bool | None = None
    """Whether what has no 4 bits is cast to float32, as PEFT's ``prepare_model_for_kbit_training`` does; by
    default, with ``Trainer``."""
    precompute_ref_log_probs: bool = False
    """Whether DPO's reference has been computed before, and is not in memory."""
    experts_implementation: str | None = None
    """How the experts of a mixture are computed: ``grouped_mm``, as transformers does by default,
    ``batched_mm`` or ``eager``."""
    router_aux_loss_coef: float | None = None
    """The weight of the loss that balances experts, with TRL's trainers; by default, that of the model's
    config, and 0 is without it."""
    output_router_logits: bool | None = None
    """Whether ``Trainer`` adds that loss; by default, what the model's config says."""
    ranks: int = 1
    """The number of ranks."""
    fsdp: bool = False
    """Whether ranks share the weights (FSDP2); if not, each has all of them (DDP)."""

    STEPS: ClassVar = _STEPS  # the trainers, and what is said of their steps

    def __post_init__(self) -> None:
        arguments.one_of("trainer", self.trainer, tuple(self.STEPS))
        for name, choices in _CHOICES.items():
            arguments.one_of(name, getattr(self, name), choices)
        for name in _NUMBERS:
            arguments.whole(name, getattr(self, name))
        arguments.share("lora_dropout", self.lora_dropout)
        if self.fsdp and self.has_pairs and not (self.lora or self.precompute_ref_log_probs):
            raise UsageError(
                "fsdp: two sharded models, as DPO with a reference in memory has, cannot be traced. Set "
                "precompute_ref_log_probs=True, or fsdp=False for ranks that have all weights (more memory)."
            )
        if self.packing and (self.trainer != SFT or self.padded):
            reason = "has no padding" if self.padded else f"is SFTTrainer's, not {self.trainer}'s"
            raise UsageError(
                f"packing: what is packed {reason}. Set padded=False and trainer={SFT!r}."
            )
        if self.packing and self._half is None and self.dtype == "float32":
            raise UsageError(
                "packing: FlashAttention, which keeps packed samples apart, has no kernels for float32. Set "
                "bf16=True or dtype=bfloat16."
            )
        if self.router_aux_loss_coef is not None:
            arguments.weight("router_aux_loss_coef", self.router_aux_loss_coef)
            if self.trainer == PLAIN:
                raise UsageError(
                    "router_aux_loss_coef: Trainer has no such argument. Set output_router_logits=True, "
                    "which turns the loss on."
                )
        if self.output_router_logits is not None and self.trainer != PLAIN:
            raise UsageError(
                f"output_router_logits: {self.trainer} decides by router_aux_loss_coef. Set that."
            )
        if self.fp16 and self.bf16:
            raise UsageError("fp16: the model computes in one type. Leave bf16 out.")
        if self.fp16 and self.dtype == "float16" and not self.lora:
            raise UsageError(
                "dtype: gradients of weights in float16 cannot be scaled. Use dtype=float32, or lora=True, "
                "which trains adapters in float32."
            )
        if self.load_in_4bit and not self.lora:
            raise UsageError("load_in_4bit: weights of 4 bits cannot be trained. Set lora=True.")
        if self.load_in_4bit and self.fsdp:
            raise UsageError(
                "fsdp: sharded weights of 4 bits, which bitsandbytes has to store in another type, are not "
                "planned. Set fsdp=False for ranks that have all weights (more memory)."
            )
        if self.fsdp and self.optim in UNSHARDED:
            raise UsageError(
                f"fsdp: {self.optim} cannot update parameters that FSDP2 has sharded. Use "
                "optim=adamw_torch_fused, or fsdp=False for ranks that have all weights (more memory)."
            )

    @property
    def has_pairs(self) -> bool:
        """Whether a row is a pair: one that is chosen and one that is rejected."""
        return self.trainer == DPO

    @property
    def _half(self) -> torch.dtype | None:
        """The type that mixed precision computes in, if there is any."""
        if self.fp16:
            return torch.float16
        return None if self.bf16 is False else torch.bfloat16

    @property
    def _computes_4_bits_in(self) -> str:
        return self.bnb_4bit_compute_dtype or self.dtype

    @property
    def _is_prepared(self) -> bool:
        asked = self.prepare_for_kbit_training
        return self.trainer == PLAIN if asked is None else asked

    @property
    def _adapters_are_half(self) -> bool:
        return self.load_in_4bit and self.trainer != PLAIN

    def plan(
        self,
        gpu: str = "h100-80gb",
        memory: int | str | None = None,
        ceiling: int = 1 << 14,
        headroom: float = 0.05,
        timeout: float = 600.0,
    ) -> Plan:
        """Predict the peak of the step, and the largest micro-batch that fits, but no speed; the arguments
        are those of ``plan_batch_size``.

        Raises:
            UsageError: an argument cannot be used.
            NoPrediction: transformers is not installed, or the step cannot be traced.
        """
        found = answered(self._question(gpu, memory, ceiling, headroom), timeout)
        # No speed of these steps has been compared with a real one.
        return replace(found, speed=None)

    def _question(
        self, gpu: str, memory: int | str | None, ceiling: int, headroom: float
    ) -> StepQuestion:
        """The question about the step, if it can be traced here."""
        self._require_traceable()
        return step_question(
            self._build,
            optimizer=self._optimizer,
            forward=self._forward,  # type: ignore[arg-type]  # a share of the loss, which does as well
            worst_case=self._batch,
            ranks=self.ranks,
            rows=self.per_device_train_batch_size,
            accumulation=self.gradient_accumulation_steps,
            max_grad_norm=self.max_grad_norm or None,
            gpu=gpu,
            memory=memory,
            ceiling=ceiling,
            headroom=headroom,
        )

    def _require_traceable(self) -> None:
        """Raise if no step of the model can be traced here.

        Raises:
            NoPrediction: transformers is not installed, or the model is of a kind that is not planned.
        """
        if find_spec("transformers") is None:
            raise NoPrediction(
                "transformers is not installed, so its step cannot be traced. Install it (pip install "
                "transformers), or plan torchtune's step."
            )
        refuse_loops(self.folder)

    def about(self) -> tuple[str, ...]:
        """What is planned, for people."""
        half = str(self._half).removeprefix("torch.")
        computes = f", computing in {half}" if self._half and self.dtype != half else ""
        lines = [
            f"step: that of {self.STEPS[self.trainer]}",
            f"model: transformers {version('transformers')}, weights in {self.dtype}{computes}",
            f"checkpointing: {'every layer' if self.gradient_checkpointing else 'none'}",
            f"optimizer: {about_optimizer(self.optim)}; of what is trained",
        ]
        if self.load_in_4bit:
            others = "float32, as PEFT prepares it" if self._is_prepared else self.dtype
            double = "with" if self.bnb_4bit_use_double_quant else "without"
            lines.append(
                f"linear layers: 4 bits as of bitsandbytes 0.50, {double} double quantization, computing in "
                f"{self._computes_4_bits_in}; the rest is in {others}"
            )
        if self.lora:
            targets = self.target_modules
            named = targets if isinstance(targets, str) else ", ".join(targets)
            dtype = "bfloat16 as TRL" if self._adapters_are_half else "float32 as PEFT 0.21"
            lines.append(f"adapters: rank {self.r}, in {dtype} has them, on {named}")
        if self.has_pairs:
            reference = "the model without adapters" if self.lora else "a second model, in memory"
            found = "computed before" if self.precompute_ref_log_probs else reference
            lines.append(f"reference: {found}; a row is a pair, whose two halves are one batch")
        if self.fp16:
            lines.append(
                "attention: FlashAttention's; on GPUs that lack it (V100, T4) it may take more"
            )
        if self.ranks > 1:
            how = (
                "FSDP2 as accelerate 1.15 wraps it"
                if self.fsdp
                else "DDP, with gradients in buckets"
            )
            lines.append(f"ranks: {how}")
        if self.packing:
            lines.append(
                "rows: packed, and those of a micro-batch are one row. attn_implementation="
                "'flash_attention_2' is assumed; sdpa would have a mask for each pair of tokens"
            )
        else:
            mask = "with padding, which costs a mask" if self.padded else "without padding"
            lines.append(f"rows: {mask}")
        return (*lines, *about_kernels(self.folder))

    def _build(self) -> nn.Module:
        """The model as the trainer has prepared it, and its reference."""
        model = self._policy()
        prepared = Prepared(model, self._reference_model())
        if self.fsdp:
            self._shard(model)
        elif self.ranks > 1:
            return DistributedDataParallel(prepared, broadcast_buffers=False).train()
        return prepared.train()

    def _reference_model(self) -> nn.Module | None:
        """DPO's reference, if it is another model."""
        if self.trainer != DPO or self.lora or self.precompute_ref_log_probs:
            return None
        reference: nn.Module = self._made()
        return reference.requires_grad_(False)

    def _policy(self) -> Any:
        """The model that is trained."""
        model = self._made()
        if self.load_in_4bit:
            compute_in = getattr(torch, self._computes_4_bits_in)
            quantize(model, compute_in, self.bnb_4bit_use_double_quant)
            if self._is_prepared:
                prepare(model)
        if self.lora:
            dtype = torch.bfloat16 if self._adapters_are_half else torch.float32
            settings = self.r, self.lora_dropout, dtype, self.target_parameters
            adapt(model, Adapters(self.target_modules, *settings))
        if self.gradient_checkpointing:
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
            if self.lora:
                model.enable_input_require_grads()
        mark_embeddings(model)
        return model

    def _optimizer(self, parameters: Iterator[nn.Parameter]) -> Optimizer:
        """The optimizer of what is trained; without weight decay for vectors, as the trainers have it."""
        trained = [one for one in parameters if one.requires_grad]
        groups = [
            {"params": [one for one in trained if (one.ndim > 1) is decays]}
            for decays in (True, False)
        ]
        groups = [group for group in groups if group["params"]]
        return make_optimizer(self.optim, groups)

    def _batch(self, rows: int) -> Batch:
        """Rows; of a pair, the chosen and the rejected one."""
        if self.packing:
            return self._packed(rows)
        rows *= 1 + self.has_pairs
        tokens = torch.zeros(rows, self.max_length, dtype=torch.long)
        return {"input_ids": tokens, "labels": tokens.clone(), "attention_mask": tokens.clone()}

    def _packed(self, rows: int) -> Batch:
        """Rows as one, of which samples are told apart by where they begin: as many samples as rows."""
        tokens = torch.zeros(1, rows * self.max_length, dtype=torch.long)
        begins = torch.zeros(rows + 1, dtype=torch.int32)
        named = {name: tokens.clone() for name in ("input_ids", "labels", "position_ids")}
        return {**named, "cu_seq_lens": begins, "seq_idx": tokens.int()}

    def _forward(self, built: nn.Module, batch: Batch) -> torch.Tensor:
        """The loss of a micro-batch."""
        prepared = prepared_of(built)
        model: Any = prepared.model
        tokens, labels = batch["input_ids"], batch["labels"]
        if self.trainer == PLAIN:
            with self._mixed_precision():
                balanced = getattr(model.config.get_text_config(), "output_router_logits", False)
                mask = {"attention_mask": batch["attention_mask"]} if balanced else {}
                found = model(input_ids=tokens, labels=labels, use_cache=False, **mask)
            if self._half:
                found.logits = found.logits.float()  # accelerate's, of every output
            loss: torch.Tensor = found.loss
            return loss
        found, balance = model(
            tokens, labels, batch.get("position_ids"), batch.get("attention_mask")
        )
        if self.trainer == SFT:
            loss = -found.sum() / found.numel()
        else:
            loss = preference_loss(found, self._reference_log_probs(prepared, tokens, labels))
        return loss if balance is None else loss + balance

    def _made(self) -> Any:
        from transformers import AttentionInterface, AttentionMaskInterface

        model = self._from_config()
        if attends_by_sdpa(model):
            AttentionInterface.register(_ATTENTION, AttentionInterface()["sdpa"])
            AttentionMaskInterface.register(_ATTENTION, self._mask)
            model.set_attn_implementation(_ATTENTION)
        if self.trainer != PLAIN:
            if model.base_model is model:
                raise UsageError(
                    f"trainer: {self.trainer} computes log-probabilities from what base_model gives, and "
                    f"{type(model).__name__} has none. Use {PLAIN}."
                )
            model.forward = partial(self._log_probs, model)  # as TRL does
        return model

    def _from_config(self) -> Any:
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

        try:
            # Code that comes with a model is not run: from_pretrained would ask for consent.
            config = AutoConfig.from_pretrained(self.folder, trust_remote_code=False)
            if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
                dtype = getattr(torch, self.dtype)
                self._ask_for_balance(config)
                how = self.experts_implementation
                options = {"experts_implementation": how} if how else {}
                return AutoModelForCausalLM.from_config(config, dtype=dtype, **options)
            reason = f"it has no causal language model of type {config.model_type}"
        except UsageError:
            raise
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise NoPrediction(
            f"transformers {version('transformers')} cannot make a model from {self.folder}: {reason}. Use a "
            "newer transformers, install what it asks for, or give another model."
        )

    def _ask_for_balance(self, config: Any) -> None:
        """Let ``Trainer``'s model add the loss that balances experts, or not, as asked for."""
        if self.output_router_logits is None:
            return
        text = config.get_text_config()
        if not hasattr(text, "output_router_logits"):
            raise UsageError(
                f"output_router_logits: {type(text).__name__} has no such setting, so its model adds no loss "
                "that balances experts. Leave it out."
            )
        text.output_router_logits = self.output_router_logits

    def _mask(
        self, *, batch_size: int, q_length: int, kv_length: int, device: torch.device, **_: Any
    ) -> torch.Tensor | None:
        """The mask of attention, which transformers makes where a row has padding. It looks for that in
        values, and there are none here."""
        if not self.padded:
            return None
        return torch.ones(batch_size, 1, q_length, kv_length, dtype=torch.bool, device=device)

    def _mixed_precision(self) -> AbstractContextManager[Any]:
        if self._half is None:
            return Traceable()
        # DPO's second model is not trained, but the trainer leaves it as if it were.
        return Autocast(self._half, keeps_all=not self.lora and not torch.is_grad_enabled())

    def _when_checkpointed(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """The contexts of a layer in the forward pass, and when backward repeats it."""
        return nullcontext(), self._mixed_precision()

    def _log_probs(
        self,
        model: Any,
        tokens: torch.Tensor,
        labels: torch.Tensor,
        positions: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ) -> Any:
        """The log-probability of each token that is predicted, by TRL's head, and the loss that balances
        experts, if there is one. The reference has none."""
        weight_of_balance = balance_weight(model, self.router_aux_loss_coef)
        balanced = bool(weight_of_balance) and torch.is_grad_enabled()
        options = {"output_router_logits": True} if balanced else {}
        with self._mixed_precision():
            found = model.base_model(
                input_ids=tokens, position_ids=positions, use_cache=False, **options
            )
            hidden = found.last_hidden_state[:, :-1]
            weight = model.get_output_embeddings().weight
            if isinstance(weight, DTensor):
                weight = weight.full_tensor()
            compute_in = self._half or hidden.dtype
            log_probs: torch.Tensor = TiledLogProbs.apply(
                flat(hidden), weight, labels[:, 1:].reshape(-1), compute_in
            )
            log_probs = log_probs.view(len(tokens), -1)
            balance = balance_loss(model, found.router_logits, mask) if balanced else None
        return log_probs, balance if balance is None else weight_of_balance * balance

    def _reference_log_probs(
        self, prepared: Prepared, tokens: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        if self.precompute_ref_log_probs:
            return torch.zeros_like(labels[:, 1:], dtype=torch.float32)
        with torch.no_grad(), without_adapters(prepared.model):
            found: torch.Tensor = (prepared.reference or prepared.model)(tokens, labels)[0]
            return found

    def _shard(self, model: Any) -> None:
        """Shard a model as accelerate does."""
        options: dict[str, Any] = {}
        if half := self._half:
            for parameter in model.parameters():
                if parameter.requires_grad:  # accelerate's master weights
                    parameter.data = parameter.data.float()
            options["mp_policy"] = MixedPrecisionPolicy(half, half, half)
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
