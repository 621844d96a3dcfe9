"""The steps of TRL's GRPOTrainer and RLOOTrainer, to be planned with what precedes them.

They generate the rows that they train on, and score them. Checked against TRL 1.16, as ``transformers_step``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torchtune_adaptive.common import ConfigError, UsageError, arguments, human_bytes
from torchtune_adaptive.library.phase_planning import (
    PhasePeak,
    PhaseQuestion,
    PhasesAnswer,
    PhasesQuestion,
    phases_answered,
    remembered_phases,
)
from torchtune_adaptive.library.rollouts_plan import PlannedPhase, RolloutsPlan
from torchtune_adaptive.library.step_choices import TILE_TOKENS
from torchtune_adaptive.library.transformers_step import TransformersStep
from torchtune_adaptive.library.vllm_engine import (
    ASLEEP,
    EngineNeeds,
    VllmEngine,
    engine_needs,
)
from torchtune_adaptive.planner import gpus

if TYPE_CHECKING:
    from torchtune_adaptive.library.rollouts_model import RolloutsModel
    from torchtune_adaptive.planner import Machine, Pace

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
    UNTRACED: ClassVar[tuple[str, ...]] = (
        *TransformersStep.UNTRACED,
        *("num_generations", "steps_per_generation", "generation_batch_size"),
        *("vllm_mode", "vllm_gpu_memory_utilization", "vllm_enable_sleep_mode"),
        *("vllm_tensor_parallel_size", "vllm_max_model_length"),
    )

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
        if self.use_liger_kernel:
            raise UsageError(
                f"use_liger_kernel: Liger's kernels are not planned for {self.trainer}. Leave it out."
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
        cache: bool | str = True,
        machine: Machine | None = None,
    ) -> RolloutsPlan:
        """Predict the peak of each phase, and the largest micro-batch with which all of them fit, but no
        speed, so that ``machine`` changes nothing; the arguments are those of ``TransformersStep.plan``.

        Raises:
            UsageError: an argument cannot be used.
            NoPrediction: transformers is not installed, or a phase cannot be traced.
        """
        engine = self._engine(gpu, memory)
        question = self._of_phases(engine, gpu, memory, ceiling, headroom, cache, machine)
        return self._planned(engine, question, phases_answered(question, timeout))

    def remembered(
        self,
        gpu: str = "h100-80gb",
        memory: int | str | None = None,
        ceiling: int = 1 << 14,
        headroom: float = 0.05,
        cache: bool | str = True,
        machine: Machine | None = None,
    ) -> RolloutsPlan | None:
        """What ``plan`` answers, if that follows from what it has traced before; else None. It takes no
        trace, and no torch.

        Raises:
            UsageError: an argument cannot be used.
            NoPrediction: transformers is not installed, or the model is of a kind that is not planned.
        """
        engine = self._engine(gpu, memory)
        question = self._of_phases(engine, gpu, memory, ceiling, headroom, cache, machine)
        found = remembered_phases(question)
        return None if found is None else self._planned(engine, question, found)

    def model(self) -> RolloutsModel:
        from torchtune_adaptive.library.rollouts_model import RolloutsModel

        return RolloutsModel(self)

    def _of_phases(self, engine: VllmEngine, gpu: str, *rest: Any) -> PhasesQuestion:
        """The question about all phases."""
        question = self._question(gpu, *rest)
        phases = self._phases(engine, self._filling(question.asked.device.caching))
        return PhasesQuestion(question, phases[:-1], phases[-1], self._in_model("numbers"))

    def _pace(self, pace: Pace | None) -> None:
        """No speed is predicted."""

    def _derived(self) -> dict[str, Any]:
        return {"generated together": self.generated_together, "scores": self.scores}

    def _planned(
        self, engine: VllmEngine, question: PhasesQuestion, found: PhasesAnswer
    ) -> RolloutsPlan:
        step = question.step
        usable = step.asked.device.usable_bytes
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
                *step.assumptions,
                *filter(None, [found.as_written]),
                *_EXPERTS * found.has_experts,
            ),
            allocated=least.allocated,
            with_retries=least.with_retries,
            unchecked=found.unchecked,
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

    def _filling(self, on_gpu: bool) -> int:
        """The rows that fill a tile of the head: with fewer, it takes memory for fewer tokens. There are two
        at least, as torch takes another path with one."""
        tokens = self.max_completion_length if on_gpu else self.max_length - 1
        return max(2, -(-TILE_TOKENS // tokens))

    def _phases(self, engine: VllmEngine, least: int) -> list[PhaseQuestion]:
        """All phases; the last one is the step, which has no work of a phase."""
        if self.use_vllm:
            send = PhaseQuestion(
                GENERATION,
                self._in_model("send_weights"),
                self._in_model("nothing"),
                0,
                engine.share,
            )
            phases = [send]
        else:
            times = self.generated_together
            phases = [
                PhaseQuestion(
                    GENERATION, self._in_model("generate"), self._in_model("prompts"), times
                )
            ]
        alike = {"beside": engine.share_in_training, "least": least}
        if self.scores:
            phases.append(
                PhaseQuestion(SCORING, self._in_model("score"), self._in_model("batch"), **alike)
            )
        # Otherwise the reference, which scores the same rows, takes no more than the policy.
        if self.has_reference and (not self.scores or (self.fsdp and not self.lora)):
            by = self._in_model("score_by_reference")
            phases.append(PhaseQuestion(REFERENCE, by, self._in_model("batch"), **alike))
        return [
            *phases,
            PhaseQuestion(TRAINING, self._in_model("no_work"), self._in_model("batch"), **alike),
        ]

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
        if self.is_quantized:
            return None  # how many bits its weights have is up to vLLM
        config = json.loads((Path(self.folder) / "config.json").read_text())
        shared_by = self.vllm_tensor_parallel_size
        return engine_needs(config, numbers, shared_by, self.vllm_max_model_length)


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
