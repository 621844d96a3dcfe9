"""The cost of a search: trials and seconds, for each strategy and for what people did before.

    python benchmarks/search_cost.py [--limit 40MiB] [--rounding power_of_two]

All searches run on the same model, one after the other, with the same trial: a real step on the worst case.
They differ in which sizes they try. Beside the three strategies of this package stand

- the bisection between 0 and 100,000 of torchtune's RFC 2199, as it is written there, and
- repeated halving from a start size (512), as trainers do that react to running out of memory.

Runs on the CPU, on the simulated device, in one process.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
import time
from collections.abc import Callable

import torch
from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.core.search.probe import Probe
from torchtune_adaptive.core.search.strategies import STRATEGIES, find_largest
from torchtune_adaptive.core.search.trial import SizeTrial
from torchtune_adaptive.core.sizes.split import candidates
from torchtune_adaptive.recipe.data.dataset import data_of, load_rows
from torchtune_adaptive.recipe.data.row_lengths import RowLengths
from torchtune_adaptive.recipe.registry import find_config
from torchtune_adaptive.recipe.run import Run
from torchtune_adaptive.recipe.search.worst_case import worst_case
from torchtune_adaptive.recipe.setup.optimizer import build_optimizers

Trial = Callable[[int], SizeTrial]


def rfc_2199(trial: Trial) -> int:
    """The RFC's bisection: sizes between 0 and 100,000, whatever the data or the rounding."""
    low, high = 0, 100_000
    while high - low > 1:
        middle = (low + high) // 2
        if trial(middle).fits:
            low = middle
        else:
            high = middle
    return low


def repeated_halving(trial: Trial) -> int:
    """Start with 512 and halve until it fits."""
    size = 512
    while size > 1 and not trial(size).fits:
        size //= 2
    return size


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--limit", default="40MiB", help="memory of the simulated device")
    arguments.add_argument("--rounding", default="power_of_two", choices=["power_of_two", "none"])
    asked = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cfg = OmegaConf.load(find_config("tiny/full"))
        cfg.output_dir = folder
        cfg.adaptive_batching.memory_limit = asked.limit
        compare(cfg, asked.rounding)  # type: ignore[arg-type]


def compare(cfg: DictConfig, rounding: str) -> None:
    run = Run(cfg, "full")
    settings, ranks = run.settings, run.ranks
    model = run.kind.model(run.kind.checkpoints().load())
    optimizers = build_optimizers(run.asked, run.environment, model.module, None)
    objective = run.kind.objective(model.module, ())
    loaded = load_rows(run.asked)
    data = data_of(run.asked, loaded.tokenizer, loaded.training, run.kind.rows(), objective)
    step = run.train_step(model, optimizers, objective)
    worst = worst_case(data, None, ranks, RowLengths(data.dataset, cfg, ranks, cache=False))
    sizes = candidates(rounding, len(data.dataset), 0)
    ways: dict[str, Callable[[Trial], int | None]] = {
        name: lambda trial, name=name: find_largest(name, sizes, trial).size for name in STRATEGIES
    }
    ways["RFC 2199, 0..100000"] = rfc_2199
    ways["halving from 512"] = repeated_halving

    print(
        f"\ntorch {torch.__version__}, {platform.machine()}, {platform.system()}; tiny Llama, rows of "
        f"{worst.length} tokens, {settings.memory_limit:,} bytes, rounding {rounding}\n"
    )
    print(f"{'way':22}{'finds':>7}{'trials':>8}{'failed':>8}{'seconds':>9}  sizes tried")
    for name, way in ways.items():
        tried: list[SizeTrial] = []
        probe = Probe(
            step=step,
            accumulation=lambda size: 1,
            headroom=settings.headroom,
            entering=lambda phase: None,
        )
        started = time.perf_counter()
        with probe:
            probe.prime(worst.batch)

            def trial(size: int, probe: Probe = probe, tried: list[SizeTrial] = tried) -> SizeTrial:
                tried.append(probe.trial(size, worst.batch))
                return tried[-1]

            found = way(trial)
        seconds = time.perf_counter() - started
        failed = sum(not one.fits for one in tried)
        print(
            f"{name:22}{found!s:>7}{len(tried):>8}{failed:>8}{seconds:>9.1f}  "
            f"{' '.join(str(one.size) for one in tried)}"
        )


if __name__ == "__main__":
    main()
