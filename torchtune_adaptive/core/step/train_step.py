"""One optimizer step: the same object wherever one is needed, so that what is probed is what is trained.

    for number, batch in enumerate(micro_batches, 1):
        step.forward_backward(batch, last=number == len(micro_batches))
    outcome = step.apply()

Running out of memory does not raise while the step can still be discarded; see Note [Failure before a
collective] in ``step.failures``. Then ``outcome.lost`` is true on every rank, nothing has changed on any, and
the caller decides what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from torchtune_adaptive.common import RankLost, UsageError
from torchtune_adaptive.core.device.memory import DeviceMemory
from torchtune_adaptive.core.private import drop_masks
from torchtune_adaptive.core.ranks import fsdp
from torchtune_adaptive.core.ranks.agreement import Ranks
from torchtune_adaptive.core.ranks.collectives import Collectives
from torchtune_adaptive.core.ranks.communicators import connect
from torchtune_adaptive.core.ranks.counts import groups_of
from torchtune_adaptive.core.ranks.reduction import reduction_of
from torchtune_adaptive.core.ranks.supported import (
    holders_of,
    require_no_graphs,
    require_supported,
    require_watchable,
    sharers_of,
    wrapped_in,
)
from torchtune_adaptive.core.rows.micro_batches import Weightless
from torchtune_adaptive.core.step import gradients
from torchtune_adaptive.core.step.buffers import Buffers
from torchtune_adaptive.core.step.exchange import Exchange, ForwardDone, StepLost, StepOutcome
from torchtune_adaptive.core.step.failures import Failures, StepHalfApplied, drop_unfinished
from torchtune_adaptive.core.step.knobs import Choice, Switches
from torchtune_adaptive.core.step.objective import Batch, Objective, Summed
from torchtune_adaptive.core.step.small_batches import SmallBatches
from torchtune_adaptive.core.step.trees import mapped, shape_of, tensors_in

T = TypeVar("T")
# What ranks tell each other after a pass without gradients; the largest counts.
_STOP, _FAILED = 1, 2


@dataclass(frozen=True)
class StepOptions:
    """The ways in which a step may be taken."""

    survive: bool = True
    """Whether a step in which memory runs out is discarded; otherwise the error is raised as it is."""
    compiled: bool = False
    """Whether the model runs compiled code: collectives in it cannot be seen."""
    activations: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Maker of the context of forward passes, such as activation offloading; a failed step's is replaced."""
    switches: Switches = field(default_factory=Switches)
    """The memory knobs that can be changed between steps."""
    clip_grad_norm: float | None = None
    """The norm above which gradients are scaled down."""
    optimizer_steps: bool = True
    """Whether a step ends with that of the optimizer; otherwise with the gradient of the mean loss in
    ``.grad``, which is then the caller's. Trials always include the optimizer."""
    optimizer_in_backward: bool = False
    """Whether the optimizers step in backward, by hooks that they come with."""
    launched: Callable[[], None] = lambda: None
    """Function called after every collective that FSDP launches, if the step is to survive."""
    sync_each_batch: bool = True
    """Whether FSDP reduces the gradients of each micro-batch. If not, each rank adds up whole ones and
    reduces them with the last: fewer collectives, and as much memory as unsharded gradients take."""
    measure_noise: bool = False
    """Whether gradient noise is measured, by one more norm of each micro-batch's gradient. Not possible where
    optimizers step in backward: there the step's gradient is never complete."""
    scaler: GradScaler | None = None
    """The scaler of losses against underflow in float16, which is kept up to date. Not possible where
    optimizers step in backward."""
    context_group: dist.ProcessGroup | None = None
    """The ranks that hold parts of the same rows, as in context parallelism: their micro-batches always have
    one shape."""
    stop_requested: Callable[[], bool] = lambda: False
    """Whether this rank has been asked to stop; all ranks learn of it in the outcome."""


@dataclass(kw_only=True, eq=False, repr=False)
class TrainStep:
    """Forward, backward, and the optimizer step of a model.

    Raises:
        UsageError: ``options.survive`` is set, and the model is spread over the ranks in a way that is not
            supported.
    """

    model: nn.Module
    """The model that is trained, sharded by FSDP2 or not."""
    objective: Objective
    optimizers: Sequence[Optimizer]
    """The optimizer, or one for each parameter if they step in backward."""
    device: torch.device
    memory: DeviceMemory
    """The memory of that device."""
    ranks: Ranks
    options: StepOptions = field(default_factory=StepOptions)

    require_no_graphs = staticmethod(require_no_graphs)

    def __post_init__(self) -> None:
        model, ranks, device, memory = self.model, self.ranks, self.device, self.memory
        options, objective = self.options, self.objective
        self._models = (model, *objective.frozen)
        self._buffers: dict[str, Buffers] = {}
        self.recomputes = False
        """Whether layers are computed again in backward where the caller's own step does not: buffers then
        are as after forward, although they change twice."""
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._activations = options.activations()
        if options.survive:
            for each in self._models:
                require_no_graphs("model", each)
            require_watchable(self._models)
            require_supported(model, ranks)
        self._holders = holders_of(model, ranks)
        sharers = sharers_of(self._holders, ranks, options.context_group)
        self.splits_rows = sharers.size > 1
        """Whether several ranks have the same rows, or parts of them."""
        if self.splits_rows and options.survive:
            self._require_no_obstacle()
        if not options.sync_each_batch and fsdp.roots(model):
            self._require_gradients_of_step()
        if options.measure_noise and fsdp.has_experts(model):
            raise UsageError(
                "model: its experts have gradients of the rows of other ranks, whose noise cannot be told "
                "apart. Do not measure gradient noise."
            )
        self._reduction = reduction_of(model, ranks, self._holders, options.sync_each_batch)
        measures_noise = options.measure_noise and not options.optimizer_in_backward
        self._noise = SmallBatches(device, self._reduction, measures_noise)
        # Noise is measured where the gradient of each rank is complete, and not yet reduced.
        self._reduces_in_last = self._reduction.in_last and not measures_noise
        loss_scale = gradients.LossScale.of(options.scaler)
        self._scaling = gradients.Scaling(
            self._reduction.averaged_over, options.clip_grad_norm, loss_scale
        )
        self.collectives = Collectives(
            self._models,
            ranks,
            sharers,
            device,
            launched=options.launched,
            reducing=self._noise.observer,
            survive=options.survive,
            compiled=options.compiled,
        )
        self._follow_switches()
        self._failures = Failures(self.collectives, memory, options.survive, self.forget)
        self._exchange = Exchange(
            ranks=ranks,
            counts_rows=self.counts_rows,
            memory=memory,
            device=device,
            metrics=objective.metrics,
            noise=self._noise,
            scaling=self._scaling,
            stop_requested=options.stop_requested,
        )
        self._connect()
        for each in self._models:
            memory.adopt([*each.parameters(), *each.buffers()])
        self.buckets = self._reduction.memory
        """The memory that gradients have even before a step."""
        memory.adopt(self.buckets)
        memory.adopt(tensors_in([[*optimizer.state.values()] for optimizer in self.optimizers]))
        self._begin()

    def _require_gradients_of_step(self) -> None:
        needs = {
            "measure_noise": self.options.measure_noise,
            "optimizer_in_backward": self.options.optimizer_in_backward,
        }
        for name in filter(needs.get, needs):
            raise UsageError(
                f"sync_each_batch: False does not go with {name}, which needs the gradients of each "
                "micro-batch. Leave one of them out."
            )

    def _connect(self) -> None:
        """Make the communicators of all groups now, while the device has memory for them."""
        if self.ranks.size > 1 and self.ranks.communicate:
            groups = groups_of(self._models)
            if self.options.context_group is not None:
                groups.add(self.options.context_group)
            if wrapped := wrapped_in(self.model):
                groups.add(wrapped.process_group)
            connect(groups, self._exchange.number)

    def _require_no_obstacle(self) -> None:
        """Check the options of a step in which several ranks hold the same rows, or parts of them."""
        options = self.options
        obstacles = {
            "compiled code launches other collectives than those that were recorded. Do not compile": (
                options.compiled
            ),
            "optimizers in backward come before gradients are whole. Step them after it": (
                options.optimizer_in_backward and self._holders.size > 1
            ),
            "gradient noise is not measured on such a mesh. Do not measure it": options.measure_noise,
        }
        for obstacle, there in obstacles.items():
            if there:
                raise UsageError(f"model: its layers, or rows, are split over ranks: {obstacle}.")

    def _begin(self) -> None:
        self._graph: torch.Tensor | None = None  # between forward and backward
        self._agreed: StepOutcome | None = None  # where the optimizer steps in backward
        self._had_last = False
        self._reduction.begin()
        self._failures.begin()
        self._noise.begin()
        self._exchange.begin()
        self.collectives.end_step()

    @property
    def counts_rows(self) -> bool:
        """Whether the rows of this rank count: of the ranks that hold the same ones, those of one do."""
        return self._holders.is_zero

    @property
    def takes_as_much_from(self) -> int:
        """The micro-batch from which on the next ones, but the last, take as much memory."""
        return self._reduction.takes_as_much_from

    @property
    def stage(self) -> str:
        """The stage that the step is in, or was in last."""
        return self._failures.stage

    def ask(self, on: bool) -> None:
        """Say in the next step whether this rank asks all others to exchange something after it."""
        self._exchange.asks = on

    def survive_errors(self, on: bool) -> None:
        """Discard the step that begins, too, where the model or the caller's functions raise an error."""
        self._failures.survives_errors = on and self.options.survive

    def switch(self, choice: Choice) -> None:
        """Use these values of the memory knobs from the next step on; on all ranks alike."""
        self.options.switches.set(choice)
        self._follow_switches()
        self._activations = self.options.activations()

    def _follow_switches(self) -> None:
        switches = self.options.switches
        self.collectives.variant, self.collectives.choice = switches.variant, switches.choice

    def abandon(self) -> None:
        """Give up an unfinished step, after an exception that was raised in it or between micro-batches.

        Whoever catches it can take another step, on all ranks.
        """
        self.forget()
        self._begin()

    def drop_gradients(self) -> None:
        """Drop the gradients of the trained parameters."""
        for parameter in self._parameters:
            parameter.grad = None

    def forget(self) -> None:
        """Drop everything that the step has made on this rank."""
        self._exchange.begin()
        self._graph = None
        self._activations = self.options.activations()
        drop_unfinished(self.device)
        if self._holders.size > 1:
            drop_masks()
        self._reset_models()
        self.memory.release()  # last: it can give back only what nothing refers to anymore

    def _reset_models(self) -> None:
        self.collectives.disturbed = False
        with self.memory.running():
            for model in self._models:
                fsdp.reset(model)

    def kept_buffers(self, before: str) -> Buffers:
        """The buffers and plain attributes of the models as they are now, before something that is done again
        and again under this name; for each, it is learned what that changes."""
        if before in self._buffers:
            self._failures.insist(self._buffers[before].keep)
        else:
            self._buffers[before] = Buffers(*(self._models if self.options.survive else ()))
        return self._buffers[before]

    # --- forward and backward -------------------------------------------------------------------

    def forward_backward(self, batch: Batch, last: bool = False) -> None:
        """Add one micro-batch to the step.

        Args:
            batch: the micro-batch, on the host.
            last: whether it is known to be the step's last one, on all ranks. Then replicas are reduced while
                backward goes on, and otherwise after it. Without ``options.sync_each_batch``, one has to be.
        """
        if self._had_last:
            raise RuntimeError(
                "A micro-batch follows the one that was given as the last. Call apply() before the next step."
            )
        self._had_last = last
        if self.collectives.disturbed and self._exchange.loss is None:
            # FSDP would take a forward pass that had no backward for a part of this step, and gather more.
            self._reset_models()
        reduces = last and self._reduces_in_last
        kind = "training, last" if reduces else "training"
        kept = self.kept_buffers("weightless") if type(batch) is Weightless else None
        self.collectives.begin_pass(kind, partial(_shape_of, batch))
        with self._reduction.apart():
            self._failures.do("forward", self._forward, batch)
            if kept is None and self.recomputes and self._failures.none:
                kept = self.kept_buffers("backward")
            if self.options.optimizer_in_backward:
                # Backward is the optimizer step: gradients are scaled in it, and there is no way back.
                self._failures.look_elsewhere()
                self._agreed = self._agree()
            self._failures.do("backward", self._backward, reduces)
        if kept is not None and self._failures.none:  # a lost step's are set back as a whole
            kept.learn()
            kept.restore()
        self._failures.end_pass()

    def _forward(self, batch: Batch) -> None:
        self._noise.before_forward(self._squared_gradient_norm)
        summed, weight = self._summed_loss(batch)
        self._exchange.add(summed, weight)
        if self._noise.on:
            self._noise.after_forward(weight, self.rows(batch))
        self._graph = summed.loss

    def rows(self, batch: Batch) -> int:
        """The rows of a micro-batch that count."""
        return 0 if isinstance(batch, Weightless) else self.objective.rows(batch)

    def to_device(self, batch: Batch) -> Batch:
        """A micro-batch on the device."""

        def copied(value: Any) -> Any:  # tensors, and the masks of packed rows, which it makes
            if isinstance(value, torch.Tensor):  # the host waits for a copy of what is not pinned
                return value.to(
                    self.device, non_blocking=self.device.type != "cpu" and value.is_pinned()
                )
            return value.to(self.device) if hasattr(value, "to") else value

        moved = mapped(copied, batch)
        if self.memory.measured:
            self.memory.adopt(tensors_in(moved))
        return moved

    def _run_model(self, *arguments: Any, **named: Any) -> Any:
        with self._activations:
            return self.model(*arguments, **named)

    def _backward(self, reduces: bool) -> None:
        loss, self._graph = self._graph, None
        assert loss is not None
        if self._agreed is not None and not self._agreed.lost:
            loss = loss * self._scaling.to_mean(self._agreed.weight)
        if self._scaling.loss_scale is not None:
            loss = loss * self._scaling.loss_scale.factor
        self._reduction.backward(loss, self.collectives, reduces)

    # --- between steps, without gradients -----------------------------------------------------------

    def forward_only(
        self,
        kind: str,
        work: Callable[[], T],
        shape: Callable[[], Hashable] = lambda: None,
        reshard: bool = True,
    ) -> ForwardDone[T] | StepLost:
        """Do something in evaluation mode, without gradients; on all ranks or, if memory runs out, on none.

        Only between steps: the next one resets FSDP, which drops gradients.

        Args:
            kind: the name of what is done, on all ranks; each kind launches the same collectives each time.
            work: the function that does it.
            shape: that of its rows; where layers are split, it decides what is launched.
            reshard: whether parameters that were gathered are freed.
        """
        made: list[T] = []
        kept = self.kept_buffers(kind)

        def attempt() -> None:
            with self._reduction.apart():
                made.append(work())
            if reshard:
                # So the next one gathers as much again. FSDP remembers it until a backward: the next step
                # resets that, once for all of them, as it makes the host wait.
                self.collectives.disturbed = True
                for model in self._models:
                    fsdp.reshard(model)

        try:
            self.collectives.begin_pass(kind, shape)
            with _evaluating(self._models):
                self._failures.do(kind, attempt)
            self._failures.end_pass()
            if not self._failures.known:
                # On the host, so the device goes on: where memory has run out, the host knows at once.
                stop = self.options.stop_requested()
                heard = self.ranks.spread(_STOP * stop if self._failures.none else _FAILED)[1]
                if heard < _FAILED:
                    kept.learn()
                    return ForwardDone(made.pop(), heard == _STOP)
            made.clear()
            lost = self._lost()
            kept.restore()
            return lost
        except RankLost:
            raise
        except BaseException:
            self.forget()
            raise
        finally:
            self._begin()

    def alone(self, kind: str, work: Callable[[], T]) -> ForwardDone[T] | StepLost:
        """Do something that launches no collective in the same way, but on this rank only."""
        kept = self.kept_buffers(kind)
        try:
            with self.memory.running(), _evaluating(self._models):
                done = ForwardDone(work())
            kept.learn()
            return done
        except Exception as error:
            if not self._failures.is_survived(error):
                raise
        kept.restore()
        self.memory.release()  # only now: the exception is gone, and what its frames held with it
        here = range(self.ranks.size)
        return StepLost(tuple(kind if rank == self.ranks.rank else None for rank in here))

    @contextmanager
    def gathered(self, model: nn.Module) -> Iterator[ForwardDone[None] | StepLost]:
        """A context in which each rank has all parameters of a sharded model, which then launches nothing.

        Its value says whether they fit. Where memory runs out, they stay sharded on all ranks. The model is
        not part of one that FSDP shards as well.
        """
        try:
            with fsdp.kept_gathered(model) as gather:
                yield self.forward_only(f"gathering {type(model).__name__}", gather, reshard=False)
        except RankLost:
            raise
        except BaseException:
            self.forget()
            raise
        with self.memory.running():
            fsdp.reshard(model)
        self.collectives.disturbed |= bool(fsdp.roots(model))  # which the next step resets
        self._exchange.follows_others = True

    def sums(self, batch: Batch) -> torch.Tensor:
        """The weight, the loss and the objective's metrics of a micro-batch, each summed over its terms."""
        summed, weight = self._summed_loss(batch)
        metrics = summed.metrics or {}
        terms = [summed.loss, *(metrics[name] for name in self.objective.metrics)]
        values = [gradients.whole(term).double() for term in terms]
        return torch.stack([values[0].new_tensor(weight), *values])

    def _summed_loss(self, batch: Batch) -> tuple[Summed, int]:
        """The loss of a micro-batch that is on the host, and its weight."""
        if isinstance(batch, Weightless):
            summed, _ = self._summed_loss(batch.batch)
            metrics = summed.metrics and {n: torch.zeros_like(v) for n, v in summed.metrics.items()}
            return Summed(summed.loss * 0.0, metrics=metrics), 0
        weight = self.objective.weight(batch)
        loss = self.objective.summed_loss(self._run_model, self.to_device(batch), weight)
        summed = loss if isinstance(loss, Summed) else Summed(loss)
        return summed, weight if summed.weight is None else summed.weight

    # --- what follows all micro-batches -----------------------------------------------------------

    def apply(self, trial: bool = False) -> StepOutcome:
        """End the step: apply it, or, if memory ran out on any rank, leave no trace of it.

        Args:
            trial: whether the optimizer steps in any case, whatever the gradients are, and a loss scale stays
                as it is.

        Raises:
            StepHalfApplied: memory ran out after parameters may have changed on some rank.
        """
        try:
            if self.options.optimizer_in_backward:
                return self._applied_in_backward()
            return self._apply(trial)
        finally:
            self._begin()

    def _applied_in_backward(self) -> StepOutcome:
        assert self._agreed is not None
        if not self._agreed.lost and not self._failures.none:
            here, known = self._failures.here is not None, self._failures.known
            raise StepHalfApplied("backward", here, everywhere=known)
        return self._agreed

    def _apply(self, trial: bool) -> StepOutcome:
        if self._reduction.needs_last and not self._had_last:
            self.forget()  # the whole gradients, too, on every rank alike
            raise RuntimeError(
                "No micro-batch was given as the last, so no gradient is reduced over the ranks. Call "
                "forward_backward(batch, last=True) for the last one, or leave sync_each_batch on."
            )
        outcome = self._agree(self._reduced())
        if outcome.lost:
            return outcome
        self._reduction.settle(outcome.alike)
        scale = self._scaling.loss_scale
        factor = self._scaling.factor(outcome.weight, outcome.gradient_norm)  # before it changes
        if scale is not None and not trial:
            scale.update(outcome.overflow)
            if outcome.overflow:
                self.drop_gradients()
                return outcome
        try:
            with self.memory.running():
                self._scale_gradients(factor)
                if not self.options.optimizer_steps and not trial:
                    return outcome
                self._failures.stage = "optimizer step"
                for optimizer in self.optimizers:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
        except Exception as error:
            if not self._failures.is_survived(error):
                raise
            raise StepHalfApplied(self.stage) from None
        return outcome

    def _reduced(self) -> torch.Tensor | None:
        """Reduce what is not reduced yet; gives the squared norm of the gradients, where it is wanted."""
        failures = self._failures
        self.collectives.wait_for_pending()
        if self._noise.of_rank:
            failures.attempt("gradient noise", self._noise.before_reduction, self._gradients())
        if self._reduction.places and not (self._had_last and self._reduces_in_last):
            self.collectives.begin_pass("reduction")
            failures.do("reduction", self._reduction.place, self._parameters, self.collectives)
            failures.end_pass()
        self._reduction.wait()
        if not (self._scaling.needs_norm or self._noise.measured):
            return None
        return failures.attempt("gradient norm", self._squared_gradient_norm)

    def _agree(self, squared_norm: torch.Tensor | None = None) -> StepOutcome:
        """The outcome of the step on all ranks; if one of them has failed, nothing is left of it."""
        if not self._failures.known:
            failed = not self._failures.none
            done = self._exchange.run(failed, squared_norm, self._reduction.fingerprint)
            if done is not None:
                return done
            self._failures.all_know()
        return self._lost()

    def _lost(self) -> StepLost:
        """Nothing, as all ranks know, and where each has failed."""
        said = self.ranks.gather((self._failures.here, self._failures.error))
        failures, errors = zip(*said, strict=True)
        self.forget()
        self.memory.end_step()  # the retries of a lost step say nothing about the size that follows
        return StepLost(failures, next(filter(None, errors), ""))

    def _gradients(self) -> list[torch.Tensor]:
        return [grad for p in self._parameters if (grad := p.grad) is not None]

    def _squared_gradient_norm(self) -> torch.Tensor:
        """This rank's part, before gradients are scaled."""
        return gradients.squared_norm(self._gradients(), self.ranks.size, self.device)

    def _scale_gradients(self, factor: float) -> None:
        self._failures.stage = "gradient scaling"
        gradients.scale(self._gradients(), factor, self._failures.insist)


def _shape_of(batch: Batch) -> Hashable:
    shape = shape_of(batch.batch if isinstance(batch, Weightless) else batch)
    if not shape:
        raise UsageError(
            f"batch: there is no tensor in {type(batch).__name__}, and the shapes of tensors tell what a "
            "model launches. Make a tensor, list, tuple or mapping of micro-batches."
        )
    return shape


@contextmanager
def _evaluating(models: Sequence[nn.Module]) -> Iterator[None]:
    """Evaluation mode, without gradients; afterward each module has the mode that it had."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
