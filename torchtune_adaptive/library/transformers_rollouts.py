"""The steps of TRL's GRPOTrainer and RLOOTrainer, to be planned with what precedes them.

They generate the rows that they train on, and score them. Checked against TRL 1.16, as ``transformers_step``.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchtune_adaptive.common import ConfigError, UsageError, arguments, human_bytes
from torchtune_adaptive.library.longest_generation import (
    Sampling,
    generate_longest,
    without_checkpointing,
)
from torchtune_adaptive.library.phase_planning import (
    Label,
    PhasePeak,
    PhaseQuestion,
    answer_phases,
)
from torchtune_adaptive.library.rollout_parts import (
    gathered,
    numbers_in_weights,
    send_weights,
    shard,
)
from torchtune_adaptive.library.rollouts_plan import PlannedPhase, RolloutsPlan
from torchtune_adaptive.library.trainer_parts import (
    TiledLogProbs,
    Traceable,
    flat,
    policy_loss,
    without_adapters,
)
from torchtune_adaptive.library.transformers_step import (
    Batch,
    Prepared,
    TransformersStep,
    prepared_of,
)
from torchtune_adaptive.library.vllm_engine import (
    ASLEEP,
    EngineNeeds,
    VllmEngine,
    engine_needs,
)
from torchtune_adaptive.planner import call_alone, gpus

GRPO, RLOO = "GRPOTrainer", "RLOOTrainer"
GENERATION, SCORING, TRAINING = "generation", "scoring", "training"
REFERENCE = "scoring by the reference"
_STEPS = {
    name: f"{name} as of TRL 1.16, whose head computes log-probabilities in tiles, of completions only"
    for name in (GRPO, RLOO)
}
_NUMBERS = (
    *("num_generations", "max_prompt_length", "max_completion_length", "num_iterations"),
    "vllm_tensor_parallel_size",
)
_MAY_BE_NONE = ("steps_per_generation", "generation_batch_size", "vllm_max_model_length")
_SWITCHES = ("use_vllm", "vllm_enable_sleep_mode", "vllm_importance_sampling_correction")
_MODES = ("colocate", "server")
_EXPERTS = (
    "experts: all get as many tokens, and without the loss that balances them (underestimates)",
)
_GATHERED, _ACTIVATIONS = "gathered parameters", "activations"


@dataclass(frozen=True, kw_only=True)
class TransformersRollouts(TransformersStep):
    """A step of TRL's GRPOTrainer or RLOOTrainer, to be planned with generating and scoring its rows.

    Its settings are those of ``TransformersStep`` and these, which have the names of the trainer's own
    arguments; the defaults are those of GRPOTrainer.

        step = TransformersRollouts(folder="Qwen3-8B", use_vllm=True, vllm_enable_sleep_mode=True)
        print(step.plan(gpu="h100-80gb").largest)
    """

    trainer: str = GRPO
    """``GRPOTrainer`` or ``RLOOTrainer``."""
    max_length: int = field(default=0, init=False)
    """Tokens in a row: those of the longest prompt and of the longest completion."""
    num_generations: int = 8
    """Completions of each prompt."""
    max_prompt_length: int = 512
    """Tokens of the longest prompt of the data, which TRL 1.16 does not shorten."""
    max_completion_length: int = 512
    """Tokens of the longest completion."""
    steps_per_generation: int | None = None
    """Micro-batches that are generated together; by default, ``gradient_accumulation_steps``."""
    generation_batch_size: int | None = None
    """The same as a number of rows, of all ranks together."""
    num_iterations: int = 1
    """How often what was generated is trained on."""
    beta: float = 0.0
    """The weight of the divergence from the reference; with 0 there is none."""
    use_vllm: bool = False
    """Whether vLLM generates, and not the model itself."""
    vllm_mode: str = "colocate"
    """``colocate``, on the GPUs of the training, or ``server``, on others."""
    vllm_gpu_memory_utilization: float = 0.3
    """The share of a card that colocated vLLM takes."""
    vllm_enable_sleep_mode: bool = False
    """Whether colocated vLLM gives it back while it does not generate."""
    vllm_tensor_parallel_size: int = 1
    """The GPUs that share vLLM's layers."""
    vllm_max_model_length: int | None = None
    """The tokens of the longest sequence that vLLM takes; by default, the model's."""
    vllm_importance_sampling_correction: bool = True
    """Whether the trainer scores what vLLM has generated, to correct for the difference."""
    temperature: float = 1.0
    """The temperature at which the model itself draws tokens; with another one than 1 it holds a copy."""
    top_p: float = 1.0
    """The share of the probabilities among which it draws, for which it sorts them if it is below 1."""

    STEPS: ClassVar = _STEPS

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            arguments.whole(name, getattr(self, name))
        for name in _MAY_BE_NONE:
            if getattr(self, name) is not None:
                arguments.whole(name, getattr(self, name))
        for name in _SWITCHES:
            arguments.one_of(name, getattr(self, name), (True, False))
        arguments.one_of("vllm_mode", self.vllm_mode, _MODES)
        arguments.share("vllm_gpu_memory_utilization", self.vllm_gpu_memory_utilization)
        length = self.max_prompt_length + self.max_completion_length
        object.__setattr__(self, "max_length", length)
        super().__post_init__()
        if self.precompute_ref_log_probs:
            raise UsageError(
                "precompute_ref_log_probs: completions are not known before. Leave it out, or set beta=0."
            )
        if self.num_generations < 2:
            raise UsageError("num_generations: advantages compare completions. Use 2 or more.")
        if self.router_aux_loss_coef is not None:
            raise UsageError(
                f"router_aux_loss_coef: the loss that balances experts is not planned for {self.trainer}. "
                "Leave it out."
            )
        self._check_division()
        if self.colocated and self.ranks % self.vllm_tensor_parallel_size:
            raise UsageError(
                f"vllm_tensor_parallel_size: {self.vllm_tensor_parallel_size} does not divide the "
                f"{self.ranks} GPUs. Use a number that does."
            )

    def _check_division(self) -> None:
        """Raise if what is generated together cannot be divided as TRL does."""
        of_all = self.generation_batch_size
        if of_all is not None:
            if self.steps_per_generation is not None:
                raise UsageError(
                    "generation_batch_size: steps_per_generation says the same. Leave one of them out."
                )
            together = self.per_device_train_batch_size * self.ranks
            if of_all % together:
                raise UsageError(
                    f"generation_batch_size: {of_all} is no multiple of {together}, the rows of a "
                    "micro-batch on all GPUs. Use one."
                )
        rows = self.rows_generated * self.ranks
        if rows % self.num_generations:
            raise UsageError(
                f"num_generations: {self.num_generations} does not divide the {rows} completions that are "
                "generated together (per_device_train_batch_size, steps_per_generation and GPUs, "
                "multiplied). Change one of them."
            )

    @property
    def generated_together(self) -> int:
        """Micro-batches that are generated together."""
        if self.generation_batch_size is not None:
            return self.generation_batch_size // (self.per_device_train_batch_size * self.ranks)
        return self.steps_per_generation or self.gradient_accumulation_steps

    @property
    def rows_generated(self) -> int:
        """The rows that are generated together on each rank."""
        return self.per_device_train_batch_size * self.generated_together

    @property
    def colocated(self) -> bool:
        """Whether vLLM is on the GPUs of the training."""
        return self.use_vllm and self.vllm_mode == "colocate"

    @property
    def scores(self) -> bool:
        """Whether the policy scores completions before it is trained on them."""
        every = self.generated_together * self.num_iterations
        changes_between = self.gradient_accumulation_steps % every != 0
        corrected = self.use_vllm and self.vllm_importance_sampling_correction
        return self.trainer == RLOO or changes_between or corrected

    @property
    def has_reference(self) -> bool:
        """Whether there is a reference: a second model or, with adapters, the same one without them."""
        return self.beta != 0.0

    def plan(
        self,
        gpu: str = "h100-80gb",
        memory: int | str | None = None,
        ceiling: int = 1 << 14,
        headroom: float = 0.05,
        timeout: float = 600.0,
    ) -> RolloutsPlan:
        """Predict the peak of each phase, and the largest micro-batch with which all of them fit, but no
        speed; the arguments are those of ``plan_batch_size``.

        Raises:
            UsageError: an argument cannot be used.
            NoPrediction: transformers is not installed, or a phase cannot be traced.
        """
        question = self._question(gpu, memory, ceiling, headroom)
        engine = self._engine(gpu, memory)
        phases = self._phases(engine, self._least(question.asked.device.caching))
        training = phases.pop()
        found = call_alone(
            answer_phases,
            question,
            phases,
            training,
            _numbers_of,
            timeout=timeout,
        )
        usable = question.asked.device.usable_bytes
        planned = tuple(_planned(one, usable) for one in found.phases)
        least = min(planned, key=lambda one: one.usable_bytes - one.peak)
        largest = min(one.largest for one in planned)
        most = needs = None
        if self.colocated:
            generating = next(one.peak for one in planned if one.name == GENERATION)
            others = max(one.peak for one in planned if one.name != GENERATION)
            most = engine.most(usable, generating, others)
            needs = self._engine_needs(found.weights)
        return RolloutsPlan(
            largest,
            self.per_device_train_batch_size,
            least.peak,
            least.parts,
            least.usable_bytes,
            (
                *question.assumptions,
                *filter(None, [found.as_written]),
                *_EXPERTS * found.has_experts,
            ),
            allocated=least.allocated,
            with_retries=least.with_retries,
            phases=planned,
            limiting=least.name,
            most_utilization=most,
            engine=needs,
        )

    def about(self) -> tuple[str, ...]:
        """What is planned, for people."""
        together = f"{self.rows_generated} rows on each GPU, {self.num_generations} for each prompt"
        lines = [
            *super().about(),
            f"prompts of {self.max_prompt_length} tokens, completions of {self.max_completion_length}, all "
            f"as long as they may be; generated together: {together}",
        ]
        if not self.has_reference:
            lines.append("reference: none, as beta is 0")
        elif self.lora:
            lines.append("reference: the model without adapters")
        else:
            lines.append("reference: a second model, in memory")
        lines.append(f"generation: {self._about_generation()}")
        return tuple(lines)

    def _about_generation(self) -> str:
        if not self.use_vllm:
            return "by the model itself, with a cache of keys and values for all rows at once"
        if self.vllm_mode == "server":
            return "by a server of vLLM on other GPUs, which takes nothing here but what sends it weights"
        share = (
            f"by vLLM, which takes {self.vllm_gpu_memory_utilization:g} of the whole card by its own setting "
            "(arithmetic, not measured)"
        )
        if not self.vllm_enable_sleep_mode:
            return f"{share} all the time"
        return f"{share} while it generates; asleep it is taken to keep {human_bytes(ASLEEP)}"

    # --- the model ------------------------------------------------------------------------------------

    def _reference_model(self) -> nn.Module | None:
        if not self.has_reference or self.lora:
            return None
        reference: nn.Module = self._made()
        reference.requires_grad_(False)
        if self.fsdp:
            shard(reference, self.ranks)
        return reference

    def _log_probs(
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
        with self._mixed_precision():
            found = model.base_model(input_ids=tokens, position_ids=positions, use_cache=False)
            hidden = found.last_hidden_state[:, :-1]
            weight = model.get_output_embeddings().weight
            if isinstance(weight, DTensor):
                weight = weight.full_tensor()
            compute_in = self._half or hidden.dtype
            last = self.max_completion_length
            labels = labels[:, 1:] if hidden.device.type == "cpu" else labels[:, -last:]
            log_probs: torch.Tensor = TiledLogProbs.apply(
                flat(hidden, last), weight, labels.reshape(-1), compute_in
            )
        return log_probs.view(len(hidden), -1)[:, -last:]

    # --- rows -----------------------------------------------------------------------------------------

    def _batch(self, rows: int) -> Batch:
        """A micro-batch among all that were generated together, which stay in memory: tokens and masks, and
        numbers of 32 bits for each token of a completion."""
        numbers = self.scores + self.has_reference + 2 * self.use_vllm
        width = 2 * self.max_length + math.ceil(numbers * self.max_completion_length / 2)
        generated = torch.zeros(rows * self.generated_together, width, dtype=torch.long)
        return {"generated": generated, "advantages": torch.zeros(rows)}

    def _prompts(self, rows: int) -> Batch:
        tokens = torch.zeros(rows, self.max_prompt_length, dtype=torch.long)
        return {"input_ids": tokens, "attention_mask": tokens.clone()}

    def _tokens(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens and the labels of a micro-batch; its mask has been made and is not kept."""
        some = batch["generated"][: len(batch["advantages"]), : self.max_length]
        return some.clone(), some.clone()

    # --- phases ---------------------------------------------------------------------------------------

    def _forward(self, built: nn.Module, batch: Batch) -> torch.Tensor:
        """The loss of a micro-batch."""
        tokens, labels = self._tokens(batch)
        found = prepared_of(built).model(tokens, labels)
        return policy_loss(found, batch["advantages"], with_reference=self.has_reference)

    def _least(self, on_gpu: bool) -> int:
        """The rows that fill a tile of the head: with fewer, it takes memory for fewer tokens. There are two
        at least, as torch takes another path with one."""
        tokens = self.max_completion_length if on_gpu else self.max_length - 1
        return max(2, -(-TiledLogProbs.TOKENS // tokens))

    def _phases(self, engine: VllmEngine, least: int) -> list[PhaseQuestion]:
        """All phases; the last one is the step, which has no work of a phase."""
        if self.use_vllm:
            send = PhaseQuestion(GENERATION, self._send_weights, _nothing, 0, engine.share)
            phases = [send]
        else:
            times = self.generated_together
            phases = [PhaseQuestion(GENERATION, self._generate, self._prompts, times)]
        alike = {"beside": engine.share_in_training, "least": least}
        if self.scores:
            phases.append(PhaseQuestion(SCORING, self._score, self._batch, **alike))
        # Otherwise the reference, which scores the same rows, takes no more than the policy.
        if self.has_reference and (not self.scores or (self.fsdp and not self.lora)):
            by = self._score_by_reference
            phases.append(PhaseQuestion(REFERENCE, by, self._batch, **alike))
        return [*phases, PhaseQuestion(TRAINING, _no_work, self._batch, **alike)]

    def _generate(self, built: nn.Module, batch: Batch, label: Label) -> None:
        model: Any = prepared_of(built).model
        # PEFT generates by the model inside, which accelerate has not wrapped.
        half = None if self.lora else self._half

        def logits(**inputs: Any) -> Any:
            with Traceable() if half is None else self._mixed_precision():
                found = model(positions=inputs.pop("position_ids", None), **inputs)
            if half is not None:
                found.logits = found.logits.float()  # accelerate's, of every output
            return found

        sampling = Sampling(self.temperature != 1.0, self.top_p < 1.0)
        longest = batch["input_ids"], self.max_completion_length
        with without_checkpointing(model):
            generate_longest(logits, model.config, *longest, sampling, label)

    def _send_weights(self, built: nn.Module, batch: Batch, label: Label) -> None:
        send_weights(prepared_of(built).model)

    def _score(self, built: nn.Module, batch: Batch, label: Label) -> None:
        self._scored(prepared_of(built).model, batch)

    def _score_by_reference(self, built: nn.Module, batch: Batch, label: Label) -> None:
        prepared: Prepared = prepared_of(built)
        reference = prepared.reference or prepared.model
        with without_adapters(prepared.model):
            if not self.fsdp or self.lora:
                return self._scored(reference, batch)
            label(_GATHERED)
            with gathered(reference, self._half):
                label(_ACTIVATIONS)
                self._scored(reference, batch)

    def _scored(self, model: nn.Module, batch: Batch) -> None:
        tokens, labels = self._tokens(batch)
        with torch.no_grad(), without_checkpointing(model):
            model(tokens, labels)

    # --- vLLM -----------------------------------------------------------------------------------------

    def _engine(self, gpu: str, memory: int | str | None) -> VllmEngine:
        total = arguments.memory("memory", memory)
        if total is None:
            try:
                total = gpus.gpu(gpu, "gpu", "memory").total
            except ConfigError as error:  # which is for configs
                raise UsageError(str(error)) from None
        return VllmEngine(
            total, self.vllm_gpu_memory_utilization, self.colocated, self.vllm_enable_sleep_mode
        )

    def _engine_needs(self, numbers: int) -> EngineNeeds | None:
        if self.load_in_4bit:
            return None  # how many bits its weights have is up to vLLM
        config = json.loads((Path(self.folder) / "config.json").read_text())
        shared_by = self.vllm_tensor_parallel_size
        return engine_needs(config, numbers, shared_by, self.vllm_max_model_length)


def _nothing(rows: int) -> Batch:
    return {"rows": torch.zeros(rows)}


def _no_work(*_: Any) -> None:
    """Training is a step, and traced as such."""


def _planned(found: PhasePeak, usable: int) -> PlannedPhase:
    peak = found.peak
    return PlannedPhase(
        found.name,
        found.rows,
        peak.reserved,
        found.beside,
        usable - found.beside,
        found.largest,
        peak.parts,
        peak.allocated,
        peak.with_retries,
    )


def _numbers_of(built: nn.Module) -> int:
    return numbers_in_weights(prepared_of(built).model)
