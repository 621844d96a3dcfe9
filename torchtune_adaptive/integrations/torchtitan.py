"""torchtitan's ``Trainer``, which takes its steps in micro-batches of the size that fits.

    from torchtune_adaptive.integrations.torchtitan import adaptive

    def llama3_8b():
        return adaptive(config_registry.llama3_8b())

The rows of an optimizer step are what they were: ``global_batch_size``. So are their order, the loss,
clipping, the optimizer, the schedule, metrics, validation and checkpoints, which are the trainer's own. On
another number of ranks a run goes on with the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, TypeVar
from unittest import mock

import torch

from torchtune_adaptive.common import UsageError, check_versions
from torchtune_adaptive.integrations import private
from torchtune_adaptive.integrations import titan_refusals as refusals
from torchtune_adaptive.integrations.options import Adaptive
from torchtune_adaptive.integrations.titan_rows import Batch, Parts, merged, with_rows_shared
from torchtune_adaptive.integrations.titan_step import TitanStep

Config = TypeVar("Config")
_Trainer: Any = object
"""What stands for the trainer, which is the next base of a class with the mixin."""


def adaptive(config: Config, options: Adaptive | None = None) -> Config:
    """The same config, of a trainer whose micro-batches have the size that fits."""
    trainer = private.builder_of(config)
    if trainer is None:
        raise UsageError(
            f"adaptive: {config!r} is not the config of a trainer of torchtitan. Pass what a function of a "
            "config registry returns."
        )

    @dataclass(kw_only=True, slots=True)
    class AdaptiveConfig(type(config)):  # type: ignore[misc]
        pass

    # Its build() makes the class that it stands in.
    own: dict[str, Any] = {"Config": AdaptiveConfig}
    if options is not None:
        own["adaptive"] = options
    type(f"Adaptive{trainer.__name__}", (AdaptiveTrainerMixin, trainer), own)
    values = {field.name: getattr(config, field.name) for field in fields(config)}  # type: ignore[arg-type]
    return AdaptiveConfig(**values)


class AdaptiveTrainerMixin(_Trainer):
    """Makes a trainer take its steps in micro-batches of the size that fits.

        class AdaptiveTrainer(AdaptiveTrainerMixin, Trainer):
            adaptive = Adaptive(headroom=0.1)

            @dataclass(kw_only=True, slots=True)
            class Config(Trainer.Config):
                pass

    Raises:
        UsageError: when the trainer is made, if a setting cannot be kept; on all ranks.
    """

    adaptive = Adaptive()
    gradient_accumulation_steps: int
    metrics_processor: Any
    ntokens_seen: int

    def __init__(self, config: Any) -> None:
        check_versions("torchtitan")
        refusals.require_supported_config(config, self.adaptive)
        refusals.require_known_trainer(super())
        self._parts: Parts | None = None
        super().__init__(with_rows_shared(config))
        refusals.require_supported(self)
        self._parts = Parts(self, config.training.local_batch_size)
        self._adaptive_step: TitanStep | None = None

    def state_dict(self) -> dict[str, Any]:
        assert self._parts is not None
        state: dict[str, Any] = super().state_dict()
        return state | {"ntokens_seen": self._parts.counted(self.ntokens_seen)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert self._parts is not None
        super().load_state_dict(state_dict)
        self.ntokens_seen = self._parts.counted_here(self.ntokens_seen)

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        batches = self.gradient_accumulation_steps

        def all_of_the_step() -> Iterator[Batch]:
            yield merged([next(data_iterator) for _ in range(batches)])

        processor = self.metrics_processor
        log = processor.log

        def with_ours(
            *args: Any, extra_metrics: dict[str, Any] | None = None, **named: Any
        ) -> None:
            assert self._adaptive_step is not None
            ours = self._adaptive_step.metrics
            log(*args, extra_metrics={**(extra_metrics or {}), **ours}, **named)

        with (
            mock.patch.object(self, "gradient_accumulation_steps", 1),
            mock.patch.object(processor, "log", with_ours),
        ):
            super().train_step(all_of_the_step())

    def forward_backward_step(
        self,
        *,
        input_dict: dict[str, torch.Tensor],
        labels: torch.Tensor,
        global_valid_tokens: torch.Tensor,
    ) -> torch.Tensor:
        if self._adaptive_step is None:
            self._adaptive_step = TitanStep(self, super().forward_backward_step)
        return self._adaptive_step.take(input_dict, labels, global_valid_tokens)
