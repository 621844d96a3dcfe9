"""What a lost attempt has changed on the host is set back."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import torch
from torch import nn

from torchtune_adaptive.integrations.host_state import HostState, state_of


def test_what_was_there_is_set_back_and_what_was_not_is_removed() -> None:
    metrics = {"train": defaultdict(list, loss=[1.0]), "other": [[1]]}
    owner = SimpleNamespace(metrics=metrics, state=SimpleNamespace(step=3))
    kept = HostState(owner, ("metrics", "state.tokens", "nobody"))
    for _ in range(2):  # a retried attempt may be lost, too
        owner.metrics["train"]["new"].append(1.0)
        owner.metrics["train"]["loss"].append(2.0)
        owner.metrics["other"][0].append(2)
        owner.state.tokens = 5
        kept.restore()
        assert owner.metrics == {"train": {"loss": [1.0]}, "other": [[1]]}
        assert vars(owner.state) == {"step": 3} and not hasattr(owner, "nobody")
    assert kept.values["metrics"] == owner.metrics is not kept.values["metrics"]


def test_what_is_not_named_stays() -> None:
    owner = SimpleNamespace(counted=1, other=1)
    kept = HostState(owner, ("counted",))
    owner.counted = owner.other = 2
    kept.restore()
    assert (owner.counted, owner.other) == (1, 2)


class Meter:
    def __init__(self) -> None:
        self.total, self.form = 0.0, str


class Owner(SimpleNamespace):
    restored = ("named",)


def test_of_a_trainer_numbers_and_what_has_some_are_kept() -> None:
    big = {"rows": [torch.zeros(2)] * 2000}
    owner = Owner(
        counted=1,
        metrics={"train": defaultdict(Meter)},
        seen=torch.zeros(3),
        weights=torch.zeros(3, requires_grad=True),
        losses={"a": nn.MSELoss()},
        big=big,
        many=[0.5] * 5000,
        named=Meter(),
        _adaptive_rows=[1],
    )
    owner.metrics["train"]["loss"].total = 2.0
    kept = state_of(owner)
    assert kept.values.keys() == {"counted", "metrics", "seen", "many", "named"}
    metrics, many = owner.metrics, owner.many
    owner.counted += 1
    owner.metrics["train"]["loss"].total += 1
    owner.metrics["train"]["other"].total += 1
    owner.seen += 1
    owner.named.total = 3.0
    kept.restore()
    assert owner.counted == 1 and owner.seen.tolist() == [0, 0, 0] and owner.named.total == 0
    assert {name: each.total for name, each in owner.metrics["train"].items()} == {"loss": 2.0}
    assert owner.metrics is not metrics and owner.many is many, (
        "what has not changed stays the same object"
    )
