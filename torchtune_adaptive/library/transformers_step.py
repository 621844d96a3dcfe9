"""The step of a trainer of transformers or TRL, to be planned: the trainer itself runs, as settings say."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torchtune_adaptive.common import ConfigError, NoPrediction, UsageError, arguments
from torchtune_adaptive.library.planning import Plan
from torchtune_adaptive.planner import Machine, gpus, planned_gpu, programs

_CEILING = 1 << 11
"""The largest micro-batch that is considered, in rows."""
_DEFAULTS = {"per_device_train_batch_size": 8, "max_length": 1024}


class TransformersStep:
    """A training step of transformers' ``Trainer``, or of one of TRL's trainers, to be planned.

    The trainer runs to its third step on a GPU that is not there, with rows that are made up, so it has to be
    installed. Settings have the names of its own arguments, of ``LoraConfig`` and of ``BitsAndBytesConfig``,
    and their defaults.

        step = TransformersStep(folder="Qwen3-8B", per_device_train_batch_size=4, lora=True)
        print(step.plan(gpu="a100-80gb").largest)

    Args:
        folder: the folder that has the ``config.json``; weights are not read.
        trainer: the name of its class.
        ranks: the number of ranks.
        settings: arguments of the trainer, of the model as it is loaded (``dtype``, ``attn_implementation``,
            ``experts_implementation``, ``load_in_4bit``, ...) and of its adapters (``r``, ...); and

            - ``max_length``: tokens in a row, 1024 where the trainer has no such argument,
            - ``max_prompt_length``: tokens of a prompt that texts are generated for, 512 by default,
            - ``padded``: whether some rows are shorter, so that attention needs a mask,
            - ``lora``: whether adapters are trained instead of the model,
            - ``prepare_for_kbit_training``: whether ``Trainer`` gets a model of few bits as PEFT prepares it,
            - ``teacher_model``: of trainers that distill, the model itself by default,
            - ``fsdp``: whether ranks share the weights (FSDP2); if not, each has all of them (DDP).
    """

    def __init__(
        self, *, folder: str, trainer: str = "SFTTrainer", ranks: int = 1, **settings: Any
    ) -> None:
        self.ranks = arguments.whole("ranks", ranks)
        folder = str(Path(folder).resolve())
        self.settings = {"folder": folder, "trainer": trainer, **_DEFAULTS, **settings}

    def program(self, gpu: gpus.Gpu, **others: Any) -> programs.Program:
        """The program that trains so.

        Raises:
            NoPrediction: a package that it needs is not installed.
        """
        for package in self._packages():
            if find_spec(package) is None:
                raise NoPrediction(
                    f"{package} is not installed, so that {self.settings['trainer']} cannot run. Install it "
                    f"(pip install {package}), or plan one of torchtune's configs."
                )
        return programs.of_trainer(self.settings, gpu, ranks=self.ranks, **others)

    def _packages(self) -> list[str]:
        """The packages that it needs."""
        needed = ["transformers", "accelerate", "datasets"]
        given = self.settings
        if given["trainer"] not in ("Trainer", "Seq2SeqTrainer"):
            needed.append("trl")
        if given.get("lora"):
            needed.append("peft")
        if given.get("load_in_4bit") or given.get("load_in_8bit"):
            needed.append("bitsandbytes")
        return needed

    def plan(
        self,
        gpu: str = "h100-80gb",
        memory: int | str | None = None,
        ceiling: int = _CEILING,
        headroom: float = 0.05,
        timeout: float = 600.0,
        cache: bool | str = True,
        machine: Machine | None = None,
    ) -> Plan:
        """Predict the peak of the step, the largest micro-batch that fits, and the speed; the arguments
        are those of ``plan_batch_size``. What was run is remembered in ``cache``: the user's, a folder, or
        none.

        Raises:
            UsageError: an argument cannot be used.
            NoPrediction: a package is not installed, or the trainer cannot run so.
        """
        ceiling = arguments.whole("ceiling", ceiling)
        headroom = arguments.share("headroom", headroom)
        arguments.seconds("timeout", timeout)
        capacity, machine = arguments.memory("memory", memory), machine or Machine()
        try:
            kind = gpus.gpu(gpu, "gpu", "memory")
            lines = [*machine.lines(kind.name, self.ranks)]
        except ConfigError as error:  # which is for configs
            raise UsageError(str(error)) from None
        _, assumptions = planned_gpu(kind, self.ranks, headroom, capacity)
        devices = programs.OnGpus(kind, machine, headroom, capacity)
        program = self.program(kind, ceiling=ceiling, cache=cache)
        found = programs.plan_program(program, devices, timeout)
        answer = found.answers[0]
        return Plan(
            answer.largest,
            answer.peak.rows,
            answer.peak.reserved,
            dict(answer.peak.parts),
            answer.device.usable_bytes,
            (*assumptions, *lines),
            answer.speed,
            answer.peak.allocated,
            answer.peak.with_retries,
            unchecked=found.unchecked,
        )
