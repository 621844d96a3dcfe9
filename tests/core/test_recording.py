"""What a launch is, by whatever operator it is made, and that it can be made again."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tests.helpers.library import gather_with_gradient
from torchtune_adaptive.core.private import launches_of, unfinished_works
from torchtune_adaptive.core.ranks import recording
from torchtune_adaptive.core.ranks.recording import Launch, LaunchRecorder, launch_again
from torchtune_adaptive.core.step.failures import settle


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def seen_in(call: Callable[[], Any]) -> list[Launch]:
    seen: list[Launch] = []
    with LaunchRecorder(seen.append):
        call()
    return seen


@torch.library.custom_op("tests::summed", mutates_args=())
def _summed(tensor: torch.Tensor) -> torch.Tensor:
    return functional.all_reduce(tensor, "sum", dist.group.WORLD).clone()


CALLS: dict[str, Callable[[int], Any]] = {
    "all-reduce": lambda size: dist.all_reduce(torch.ones(size)),
    "asynchronous": lambda size: dist.all_reduce(torch.ones(size), async_op=True).wait(),  # type: ignore[union-attr]
    "list of tensors": lambda size: dist.all_gather([torch.ones(size)], torch.ones(size)),
    "functional": lambda size: functional.all_reduce(
        torch.ones(size), "sum", dist.group.WORLD
    ).sum(),
    "in place": lambda size: torch.ops._c10d_functional.wait_tensor(
        torch.ops._c10d_functional.all_reduce_(torch.ones(size), "sum", "0")
    ),
    "in backward": lambda size: (
        gather_with_gradient(torch.ones(size, requires_grad=True), 0, dist.group.WORLD)
        .sum()
        .backward()
    ),
    "in an operator of its own": lambda size: _summed(torch.ones(size)),
    "all-to-all": lambda size: dist.all_to_all_single(torch.ones(size), torch.ones(size)),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_launch_is_seen_compared_and_made_again(call: Callable[[int], Any]) -> None:
    seen = seen_in(lambda: call(2))
    assert len(seen) == (2 if call is CALLS["in backward"] else 1)
    assert seen == seen_in(lambda: call(2)) != seen_in(lambda: call(3))
    assert dist.group.WORLD is not None
    before, told = launches_of(dist.group.WORLD), []
    launch_again(seen, torch.device("cpu"), lambda: told.append(0))
    after = launches_of(dist.group.WORLD)
    assert before is not None and after == before + len(seen)
    assert unfinished_works() == 0 and not told


@pytest.mark.parametrize(
    ("received", "sent", "follows", "in_tensors"),
    [
        (None, None, False, False),
        ([0, 4], [4, 0], False, False),
        ([0, 0], [4, 0], True, True),
        ([2, 2], [2, 2], True, False),
        ([1, 3], [2, 2], True, True),
    ],
)
def test_sizes_of_parts_may_follow_data(
    received: list[int] | None, sent: list[int] | None, follows: bool, in_tensors: bool
) -> None:
    """Where parts are tensors of their own, there is no other way to say that they are equal."""
    followed = []

    class Seen(Exception):
        pass

    def stop(launch: Launch) -> None:
        followed.append(launch.follows_data)
        raise Seen

    with pytest.raises(Seen), LaunchRecorder(stop):
        dist.all_to_all_single(torch.ones(4), torch.ones(4), received, sent)
    if received and sent:
        with pytest.raises(Seen), LaunchRecorder(stop):
            dist.all_to_all([torch.ones(n) for n in received], [torch.ones(n) for n in sent])
    assert followed == [follows, in_tensors][: len(followed)]


@pytest.mark.parametrize(
    ("namespace", "name", "why"),
    [
        ("c10d", "send", "sequence of its own"),
        ("c10d", "recv_", "sequence of its own"),
        ("c10d", "recv_any_source_", "sequence of its own"),
        ("_c10d_functional", "isend", "sequence of its own"),
        ("_c10d_functional", "irecv", "sequence of its own"),
        ("_c10d_functional", "batch_p2p_ops", "sequence of its own"),
        ("symm_mem", "one_shot_all_reduce", "memory of other ranks"),
    ],
)
def test_what_no_rank_could_make_alone_is_refused_by_name(
    namespace: str, name: str, why: str
) -> None:
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None:
        pytest.skip(f"torch {torch.__version__} has no {namespace}.{name}")
    launch = recording._seen(packet.default, (torch.ones(1),), {})
    assert name in launch.refused and why in launch.refused


class Recorded(NamedTuple):
    """A compiled function, of which some calls are recorded, as the passes of a step are."""

    function: Callable[..., torch.Tensor]
    graphs: list[torch.fx.GraphModule]

    @classmethod
    def of(cls, function: Callable[..., torch.Tensor]) -> Recorded:
        graphs: list[torch.fx.GraphModule] = []

        def kept(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
            graphs.append(graph)
            return graph

        torch.compiler.reset()
        return cls(torch.compile(function, backend=kept), graphs)


@pytest.mark.parametrize("recorded", [{0, 1}, {2, 3}], ids=["first", "later"])
def test_what_is_compiled_stays_compiled_while_it_is_recorded(recorded: set[int]) -> None:
    squares = Recorded.of(lambda tensor: (tensor * tensor).sum())
    for step in range(5):
        values = torch.ones(3, requires_grad=True)
        with LaunchRecorder(lambda launch: None) if step in recorded else nullcontext():
            squares.function(values).backward()
        assert values.grad is not None and values.grad.tolist() == [2.0] * 3
    assert len(squares.graphs) == 1


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_flex_attention_runs_while_it_is_recorded(compiled: bool) -> None:
    attend, graphs = Recorded.of(flex_attention) if compiled else Recorded(flex_attention, [])
    mask = create_block_mask(lambda b, h, query, key: query >= key, 1, None, 8, 8, device="cpu")
    query, key, value = torch.randn(3, 1, 2, 8, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        with LaunchRecorder(lambda launch: None):
            found = attend(query, key, value, block_mask=mask)
        expected = flex_attention(query, key, value, block_mask=mask)
    torch.testing.assert_close(found, expected)
    assert len(graphs) == compiled


def test_an_operator_runs_on_its_device_although_offsets_are_on_the_host() -> None:
    with torch.library._scoped_library("tests", "FRAGMENT") as library:
        library.define("attend(Tensor offsets, Tensor rows) -> Tensor")
        library.impl("attend", lambda offsets, rows: rows.clone(), "Meta")
        seen = seen_in(lambda: torch.ops.tests.attend(torch.zeros(2), torch.ones(3, device="meta")))
    assert seen == []


def test_a_failure_between_launch_and_wait_leaves_nothing_behind() -> None:
    def fail() -> None:
        raw = torch.ops._c10d_functional.all_reduce(torch.ones(2), "sum", "0")
        wrapped = functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
        raise torch.OutOfMemoryError(f"{raw.shape} {type(wrapped)}")

    with pytest.raises(torch.OutOfMemoryError) as failed:
        fail()
    assert unfinished_works() == 2
    settle(failed.value)
    assert unfinished_works() == 0
