"""The tables of ``docs/trainer-files.md``, made from those that read the files.

python docs/make/trainer_files.py
"""

from __future__ import annotations

from collections.abc import Iterable

from torchtune_adaptive.cli.other_trainers import accelerate, sharding
from torchtune_adaptive.cli.other_trainers.axolotl import AXOLOTL
from torchtune_adaptive.cli.other_trainers.keys import Joint, Keys, Refused, Sets
from torchtune_adaptive.cli.other_trainers.llama_factory import LLAMA_FACTORY
from torchtune_adaptive.cli.other_trainers.trl import DPO, SFT
from torchtune_adaptive.cli.other_trainers.trl_rollouts import GRPO, RLOO


def text() -> str:
    """All tables, as Markdown."""
    parts = [
        _section(trainer.name, f"Read from {trainer.checked}.", trainer.keys, trainer.ignored)
        for trainer in (AXOLOTL, LLAMA_FACTORY, SFT, DPO, GRPO, RLOO)
    ]
    note = "With or without the prefix `fsdp_`. The default of `version` is 2 for TRL and 1 for the others."
    parts.append(_section("fsdp_config", note, sharding.KEYS, sharding.IGNORED))
    parts.append(
        _section(
            "accelerate",
            "With `--accelerate`. Read from accelerate 1.15.",
            accelerate.KEYS,
            accelerate.IGNORED,
        )
    )
    return "\n".join(parts)


def _section(name: str, note: str, keys: Keys, ignored: Iterable[str]) -> str:
    read = [
        f"| `{key}` | {_value(kind.default)} | {_cell(kind.becomes())} |"
        for key, kind in keys.items()
        if isinstance(kind, Sets | Joint)
    ]
    refused: dict[str, list[str]] = {}
    for key, kind in keys.items():
        if isinstance(kind, Refused):
            refused.setdefault(kind.reason, []).append(f"`{key}`")
    lines = [
        f"### {name}",
        "",
        note,
        "",
        "| key | default | what it becomes |",
        "|---|---|---|",
        *read,
        "",
    ]
    lines += ["| refused, unless it is off | because it |", "|---|---|"]
    lines += [f"| {', '.join(names)} | {_cell(reason)} |" for reason, names in refused.items()]
    lines += [
        "",
        "<details><summary>Not read: no memory of a training step depends on them</summary>",
        "",
    ]
    lines += [" ".join(f"`{key}`" for key in sorted(ignored)), "", "</details>", ""]
    return "\n".join(lines)


def _value(value: object) -> str:
    if value is None:
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _cell(words: str) -> str:
    return words.replace("|", r"\|")


if __name__ == "__main__":
    print(text())
