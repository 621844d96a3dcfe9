"""Keep the ranks together in the collectives of a pass when one of them runs out of memory.

This is the first part of Note [Failure before a collective] in ``step.failures``:

- Once (twice, to check that it repeats) the sequence of launches is *recorded*, and while it is, the ranks
  agree before each, so that nobody enters a collective that another rank will miss. FSDP's are seen where it
  makes them. If the groups, which count their launches, tell of others, or if tensors are split, a dispatch
  mode sees all, whoever makes them.
- From then on, a rank that runs out of memory drops its graph and launches *the rest of the recorded
  sequence* with scratch buffers: each group tells how far it has come. Nobody waits, nobody asks, and a
  healthy step pays nothing. The others learn that the step is lost from the all-reduce that ends it anyway.
- Before a collective of the caller's own that it announces, such as a gather of metrics, the ranks always
  *vote*. So its sizes may follow anything. A rank that has failed launches what is recorded up to there, and
  votes; then all know. One that fails in the collective itself, after the vote, knows its sizes and launches
  it first.
- A gather of single numbers, as most metrics are, is its own vote once it is recorded: each rank adds a 1,
  and one that has failed gathers zeros.

Note [Who is asked]
~~~~~~~~~~~~~~~~~~~
The *holders* are the ranks that hold the same rows, whole (tensor parallelism) or a part of each (context
parallelism), or one rank alone. A launch is *local* if its group is within the holders, and *wide* otherwise.
Local launches follow the shape of the micro-batch, which holders share by definition; even their number does.
FSDP's, which are wide, do not. So there are three kinds of passes:

1. The first ones: the holders agree before each launch and, if it is wide, all ranks do after them.
2. A shape that the holders have not met twice: they agree before launches in which they wait for each other,
   and no other rank is asked. With tensor parallelism those are the local ones; with context parallelism
   FSDP's, too, whose groups have several holders. Where one of them fails, it launches what they have agreed
   on, tells them where they ask next, and only then completes what is wide: those who wait there may wait for
   a holder that has not heard. From then on, until the step ends, these holders complete what is wide and
   nothing else.
3. All others: nobody is asked.

A model that makes wide launches of its own may make others for each shape, and ranks may have different ones.
So all ranks ask each other, once in each pass, whether one of them has a new shape; if so, it is one of the
first kind. That is the price of such a model.

Note [Sizes that follow data]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The sizes of an all-to-all may follow data, as where rows are sent to experts. A rank that has failed cannot
know how much the others send it, and none can tell it once they wait. So before such a launch all ranks vote,
as before one of the caller's own, and those that hear of a failure leave it out. What lies between two votes
is recorded and completed like any other sequence. To ask once a pass would not do: memory may run out after
it, and the sizes are not known before the layers ahead have run.

Which launches these are must not follow data itself: a rank that happens to send one part and get one could
take an exchange of rows for a rotation. So the first rank that sees one says so while all agree anyway, and
from then on they vote before each wide all-to-all that is told the sizes of its parts, in such passes.

Local launches of this kind, whose number may follow the shape, are never certain: before each launch of such
a pass the ranks agree.

Note [The largest is heard]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
What ranks say to each other (``_Said``) is one number, and they hear the largest, as ``Ranks.spread`` gives
it in one exchange of a tensor that exists. So ``_Said`` is ordered and compared by ``>=``. Flags would be
wrong: the maximum of two sets of flags is one of them, and not their union. Nothing is lost with the smaller:

- a pass in which the wide launches are new is new;
- one in which sizes are said to follow data is recorded again, with votes;
- one with launches that nobody has seen is not recorded, so it does not matter what is new in it;
- one that failed is lost, and the next is recorded in its place. Who has noticed unseen launches says so
  then;
- a launch that is refused ends the run.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from torchtune_adaptive.common import RankLost, UsageError, announce, counted
from torchtune_adaptive.core.ranks import fsdp
from torchtune_adaptive.core.ranks.agreement import Ranks
from torchtune_adaptive.core.ranks.counts import Counts, groups_of, other_groups
from torchtune_adaptive.core.ranks.recording import (
    Launch,
    LaunchRecorder,
    gather_of,
    knows_one_sided_experts,
    launch_again,
    launch_of,
)
from torchtune_adaptive.core.ranks.supported import reason_not_to_reduce

log = logging.getLogger(__name__)
T = TypeVar("T")

KEPT = 256
"""The sequences that are remembered, each of a kind of pass and a shape: those that were used last."""

Launches = dict[str, list[Launch]]
"""The launches of a pass, by segment: a stage, or what lies between two votes of it."""


class AnotherRankFailed(BaseException):
    """Raised where a rank would enter a collective that another rank will not enter.

    ``everywhere`` says whether all ranks know; otherwise only those that hold the same rows do. It goes
    through the caller's own forward pass, where an ``except Exception`` must not end it.
    """

    def __init__(self, everywhere: bool) -> None:
        super().__init__()
        self.everywhere = everywhere


class _Said(IntEnum):
    """What a rank tells the others while recording; see Note [The largest is heard]."""

    SAME = 0
    NEW = 1
    """The launches of the pass are not those that are recorded, or may be others the next time."""
    WIDE = 2
    """The wide ones are not those that are recorded."""
    SIZED = 3
    """The sizes of the next launch follow data."""
    UNSEEN = 4
    """A group has launched what only it has seen."""
    FAILED = 5
    REFUSED = 6
    """There is a launch that no rank could complete."""


class _Asked(Enum):
    """The ranks that are asked before a launch; see Note [Who is asked]."""

    NOBODY = 0
    HOLDERS = 1
    EVERYONE = 2


@dataclass
class _Sequence:
    """The launches of one kind of pass, and how often in a row they have been these."""

    recorded: Launches = field(default_factory=dict)
    of_groups: dict[str, dict[dist.ProcessGroup, int]] = field(default_factory=dict)
    """The number of them that each group launches, by segment."""
    equal_passes: int = 0

    @property
    def certain(self) -> bool:
        return self.equal_passes >= 2

    def learn(self, launches: Launches, equal: bool) -> None:
        self.equal_passes = self.equal_passes + 1 if equal else 1
        self.recorded = launches
        self.of_groups = {
            segment: dict(Counter(each.group for each in some))
            for segment, some in launches.items()
        }


@dataclass(eq=False, repr=False)
class Collectives:
    """The collectives of a pass, e.g. one forward and backward: recorded, then completed where a rank fails.

    A pass is a sequence of named *stages*; between them the ranks may do something else together. Passes of
    different kinds, and of each ``variant`` of the models, have different sequences, each recorded by itself.
    """

    models: Sequence[nn.Module]
    """The models that run in a pass."""
    ranks: Ranks
    holders: Ranks
    """Those of the ranks that hold the same rows as this one, or parts of them."""
    device: torch.device
    launched: Callable[[], None] = lambda: None
    """Function called for each launch of FSDP: there is no finer sign of progress."""
    reducing: fsdp.Reducing | None = None
    """Function called with gradients that FSDP reduces, but not with the buffers of ``finish``."""
    survive: bool = True
    """Whether a pass may fail; if not, nothing is recorded, and ``launched`` is not called."""
    compiled: bool = False
    """Whether models run compiled code, whose launches a dispatch mode does not see."""

    def __post_init__(self) -> None:
        self._nobody_waits = not self.survive or self.ranks.size == 1 or not self.ranks.communicate
        self._refuse = partial(reason_not_to_reduce, self.models)
        self._sees_all = self.holders.size > 1 or knows_one_sided_experts()
        self._groups = groups_of(self.models) if self.survive else set()
        self._others = other_groups(self._groups) if self.survive else set()
        self._of_fsdp = set[dist.ProcessGroup]().union(*map(fsdp.replicas, self.models))
        # One for all that are equal: each layer makes the same, and each shape's sequence is kept.
        self._same: dict[Launch, Launch] = {}
        self._forgotten = 0  # sequences, since launches that none has any more were forgotten
        self._gathers: dict[tuple[Any, ...], Launch] = {}
        self._wide_sequences: dict[Hashable, _Sequence] = {}
        self._sequences: dict[Hashable, _Sequence] = {}
        self._wide, self._sequence = _Sequence(), _Sequence()
        self._follow_shape: set[Hashable] = set()
        self._asked = _Asked.NOBODY
        self.recording = False
        """Whether the sequence is not certain yet: a failure must be announced before the next collective."""
        self._mode = self._mode_was_on = False
        self._in_hook = False
        self._unrecorded = False
        self._in_step = False
        self._passes = 0
        self._kind: Hashable = None
        self._stage = self._segment = ""
        self._votes = 0  # in this stage
        self._pass: Launches = {}
        self._counts = Counts()
        self._unseen, self._refusal = False, ""
        self._holders_know = False
        self._votes_on_sizes = set[Hashable]()
        self._told_cost = False
        self.variant: Hashable = None
        """What decides which collectives FSDP launches from the next pass on, where that can change."""
        self.choice: Hashable = None
        """What decides it for layers' own: those that are computed again launch them again."""
        self.was_recorded = False
        """Whether a dispatch mode was on in the last step: it takes memory, as backward copies gradients."""
        self.pending: Callable[[], object] | None = None
        """Function called before the next launch in a step: it waits for an exchange of the ranks."""
        self.disturbed = False
        """Whether the models have run between steps since the last reset; see ``step.train_step``."""
        if self.survive or self.reducing is not None:
            for model in self.models:
                fsdp.watch_collectives(model, self.watch, self.reducing)

    @property
    def foreseen(self) -> bool:
        """Whether all that this pass launches is known, and launched by ``watch``."""
        return not self.recording and not self._sees_all

    # --- passes and stages ----------------------------------------------------------------------------

    def end_step(self) -> None:
        """End a step: what is launched from now on, as when the caller evaluates the model, is in no pass."""
        self.was_recorded, self._mode_was_on = self._mode_was_on, False
        self._in_step = self._holders_know = False
        self._passes = 0
        self.pending = None

    def wait_for_pending(self) -> None:
        """Wait for the exchange that is pending, if one is."""
        if self.pending is not None:
            pending, self.pending = self.pending, None
            pending()

    def begin_pass(
        self, kind: str = "training", shape: Callable[[], Hashable] = lambda: None
    ) -> None:
        """Begin a pass, on all ranks; ``shape`` gives that of its micro-batch."""
        self._in_step = True
        if self._nobody_waits:
            return
        key: Hashable = (self.variant, kind)
        self._kind = key
        self._wide = self._wide_sequences.setdefault(key, _Sequence())
        if self._sees_all or key in self._follow_shape or not self._wide.certain:
            self.wait_for_pending()  # the ranks may ask each other at once, and not each launch can be seen
        if self.holders.size > 1 or key in self._follow_shape:
            # Gradients that exist are placed; others are added to them in other ways than to none.
            key = (key, self.choice, shape(), self._passes > 0)
        self._sequence = self._remembered(key)
        self._asked = self._who_is_asked()
        self.recording = self._asked is not _Asked.NOBODY
        self._passes += 1
        self._stage, self._votes = "", 0
        self._pass, self._counts = {}, Counts()
        self._unseen &= not self._sees_all  # it is said again if a failure was heard instead
        self._refusal = ""

    def _remembered(self, key: Hashable) -> _Sequence:
        """A sequence, which is now the last that was used; for a new one, that whose use is longest ago is
        forgotten. Holders have the same shapes one after the other, so they forget the same."""
        sequence = self._sequences.pop(key, None) or _Sequence()
        self._sequences[key] = sequence
        if len(self._sequences) > KEPT:
            self._sequences.pop(next(iter(self._sequences)))
            self._forgotten += 1
        if self._forgotten == KEPT:  # seldom: it looks at all launches that are left
            self._forgotten = 0
            left = (*self._wide_sequences.values(), *self._sequences.values())
            launches = [each for one in left for some in one.recorded.values() for each in some]
            self._same = dict(zip(launches, launches, strict=True))
        return sequence

    def _who_is_asked(self) -> _Asked:
        if self._kind in self._follow_shape:
            new = self.ranks.any(not self._sequence.certain)
        else:
            new = not self._wide.certain
        if new:
            return _Asked.EVERYONE
        return _Asked.NOBODY if self._sequence.certain else _Asked.HOLDERS

    def begin_stage(self, stage: str) -> LaunchRecorder | None:
        """Begin a stage; gives the recorder in whose context it runs, if any."""
        if self._nobody_waits:
            return None
        self._stage, self._votes = stage, 0
        self._begin_segment()
        self._mode = self._sees_all and (self.recording or self._kind in self._votes_on_sizes)
        self._mode_was_on |= self._mode
        return LaunchRecorder(self._note_one, self._refuse) if self._mode else None

    def _begin_segment(self) -> None:
        segment = self._segment = _segment_of(self._stage, self._votes)
        self._pass[segment] = []
        groups: Iterable[dist.ProcessGroup] = self._sequence.of_groups.get(segment, ())
        if self.recording:
            # While only FSDP's launches are seen, the counts of all other groups tell of any that are not.
            groups = self._groups if self._sees_all else self._groups | self._others
        self._counts.begin(segment, groups)

    def end_stage(self) -> None:
        """End a stage without failure on this rank."""
        if self._nobody_waits:
            return
        launched = self._counts.launched_in(self._segment)
        if self.recording:
            self._compare(launched, Counter(each.group for each in self._pass[self._segment]))
        else:
            self._look_for_others(launched, self._sequence.of_groups.get(self._segment, {}))

    def _look_for_others(
        self, launched: dict[dist.ProcessGroup, int], recorded: Mapping[dist.ProcessGroup, int]
    ) -> None:
        """Record again, in agreement, what is not a constant sequence after all."""
        if launched == recorded:
            return
        for group in launched.keys() | recorded.keys():
            if launched.get(group, 0) != recorded.get(group, 0):
                self._sequence.equal_passes = 0
                if not self._is_within(group):  # ranks other than holders have seen it, too
                    self._wide.equal_passes = 0

    def _compare(
        self, launched: dict[dist.ProcessGroup, int], seen: Counter[dist.ProcessGroup]
    ) -> None:
        """Notice launches that groups have counted and nobody has seen."""
        for group, number in launched.items():
            if number != seen[group]:
                self._unseen = True
                if self._mode or self.compiled:
                    self._refusal = self._unseen_in(group, number, seen[group])

    def _unseen_in(self, group: dist.ProcessGroup, launched: int, seen: int) -> str:
        where = "compiled code" if self.compiled else "an operator of its own"
        remedy = (
            "Compile nothing that communicates" if self.compiled else "Use torch's own operators"
        )
        return (
            f"model: in {self._stage}, a process group of {group.size()} ranks has launched "
            f"{counted(launched, 'collective')}, of which {seen} could be seen: {where} launches the others. "
            f"A rank that runs out of memory cannot complete them. {remedy}; or, in a recipe, choose "
            "batch_size yourself and set adaptive_batching.on_out_of_memory=raise."
        )

    def end_pass(self) -> None:
        """End a pass without failure on this rank.

        Raises:
            AnotherRankFailed: another one was not as lucky.
        """
        if self.recording:
            wide = {
                segment: [each for each in some if not self._is_within(each.group)]
                for segment, some in self._pass.items()
            }
            heard = self._ask(self._news(wide))
            if self._mode or not self._sees_all:  # or it has not seen what there is
                self._learn(wide, *heard)

    def look_elsewhere(self) -> None:
        """Learn, between stages, of a failure that all ranks will know of; raises as ``end_pass`` does."""
        if self._asked is _Asked.EVERYONE:
            self._ask()

    def _news(self, wide: Launches) -> _Said:
        """What is not as recorded on this rank: where it is on others, they still have to agree with it."""
        data = any(each.follows_data for some in self._pass.values() for each in some)
        if wide != self._wide.recorded:
            return _Said.WIDE
        return _Said.NEW if data or self._pass != self._sequence.recorded else _Said.SAME

    def _learn(self, wide: Launches, of_holders: int, of_all: int) -> None:
        """Record a pass, after which ranks have heard of what is new among the holders, and among all."""
        self._sequence.learn(self._pass, equal=of_holders < _Said.NEW)
        if self._asked is _Asked.EVERYONE:
            self._wide.learn(wide, equal=of_all < _Said.WIDE)
        elif wide != self._wide.recorded:
            raise UsageError(
                "model: what it launches for all ranks is not the same for each shape of a micro-batch. "
                "Layers must take part in each, if only with the factor 0."
            )

    def _say_what_it_costs(self, launch: Launch, votes: bool) -> None:
        """Say once what it costs that the sizes of a launch may follow data."""
        if not self._told_cost:
            line = (
                f"{launch.key[0]} is told the sizes of its parts, which may follow data. So the ranks agree "
                f"before each {'such ' * votes}collective, in every micro-batch: one exchange for each."
            )
            announce(log, line, logging.WARNING, rank_zero=self.ranks.is_zero)
        self._told_cost = True

    # --- launches -------------------------------------------------------------------------------------

    def watch(self, launch: partial[Any], *then: partial[Any]) -> Any:
        """Launch what FSDP launches, which will go on with ``then``; or what reduces replicas."""
        if not self.survive or not self._in_step:
            self.disturbed = self.survive
            return launch()
        self.wait_for_pending()
        if not self.recording:
            self.launched()
        elif not self._mode:
            first, *others = map(launch_of, (launch, *then))
            self._note([replace(first, of_fsdp=True), *others])
        self._in_hook = True
        try:
            return launch()
        finally:
            self._in_hook = False

    def together(self, launch: Callable[[], T], known: Launch | None = None) -> T:
        """Launch collectives of the caller's own, as many on each rank; where a rank has failed, on none.

        The ranks vote before each of them. So memory may also run out before the first, and between two.
        If there is one only, and it is ``known``, no mode has to look for it.

        Raises:
            AnotherRankFailed: the next one must not be made.
        """
        if self._nobody_waits or not self._in_step or self._unrecorded:
            return launch()
        self.wait_for_pending()
        self._unrecorded = True  # the votes, and what is launched
        try:
            if known is None:
                with LaunchRecorder(self._vote_on):
                    return launch()
            self._vote_on(known)
            return launch()
        finally:
            self._unrecorded = False

    def gather(self, gather: Callable[[torch.Tensor], T], tensor: torch.Tensor) -> T | torch.Tensor:
        """``together`` for a function that gathers a tensor from all ranks, in one launch, along its rows."""
        if self._nobody_waits or not self._in_step or self._unrecorded:
            return gather(tensor)
        if tensor.ndim > 0 or self.holders.size > 1:
            return self.together(lambda: gather(tensor), self._gather_of(tensor))
        number = tensor.detach()
        both = torch.stack([number, torch.ones_like(number)])
        gathered = self.together(lambda: gather(both), self._gather_of(both, tells=True))
        assert isinstance(gathered, torch.Tensor)
        numbers, here = gathered.view(-1, 2).T
        if self._asked is not _Asked.HOLDERS and not here.all():
            if self.recording:
                self._ask()  # as the one that has failed does next
            raise AnotherRankFailed(everywhere=True)
        return numbers.contiguous()

    def _gather_of(self, tensor: torch.Tensor, tells: bool = False) -> Launch:
        key = tensor.shape, tensor.dtype, tensor.device, tells
        known = self._gathers.get(key)
        if known is None:
            known = self._gathers[key] = replace(gather_of(tensor).of_any_size(), tells=tells)
        return known

    def _vote_on(self, launch: Launch) -> None:
        """Begin a segment with a launch whose sizes only those know that make it, if no rank has failed."""
        if launch.refused:
            raise UsageError(launch.refused)
        self.end_stage()
        if self.recording or not launch.tells:
            self._vote()
        self._votes += 1
        self._begin_segment()
        self._counts.add(self._segment, launch.group)
        self._pass[self._segment].append(launch if launch.any_size else launch.of_any_size())

    def _note_one(self, launch: Launch) -> None:
        if self._unrecorded:
            return
        sized = self._kind in self._votes_on_sizes and launch.told_sizes
        if sized and not self._is_within(launch.group):
            self._groups.add(launch.group)
            self._vote_on(launch)
            return
        if not self.recording:
            return
        if self._in_hook:  # which knows what it reduces in place
            launch = replace(launch, of_fsdp=True, refused="")
        self._note([launch])

    def _note(self, launches: Sequence[Launch]) -> None:
        """Agree on launches that follow each other, and record them.

        Raises:
            AnotherRankFailed: they must not be made.
        """
        self._refusal = self._refusal or next(
            (each.refused for each in launches if each.refused), ""
        )
        wide = not all(self._is_within(each.group) for each in launches)
        first = launches[0]
        sized = _Said.SIZED if wide and first.follows_data else _Said.SAME
        if self._refusal or self._asked is _Asked.EVERYONE or any(map(self._joins, launches)):
            try:
                on_sizes = self._ask(sized, wide=wide)[1] == _Said.SIZED
                if on_sizes:
                    self._votes_on_sizes.add(self._kind)
                if on_sizes or first.follows_data:
                    self._say_what_it_costs(first, votes=on_sizes and first.told_sizes)
            except RankLost as lost:
                here = f"Rank {self.ranks.rank} stood before {first.key[0]} in {self._stage}."
                raise RankLost(f"{lost} {here}") from lost
        for launch in launches:
            self._groups.add(launch.group)
            self._counts.add(self._segment, launch.group)
            self._pass[self._segment].append(self._same.setdefault(launch, launch))
            if launch.of_fsdp:
                self.launched()
            elif wide and launch.group not in self._of_fsdp:
                self._follow_shape.add(self._kind)

    def _is_within(self, group: dist.ProcessGroup) -> bool:
        """Whether all of its ranks are holders, so that its launches are local."""
        return self.holders.members.issuperset(dist.get_process_group_ranks(group))

    def _joins(self, launch: Launch) -> bool:
        """Whether holders wait for each other in it."""
        ranks = dist.get_process_group_ranks(launch.group)
        return len(self.holders.members.intersection(ranks)) > 1

    # --- agreement and completion ---------------------------------------------------------------------

    def _ask(
        self, news: _Said = _Said.SAME, wide: bool = True, failed: bool = False
    ) -> tuple[int, int]:
        """Tell the ranks that are asked how this one is; gives what holders say, and what all say.

        Raises:
            AnotherRankFailed: one of them has failed; also where this one has.
            UsageError: on each of them, if one has noticed a launch that cannot be completed.
        """
        said = max(
            news,
            _Said.UNSEEN * self._unseen,
            _Said.FAILED * failed,
            _Said.REFUSED * bool(self._refusal),
        )
        asked = self.holders
        of_holders = heard = asked.spread(said)[1]
        if self._asked is _Asked.EVERYONE and (wide or heard >= _Said.FAILED):
            asked = self.ranks
            heard = asked.spread(heard)[1]
        if heard >= _Said.REFUSED:
            raise UsageError(next(filter(None, asked.gather(self._refusal))))
        if heard >= _Said.FAILED:
            self._holders_know = True
            raise AnotherRankFailed(everywhere=asked is self.ranks)
        if heard >= _Said.UNSEEN and asked is self.ranks:
            self._sees_all = True  # from the next pass on
        return of_holders, heard

    def _vote(self, failed: bool = False) -> None:
        """Ask all ranks; raises as ``_ask`` does."""
        if self._asked is _Asked.EVERYONE:
            self._ask(failed=failed)
            return
        if self._asked is _Asked.HOLDERS and not self._holders_know:
            failed = self.holders.any(failed)  # where one has failed, it tells them first
        if self.ranks.any(failed):
            raise AnotherRankFailed(everywhere=True)

    def finish(self, stage: str) -> bool:
        """Launch what the others wait for, after a failure on this rank; whether all know of it then.

        The data is worthless, and every rank discards it. By now the memory of the failed step has been
        freed, which is more than the scratch buffer takes. See Note [Who is asked].
        """
        if self._nobody_waits:
            return False
        self.wait_for_pending()
        votes = self._votes if stage == self._stage else 0
        segment = _segment_of(stage, votes)
        agreed = self._pass.get(segment, [])
        if self._asked is _Asked.EVERYONE:
            self._complete(segment, agreed)
            self._tell()
            return True
        own = [each for each in agreed if each.any_size]  # others wait in it, whoever they are
        if self._tells(own, segment):
            return True
        if not self._holders_know and self._asked is _Asked.HOLDERS:
            joined = [each for each in agreed if self._joins(each) and not each.any_size]
            self._complete(segment, own + joined)
            self._tell()
        sequence = self._wide if self._holders_know else self._sequence
        rest = [each for each in sequence.recorded.get(segment, []) if not each.any_size]
        self._complete(segment, own + rest)
        after = _segment_of(stage, votes + 1)
        if after not in self._wide.recorded:
            return False
        if self._tells(self._wide.recorded[after], after):
            return True
        with suppress(AnotherRankFailed):
            self._vote(failed=True)
        return True

    def _tells(self, launches: Sequence[Launch], segment: str) -> bool:
        """Tell all ranks of a failure by the first launch of a segment, if that is an unmade vote."""
        if self.recording or not launches or not launches[0].tells:
            return False
        if self._counts.launched_in(segment).get(launches[0].group):
            return False
        launch_again(launches[:1], self.device, self.launched)
        return True

    def _tell(self) -> None:
        with suppress(AnotherRankFailed):
            self._ask(failed=True)

    def _complete(self, segment: str, launches: Sequence[Launch]) -> None:
        """Make those of these launches that have not been made, by the counts of their groups."""
        made = self._counts.launched_in(segment)
        rest = []
        for launch in launches:
            if made.get(launch.group, 0) > 0:
                made[launch.group] -= 1
            else:
                rest.append(launch)
        launch_again(rest, self.device, self.launched)


def _segment_of(stage: str, votes: int) -> str:
    return f"{stage} after vote {votes}" if votes else stage
