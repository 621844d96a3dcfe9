"""What a plan of a trainer's file says in that trainer's words, and what to write in the file."""

from __future__ import annotations

from torchtune_adaptive.cli.other_trainers.files import TrainerFile


def subject(file: TrainerFile) -> str:
    """Whose step is planned."""
    return f"{file.path.name} as {file.trainer.name} trains {file.model}"


def advice(file: TrainerFile, rows: int, accumulation: int, largest: int | None) -> str:
    """What to write in the file: the largest micro-batch that fits and keeps the rows of a step, or what
    else takes less memory."""
    trainer, settings = file.trainer, file.settings
    if largest:
        of_step = rows * accumulation
        best = max(size for size in range(1, min(largest, of_step) + 1) if of_step % size == 0)
        if best == rows:
            return f"In {file.path.name}, nothing has to change."
        return (
            f"Write in {file.path.name}: {trainer.rows}: {best}, {trainer.accumulation}: {of_step // best} "
            f"(a step keeps its {of_step} rows on each GPU)"
        )
    ways = [f"a shorter {trainer.length}"]
    more = {
        "checkpointing": None if settings["gradient_checkpointing"] else trainer.checkpointing,
        "adapters": None if settings["lora"] else trainer.adapters,
    }
    return what_takes_less(f" in {file.path.name}", ways, **more)


def what_takes_less(
    where: str,
    ways: list[str],
    checkpointing: tuple[str, object] | None,
    adapters: tuple[str, object] | None,
) -> str:
    """What takes less memory: some ways, and the keys that switch checkpointing and adapters on, if they are
    off; ``where`` names the file that they are of."""
    switched = [_line(pair) for pair in (adapters, checkpointing) if pair]
    less = f"{', '.join(switched + ways)}; or more GPUs that share the weights (FSDP2)"
    return f"What takes less,{where}: {less}"


def _line(pair: tuple[str, object]) -> str:
    key, value = pair
    return f"{key}: {str(value).lower()}"
