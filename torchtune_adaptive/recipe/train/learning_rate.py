"""The learning rate of the next step: the base schedule at the consumed samples, scaled by the batch.

The base rate is kept separately and never multiplied in place, because torch's schedulers compute the next
rate from the current one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from torchtune_adaptive.core import LrScaling, lr_factor
from torchtune_adaptive.recipe.setup.optimizer import Optimizers

SchedulerFactory = Callable[[int], LRScheduler | None]
"""The factory of the base schedule, advanced to a position."""


class LearningRate:
    """Advances the base schedule by position, and scales it by the batch.

    Args:
        optimizers: the optimizers of the run; all their groups are scheduled.
        make_scheduler: the factory of torch's or torchtune's scheduler; it gives None for a constant rate.
        position: the base steps that the run has taken.
        rule: the rule by which the batch changes the rate; see ``core.lr_factor``.
        half_life: keep the half-life of Adam's second moment constant in samples, instead of in steps.
        start: the global batch that the base schedule is meant for.
        total: the base steps of the whole schedule.
        anew: take the optimizer's own rate, as if the run had begun with it, and not a checkpoint's.
    """

    def __init__(
        self,
        optimizers: Optimizers,
        make_scheduler: SchedulerFactory,
        position: int,
        rule: LrScaling,
        half_life: bool,
        start: int,
        total: int = 0,
        anew: bool = False,
    ) -> None:
        self._groups = [group for o in optimizers.steppers for group in o.param_groups]
        self._optimizers = optimizers.steppers
        self._total = total
        self._is_anew = anew
        self._rule = rule
        self._half_life = half_life
        self._start = start
        # SGD's update is proportional to the gradient; those of Adam and similar optimizers are not.
        first = self._optimizers[0]
        self._exponent = 1.0 if isinstance(first, torch.optim.SGD) else 0.5
        self._beta2 = [group["betas"][1] for group in self._groups] if half_life else []
        self._batch = start
        self._factor = 1.0
        if anew:
            rate = float(first.defaults["lr"])
            self._set([rate] * len(self._groups))
            for group in self._groups:
                group["initial_lr"] = rate
        self._position = 0 if anew else position
        self._scheduler = make_scheduler(self._position)
        self._base = [float(group["lr"]) for group in self._groups]
        self._highest = self._base[0]
        if anew:
            self.move_to(position)

    @property
    def now(self) -> float:
        return float(self._groups[0]["lr"])

    @property
    def base_factor(self) -> float:
        """The base rate divided by the highest value it has had."""
        return self._base[0] / self._highest if self._highest else 0.0

    def move_to(self, position: int) -> None:
        """Advance the base schedule to ``position``, in base steps."""
        if self._scheduler is None:
            return
        self._set(self._base)
        for _ in range(position - self._position):
            self._step()
            self._highest = max(self._highest, float(self._groups[0]["lr"]))
        self._position = position
        self._base = [float(group["lr"]) for group in self._groups]
        self._scale()

    def _step(self) -> None:
        assert self._scheduler is not None
        with warnings.catch_warnings():
            # A run that is resumed has taken steps of the optimizer; this process need not have.
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            self._scheduler.step()

    def follow(self, batch: int, noise: float | None) -> None:
        """Scale the rate (and beta2) for a next step with a global batch of ``batch``."""
        self._factor = lr_factor(self._rule, batch, self._start, noise, self._exponent)
        if self._half_life and batch != self._batch:
            self._change_beta2(batch)
        self._batch = batch
        self._scale()

    def _scale(self) -> None:
        if self._factor != 1.0 or self._rule != "none":
            self._set([base * self._factor for base in self._base])

    def _set(self, rates: list[float]) -> None:
        for group, rate in zip(self._groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    @torch.no_grad()
    def _change_beta2(self, batch: int) -> None:
        """Change beta2 without changing the bias-corrected second moment.

        Adam divides the moment by 1 - beta2^t. With a new beta2 that correction would be wrong for a thousand
        steps, so the moment is rescaled by the ratio of the two.
        """
        for group, beta2 in zip(self._groups, self._beta2, strict=True):
            old = beta2_at(beta2, self._batch, self._start)
            new = beta2_at(beta2, batch, self._start)
            group["betas"] = (group["betas"][0], new)
            for parameter in group["params"]:
                state = _state_of(self._optimizers, parameter)
                if state:
                    steps = float(state["step"])
                    state["exp_avg_sq"].mul_((1 - new**steps) / (1 - old**steps))

    def state_dict(self) -> dict[str, Any]:
        return {
            "start": self._start,
            "total": self._total,
            "position": self._position,
            "base": self._base,
            "highest": self._highest,
            "batch": self._batch,
            "factor": self._factor,
            "beta2": self._beta2,
            "scheduler": self._scheduler and _plain(self._scheduler.state_dict()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict``; the optimizer's own state has been loaded before.

        A state for a different starting batch is ignored: its positions mean something else.
        """
        if state["start"] != self._start:
            return
        self._batch, self._factor = state["batch"], state["factor"]
        if self._half_life:
            self._beta2 = list(state["beta2"])
        if not self._is_anew:
            self._load_base(state)
        self._set(self._base)
        self._scale()

    def _load_base(self, state: dict[str, Any]) -> None:
        scheduler, saved = self._scheduler, state["scheduler"]
        self._highest = state["highest"]
        is_longer = state.get("total", self._total) != self._total  # or shorter
        if is_longer and saved is not None and isinstance(scheduler, LambdaLR):
            # The rate is what the schedule of the new length gives at this position.
            scheduler.base_lrs = list(saved["base_lrs"])
            scheduler.last_epoch = self._position - 1
            self._step()
            self._base = [float(group["lr"]) for group in self._groups]
            self._highest = max(self._highest, self._base[0])
            return
        self._position, self._base = state["position"], list(state["base"])
        if scheduler is not None and saved is not None:
            scheduler.load_state_dict(saved)


def _state_of(optimizers: tuple[Optimizer, ...], parameter: torch.Tensor) -> dict[str, Any]:
    for optimizer in optimizers:
        if parameter in optimizer.state:
            return optimizer.state[parameter]
    return {}


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """The state without the function that torchtune adds to a scheduler for optimizers in backward."""
    return {key: value for key, value in state.items() if not callable(value)}


def beta2_at(beta2: float, batch: int, start: int) -> float:
    """The beta2 at ``batch`` with the same half-life in samples as ``beta2`` has at ``start``."""
    return float(beta2 ** (batch / start))
