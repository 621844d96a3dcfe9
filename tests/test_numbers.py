"""Measured numbers in the README and the docs are those of docs/results, or of the constants they speak of.

A sentence with such a number is a `Claim`: a pattern with a group for each number, and where the numbers come
from. What looks measured and is in no claim fails, so a new sentence needs its source here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.results import (
    OF_70B,
    RESULTS,
    ROOT,
    SAVES,
    blocks,
    calls_added,
    column,
    dropout_by_sample,
    errors_on_a_gpu,
    example_files,
    failed,
    gain,
    kinds_of_training,
    largest_on_a_gpu,
    of_trainers,
    percent,
    rollout_gain,
    said,
    speeds_on_a_gpu,
    table,
    text_of,
    throughput,
    time_with_ddp,
    trials,
    update_after_beta2,
    with_ddp,
    with_fewer_layers,
)
from torchtune_adaptive.common.folder_lock import LEASE
from torchtune_adaptive.planner.memory.gpus import COMMUNICATION, CONTEXT, GIB, GPUS, MIB
from torchtune_adaptive.planner.memory.peak import FRAGMENTATION
from torchtune_adaptive.planner.memory.planned import ERROR_BAND
from torchtune_adaptive.planner.programs.vllm import ASLEEP
from torchtune_adaptive.planner.speed.devices import FSDP_COLLECTIVE, FSDP_PARAMETER, PCIE
from torchtune_adaptive.planner.speed.speed import (
    COMPILED_BAND,
    EAGER_BAND,
    MUCH_ATTENTION,
    QUANTIZED_BAND,
    SLOWEST_ATTENTION,
    SLOWEST_EXPERTS,
    Speed,
)
from torchtune_adaptive.recipe.settings.adaptive import AdaptiveSettings
from torchtune_adaptive.recipe.train.display import EVERY_SECONDS
from torchtune_adaptive.recipe.train.stop import SAME_REQUEST

API = ROOT / "docs" / "api.md"  # made of docstrings, whose numbers are examples
# What fits is made of its results: tests/cli/test_what_fits.py.
PAGES = [
    ROOT / "README.md",
    *sorted({*ROOT.glob("docs/*.md")} - {ROOT / "docs" / "what-fits.md", API}),
    RESULTS / "README.md",
]
_UNITS = r"ms|s|seconds|minutes|hours|[KMG]i?B|[KMG]B/s|tokens/s"
MEASURED = re.compile(rf"\d[\d.,]*(?: ?%| times(?! `)| (?:{_UNITS})(?!\w))")

# What looks like a measurement and is none, as it stands in the pages.
NOT_MEASURED = (
    r"32 times that\.",  # a multiple that rows are padded to
    r"less 5 %\. What would take more",  # what the program leaves free
    r"5 % of the capacity is kept free",
    r"more than 5 % in the best of four measurements",
    r"125 % 62 = 1",  # a remainder
    r"`max_generated_tokens` - 1 times the token",
    r"train\[95%:\]",
    r"`peak 20\.5 GiB \(\+-3%\) of 21\.9 GiB`",  # an example of what is printed
    r"in about 30 minutes on 2 idle cores",  # as machines and what else they do differ
    r"at about 2, 20 and 100 ms",  # what a benchmark is made for
    r"carried there takes less than 25 MiB",  # the limit of that machine
    # Of torchrun and torch.
    r"its processes 30 seconds (?:later|after)",
    r"waits 30 seconds for it to end .{0,200}?waits 5 seconds",
    r"does not answer within 60 seconds",
    r"kills it 30 seconds later",
    r"name it after 10 minutes",
    r"then wait 5 minutes for it",
    r"typically 10 minutes later",
    # Of other people's papers, with their numbers beside them.
    r"43 % fewer steps",
    r"6\.25\S faster on 4 P100, accuracy within 1 %",
    r"18 % less training time",
    r"36 % less time",
    r"33 % of the steps if capped at 4\S, 36 % at 8\S \(derived\)",
)


def in_words(number: str) -> str:
    return {"one": "1", "three": "3", "five": "5"}.get(number, number)


@dataclass(frozen=True)
class Claim:
    """A sentence of a page, and the numbers that must stand in it."""

    page: str
    sentence: str
    numbers: Callable[[], Iterable[str]]

    def found(self) -> re.Match[str] | None:
        return re.search(self.sentence, text_of(ROOT / self.page))


SEEN_BY_NOBODY = (
    r"of (\d+) published throughputs that nobody had seen, all were predicted too fast, by (\d+) %"
)

PUBLISHED_SPEEDS = (
    r"(\d+) fit by their plans: half of the speeds are within ([\d.]+) %, .*? "
    r"(\d+) are within the band"
)
PUBLISHED = (
    r"(\d+) peaks: half are within ([\d.]+) %.*? the worst is off by ([\d.]+) %.*? "
    r"all (\d+) are within ([\d.]+) %.*? all (\d+) are within"
)
PUBLISHED_4090 = (
    r"of (\d+) peaks: (\d+) are within ([\d.]+) %.*? Seconds of a step: half are within ([\d.]+) %"
)


PUBLISHED_EXPERTS = (
    r"gpt-oss-20b are within ([\d.]+) %.*? (\d+) steps took ([\d.]+) to ([\d.]+) times as long"
)


TRAINERS = r"Of (\d+) cases, (\d+) are within ([\d.]+) %"


def trainers_as_described() -> Iterable[str]:
    count, near, share = said("trainers.md", TRAINERS)
    return near, count, share


CLAIMS = [
    Claim(
        "docs/planning.md",
        r"Of (\d+) \[steps of these trainers\]\S+ (\d+) take what had been described before, within "
        r"([\d.]+) %",
        lambda: said("trainers.md", TRAINERS),
    ),
    Claim(
        "docs/results/README.md",
        r"(\d+) of (\d+) do, within ([\d.]+) %; the others are FSDP2 with adapters",
        trainers_as_described,
    ),
    *(
        Claim(
            page,
            rf"([\d.]+) to ([\d.]+) times the time of `nn.Dropout`{by}([\d.]+) times",
            dropout_by_sample,
        )
        for page, by in (
            ("docs/results/README.md", ", and "),
            ("docs/results/dropout.md", " alone, and "),
        )
    ),
    Claim(
        "docs/planning.md", r"Of (\d+) kinds of training, .* names, (\d+) are", kinds_of_training
    ),
    *(
        Claim(page, r"(\d+) of the (\d+) example files of Axolotl 0\.19", example_files)
        for page in ("README.md", "docs/trainer-files.md", "docs/results/example-files.md")
    ),
    Claim(
        "README.md",
        r"allocated memory were within ([\d.]+) % of what was measured, and those of reserved memory within "
        r"([\d.]+) %; of (\d+) predicted largest micro-batches, (\d+) were the largest",
        lambda: (*errors_on_a_gpu(), *largest_on_a_gpu()),
    ),
    Claim(
        "docs/results/README.md",
        r"predicted peaks within ([\d.]+) % \(allocated\) and ([\d.]+) % \(reserved\)",
        lambda: errors_on_a_gpu(),
    ),
    Claim(
        "docs/fastest.md",
        r"they were ([\d.]+) to ([\d.]+) times the measured ones",
        speeds_on_a_gpu,
    ),
    Claim(
        "README.md",
        r"A search finds 8 rows in (\d+) trials, (\w+) of which runs out of memory\. Doubling until it fails "
        r"takes (\d+), halving by hand from 512 takes (\d+)",
        lambda: (
            trials("extrapolate"),
            failed("extrapolate"),
            trials("bisect"),
            trials("halving from 512"),
        ),
    ),
    Claim(
        "README.md",
        r"launches (\d+) collectives where plain DDP launches (\d+)",
        lambda: (with_ddp(2), with_ddp(0)),
    ),
    Claim(
        "docs/results/README.md",
        r"(\d+) collectives where plain DDP launches (\d+), and ([\d.]+) times its time "
        r"\(([\d.]+) to ([\d.]+)\)",
        lambda: (with_ddp(2), with_ddp(0), *time_with_ddp()),
    ),
    Claim(
        "docs/results/README.md",
        r"([\d.]+) in one process, ([\d.]+) with DDP, ([\d.]+) with FSDP2; "
        r"times ([\d.]+), ([\d.]+), and ([\d.]+) or, [a-z ,-]+, ([\d.]+), ",
        lambda: (*of_trainers(3)[:3], *of_trainers(2, larger=True)),
    ),
    Claim(
        "docs/results/README.md",
        r"([\d.]+), ([\d.]+), ([\d.]+) and ([\d.]+) times the plain trainer's speed",
        with_fewer_layers,
    ),
    Claim(
        "README.md",
        r"has ([\d.]+) to ([\d.]+) times torchtune's throughput \(medians of (\w+) runs",
        lambda: (f"{min(throughput()):.2f}", f"{max(throughput()):.2f}", str(len(throughput()))),
    ),
    Claim(
        "README.md",
        r"trains ([\d.]+) times as many real tokens .* with lengths like Alpaca's, and ([\d.]+) times with",
        lambda: (f"{gain('alpaca', 'budget'):.1f}", f"{gain('openhermes', 'budget'):.1f}"),
    ),
    Claim("README.md", SEEN_BY_NOBODY, lambda: said("speed_anchors.md", SEEN_BY_NOBODY)),
    Claim(
        "README.md",
        r"Of (\d+) peaks of transformers' trainers .*, half were within ([\d.]+) % and (\d+) within 8 %; "
        r"the worst was off by ([\d.]+) %\. Since .* is mended, all are within ([\d.]+) %",
        lambda: said(
            "published.md",
            r"(\d+) peaks: half are within ([\d.]+) %, .*?, (\d+) within 8 %, and the worst is off by "
            r"([\d.]+) %\..*?With that mended, all \d+ are within ([\d.]+) %",
        ),
    ),
    Claim(
        "docs/planning.md",
        r"of \[(\d+) published throughputs\]\S+ that nobody had seen, all were predicted too fast, "
        r"by (\d+) %",
        lambda: said("speed_anchors.md", SEEN_BY_NOBODY),
    ),
    Claim(
        "docs/planning.md",
        r"taken to be (\d+) % below to (\d+) % above the predicted one \(compiled: -(\d+) to \+(\d+) %, "
        r"quantized: -(\d+) to \+(\d+) %\)",
        lambda: map(percent, (*EAGER_BAND, *COMPILED_BAND, *QUANTIZED_BAND)),
    ),
    Claim(
        "docs/planning.md",
        r"attention takes more than ([\d.]+) of a step, as it does with long rows, it may be (\d+) % below",
        lambda: (str(MUCH_ATTENTION), percent(SLOWEST_ATTENTION)),
    ),
    Claim(
        "docs/planning.md",
        r"off by different amounts: by up to (\d+) % in nine of ten pairs",
        lambda: [percent(Speed.CLOSE)],
    ),
    Claim(
        "docs/how-plans-work.md",
        r"is (\d+) % of the peak, and on several ranks up to (\d+) % more than predicted",
        lambda: (percent(ERROR_BAND), percent(FRAGMENTATION)),
    ),
    Claim(
        "docs/results/planner.md",
        r"the error to be (\d+) % in either direction, and on several ranks and with weights of 4 bits up to "
        r"(\d+) % more than predicted",
        lambda: (percent(ERROR_BAND), percent(FRAGMENTATION)),
    ),
    Claim(
        "docs/results/planner.md",
        r"band held in \[(\d+) of (\d+) published runs\]",
        lambda: reversed(
            said(
                "published.md",
                r"Of (\d+) runs on one GPU with the attention that plans have, (\d+) are within the band",
            )
        ),
    ),
    Claim(
        "docs/planning.md",
        r"and keeps (\d) GiB as it sleeps",
        lambda: [f"{ASLEEP / GIB:g}"],
    ),
    Claim(
        "docs/how-plans-work.md",
        r"the CUDA context \(([\d.]+) GiB\) and, on several ranks, NCCL \((\d) GiB\)",
        lambda: (f"{CONTEXT / GIB:g}", f"{COMMUNICATION / GIB:g}"),
    ),
    Claim(
        "docs/how-plans-work.md",
        r"cuBLAS workspaces: two of (\d+) MiB from Hopper on, of ([\d.]+) MiB before",
        lambda: [f"{GPUS[gpu].workspace / MIB:g}" for gpu in ("h100-80gb", "a100-80gb")],
    ),
    Claim(
        "docs/planning.md",
        r"Over PCIe 4 a collective is taken to reach (\d+) GB/s and copies to the host (\d+) GB/s",
        lambda: [f"{speed / 1e9:g}" for speed in PCIE[4]],
    ),
    Claim(
        "docs/results/README.md",
        r"still for ([\d.]+) s where 1 GB of weights .* 4 ranks, ([\d.]+) s sharded, ([\d.]+) s in the",
        lambda: [column(blocks("checkpoints.md", "still, s")[0], way, 0) for way in SAVES],
    ),
    Claim(
        "docs/results/README.md",
        r"([\d.]+) s until the first answer for 8B on 8 GPUs, ([\d.]+) s for 70B QLoRA",
        lambda: [
            column(blocks("plan_seconds.md", "headline")[0], row, 0)
            for row in ("8B full, 8 x H100", "70B QLoRA, 2 x 4090")
        ],
    ),
    Claim(
        "docs/results/README.md",
        r"of 4,096 ranks: ([\d.]+) ms to pack a step, (\d+) ms of the store's CPU .*?, (\d+) s for a plan",
        lambda: [
            column(blocks("scale.md", "ranks")[0], row, 3)
            for row in (
                "a step's 16 rows a rank packed by a token budget, ms",
                "signs of life, CPU of the store in a beat of all, ms",
                "plan of 8B full fine-tuning, without what-ifs, s",
            )
        ],
    ),
    Claim(
        "docs/clusters.md",
        r"for a save \| (\d+) GB \| 0 \| (\d+) GB \|",
        lambda: [f"{OF_70B * share:.0f}" for share in (3, 3 / 8)],
    ),
    Claim(
        "docs/clusters.md",
        r"each other machine \| 0 \| 0 \| (\d+) GB \|",
        lambda: [f"{OF_70B * 3 / 8:.0f}"],
    ),
    Claim(
        "docs/clusters.md",
        r"being written \| (\d+) GB \| (\d+) GB \| (\d+) GB \|",
        lambda: [f"{OF_70B * 3:.0f}"] * 3,
    ),
    Claim(
        "docs/clusters.md",
        r"while they are written \| (\d+) GB \| (\d+) GB \| (\d+) GB \|",
        lambda: [f"{OF_70B:.0f}"] * 3,
    ),
    Claim(
        "docs/clusters.md",
        r"one rank \| 64 ranks, ([\d.]+) GB each \| 64 ranks, ([\d.]+) GB each",
        lambda: [f"{OF_70B * 3 / 64:.1f}"] * 2,
    ),
    Claim(
        "docs/checkpoints.md",
        r"`adaptive_batching\.stop_timeout` \((\d+) s\)",
        lambda: [f"{AdaptiveSettings().stop_timeout:g}"],
    ),
    Claim(
        "docs/checkpoints.md",
        r"again more than (\d) s later \| exits at once",
        lambda: [f"{SAME_REQUEST:g}"],
    ),
    Claim(
        "docs/checkpoints.md",
        r"another machine has it, the run waits up to (\d) minutes",
        lambda: [f"{LEASE / 60:g}"],
    ),
    Claim(
        "docs/how-it-works.md",
        r"The ranks look for it together, for (\d+) seconds at most",
        lambda: [f"{AdaptiveSettings().wait_for_memory:g}"],
    ),
    Claim(
        "docs/settings.md",
        r"the end of an epoch and one every (\d+) seconds between",
        lambda: [f"{EVERY_SECONDS:g}"],
    ),
    Claim(
        "docs/growing-the-batch.md",
        r"is then ([\d.]+) times what it should be if beta2 changes after 10 steps, "
        r"([\d.]+) times after 100, and ([\d.]+) times after 1000",
        lambda: map(update_after_beta2, (10, 100, 1000)),
    ),
    Claim(
        "docs/fastest.md",
        r"with (\w+) small models and (\d+) memory limits",
        lambda: ("3", table("fastest.md", "ours, 3 timed trials")[0]),
    ),
    Claim(
        "docs/reinforcement.md",
        r"scoring and training together were ([\d.]+) times as fast",
        lambda: [f"{rollout_gain():.1f}"],
    ),
    Claim(
        "docs/results/README.md",
        r"\| (\d+), (\w+) of which runs out of memory; doubling until it fails takes (\d+), "
        r"RFC #2199 takes (\d+)",
        lambda: (
            trials("extrapolate"),
            failed("extrapolate"),
            trials("bisect"),
            trials("RFC 2199, 0..100000"),
        ),
    ),
    Claim(
        "docs/results/README.md",
        r"([\d.]+) to ([\d.]+) times torchtune's throughput",
        lambda: (f"{min(throughput()):.2f}", f"{max(throughput()):.2f}"),
    ),
    Claim(
        "docs/results/README.md",
        r"(\d+) calls of Python's functions",
        lambda: [str(calls_added())],
    ),
    Claim(
        "docs/results/README.md",
        r"([\d.]+) times the tokens/s with lengths like Alpaca's",
        lambda: [f"{gain('alpaca', 'budget'):.1f}"],
    ),
    Claim(
        "docs/results/README.md",
        r"([\d.]+) times, scoring and training together",
        lambda: [f"{rollout_gain():.1f}"],
    ),
    Claim(
        "docs/results/README.md",
        r"([\d.]+) % of the best speed is given away in the mean, ([\d.]+) % at worst",
        lambda: (
            each.removesuffix(" %") for each in table("fastest.md", "ours, 3 timed trials")[1:]
        ),
    ),
    Claim(
        "docs/results/README.md",
        r"; ([\d.]+) % on (\d+) unseen runs",
        lambda: reversed(said("planner.md", r"one A100-80, (\d+) rows .*?: within ([\d.]+) %")),
    ),
    Claim(
        "docs/results/README.md",
        r"half of (\d+) are predicted within ([\d.]+) %, the worst is ([\d.]+) % off; without eager "
        r"attention all (\d+) are within ([\d.]+) %, and all (\d+) since that is mended",
        lambda: said("published.md", PUBLISHED),
    ),
    Claim(
        "docs/results/README.md",
        r"of (\d+) that fit, half are predicted within ([\d.]+) %, nearly all too fast, and (\d+) are",
        lambda: said("published_speeds.md", PUBLISHED_SPEEDS),
    ),
    Claim(
        "docs/planning.md",
        r"Of (\d+) published runs of `Trainer` that fit, half are \[within ([\d.]+) %\]\S+, and (\d+) in",
        lambda: said("published_speeds.md", PUBLISHED_SPEEDS),
    ),
    Claim(
        "docs/results/README.md",
        r"as long as (\d+) launches, in each layer of 9 parameters",
        lambda: re.findall(
            r"full: .* as long as (\d+) launches", blocks("fsdp_host.md", "LoRA")[0]
        ),
    ),
    Claim(
        "docs/results/fsdp_host.md",
        r"Plans count (\d+) launches and ([\d.]+),",
        lambda: map(str, (FSDP_COLLECTIVE, FSDP_PARAMETER)),
    ),
    Claim(
        "docs/results/README.md",
        r"(\d+) of (\d+) peaks of tensors are within ([\d.]+) %; half of the seconds are within ([\d.]+) %",
        lambda: [said("published_4090.md", PUBLISHED_4090)[n] for n in (1, 0, 2, 3)],
    ),
    Claim(
        "docs/planning.md",
        r"Of (\d+) steps of a loop on one and two RTX 4090, some with DDP, half are \[within ([\d.]+) %\]",
        lambda: said("published_4090.md", PUBLISHED_4090)[::3],
    ),
    Claim(
        "docs/results/README.md",
        r"gpt-oss-20b within ([\d.]+) %; steps take ([\d.]+) to ([\d.]+) times as long as predicted",
        lambda: [said("published_experts.md", PUBLISHED_EXPERTS)[n] for n in (0, 2, 3)],
    ),
    Claim(
        "docs/planning.md",
        r"(\d+) published steps of gpt-oss-20b and Qwen3-30B-A3B took \S*?([\d.]+) to ([\d.]+) times as long",
        lambda: said("published_experts.md", PUBLISHED_EXPERTS)[1:],
    ),
    Claim(
        "docs/planning.md",
        r"With experts it may be (\d+) % below",
        lambda: [percent(SLOWEST_EXPERTS)],
    ),
    Claim(
        "docs/planning.md",
        r"plans say that the real speed may be (\d+) % below",
        lambda: [percent(SLOWEST_EXPERTS)],
    ),
    Claim(
        "docs/results/README.md",
        r"(\d+) % too fast in the median of (\d+) unseen runs",
        lambda: reversed(said("speed_anchors.md", SEEN_BY_NOBODY)),
    ),
]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim.page}: {claim.sentence[:40]}")
def test_a_number_is_that_of_a_result(claim: Claim) -> None:
    found = claim.found()
    assert found, f"{claim.page} does not say {claim.sentence!r} anymore: change the claim with it"
    assert [*map(in_words, found.groups())] == [*claim.numbers()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_looks_measured_has_a_source(page: Path) -> None:
    text = text_of(page)
    spans = [
        match.span() for claim in CLAIMS if ROOT / claim.page == page and (match := claim.found())
    ]
    spans += [match.span() for pattern in NOT_MEASURED for match in re.finditer(pattern, text)]
    without = [
        text[max(0, number.start() - 60) : number.end() + 30]
        for number in MEASURED.finditer(text)
        if not any(begin <= number.start() < end for begin, end in spans)
    ]
    assert not without


def test_the_median_of_all_unseen_rows_follows_from_its_groups() -> None:
    """25 % lies between the medians of the rows of 2023 and of those of late 2024."""
    _, overall = said("speed_anchors.md", SEEN_BY_NOBODY)
    old, new = (
        float(table("speed_anchors.md", row)[1].strip("+ %"))
        for row in ("software of 2023", "software of late 2024, A100")
    )
    assert new < float(overall) < old
