"""The time model: a roofline for each operation, replayed over streams."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import combinations, pairwise
from statistics import quantiles
from typing import Any

import pytest

from tests.helpers.speeds import RESULTS, once_blind
from torchtune_adaptive.planner.memory.gpus import GPUS
from torchtune_adaptive.planner.speed import devices, kernels
from torchtune_adaptive.planner.speed.devices import SPEEDS, with_power
from torchtune_adaptive.planner.speed.operations import (
    ATTENTION,
    COLLECTIVE,
    COPY,
    GATHERS,
    GEMM,
    HOST_WAIT,
    MEMORY,
    RECORD,
    REDUCES,
    WAIT,
    DifferentOperations,
    Operation,
    StepOperations,
    at_rows,
    packed_up,
    unpacked,
)
from torchtune_adaptive.planner.speed.replay import LAUNCHES, step_time
from torchtune_adaptive.planner.speed.roofline import seconds
from torchtune_adaptive.planner.speed.speed import EAGER_BAND, MUCH_ATTENTION, Pace, Speed

A100 = SPEEDS["a100-80gb"]
MEASURED = {f"{name}gb" for name in ("a100-40", "a100-80", "a800-80", "h100-80", "h800-80")}
MEASURED |= {f"{name}gb" for name in ("gh200-96", "gh200-144", "h200-141")}
"""GPUs whose shares of the peaks follow from published measurements."""
FAST_HOST = replace(A100, launch=0.0, kernel=0.0)
MEBIBYTE = 1 << 20


def gemm(m: float, n: float = 4096, k: float = 4096, **more) -> Operation:  # type: ignore[no-untyped-def]
    flops, nbytes = 2.0 * m * n * k, 2.0 * (m * k + k * n + m * n)
    sized = {"flops": flops, "nbytes": nbytes, "fused_bytes": nbytes, "shape": (1, m, n, k)}
    return Operation(GEMM, "mm", "forward", 0, "bfloat16", **{**sized, **more})


def moved(nbytes: float, stream: int = 0, name: str = "mul", **more) -> Operation:  # type: ignore[no-untyped-def]
    sized = {"nbytes": nbytes, "fused_bytes": nbytes}
    return Operation(MEMORY, name, "forward", stream, "bfloat16", **{**sized, **more})


def gathered(nbytes: float, stream: int) -> Operation:
    return Operation(COLLECTIVE, "_allgather_base_", "forward", stream, nbytes=nbytes)


def record(event: int, stream: int = 0) -> Operation:
    return Operation(RECORD, "", "forward", stream, event=event)


def wait(event: int, stream: int = 0) -> Operation:
    return Operation(WAIT, "", "forward", stream, event=event)


def took(*operations: Operation, ranks: int = 8, speeds: devices.Speeds = FAST_HOST) -> float:
    return step_time(StepOperations([list(operations)], []), speeds, ranks, 1).seconds


def test_every_gpu_has_a_speed() -> None:
    assert SPEEDS.keys() == GPUS.keys()
    for one in SPEEDS.values():
        assert 0.3 < one.gemm < 1 and all(0.1 < share < 1 for share in one.attention)


def test_an_operation_takes_what_it_computes_or_what_it_moves() -> None:
    large, thin = gemm(8192), gemm(8192, n=8)
    assert seconds(large, A100, 1, False) > large.flops / (A100.half or 0)
    assert seconds(thin, A100, 1, False) == pytest.approx(
        thin.nbytes / (A100.bandwidth * devices.STREAMING)
    )
    assert seconds(moved(8), A100, 1, False) == A100.kernel
    in_fp32 = large._replace(dtype="float32")
    assert seconds(in_fp32, A100, 1, False) > 10 * seconds(large, A100, 1, False)


def test_products_that_leave_processors_without_a_tile_are_slower() -> None:
    full = gemm(128 * 108, 256, 4096)  # a tile for each processor
    one_more = gemm(128 * 109, 256, 4096)
    assert seconds(one_more, A100, 1, False) > 1.1 * seconds(full, A100, 1, False)


def test_less_power_computes_less_and_moves_as_much() -> None:
    slower = with_power(A100, "slower", 0.5)
    assert seconds(gemm(8192), slower, 1, False) > 1.35 * seconds(gemm(8192), A100, 1, False)
    assert seconds(moved(1e9), slower, 1, False) == seconds(moved(1e9), A100, 1, False)


def test_collectives_take_the_slowest_link() -> None:
    one, eight, many = (seconds(gathered(1e9, 1), A100, n, False) for n in (1, 8, 64))
    assert one == 0.0 and 0 < eight < many
    reduced = gathered(1e9, 1)._replace(name="allreduce_")
    assert seconds(reduced, A100, 8, False) > 1.9 * eight


def test_collectives_grow_with_ranks_and_nodes() -> None:
    short = gathered(8e6, 1)
    few, more, most = (seconds(short, A100, n, False) for n in (8, 128, 512))
    assert few < more and most > 2 * more  # a ring has more steps
    within, across = (short._replace(shape=(8, distance)) for distance in (1, 8))
    assert seconds(within, A100, 64, False) == few  # the group's size counts, not all ranks
    assert seconds(across, A100, 64, False) > 3 * few  # each rank of the group in another node


def test_a_collective_takes_from_what_runs_beside_it() -> None:
    compute, move = gemm(16384), moved(4e9)
    for beside in (compute, move):
        alone = took(beside)
        collective = gathered(1e8, 1)
        both = took(record(2), wait(2, 1), collective, beside)  # it begins when the step does
        assert 1.01 * alone < both < alone + seconds(collective, FAST_HOST, 8, False)


def test_collectives_share_the_links() -> None:
    one = seconds(gathered(1e9, 1), FAST_HOST, 8, False)
    step = (gathered(1e9, 1), gathered(1e9, 2), record(1, 2), wait(1))
    assert took(*step) == pytest.approx(2 * one, rel=1e-3)


def test_a_collective_of_split_layers_is_not_hidden() -> None:
    """It is on the stream that computes, and takes what its own group takes, however many ranks there are."""
    one = gathered(1e9, 0)._replace(name="all_reduce", shape=(2, 1))
    alone = seconds(one, FAST_HOST, 2, False)
    assert (
        alone
        == seconds(one, FAST_HOST, 64, False)
        == seconds(one._replace(name="allreduce_"), FAST_HOST, 64, False)
    )
    assert took(gemm(8192), one, ranks=64) == pytest.approx(took(gemm(8192)) + alone)
    across = one._replace(shape=(16, 1))
    assert seconds(across, FAST_HOST, 64, False) > 2 * alone, "over the network"


def test_ranks_with_the_same_rows_train_on_them_once() -> None:
    pace, step = Pace(A100, 8, False, False, "bfloat16"), StepOperations([[gemm(8192)]], [])
    apart, together = (replace(pace, holders=n).speed(step, 4, 512, 1) for n in (1, 4))
    assert together.rows_per_second_per_gpu * 4 == apart.rows_per_second_per_gpu
    assert together.hours(1e9, 8) == pytest.approx(4 * apart.hours(1e9, 8))
    assert together.mfu == apart.mfu, "each has computed its own share"


def share_of_bandwidth(gpu: str, name: str, columns: int = 0, nbytes: float = 1e9) -> float:
    shape = (nbytes / columns / 2, columns) if columns else ()
    operation = moved(nbytes, name=name, shape=shape)
    speeds = SPEEDS[gpu]
    return nbytes / seconds(operation, speeds, 1, False) / speeds.bandwidth


def test_what_the_cache_holds_moves_faster() -> None:
    for gpu, large in (("a100-80gb", 30e6), ("rtx4090-24gb", 50e6)):
        shares = [share_of_bandwidth(gpu, "add", nbytes=nbytes) for nbytes in (large / 2, large)]
        assert shares == pytest.approx([devices.STREAMING / kernels.CACHED, devices.STREAMING])
    assert all(speeds.cache > 0 for speeds in SPEEDS.values())


def test_memory_bound_kernels_reach_what_their_structure_allows() -> None:
    for gpu in ("a100-80gb", "h100-80gb"):
        assert share_of_bandwidth(gpu, "add") == pytest.approx(devices.STREAMING)
        # Each of two kernels reads the gradient and the input.
        backward = share_of_bandwidth(gpu, "native_layer_norm_backward", 4096)
        assert backward == pytest.approx(devices.STREAMING * 3 / 5)
        vocabulary, few = (share_of_bandwidth(gpu, "_log_softmax", n) for n in (1 << 18, 1 << 13))
        assert vocabulary < few < devices.STREAMING  # long rows do not fit into the cache
        assert share_of_bandwidth(gpu, "_softmax", 1024) == pytest.approx(devices.STREAMING)
    # More bandwidth for each multiprocessor needs more under way, or is left unused.
    sums = [share_of_bandwidth(gpu, "sum", 4096) for gpu in ("a100-80gb", "h100-80gb")]
    assert sums[1] < 0.8 * sums[0] < sums[0] < devices.STREAMING
    # erf is arithmetic, of which an A100 has little.
    gelu = [share_of_bandwidth(gpu, "gelu_backward") for gpu in ("a100-80gb", "h100-80gb")]
    assert gelu[0] < gelu[1] == pytest.approx(devices.STREAMING)
    compiled = moved(1e9, name="gelu_backward")
    assert seconds(compiled, A100, 1, True) < seconds(compiled, A100, 1, False)


def test_attention_is_slower_over_short_rows_and_with_small_heads() -> None:
    def took_by(length: int, dim: int = 128) -> float:
        shape = (32, length, length, dim)
        one = Operation(ATTENTION, "flash", "forward", 0, "bfloat16", flops=1e12, shape=shape)
        return seconds(one, A100, 1, False)

    lengths = [took_by(n) for n in (512, 2048, 8192, 32768)]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] > 1.6 * lengths[-1]
    assert took_by(2048, 64) == pytest.approx(took_by(2048) / 0.9, rel=0.01)
    assert took_by(2048, 256) == took_by(2048)


def test_products_with_few_steps_mostly_write() -> None:
    h100 = SPEEDS["h100-80gb"]
    for speeds in (A100, h100):
        deep, flat = (gemm(16384, k=k) for k in (8192, 512))
        assert seconds(flat, speeds, 1, False) > 1.1 * seconds(deep, speeds, 1, False) / 16
    lost = [
        seconds(gemm(16384, k=1024), s, 1, False) * (s.half or 0) * s.gemm for s in (A100, h100)
    ]
    assert lost[1] > lost[0]  # which computes more for each byte that it moves


def test_communication_hides_behind_computation() -> None:
    compute = gemm(16384)
    alone = seconds(compute, FAST_HOST, 8, False)
    hidden = took(gathered(1e8, 1), record(1, 1), compute, wait(1), compute)
    assert hidden == pytest.approx(2 * alone, rel=1e-3)
    updated = (record(2), wait(2, 1))  # what is gathered is what the step before has updated
    exposed = took(*updated, gathered(1e10, 1), record(1, 1), compute, wait(1), compute)
    assert exposed == pytest.approx(
        seconds(gathered(1e10, 1), FAST_HOST, 8, False) + alone, rel=1e-3
    )


def test_a_step_of_many_short_kernels_waits_for_launches() -> None:
    step = StepOperations([[moved(8)] * 1000], [])
    time = step_time(step, A100, 1, 1)
    assert time.seconds == pytest.approx(1000 * A100.launch, rel=0.01)
    assert time.parts[LAUNCHES] > 0.5 * time.seconds
    fused = [moved(8), *[moved(8, joins=True)] * 999]
    assert (
        step_time(StepOperations([fused], []), A100, 1, 1, compiled=True).seconds
        < 0.01 * time.seconds
    )


def test_compiled_steps_are_launched_sooner_and_repeated_layers_later() -> None:
    short, many = moved(8), 1000
    step = StepOperations([[short] * many], [])
    compiled = step_time(step, A100, 1, 1, compiled=True).seconds
    assert compiled == pytest.approx(many * A100.compiled_launch, rel=0.01)
    eager = step_time(step, A100, 1, 1).seconds
    repeated = StepOperations(
        [[*[short] * many, gemm(8, 8, 8, repeats=1), gemm(8, 8, 8, repeats=2)]], []
    )
    later = step_time(repeated, A100, 1, 1).seconds - eager
    assert later == pytest.approx(2 * (devices.REPEATING + A100.launch), rel=0.01)


def test_the_host_takes_its_time_for_the_hooks_of_fsdp() -> None:
    short = [moved(8)] * 10
    alone, *others = (
        step_time(StepOperations([[*short, *more]], []), A100, 1, 1).seconds / A100.launch
        for more in (
            [],
            [moved(8, name=GATHERS, shape=(9,))],
            [moved(8, name=REDUCES, shape=(9,))],
            [moved(8, name=GATHERS, shape=(10,))],
        )
    )
    gathered, reduced, wider = (launches - alone for launches in others)
    hooks = 1 + devices.FSDP_COLLECTIVE + 9 * devices.FSDP_PARAMETER
    assert gathered == reduced == pytest.approx(hooks, rel=0.01)
    assert wider - gathered == pytest.approx(devices.FSDP_PARAMETER, rel=0.01)


def test_the_host_waits_where_the_step_makes_it() -> None:
    busy = gemm(16384)
    until = Operation(HOST_WAIT, "", "forward", 0)
    slow_host = replace(FAST_HOST, launch=1e-4)
    ahead = took(busy, *[moved(8)] * 10, speeds=slow_host)
    blocked = took(busy, until, *[moved(8)] * 10, speeds=slow_host)
    assert blocked > ahead


def test_the_parts_of_a_steps_time_add_up() -> None:
    copy = Operation(COPY, "offload", "forward", 2, nbytes=1e8)
    attention = Operation(ATTENTION, "flash", "forward", 0, "bfloat16", flops=1e11, nbytes=1e6)
    part = [
        gathered(1e9, 1),
        record(1, 1),
        wait(1),
        gemm(4096),
        copy,
        record(2, 2),
        wait(2),
        attention,
    ]
    time = step_time(StepOperations([part, part], [moved(1e8)]), A100, 8, 7)
    assert sum(time.parts.values()) == pytest.approx(time.seconds)
    assert min(time.parts.values()) >= 0
    for kind in (GEMM, ATTENTION, MEMORY, COLLECTIVE, COPY):
        assert time.parts[kind] > 0


def test_further_micro_batches_take_as_long_as_the_second() -> None:
    first, second, update = [gemm(4096)] * 3, [gemm(4096)] * 2, [moved(1e9)]
    step = StepOperations([first, second], update)
    times = [step_time(step, A100, 1, n).seconds for n in range(1, 9)]
    gaps = [b - a for a, b in pairwise(times)]
    assert gaps == pytest.approx([2 * seconds(gemm(4096), A100, 1, False)] * 7)


def test_the_last_micro_batch_comes_once() -> None:
    """With DDP, it reduces gradients; the others do not."""
    first, between, last = [moved(8e9)], [moved(8e9), gemm(8192)], [gemm(8192), gathered(8e9, 0)]

    def seconds_of(kinds: list[list[Operation]], number: int) -> float:
        return step_time(StepOperations(kinds, []), FAST_HOST, 8, number).seconds

    three = seconds_of([first, between, last], 3)
    assert seconds_of([first, last], 2) == pytest.approx(three - took(*between))
    assert seconds_of([first, between, last], 10) == pytest.approx(three + 7 * took(*between))
    flops = step_time(StepOperations([first, between, last], []), FAST_HOST, 8, 10).model_flops
    assert flops == 9 * gemm(8192).flops


def test_repetitions_are_time_but_not_model_flops() -> None:
    plain = StepOperations([[gemm(4096)] * 3], [])
    repeated = StepOperations([[*[gemm(4096)] * 3, gemm(4096, repeats=1)]], [])
    pace = Pace(A100, 1, compiled=False, quantized=False, dtype="bfloat16")
    without, with_them = (pace.speed(step, 2, 2048, 1) for step in (plain, repeated))
    assert without.tokens_per_second_per_gpu == pytest.approx(
        with_them.tokens_per_second_per_gpu * 4 / 3, rel=1e-3
    )
    assert without.mfu == pytest.approx(with_them.mfu * 4 / 3, rel=1e-3)
    assert with_them.recomputing == pytest.approx(0.25, rel=1e-2)


def test_a_measurement_corrects_and_narrows_the_band() -> None:
    step = StepOperations([[gemm(4096)] * 3], [])
    pace = Pace(A100, 1, compiled=True, quantized=False, dtype="bfloat16")
    plain, corrected = (p.speed(step, 2, 64, 1) for p in (pace, replace(pace, correction=1.25)))
    assert corrected.seconds == pytest.approx(1.25 * plain.seconds)
    bands = [corrected.band, plain.band, replace(pace, quantized=True).band(0.0)]
    assert bands == sorted(bands, key=lambda band: band[1] - band[0])
    assert plain.hours(plain.tokens_per_second_per_gpu * 7200, 2) == pytest.approx(1.0)


def test_a_step_computes_with_the_type_of_most_flops() -> None:
    assert (
        StepOperations([[gemm(64)._replace(dtype="float32"), gemm(64)] * 2], [gemm(64)]).dtype
        == "bfloat16"
    )


def test_the_band_is_that_of_rows_that_nobody_had_seen() -> None:
    blind = RESULTS.read_text().partition("## Blind rows")[2]
    rows = re.findall(r"\| ([\d,]+) \| ([\d,]+) \| [+-]\d+ % \|", blind)
    shares = [
        float(real.replace(",", "")) / float(predicted.replace(",", "")) - 1
        for real, predicted in rows
    ]
    assert len(shares) == 26
    low, high = EAGER_BAND
    assert low == pytest.approx(quantiles(shares, n=20, method="inclusive")[0], abs=0.01)
    assert max(shares) < high


def test_the_band_holds_nine_times_of_ten_on_each_side_of_the_share_of_attention() -> None:
    blind = RESULTS.read_text().partition("## Blind rows")[2]
    rows = re.findall(r"\| ([\d,]+) \| ([\d,]+) \| [+-]\d+ % \| [^|]*attention (\d+)", blind)
    inside: dict[bool, list[bool]] = {True: [], False: []}
    pace = Pace(A100, 8, compiled=False, quantized=False, dtype="bfloat16")
    for real, predicted, percent in rows:
        low, high = pace.band(int(percent) / 100)
        share = float(real.replace(",", "")) / float(predicted.replace(",", "")) - 1
        inside[int(percent) > 30].append(low <= share <= high)
    assert len(inside[True]) + len(inside[False]) == 26
    for rows_inside in inside.values():
        assert sum(rows_inside) >= 0.9 * len(rows_inside) > 0


@pytest.mark.parametrize(
    ("facts", "lowest"),
    [
        ({}, -0.45),
        ({"compiled": True}, -0.45),
        ({"quantized": True}, -0.45),
        ({"experts": True}, -0.70),
        ({"correction": 1.1}, -0.05),
    ],
)
def test_where_attention_decides_the_speed_may_be_lower(
    facts: dict[str, Any], lowest: float
) -> None:
    given: dict[str, Any] = {"compiled": False, "quantized": False, "dtype": "bfloat16"} | facts
    pace = Pace(A100, 1, **given)
    assert pace.band(MUCH_ATTENTION)[0] >= pace.band(0.31)[0] == lowest
    assert pace.band(0.31)[1] == pace.band(0.0)[1]


def test_what_is_too_close_to_call_is_so_on_published_rows() -> None:
    rows = once_blind()
    assert len(rows) == 26
    errors = {key: then / published for key, (published, _, then) in rows.items()}
    apart = [
        abs(errors[one] / errors[other] - 1)
        for one, other in combinations(errors, 2)
        if one[0] == other[0] and one[1].split()[0] == other[1].split()[0]
    ]
    assert quantiles(apart, n=10, method="inclusive")[-1] < Speed.CLOSE


def test_steps_between_two_traces() -> None:
    few, many = (
        StepOperations([[gemm(rows * 2048), record(1), wait(1)]], [moved(MEBIBYTE)])
        for rows in (2, 3)
    )
    assert at_rows(few, many, 6.0) == StepOperations(
        [[gemm(8 * 2048), record(1), wait(1)]], [moved(MEBIBYTE)]
    )
    with pytest.raises(DifferentOperations):
        at_rows(few, StepOperations([[gemm(1)]], [moved(MEBIBYTE)]), 1.0)


def test_a_step_survives_json() -> None:
    part = [gemm(4096), record(7, 1), wait(7), moved(MEBIBYTE, joins=True, fused_bytes=8)]
    step = StepOperations([part, part[:2]], [moved(2.5)])
    assert unpacked(json.loads(json.dumps(packed_up(step)))) == step


def test_shares_that_nobody_has_measured_are_said_to_be_assumed() -> None:
    assert {name for name, one in SPEEDS.items() if not one.assumed} == MEASURED
    for name in SPEEDS.keys() - MEASURED:
        assert SPEEDS[name].assumed.startswith("its shares of the peaks are assumptions"), name
