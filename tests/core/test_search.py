"""The search knows nothing but a function, so these tests are functions: of memory, good and bad."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from torchtune_adaptive.core.search.strategies import STRATEGIES, SearchResult, Status, find_largest
from torchtune_adaptive.core.search.trial import RankReport, SizeTrial
from torchtune_adaptive.core.sizes.split import candidates


def run(
    strategy: str, sizes: tuple[int, ...], memory: Callable[[int], int], capacity: int
) -> SearchResult:
    """Search on a device that needs ``memory(size)`` bytes and has ``capacity``."""

    def trial(size: int) -> SizeTrial:
        peak = memory(size)
        failed_in = None if peak <= capacity else "forward"
        report = RankReport(peak, peak, 0, failed_in=failed_in, usable_bytes=capacity)
        return SizeTrial(size, 0.0, (report,))

    return find_largest(strategy, sizes, trial)


def tried(result: SearchResult) -> list[int]:
    return [trial.size for trial in result.trials]


def line(constant: int, per_row: int) -> Callable[[int], int]:
    return lambda size: constant + per_row * size


POWERS = candidates("power_of_two", 512, 0)
EVERY = candidates("none", 512, 0)


class TestCandidates:
    def test_powers_of_two_up_to_the_ceiling(self) -> None:
        assert candidates("power_of_two", 12, 0) == (1, 2, 4, 8)
        assert candidates("power_of_two", 16, 0) == (1, 2, 4, 8, 16)
        assert candidates("power_of_two", 1, 0) == (1,)

    def test_divisors_of_the_rows_in_a_step(self) -> None:
        assert candidates("divisor", 100, 12) == (1, 2, 3, 4, 6, 12)
        assert candidates("divisor", 5, 12) == (1, 2, 3, 4)
        assert candidates("divisor", 100, 13) == (1, 13)
        assert candidates("divisor", 100, 36)[-1] == 36  # a square's root is one divisor, not two

    def test_every_size(self) -> None:
        assert candidates("none", 4, 0) == (1, 2, 3, 4)

    def test_an_unknown_rounding_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="nearest"):
            candidates("nearest", 4, 4)


class TestExactTraces:
    """Which sizes are tried, one by one: the cost of a search is its list of trials."""

    def test_halving_comes_down_from_the_ceiling(self) -> None:
        result = run("halve", POWERS, line(0, 1), 40)
        assert tried(result) == [512, 256, 128, 64, 32]
        assert result.size == 32

    def test_halving_settles_what_it_jumped_over(self) -> None:
        result = run("halve", EVERY, line(0, 1), 100)
        assert tried(result) == [512, 256, 128, 64, 96, 112, 104, 100, 102, 101]
        assert result.size == 100

    def test_bisection_doubles_then_bisects(self) -> None:
        assert tried(run("bisect", POWERS, line(0, 1), 40)) == [1, 2, 4, 8, 16, 32, 64]
        assert tried(run("bisect", EVERY, line(0, 1), 11)) == [1, 2, 4, 8, 16, 12, 10, 11]

    def test_extrapolation_goes_where_the_line_ends(self) -> None:
        # 100 + 10 a row in 430: 33 rows. The candidate below is 32; 64 is ruled out by trying it, last.
        result = run("extrapolate", POWERS, line(100, 10), 430)
        assert tried(result) == [1, 2, 32, 64]
        assert result.size == 32 and result.status is Status.NEXT_DOES_NOT_FIT

    def test_extrapolation_finds_an_exact_end_at_once(self) -> None:
        assert tried(run("extrapolate", EVERY, line(100, 10), 435)) == [1, 2, 33, 34]

    def test_extrapolation_steps_down_where_memory_bends_up(self) -> None:
        def memory(size: int) -> int:
            return 100 + 10 * size + 30 * max(0, size - 8)

        result = run("extrapolate", POWERS, memory, 700)
        assert tried(result) == [1, 2, 32, 16]
        assert result.size == 16

    def test_extrapolation_steps_up_where_memory_bends_down(self) -> None:
        def memory(size: int) -> int:
            return 100 + 10 * min(size, 8) + size

        result = run("extrapolate", POWERS, memory, 400)
        assert tried(result) == [1, 2, 16, 32, 128, 256]
        assert result.size == 128

    def test_no_leap_is_too_long(self) -> None:
        # One byte a row in a million: a line through 1 and 2 says 999,900 rows. Try 64, then go on.
        sizes = candidates("power_of_two", 1 << 20, 0)
        assert tried(run("extrapolate", sizes, line(100, 1), 1_000_000))[:4] == [1, 2, 64, 2048]

    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_the_ceiling_ends_the_search(self, strategy: str) -> None:
        result = run(strategy, POWERS, line(0, 0), 10)
        assert (result.size, result.status) == (512, Status.CEILING)

    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_one_candidate_is_tried(self, strategy: str) -> None:
        assert tried(run(strategy, (1,), line(0, 1), 10)) == [1]

    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_nothing_fits_is_said_and_never_a_size(self, strategy: str) -> None:
        result = run(strategy, POWERS, line(0, 100), 10)
        assert (result.size, result.status) == (None, Status.NOTHING_FITS)
        assert tried(result)[-1] == 1


def random_case(seed: int) -> tuple[tuple[int, ...], Callable[[int], int], int, bool]:
    """Sizes, a memory function, a capacity, and whether the function only grows."""
    choose = random.Random(seed)
    rounding = choose.choice(["power_of_two", "divisor", "none"])
    sizes = candidates(rounding, choose.choice([1, 2, 3, 7, 64, 1000]), choose.randint(1, 5000))
    constant, per_row, bend = (
        choose.randint(0, 10**6),
        choose.randint(1, 10**4),
        choose.randint(1, 200),
    )
    noise = {size: choose.randint(0, 10**6) for size in sizes}
    functions: dict[str, Callable[[int], int]] = {
        "line": lambda size: constant + per_row * size,
        "bend": lambda size: constant + per_row * size + 3 * per_row * max(0, size - bend),
        "curve": lambda size: constant + int(per_row * size**1.5),
        "stairs": lambda size: constant + per_row * (size // bend),
        "constant": lambda size: constant,
        "falling": lambda size: constant + 10**6 // size,
        "noise": lambda size: constant + noise[size],
    }
    kind = choose.choice(list(functions))
    capacity = constant + choose.randint(-10, 10**7)
    return sizes, functions[kind], capacity, kind not in ("falling", "noise")


@pytest.mark.parametrize("block", range(10))
def test_properties_of_every_search(block: int) -> None:
    for seed in range(block * 300, (block + 1) * 300):
        sizes, memory, capacity, grows = random_case(seed)
        found = set()
        for strategy in STRATEGIES:
            result = run(strategy, sizes, memory, capacity)
            sizes_tried = tried(result)
            assert len(set(sizes_tried)) == len(sizes_tried), "no size is tried twice"
            assert set(sizes_tried) <= set(sizes)
            # 2 log2 and a little: never a walk through all sizes.
            assert len(sizes_tried) <= 2 * len(sizes).bit_length() + 6
            fitting = [trial.size for trial in result.trials if trial.fits]
            assert result.size in fitting if fitting else result.size is None
            found.add(result.size)
        if grows:
            best = max((size for size in sizes if memory(size) <= capacity), default=None)
            assert found == {best}


@pytest.mark.parametrize("seed", range(200))
def test_extrapolation_tries_nothing_that_its_line_rules_out_but_the_last(seed: int) -> None:
    choose = random.Random(seed)
    sizes = candidates(choose.choice(["power_of_two", "none"]), 4096, 0)
    memory = line(choose.randint(0, 10**6), choose.randint(100, 10**4))
    capacity = memory(choose.randint(1, 5000))
    result = run("extrapolate", sizes, memory, capacity)
    assert all(trial.fits for trial in result.trials[:-1])
