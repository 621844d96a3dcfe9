"""Traces the training step of a config, for any of the recipes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import nn
from torchtune import training
from torchtune.modules import TransformerSelfAttentionLayer

from torchtune_adaptive.core import (
    Batch,
    Choice,
    Objective,
    StepOptions,
    TrainStep,
    knobs,
    sample_dropout,
)
from torchtune_adaptive.planner import RecordedStep, StepTracer, fill
from torchtune_adaptive.recipe.checkpoints.policy_and_value import PolicyAndValue
from torchtune_adaptive.recipe.kinds.by_name import recipe_kind
from torchtune_adaptive.recipe.kinds.generating import Generating
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.settings.phase_names import SCORING
from torchtune_adaptive.recipe.setup.environment import Environment
from torchtune_adaptive.recipe.setup.model import compile_backend, initialize_ropes
from torchtune_adaptive.recipe.setup.model_switches import build_switches
from torchtune_adaptive.recipe.setup.offloading import Offloading
from torchtune_adaptive.recipe.setup.optimizer import build_optimizers
from torchtune_adaptive.recipe.tracing.helped_parts import (
    dequantizing_by,
    offloading_from_fake_device,
    quantizing_once,
)
from torchtune_adaptive.recipe.tracing.image_rows import Images
from torchtune_adaptive.recipe.tracing.packed_layer import in_four_regions, is_split
from torchtune_adaptive.recipe.tracing.rollout_phases import copying_no_values, work_of_phase

CACHES = "caches of keys and values"
"""Category of what generation allocates for each row in advance."""


class _Offloading(Offloading):
    """The same context in each forward pass: none of them fails and leaves something in it."""

    def __call__(self) -> AbstractContextManager[Any]:
        if not self.enabled:
            return nullcontext()
        if self._first is None:  # made when it is needed: it asks the device for streams
            self._first = training.get_act_offloading_ctx_manager(self._model, True)
        return self._first


class Tracer(StepTracer):
    """One rank of a run of any of the recipes, which can take steps of any size; a function may remove layers
    of its models."""

    def __init__(
        self,
        asked: Asked,
        ranks: int,
        rank: int = 0,
        shorten: Callable[[nn.Module], None] = lambda model: None,
        before_ampere: bool = False,
    ) -> None:
        super().__init__(asked["device"] == "cpu", rank, ranks, asked.holders, before_ampere)
        dtype = training.get_dtype(asked["dtype"], torch.device("cpu"))
        environment = Environment(self.device, dtype, self.ranks, shorten=shorten)
        self._within = self._with_parts_of_torchtune
        self._accumulation = min(asked.accumulation, 2)  # as in a trial
        self._layer_running = 0
        self._each_is_seen = False
        """Whether another mode has to see each operation, as that of checkpointing by operations."""

        if asked.compiled_for_gpu:
            self.follow_compiler(compile_backend())

        self._packed = asked.packed()
        self._kind = kind = recipe_kind(asked, environment)
        self._rows = kind.rows()
        with mock.patch.object(torch, "compile", self.as_compiled), quantizing_once():
            model = kind.model_without_weights(self.unrecorded)
            frozen = kind.frozen_without_weights(self.unrecorded)
        models = (model, *frozen)
        # With CPU offload, parameters wait on the host, and the optimizer works there.
        offloaded = asked["fsdp_cpu_offload"]
        home = torch.device("cpu") if offloaded else self.device
        with self.tracing():
            for each in models:
                fill(each, home)
                _initialize_fake_ropes(each, environment)
            self._images = Images.of(model)
            if self._images is not None:
                self._images.prepare(model, self.watch.replaced)
            self._follow_layers(model)  # inside of the switches that repeat them
            objective = kind.objective(model, frozen)
            step = self._new_step(asked, environment, model, objective)
        self.max_seq_len: int | None = getattr(model, "max_seq_len", None)
        self.layers = step.options.switches.layers
        self.begin(step, models)
        self._scores_first = self.uneven
        for each in models:
            self._follow_categories(each)

    @contextmanager
    def _with_parts_of_torchtune(self) -> Iterator[None]:
        offloading = nullcontext() if self.recorder.simulated else offloading_from_fake_device()
        each = self._each_is_seen or self.regions is not None
        dequantizing = nullcontext() if each else dequantizing_by(self._known_events.call)
        with offloading, dequantizing:
            yield

    def as_compiled(self, function: Any, **options: Any) -> Any:
        """The same; but a layer of packed rows is several regions."""
        if function is sample_dropout.drop and self.regions is None:
            return lambda rows, *_: torch.empty_like(rows)  # one kernel, without temporaries
        layer = getattr(function, "__self__", None)
        if self.regions is None or not (self._packed and is_split(layer)):
            return super().as_compiled(function, **options)
        split = in_four_regions(layer, self.regions.region)
        return lambda *arguments, **named: (split if self.regions.following else function)(
            *arguments, **named
        )

    def _new_step(
        self, asked: Asked, environment: Environment, model: nn.Module, objective: Objective
    ) -> TrainStep:
        optimizers = build_optimizers(asked, environment, model, None)
        offloading = _Offloading(model, asked["enable_activation_offloading"])
        switches = build_switches(asked, environment, model, objective, offloading)
        self._own = switches.choice
        return TrainStep(
            model=model,
            optimizers=optimizers.steppers,
            objective=objective,
            device=environment.device,
            memory=self.memory,
            ranks=self.ranks,
            options=StepOptions(
                survive=False,
                activations=offloading,
                switches=switches,
                clip_grad_norm=asked["clip_grad_norm"],
                optimizer_in_backward=optimizers.in_backward,
            ),
        )

    def take_step(
        self,
        rows: int,
        length: int,
        choice: Choice | None = None,
        micro_batches: int | None = None,
        as_written: bool = False,
    ) -> RecordedStep:
        """The step at a size.

        Args:
            rows: the rows in each micro-batch.
            length: the tokens in each row.
            choice: other values of knobs that are switches, for this step.
            micro_batches: their number; None is as configured, but no more than two.
            as_written: whether nothing is compiled, so that its operations can be noted.
        """
        whole = self._own | (choice or {})
        noting = as_written or self.regions is None
        with self.uncompiled() if as_written else nullcontext():
            with self.tracing():  # torchtune asks the device for streams when offloading begins
                self.step.switch(whole)
            self._each_is_seen = whole[knobs.CHECKPOINT] == "operations"
            return self.trace(
                lambda: self._batch(rows, length),
                micro_batches or self._accumulation,
                (lambda: self._layer_running) if noting else None,
            )

    def take_phase(
        self, name: str, rows: int, length: int, as_written: bool = False
    ) -> RecordedStep:
        """A micro-batch of a phase of a rollout, once the optimizer's state is there.

        Args:
            name: what is traced of a rollout: see ``traces``.
            rows: the rows in the micro-batch.
            length: the tokens of the longest prompt with the longest response.
            as_written: whether nothing is compiled. What generates never is.
        """
        assert isinstance(self._kind, Generating)
        recorder = self.recorder

        def making_caches() -> None:
            recorder.category = CACHES

        eager = as_written or name != SCORING
        with copying_no_values(), self.uncompiled() if eager else nullcontext():
            size = (rows, length)
            work = work_of_phase(self._kind, self.step, name, size, making_caches)
            if name == SCORING and self._scores_first:
                # When FSDP first uses a model, it replaces the parts of parameters that it has to pad. Those
                # that are only scored with have not been used by a step, and this happens once in a run.
                self.trace_forward(work)
                self._scores_first = False
            return self.trace_forward(work)

    def _batch(self, rows: int, length: int) -> Batch:
        batch = self._rows.imagined(rows, length, self.recorder.simulated)
        if self._images is not None:
            batch |= self._images.batch(rows, length)
        return batch

    def _follow_categories(self, model: nn.Module) -> None:
        """Distinguish activations from what belongs to the loss, which begins after the last norm."""
        recorder = self.recorder

        def enters(category: str) -> Callable[..., None]:
            def hook(*_: object) -> None:
                recorder.category = category

            return hook

        def passed_norm(module: nn.Module, inputs: object, output: torch.Tensor) -> None:
            recorder.category = recorder.LOSS
            if output.requires_grad:
                output.register_hook(enters(recorder.ACTIVATIONS))

        if isinstance(model, PolicyAndValue):
            for each in model.children():
                self._follow_categories(each)
            return
        if self.ranks.size > 1:  # FSDP gathers what the root has before any other hook
            model.register_forward_pre_hook(enters(recorder.GATHERED), prepend=True)
        model.register_forward_pre_hook(enters(recorder.ACTIVATIONS))
        decoder = getattr(model, "decoder", model)
        if isinstance(norm := getattr(decoder, "norm", None), nn.Module):
            norm.register_forward_hook(passed_norm)

    def _follow_layers(self, model: nn.Module) -> None:
        """Know the layer whose forward pass is running, by its number from 1: also when it is repeated."""

        def followed(forward: Callable[..., Any], number: int) -> Callable[..., Any]:
            def run(*arguments: Any, **named: Any) -> Any:
                self._layer_running = number
                try:
                    return forward(*arguments, **named)
                finally:  # repeating ends early, once it has all that was asked for
                    self._layer_running = 0

            return run

        layers = (m for m in model.modules() if isinstance(m, TransformerSelfAttentionLayer))
        for number, layer in enumerate(layers, 1):
            layer.forward = followed(layer.forward, number)


def _initialize_fake_ropes(model: nn.Module, environment: Environment) -> None:
    for module in model.modules():
        if hasattr(module, "apply_scaling"):  # Llama 3.1's reads values, and fake tensors have none
            module.apply_scaling = lambda freqs, *_, **__: torch.empty_like(freqs)  # type: ignore
    initialize_ropes(model, environment)
