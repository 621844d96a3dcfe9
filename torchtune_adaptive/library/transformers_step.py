"""The step of transformers' Trainer, and of TRL's SFTTrainer and DPOTrainer, to be planned.

The model is transformers' own, made from its config; ``trainer_parts`` has what the trainers add to it.
``PLANNED`` has the versions with which it was compared, none of which but transformers has to be installed.
That one is imported where it is needed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torchtune_adaptive.common import (
    NoPrediction,
    about_versions,
    package_fingerprint,
    versions_of,
)
from torchtune_adaptive.library import step_estimate
from torchtune_adaptive.library.liger_choices import about_liger, refuse_types
from torchtune_adaptive.library.model_types import about_kernels, refuse_loops
from torchtune_adaptive.library.planning import Plan, answered, remembered, tabulated
from torchtune_adaptive.library.step_checks import check_attention, check_step
from torchtune_adaptive.library.step_choices import (
    ALL_LINEAR,
    BITSANDBYTES,
    DPO,
    OPTIMIZERS,
    PLAIN,
    SDPA,
    SFT,
    TILE_TOKENS,
    about_optimizer,
)
from torchtune_adaptive.library.step_questions import (
    TRACED_MICRO_BATCHES,
    StepQuestion,
    step_question,
)

if TYPE_CHECKING:
    from torchtune_adaptive.library.transformers_model import StepModel
    from torchtune_adaptive.planner import DeviceLimits, Machine, Pace, Question, step_table

_STEPS = {
    SFT: "SFTTrainer as of TRL 1.16, whose head computes log-probabilities in tiles, never all logits",
    DPO: "DPOTrainer as of TRL 1.16, whose head computes log-probabilities in tiles, never all logits",
    PLAIN: "transformers' Trainer: all logits, in float32 for the loss",
}
_CEILING = 1 << 14
"""The largest micro-batch that is considered, in rows."""
_PACKAGES = (
    *(
        "torch",
        "transformers",
        "trl",
        "peft",
        "accelerate",
        "bitsandbytes",
        "kernels",
        "flash-attn",
    ),
    *("mamba-ssm", "causal-conv1d", "flash-linear-attention"),
)
"""Packages on whose version it may depend how a model computes."""


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
    attn_implementation: str = SDPA
    """``sdpa``, or ``flash_attention_2``, which needs no masks for padding and sliding windows."""
    packing: bool = False
    """Whether samples are packed into rows of ``max_length``, and all rows of a micro-batch into one row
    without padding, as SFTTrainer does."""
    padding_free: bool = False
    """Whether all rows of a micro-batch, which are not packed, are one row without padding, as SFTTrainer can
    have them."""
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
    load_in_8bit: bool = False
    """Whether linear layers are loaded with 8 bits (bitsandbytes, LLM.int8)."""
    load_in_4bit: bool = False
    """Whether linear layers are loaded with 4 bits (bitsandbytes, QLoRA)."""
    bnb_4bit_compute_dtype: str | None = None
    """The type in which these layers compute; None is ``dtype``, as TRL's own command has it."""
    bnb_4bit_use_double_quant: bool = False
    """Whether the scales of their weights are quantized as well."""
    bnb_4bit_quant_storage: str = "uint8"
    """The type that their weights are stored as. With ``fsdp``, each rank has all of those in ``uint8``, and
    its share of those in ``bfloat16``, ``float16`` or ``float32``."""
    prepare_for_kbit_training: bool | None = None
    """Whether what is not quantized is cast to float32, as PEFT's ``prepare_model_for_kbit_training`` does;
    by default, with ``Trainer``."""
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
    use_liger_kernel: bool = False
    """Whether norms, rotations, gated layers and, with ``Trainer``, the head and its loss are Liger's
    kernels."""
    liger_kernel_config: Mapping[str, bool] | None = None
    """Which of them are on or off: ``rope``, ``rms_norm``, ``swiglu`` (Gemma's is ``geglu``),
    ``fused_linear_cross_entropy`` and ``cross_entropy``, which alone is off by default."""
    ranks: int = 1
    """The number of ranks."""
    fsdp: bool = False
    """Whether ranks share the weights (FSDP2); if not, each has all of them (DDP)."""

    STEPS: ClassVar = _STEPS  # the trainers, and what is said of their steps
    ESTIMATE_ERROR: ClassVar = step_estimate.ERROR  # how far nine of ten estimates are off at most
    UNTRACED: ClassVar[tuple[str, ...]] = (
        "folder",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
    )
    # Settings by which steps are not told apart as they are remembered.

    def __post_init__(self) -> None:
        check_step(self)

    @property
    def has_pairs(self) -> bool:
        """Whether a row is a pair: one that is chosen and one that is rejected."""
        return self.trainer == DPO

    @property
    def in_one_row(self) -> bool:
        """Whether all rows of a micro-batch are one row."""
        return self.packing or self.padding_free

    @property
    def has_masks(self) -> bool:
        """Whether attention gets a mask where a row has padding, or a layer sees less than a row."""
        return not self.in_one_row and self.attn_implementation == SDPA

    @property
    def half(self) -> str | None:
        """The type that mixed precision computes in, if there is any."""
        if self.fp16:
            return "float16"
        return None if self.bf16 is False else "bfloat16"

    @property
    def is_quantized(self) -> bool:
        """Whether linear layers are loaded with 4 or 8 bits."""
        return self.load_in_4bit or self.load_in_8bit

    @property
    def computes_4_bits_in(self) -> str:
        """The type in which layers of 4 bits compute."""
        return self.bnb_4bit_compute_dtype or self.dtype

    @property
    def shares_4_bits(self) -> bool:
        """Whether ranks share weights of 4 bits: FSDP2 takes those that look like numbers."""
        return self.fsdp and self.bnb_4bit_quant_storage != "uint8"

    @property
    def is_prepared(self) -> bool:
        """Whether what is not quantized is in float32."""
        asked = self.prepare_for_kbit_training
        return self.trainer == PLAIN if asked is None else asked

    @property
    def adapters_are_half(self) -> bool:
        """Whether adapters are in bfloat16."""
        return self.is_quantized and self.trainer != PLAIN

    def plan(
        self,
        gpu: str = "h100-80gb",
        memory: int | str | None = None,
        ceiling: int = _CEILING,
        headroom: float = 0.05,
        timeout: float = 600.0,
        cache: bool | str = True,
        machine: Machine | None = None,
    ) -> Plan:
        """Predict the peak of the step, the largest micro-batch that fits, and the speed; the arguments
        are those of ``plan_batch_size``. What was traced is remembered in ``cache``: the user's, a folder, or
        none.

        Raises:
            UsageError: an argument cannot be used.
            NoPrediction: transformers is not installed, or the step cannot be traced.
        """
        return answered(self._question(gpu, memory, ceiling, headroom, cache, machine), timeout)

    def remembered(
        self,
        gpu: str = "h100-80gb",
        memory: int | str | None = None,
        ceiling: int = _CEILING,
        headroom: float = 0.05,
        cache: bool | str = True,
        machine: Machine | None = None,
    ) -> Plan | None:
        """What ``plan`` answers, if that follows from what it has traced before; else None. It takes no
        trace, and no torch.

        Raises:
            UsageError: an argument cannot be used.
            NoPrediction: transformers is not installed, or the model is of a kind that is not planned.
        """
        return remembered(self._question(gpu, memory, ceiling, headroom, cache, machine))

    def estimated(self) -> int | None:
        """Estimate the peak of the step by arithmetic, in bytes: without a trace, torch or transformers. Nine
        of ten estimates are within ``ESTIMATE_ERROR`` of what ``plan`` predicts. None for a step that is not
        in the formulas."""
        return step_estimate.estimated(self)

    # The memory of a device, with the error that predictions for this step have.
    def limits(self, device: DeviceLimits) -> DeviceLimits:
        return device.fragmented if self.is_quantized else device

    # Micro-batches of many sizes on several GPUs, of which one is asked about. It may trace, so it is for a
    # process that does nothing else.
    def table(
        self,
        gpus: Sequence[str],
        own: int,
        rows: tuple[int, ...] | None,
        memory: int | None,
        headroom: float,
        machine: Machine,
        timed: bool,
    ) -> step_table.StepTable:
        questions = [self._question(gpu, memory, _CEILING, headroom, True, machine) for gpu in gpus]
        devices = [(one.asked.device, one.asked.pace if timed else None) for one in questions]
        return tabulated(questions[own], devices, rows)

    # For the process that traces: it needs torch.
    def model(self) -> StepModel:
        from torchtune_adaptive.library.transformers_model import StepModel

        return StepModel(self)

    def _in_model(self, name: str) -> Callable[..., Any]:
        """A function of the model, which only a process that traces imports."""
        return partial(_call_model, self, name)

    def _question(
        self,
        gpu: str,
        memory: int | str | None,
        ceiling: int,
        headroom: float,
        cache: bool | str,
        machine: Machine | None = None,
    ) -> StepQuestion:
        """The question about the step, if it can be traced here."""
        self._require_traceable()
        question = step_question(
            self._in_model("build"),
            optimizer=self._in_model("optimizer"),
            forward=self._in_model("forward"),  # a share of the loss, which does as well as its sum
            worst_case=self._in_model("batch"),
            ranks=self.ranks,
            rows=self.per_device_train_batch_size,
            accumulation=self.gradient_accumulation_steps,
            max_grad_norm=self.max_grad_norm or None,
            gpu=gpu,
            memory=memory,
            ceiling=ceiling,
            headroom=headroom,
            length=self.max_length * (1 + self.has_pairs),
            machine=machine,
        )
        check_attention(self, gpu, question.asked.device.before_ampere)
        device, pace = self.limits(question.asked.device), self._pace(question.asked.pace)
        asked = replace(question.asked, device=device, pace=pace)
        facts = self._facts(asked)
        return replace(
            question,
            asked=asked,
            least=self._least(),
            searches=False,
            by_trainer=True,
            facts=facts,
            cache=cache,
        )

    def _pace(self, pace: Pace | None) -> Pace | None:
        """What the speed follows from, where one is predicted."""
        return pace and replace(pace, quantized=self.is_quantized)

    def _least(self) -> int:
        """The rows that fill a tile of TRL's head: with fewer, it takes memory for fewer tokens. There are
        two at least, as torch takes another path with one."""
        if self.trainer == PLAIN:
            return 2
        tokens = (self.max_length - 1) * (1 + self.has_pairs)
        return max(2, -(-TILE_TOKENS // max(1, tokens)))

    def _facts(self, asked: Question) -> dict[str, Any] | None:
        """What traces of this step depend on; None where somebody else's code is part of it."""
        kind = type(self)
        try:
            config = json.loads((Path(self.folder) / "config.json").read_text())
        except (OSError, ValueError):  # transformers says what is wrong with it
            return None
        if not kind.__module__.startswith(f"{__package__}."):
            return None
        settings = {
            one.name: getattr(self, one.name)
            for one in fields(self)
            if one.name not in self.UNTRACED
        }
        return {
            "step": kind.__name__,
            "settings": settings,
            "derived": self._derived(),
            "micro-batches": min(self.gradient_accumulation_steps, TRACED_MICRO_BATCHES),
            "config": config,
            "on a GPU": asked.device.caching,
            "before Ampere": asked.device.before_ampere,
            "timed": asked.pace is not None,
            "packages": versions_of(*_PACKAGES),
            "code": package_fingerprint(),
        }

    def _derived(self) -> dict[str, Any]:
        """What follows from settings by which steps are not told apart, and traces depend on."""
        return {}

    def _require_traceable(self) -> None:
        """Raise if no step of the model can be traced here.

        Raises:
            NoPrediction: transformers is not installed, or the model is of a kind that is not planned.
        """
        if find_spec("transformers") is None:
            raise NoPrediction(
                "transformers is not installed, so its step cannot be traced. Install it (pip install "
                "transformers), or plan one of torchtune's configs."
            )
        refuse_loops(self.folder)
        if self.use_liger_kernel:
            refuse_types(self.folder)

    def about(self) -> tuple[str, ...]:
        """What is planned, for people."""
        computes = f", computing in {self.half}" if self.half not in (None, self.dtype) else ""
        lines = [
            f"step: that of {self.STEPS[self.trainer]}",
            f"model: transformers {version('transformers')}, weights in {self.dtype}{computes}",
            f"checkpointing: {'every layer' if self.gradient_checkpointing else 'none'}",
            f"optimizer: {about_optimizer(self.optim)}; of what is trained",
        ]
        others = "float32, as PEFT prepares it" if self.is_prepared else self.dtype
        if self.load_in_8bit:
            lines.append(
                "linear layers: 8 bits as of bitsandbytes 0.50, without outliers (inputs of a magnitude of 6 "
                f"or more); the rest is in {others}"
            )
        if self.load_in_4bit:
            double = "with" if self.bnb_4bit_use_double_quant else "without"
            lines.append(
                f"linear layers: 4 bits as of bitsandbytes 0.50, {double} double quantization, computing in "
                f"{self.computes_4_bits_in}; the rest is in {others}"
            )
            if self.fsdp:
                shared = "shared by ranks" if self.shares_4_bits else "whole on each rank"
                lines.append(
                    f"weights of 4 bits: stored as {self.bnb_4bit_quant_storage}, so {shared}; their scales "
                    "are whole on each rank"
                )
        if self.lora:
            targets = self.target_modules
            named = targets if isinstance(targets, str) else ", ".join(targets)
            dtype = "bfloat16 as TRL" if self.adapters_are_half else "float32 as PEFT 0.21"
            lines.append(f"adapters: rank {self.r}, in {dtype} has them, on {named}")
        if self.has_pairs:
            reference = "the model without adapters" if self.lora else "a second model, in memory"
            found = "computed before" if self.precompute_ref_log_probs else reference
            lines.append(f"reference: {found}; a row is a pair, whose two halves are one batch")
        if self.use_liger_kernel:
            switches = self.liger_kernel_config
            lines.append(about_liger(self.folder, switches, self.trainer != PLAIN))
        if self.ranks > 1:
            how = (
                "FSDP2 as accelerate 1.15 wraps it"
                if self.fsdp
                else "DDP, with buckets besides the gradients"
            )
            lines.append(f"ranks: {how}")
        if self.in_one_row:
            how = "packed" if self.packing else "padding-free"
            lines.append(
                f"rows: {how}, and those of a micro-batch are one row. attn_implementation="
                "'flash_attention_2' is assumed; sdpa would have a mask for each pair of tokens"
            )
        else:
            mask = "with padding, which costs a mask" if self.padded else "without padding"
            lines.append(f"rows: {mask}")
        return (*lines, *about_kernels(self.folder), *about_versions(*self._packages()))

    def _packages(self) -> Iterator[str]:
        """The libraries whose code the step is."""
        yield "transformers"
        of_others = {
            "trl": self.trainer != PLAIN,
            "peft": self.lora,
            "accelerate": self.fsdp,
            "bitsandbytes": self.is_quantized or self.optim in BITSANDBYTES,
        }
        yield from (name for name, used in of_others.items() if used)


def _call_model(step: TransformersStep, name: str, *arguments: Any) -> Any:
    return getattr(step.model(), name)(*arguments)
