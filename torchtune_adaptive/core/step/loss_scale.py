"""Loss scaling for float16: a ``torch.amp.GradScaler`` that all ranks agree about.

The scaler looks for overflow in this rank's gradients. A sharded gradient may overflow on one rank alone, so
here the norm of the whole gradient decides, which is infinite on all ranks or on none.
"""

from __future__ import annotations

from torch.amp import GradScaler


class LossScale:
    """The scale of a ``GradScaler``, and its way of adapting it.

    Args:
        scaler: the scaler whose scale is used and kept up to date, so that its ``state_dict`` is the run's.
    """

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler
        self.factor = float(scaler.get_scale())

    @classmethod
    def of(cls, scaler: GradScaler | None) -> LossScale | None:
        """The scale of a scaler; None if there is none, or it is not enabled."""
        return None if scaler is None or not scaler.is_enabled() else cls(scaler)

    def update(self, overflow: bool) -> None:
        """Adapt the scale after a step: lower it at once, raise it after a while without overflow."""
        state = self._scaler.state_dict()
        steps = 0 if overflow else state["_growth_tracker"] + 1
        if overflow:
            state["scale"] *= state["backoff_factor"]
        elif steps == state["growth_interval"]:
            state["scale"] *= state["growth_factor"]
            steps = 0
        state["_growth_tracker"] = steps
        self._scaler.load_state_dict(state)
        self.factor = float(state["scale"])
