"""Plans of compiled runs: one for every config of torchtune's, and the compiler as it was."""

from __future__ import annotations

import re
from typing import Any

import pytest
from torchtune._recipe_registry import get_all_recipes

from tests.helpers.ranks import run_ranks
from torchtune_adaptive.common.errors import ConfigError
from torchtune_adaptive.planner import fake_device
from torchtune_adaptive.planner.trace.compiled_regions import check_compiler
from torchtune_adaptive.planner.workers import processes
from torchtune_adaptive.recipe.plan.predict import predict
from torchtune_adaptive.recipe.plan.request import plan_request
from torchtune_adaptive.recipe.registry import load_config, with_overrides
from torchtune_adaptive.recipe.settings.kind_table import has_images

pytestmark = pytest.mark.ranks

LARGEST = 8.5
"""Billions of parameters."""
LENGTH = 256


def names_of_configs() -> list[str]:
    names = {config.name for recipe in get_all_recipes() for config in recipe.configs}
    sizes = {name: re.search(r"/(?:([\d.]+)B|mini|[\d.]+_to)_", name) for name in names}
    return sorted(
        name
        for name, size in sizes.items()
        if size and float(size[1] or 4) <= LARGEST and _is_text(name)
    )


def _is_text(name: str) -> bool:
    try:
        return not has_images(load_config(name))
    except (ConfigError, SystemExit):  # of a recipe that we do not have
        return False


@pytest.mark.exhaustive
@pytest.mark.rotating(exhaustive=4)
@pytest.mark.parametrize("name", names_of_configs())
def test_every_config_has_a_plan_compiled_and_eager(name: str) -> None:
    queries: dict[tuple[bool, int], Any] = {}
    for compiled in (False, True)[: 1 if "_qat_" in name else 2]:  # which is not compiled
        changes = [f"compile={compiled}", "adaptive_batching.cache=False"]
        cfg = with_overrides(load_config(name), changes)
        for ranks in (1, 8):
            plan = plan_request(cfg, ranks, "h100-80gb", length=LENGTH)
            queries[compiled, ranks] = plan.query()
    with processes("torchtune_adaptive.recipe.plan.preload") as run:
        asked = {which: run(predict, query) for which, query in queries.items()}
        found = {which: answer.result(timeout=500) for which, answer in asked.items()}
    for (compiled, ranks), prediction in found.items():
        assert not prediction.as_written
        quantized_and_kept = "qlora" in name or "qdora" in name
        if compiled and not quantized_and_kept:
            eager = found[False, ranks].configured
            assert prediction.configured.allocated < 1.01 * eager.allocated


def what_stays() -> list[bool]:
    from torch._inductor import config, scheduler
    from torch._inductor.graph import GraphLowering

    def parts() -> list[Any]:
        return [GraphLowering._compile_to_module, scheduler.has_triton, config.fx_graph_cache]

    before = parts()
    assert not check_compiler(fake_device.device(), "inductor")
    return [one is other for one, other in zip(before, parts(), strict=True)]


def test_the_compiler_is_changed_only_while_a_region_is_compiled() -> None:
    [same] = run_ranks(what_stays, 1, timeout=60, join=False)
    assert same == [True, True, True]
