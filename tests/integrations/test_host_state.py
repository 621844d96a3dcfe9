"""What a lost attempt has changed on the host is set back."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

from torchtune_adaptive.integrations.host_state import HostState


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
