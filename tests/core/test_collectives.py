"""Which collectives have been launched: when a failure comes between several, and besides those of FSDP."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.counting import counted_launches, fail_in_backward
from tests.helpers.ranks import Alone
from torchtune_adaptive import UsageError
from torchtune_adaptive.common import launcher
from torchtune_adaptive.common.errors import RankLost
from torchtune_adaptive.core.ranks import collectives
from torchtune_adaptive.core.ranks.agreement import Ranks, SomeRanks
from torchtune_adaptive.core.ranks.collectives import AnotherRankFailed, Collectives, _Said
from torchtune_adaptive.core.ranks.counts import other_groups
from torchtune_adaptive.core.ranks.recording import Launch
from torchtune_adaptive.core.step.failures import drop_unfinished


class Group:
    """A process group that has launched some collectives."""

    group_name = "group"

    def __init__(self, launched: int | None, *members: int) -> None:
        self.launched, self.members = launched, members

    def _get_sequence_number_for_group(self) -> int:
        if self.launched is None:
            raise RuntimeError("Backend staging does not yet support sequence numbers.")
        return self.launched

    def size(self) -> int:
        return len(self.members)


class Holders(Alone):
    """Two ranks that hold the same rows, of which the other says what it is told to."""

    def __init__(self, says: Iterator[int], *members: int) -> None:
        super().__init__(len(members))
        self.members = frozenset(members)
        self.says = says
        self.asked = 0

    def spread(self, number: int) -> tuple[int, int]:
        self.asked += 1
        return number, max(number, next(self.says, 0))


class Passes:
    """Passes in which a tensor-parallel group of ranks 0 and 1, and FSDP's of 0 and 2, launch."""

    def __init__(self, holders: Ranks | None = None, compiled: bool = False) -> None:
        self.others = Holders(iter(()), 0, 1, 2, 3)
        self.alone = holders is None
        self.collectives = Collectives(
            [nn.Identity()],
            self.others,
            holders or SomeRanks(),
            torch.device("cpu"),
            compiled=compiled,
        )
        self.local, self.wide = self.groups = Group(7, 0, 1), Group(3, 0, 2)
        self.collectives._groups = {*self.groups}  # type: ignore[arg-type]
        self.made_again: list[str] = []

    def launch(self, group: Group, of_fsdp: bool = True, name: str = "gather") -> None:
        launch = Launch(print, ((), {}), group, (name, group.members), of_fsdp)  # type: ignore[arg-type]
        if self.collectives.recording:
            self.collectives._note([launch])
        assert group.launched is not None
        group.launched += 1

    def run(
        self,
        length: int = 1,
        own: int = 0,
        unseen: int = 0,
        launched: int | None = None,
        between: int = 0,
        goes_on: bool = False,
    ) -> None:
        """A pass with as many local launches as a micro-batch is long, between two of FSDP."""
        if not goes_on:
            self.collectives.end_step()
        self.collectives.begin_pass("training", lambda: length)
        self.collectives.begin_stage("forward")
        groups = [self.wide, *[self.local] * length, self.wide]
        for number, group in enumerate(groups):
            if number == launched:
                raise torch.OutOfMemoryError
            self.launch(group, group is self.wide or self.alone)
        for _ in range(own):
            self.launch(self.wide, of_fsdp=False, name="reduce")
        self.wide.launched += unseen  # type: ignore[operator]
        self.collectives.end_stage()
        self.wide.launched += between  # type: ignore[operator]
        self.collectives.begin_stage("backward")
        self.collectives.end_stage()
        self.collectives.end_pass()

    def fail(
        self, monkeypatch: pytest.MonkeyPatch, after: int, length: int = 1, goes_on: bool = False
    ) -> str:
        """What is made again, ``l``ocal or ``w``ide, where memory runs out after some launches."""
        again: list[Launch] = []
        monkeypatch.setattr(collectives, "launch_again", lambda rest, *_: again.extend(rest))
        with pytest.raises(torch.OutOfMemoryError):
            self.run(length, launched=after, goes_on=goes_on)
        self.known = self.collectives.finish("forward")
        return "".join("l" if each.group is self.local else "w" for each in again)  # type: ignore[comparison-overlap]


@pytest.fixture(autouse=True)
def members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [*group.members])


def test_each_variant_of_the_models_has_its_own_sequence() -> None:
    passes = Passes()

    def recording(variant: str) -> bool:
        passes.collectives.variant = variant
        passes.run()
        return passes.collectives.recording

    assert [recording(one) for one in "aabba"] == [True, True, True, True, False]


@pytest.mark.parametrize(("after", "rest"), [*enumerate(["wllw", "llw", "lw", "w"])])
def test_groups_tell_what_is_left_to_launch(
    after: int, rest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = Passes(Holders(iter(()), 0, 1))
    for _ in range(3):
        passes.run(length=2)
    assert passes.collectives._asked.name == "NOBODY"
    assert passes.fail(monkeypatch, after, 2) == rest
    assert not passes.known


def test_a_group_may_have_launched_what_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = Passes(Holders(iter(()), 0, 1))
    for _ in range(3):
        passes.run()
    launch = passes.launch

    def launch_and_fail(group: Group, *options: Any) -> None:
        launch(group, *options)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(passes, "launch", launch_and_fail)
    assert passes.fail(monkeypatch, 9) == "lw"


def test_a_new_shape_is_asked_about_among_those_who_hold_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    holders = Holders(iter(()), 0, 1)
    passes = Passes(holders)
    for _ in range(3):
        passes.run(length=1)
    asked, passes.others.asked, holders.asked = passes.others.asked, 0, 0
    assert asked == 2 * (2 + 1), "before each wide launch, and at the end, in two passes"
    for _ in range(3):
        passes.run(length=2)
    assert (holders.asked, passes.others.asked) == (2 * (2 + 1), 0)
    # It has agreed on one local launch, and made it; then it tells the holders, and completes what is wide.
    assert passes.fail(monkeypatch, after=2, length=3) == "w"
    assert not passes.known and passes.others.asked == 0
    # They have left, so in the rest of the step it completes nothing else, whatever is known of a shape.
    assert passes.fail(monkeypatch, after=0, length=1, goes_on=True) == "ww"
    assert passes.fail(monkeypatch, after=0, length=1) == "wlw"


def test_a_rank_that_does_not_answer_is_waited_for_before_a_launch_with_a_name() -> None:
    passes = Passes()

    def late(number: int) -> tuple[int, int]:
        raise RankLost("timeout.")

    passes.others.spread = late  # type: ignore[method-assign]
    with pytest.raises(RankLost, match="Rank 0 stood before gather in forward"):
        passes.run()


def test_a_failure_among_the_holders_is_told_to_all_in_the_first_passes() -> None:
    says = iter([0, 0, _Said.FAILED])
    passes = Passes(Holders(says, 0, 1))
    passes.others.says = iter([0])
    with pytest.raises(AnotherRankFailed) as failed:
        passes.run(length=2)
    assert failed.value.everywhere
    assert passes.others.asked == 2, (
        "before the first wide launch; and to tell, where they ask next"
    )


def test_later_it_is_told_to_nobody_else() -> None:
    holders = Holders(iter(()), 0, 1)
    passes = Passes(holders)
    for _ in range(3):
        passes.run(length=1)
    passes.others.asked, holders.says = 0, iter([0, _Said.FAILED])
    with pytest.raises(AnotherRankFailed) as failed:
        passes.run(length=2)
    assert not failed.value.everywhere and passes.others.asked == 0


@pytest.mark.parametrize(
    ("new", "asked"), [(0, "NOBODY"), (_Said.NEW, "HOLDERS"), (_Said.WIDE, "EVERYONE")]
)
def test_what_is_new_on_one_of_the_holders_is_new_on_all(new: int, asked: str) -> None:
    passes = Passes(Holders(repeat(new), 0, 1))
    for _ in range(4):
        passes.run(length=1)
    assert passes.collectives._asked.name == asked


def test_unseen_launches_are_told_after_a_pass_in_which_a_failure_was_heard() -> None:
    passes = Passes()
    passes.others.says = iter([0, 0, 0, _Said.FAILED])
    with pytest.raises(AnotherRankFailed):
        passes.run(unseen=1)
    assert not passes.collectives._sees_all
    passes.run()
    assert passes.collectives._sees_all and passes.collectives._unseen
    passes.collectives.begin_pass()
    assert not passes.collectives._unseen


def test_what_is_new_for_all_on_one_rank_is_new_for_all() -> None:
    passes = Passes(Holders(iter(()), 0, 1))
    passes.others.says = repeat(_Said.WIDE)
    for _ in range(4):
        passes.run(length=1)
    assert passes.collectives._asked.name == "EVERYONE"


def test_what_only_the_groups_have_seen_is_seen_by_a_mode_from_then_on() -> None:
    passes = Passes()
    passes.run()
    assert not passes.collectives._mode
    passes.run(unseen=1)
    passes.run(own=1)
    assert passes.collectives._mode
    with pytest.raises(UsageError, match="launched 4 collectives, of which 3 could be seen"):
        passes.run(own=1, unseen=1)


def test_in_compiled_code_it_is_refused() -> None:
    with pytest.raises(UsageError, match="compiled code launches the others"):
        Passes(compiled=True).run(unseen=1)


def test_a_wide_launch_of_the_models_own_may_follow_the_shape() -> None:
    passes = Passes()
    for _ in range(4):
        passes.run(length=1, own=1)
    assert not passes.collectives.recording
    passes.run(length=2, own=2)
    assert passes.collectives._asked.name == "EVERYONE"


def test_layers_that_are_computed_again_launch_their_own_again() -> None:
    passes = Passes()
    for _ in range(4):
        passes.run(own=1)
    assert not passes.collectives.recording
    passes.collectives.choice = "computed again"
    passes.run(own=2)
    assert passes.collectives._asked.name == "EVERYONE"


def test_where_holders_wait_for_each_other_in_wide_launches_they_agree_on_these(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    holders = Holders(iter(()), 0, 1)
    passes = Passes(holders)
    passes.wide.members = (0, 1, 2, 3)
    for _ in range(3):
        passes.run(length=1)
    passes.others.asked = holders.asked = 0
    passes.run(length=2)
    assert (holders.asked, passes.others.asked) == (2 + 2 + 1, 0)
    # What they have agreed on is made before they are told, and the rest of what is wide after it.
    again: list[Launch] = []
    told: list[int] = []
    tell = passes.collectives._tell

    def make_again(launches: list[Launch], *_: Any) -> None:
        again.extend(launches)
        passes.wide.launched += len(launches)  # type: ignore[operator]

    def note_and_tell() -> None:
        told.append(len(again))
        tell()

    monkeypatch.setattr(collectives, "launch_again", make_again)
    monkeypatch.setattr(passes.collectives, "_tell", note_and_tell)
    passes.collectives.end_step()
    passes.collectives.begin_pass("training", lambda: 3)
    passes.collectives.begin_stage("forward")
    key = ("gather", passes.wide.members)
    passes.collectives._note([Launch(print, ((), {}), passes.wide, key)])  # type: ignore[arg-type]
    passes.collectives.finish("forward")
    assert (told, len(again), passes.others.asked) == ([1], 2, 0)


def test_what_the_step_launches_between_phases_is_its_own() -> None:
    passes = Passes()
    for _ in range(3):
        passes.run(between=1)
    assert not passes.collectives.recording and not passes.collectives._sees_all


def test_once_the_sequence_is_certain_nobody_asks_and_each_group_is_read_twice() -> None:
    passes = Passes(Holders(iter(()), 0, 1))
    for _ in range(2):
        passes.run()
    passes.others.spread = passes.collectives.holders.spread = None  # type: ignore[assignment,method-assign]
    passes.collectives._note = None  # type: ignore[assignment,method-assign]
    passes.run()


def test_a_sequence_that_changes_is_recorded_again() -> None:
    passes = Passes()
    for _ in range(3):
        passes.run()
    assert not passes.collectives.recording
    passes.run(unseen=1)
    passes.run()
    assert passes.collectives.recording


def test_a_group_that_does_not_count_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda group: "staging")
    passes = Passes()
    passes.wide.launched = None
    with pytest.raises(UsageError, match=r"\(staging\) does not count"):
        passes.run()


def test_launches_of_a_group_that_no_parameter_has_are_noticed() -> None:
    passes = Passes()
    ring = Group(0, 0, 3)
    passes.collectives._others = {ring}  # type: ignore[arg-type]
    passes.run()
    assert not passes.collectives._sees_all
    passes.collectives.end_step()
    passes.collectives.begin_pass()
    passes.collectives.begin_stage("forward")
    ring.launched = 2
    passes.collectives.end_stage()
    passes.collectives.end_pass()
    assert passes.collectives._sees_all
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        of_parameters, of_model = dist.group.WORLD, dist.new_group([0])
        # Such as that in which a checkpoint is written, in a thread.
        dist.new_group([0], group_desc=launcher.OWN_GROUP)
        assert of_parameters is not None
        assert other_groups({of_parameters}) == {of_model}
    finally:
        dist.destroy_process_group()


def test_gloo_counts_each_collective_once() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert counted_launches("cpu") == {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 1}
    finally:
        dist.destroy_process_group()


def test_nothing_is_left_of_a_backward_pass_that_failed() -> None:
    alive = fail_in_backward("cpu")
    assert alive() > 0, "or there is nothing to show"
    drop_unfinished(torch.device("cpu"))
    assert alive() == 0


def keys_of(passes: Passes) -> list[Any]:
    """The lengths whose launches are remembered, in the order of their use."""
    return [shape for _, _, shape, _ in passes.collectives._sequences]


def test_the_sequences_that_were_used_last_are_remembered_and_all_holders_forget_the_same() -> None:
    ranks = [Passes(Holders(iter(()), 0, 1)) for _ in range(2)]
    lengths = range(1, collectives.KEPT + 1)
    for passes in ranks:
        for length in lengths:
            passes.run(length)
        assert keys_of(passes) == [*lengths]
        passes.run(1)  # which is now the last that was used
        passes.run(collectives.KEPT + 1)
    assert keys_of(ranks[0]) == keys_of(ranks[1])
    assert keys_of(ranks[0]) == [*lengths[2:], 1, collectives.KEPT + 1]


def test_a_shape_that_was_forgotten_is_agreed_on_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "KEPT", 2)
    holders = Holders(iter(()), 0, 1)
    passes = Passes(holders)
    for length in (1, 1, 1, 2, 2, 2):
        passes.run(length)
    passes.run(1)
    assert not passes.collectives.recording
    passes.run(3)
    passes.run(2)
    assert passes.collectives._asked.name == "HOLDERS"


def test_launches_that_no_sequence_has_any_more_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collectives, "KEPT", 4)
    passes = Passes(Holders(iter(()), 0, 1))
    launch = passes.launch

    def launch_by_length(group: Group, of_fsdp: bool = True, name: str = "gather") -> None:
        launch(group, of_fsdp, f"gather {length}" if group is passes.local else name)

    monkeypatch.setattr(passes, "launch", launch_by_length)
    for length in range(1, 41):
        passes.run(length)
    assert len(passes.collectives._sequences) == 4
    assert len(passes.collectives._same) <= 1 + 2 * 4


def test_what_another_rank_sees_follow_data_is_voted_on_here_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An exchange of rows may look like a rotation here: the sizes here decide nothing."""
    passes = Passes()
    passes.others.says = iter([_Said.SIZED])
    key = ("exchange", passes.wide.members)
    exchange = Launch(print, ((), {}), passes.wide, key, told_sizes=True)  # type: ignore[arg-type]
    votes: list[bool] = []
    monkeypatch.setattr(passes.others, "any", lambda failed: votes.append(failed) or failed)
    for _ in range(4):
        passes.collectives.end_step()
        passes.collectives.begin_pass()
        passes.collectives._sees_all = True
        passes.collectives.begin_stage("forward")
        passes.others.asked = 0
        votes.clear()
        passes.collectives._note_one(exchange)
        assert passes.others.asked + len(votes) == 1
        passes.wide.launched += 1  # type: ignore[operator]
        passes.collectives.end_stage()
        passes.collectives.end_pass()
    assert not passes.collectives.recording
    assert [*passes.collectives._pass] == ["forward", "forward after vote 1"]


def test_what_looks_like_a_rotation_on_all_ranks_is_not_asked_about() -> None:
    passes = Passes()
    key = ("rotate", passes.wide.members)
    rotation = Launch(print, ((), {}), passes.wide, key, told_sizes=True)  # type: ignore[arg-type]
    for _ in range(3):
        passes.collectives.end_step()
        passes.collectives.begin_pass()
        passes.collectives.begin_stage("forward")
        passes.others.asked = 0
        if passes.collectives.recording:
            passes.collectives._note_one(rotation)
        passes.wide.launched += 1  # type: ignore[operator]
        passes.collectives.end_stage()
    assert not passes.collectives._votes_on_sizes
