"""The numbers of a step that people watch: the loss or, in reinforcement learning, the reward above all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torchtune_adaptive.common import duration

LOSS = "loss"
REWARD, LENGTH, KL = "reward", "response length", "KL"
_LOGGED_AS = {
    REWARD: ("rewards", "scores"),
    LENGTH: ("response_lengths",),
    KL: ("kl_loss", "kl"),
}
"""The means over a rollout by their names here, each as GRPO logs it, and as PPO does."""

PHASES = {
    "generation": "generation_seconds",
    "scoring": "scoring_seconds",
    "rewards": "reward_seconds",
}
"""The phases in which a rollout is made, each with its metric."""
TRAINING = "training"
"""The phase that follows them."""


def watched(loss: float, metrics: Mapping[str, float]) -> dict[str, float]:
    """What people watch of a step, given its loss and its metrics: the most important first."""
    found = {
        name: float(metrics[key])
        for name, keys in _LOGGED_AS.items()
        for key in keys
        if key in metrics
    }
    return {**found, LOSS: loss}


def as_text(values: Mapping[str, float]) -> str:
    """``reward 0.3, loss 2.346``."""
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())


def shares(spent: Mapping[str, float]) -> str:
    """Seconds by phase, each with its share: ``generation 2 min 3 s (75 %), training 41.0 s (25 %)``."""
    total = sum(spent.values())
    return ", ".join(
        f"{phase} {duration(seconds)} ({seconds / total:.0%})" for phase, seconds in spent.items()
    )


def added(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """The sums by name."""
    names: Iterable[str] = dict.fromkeys([*one, *other])
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in names}
