"""What a plan prints."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

import pytest
from omegaconf import OmegaConf

from torchtune_adaptive.cli.candidates_report import Fastest
from torchtune_adaptive.cli.job import job
from torchtune_adaptive.cli.plan_report import (
    PlanReport,
    WhatIfResult,
    as_dict,
    details,
    headline,
)
from torchtune_adaptive.cli.speed_report import DeviceAnswer, compare_table
from torchtune_adaptive.common.document import as_markdown, as_text
from torchtune_adaptive.planner import Answer
from torchtune_adaptive.planner.memory.gpus import GPUS
from torchtune_adaptive.planner.memory.peak import Peak
from torchtune_adaptive.planner.speed.speed import Speed
from torchtune_adaptive.recipe.plan.limits import LengthLimits
from torchtune_adaptive.recipe.plan.predict import Prediction
from torchtune_adaptive.recipe.plan.ranking import Candidate
from torchtune_adaptive.recipe.plan.request import plan_request
from torchtune_adaptive.recipe.registry import load_config
from torchtune_adaptive.recipe.settings.knob_table import Change


def a_prediction(**changes: Any) -> Prediction:
    peak = Peak(
        2, 2048, 10 << 30, 11 << 30, 19 << 30, {"activations": 10 << 30}, "backward", "aten.mm"
    )
    return Prediction(
        **{
            **dict(rows=2, length=2048, ranks=8, rank=0, largest=13, configured=peak),
            **dict(at_largest=replace(peak, rows=13, phase="optimizer step")),
            **dict(rounding="power_of_two", picked=replace(peak, rows=8)),
            **dict(traced_directly=False, uneven=False, seconds=1.0, tool_bytes=1),
            **changes,
        }
    )


def a_report(plan: Any, *outcomes: WhatIfResult, **changes: Any) -> PlanReport:
    found = a_prediction()
    return PlanReport(
        **{**dict(plan=plan, found=found, first_answer=found, last_rank=None), **changes},
        outcomes=outcomes,
    )


class TestWhatIsPrinted:
    plan = plan_request(load_config("llama3_1/8B_full"), 8, name="8B")

    def test_the_answer_comes_first(self) -> None:
        lines = as_text(headline(self.plan, a_prediction())).splitlines()
        assert lines[:4] == [
            "batch_size 2: FITS, peak 19 GiB (-3% to +7%) of 73.7 GiB. Largest micro-batch that fits: 13; a",
            "  search picks 8 (power of two).",
            "8B on 8 x h100-80gb, rows of 2048 tokens (assumed: give --seq-len or "
            "tokenizer.max_seq_len)",
            "",
        ]
        table = [line.split() for line in lines[4:9]]
        assert table[0][2:] == ["batch_size", "2", "batch_size", "8", "batch_size", "13"]
        assert table[1] == ["activations", *["10", "GiB"] * 3]
        assert table[3] == ["held", "by", "the", "allocator", *["19", "GiB"] * 3]
        assert table[4][-1] == "optimizer"
        assert not any("aten.mm" in line for line in lines)

    def test_a_search_may_find_more_than_fits_without_one(self) -> None:
        now = a_prediction()
        larger = replace(now.configured, rows=16)
        same = replace(now.configured, rows=13, reserved=18 << 30)
        most = replace(now.configured, rows=13)
        found = a_prediction(picked=larger, at_largest=most)
        text = " ".join(as_text(headline(self.plan, found)).split())
        assert (
            "Largest micro-batch that fits: 13; a search, after which memory is in fewer pieces, picks 16"
            in text
        )
        # Of one size, what a run without a search reserves is shown.
        lines = as_text(
            headline(self.plan, a_prediction(picked=same, at_largest=most))
        ).splitlines()
        [held] = [line.split() for line in lines if "held by the allocator" in line]
        assert held[-4:] == ["19", "GiB", "19", "GiB"]

    def test_a_size_that_may_not_fit_after_all_is_warned_of(self) -> None:
        near = replace(a_prediction().configured, rows=13, reserved=int(73.6 * (1 << 30)))
        text = as_text(headline(self.plan, a_prediction(at_largest=near)))
        assert (
            "Caution: at batch_size 13 the usable memory is within the prediction's error (-3% to"
            in text
        )
        alone = replace(self.plan, device=replace(self.plan.device, fragmentation=0.0))
        assert "prediction's error (+-3%)" in as_text(
            headline(alone, a_prediction(at_largest=near))
        )

    def test_more_may_be_reserved_than_predicted_on_several_ranks(self) -> None:
        usable = self.plan.device.usable_bytes
        alone = plan_request(load_config("llama3_1/8B_full"), 1).device
        for device, share, verdict in (
            (self.plan.device, 1.06, "UNCERTAIN"),
            (self.plan.device, 1.08, "FITS"),
            (self.plan.device, 0.96, "DOES NOT FIT"),
            (alone, 1.04, "FITS"),
            (alone, 1.02, "UNCERTAIN"),
        ):
            peak = replace(a_prediction().configured, reserved=int(device.usable_bytes / share))
            assert peak.verdict(device) == verdict
        assert alone.usable_bytes > usable

    def test_what_ifs_are_in_the_order_of_what_they_gain(self) -> None:
        less = replace(a_prediction().configured, reserved=15 << 30)
        report = a_report(
            self.plan,
            WhatIfResult("smaller", a_prediction(largest=0), override="a=1"),
            WhatIfResult("leaner", a_prediction(configured=less), override="b=2"),
            WhatIfResult("larger", a_prediction(largest=40), override="c=3"),
            WhatIfResult("other", None, "It cannot be traced.", "d=4"),
            last_rank=a_prediction(largest=12),
            by_length=LengthLimits({1024: 20}, 5120, 8192),
        )
        lines = as_text(details(report)).splitlines()
        assert lines[0].startswith("Parameters do not divide evenly") and "is 12." in lines[1]
        gains = lines.index("What if, at batch_size 2: gains, largest first:")
        assert lines[gains + 2].split() == ["larger", "13", "->", "40", "+0", "B", "19", "GiB"]
        assert lines[gains + 3] == "      c=3"
        assert lines[gains + 4].split() == ["leaner", "13", "->", "13", "-4", "GiB", "15", "GiB"]
        worse = lines.index("No gain, at batch_size 2:")
        assert lines[worse + 2].split()[:4] == ["smaller", "13", "->", "none"]
        assert "  other: It cannot be traced." in lines
        limits = [line.split() for line in lines[: gains - 1]]
        assert ["rows", "in", "a", "micro-batch", "2", "13"] in limits
        assert ["rows", "of", "1024", "tokens", "20"] in limits
        assert any(line[-2:] == ["2048", "5120"] for line in limits)
        assert as_dict(report)["configured"]["operation"] == "aten.mm"
        assert as_dict(report)["what_ifs"][2]["override"] == "c=3"

    def test_what_does_not_fit_has_no_hours_and_no_cost(self) -> None:
        speed = Speed(10.0, 1234.0, 0.33, {"gemm": 1.0}, 0.0, (-0.3, 0.05))
        too_much = replace(a_prediction().configured, reserved=90 << 30)
        fits = a_prediction(speed=speed)
        does_not = a_prediction(speed=speed, configured=too_much, largest=0, picked=None)
        work = job("52M", "2.5")
        said = as_text(headline(self.plan, fits, work))
        assert (
            "Speed at batch_size 2: 1,234 tokens/s" in said and "hours" in said and "cost" in said
        )
        said = as_text(headline(self.plan, does_not, work))
        assert "Speed at batch_size 2, if it fitted: 1,234 tokens/s" in said
        assert "No hours and no cost, because batch_size 2 does not fit." in said
        assert "take" not in said.partition("No hours")[2]
        report = a_report(self.plan, found=does_not, job=work)
        assert {as_dict(report)[key] for key in ("hours", "cost")} == {None}
        assert as_dict(a_report(self.plan, found=fits, job=work))["hours"] > 0

    def test_the_planned_gpu_is_billed_at_its_own_price(self) -> None:
        speed = Speed(10.0, 1e6 / 3600, 0.33, {"gemm": 1.0}, 0.0, (-0.3, 0.05))
        found = a_prediction(speed=speed)
        for compared, said, cost in (
            ("4090", "cost 32.00 (at 4.00 for", 32),
            ("t4", "take 1 hours, 8 GPU", None),
        ):
            work = job("8M", "1,4", "h100-80gb", [compared, "h100" if cost else "a30"])
            for render in (as_text, as_markdown):
                text = " ".join(render(headline(self.plan, found, work)).split())
                assert said in text and ("cost" in text) == bool(cost)
            assert as_dict(a_report(self.plan, found=found, job=work))["cost"] == cost

    def test_devices_are_compared_at_the_size_that_is_configured(self) -> None:
        speed = Speed(10.0, 1234.0, 0.33, {"gemm": 1.0}, 0.0, (-0.3, 0.05))
        peak = a_prediction().configured
        devices = [
            DeviceAnswer(
                replace(self.plan.device, name=name),
                verdict,
                peak.rows,
                peak.reserved,
                largest,
                speed,
            )
            for name, largest, verdict in (
                ("small", 0, "DOES NOT FIT"),
                ("near", 2, "UNCERTAIN"),
                ("large", 5, "FITS"),
            )
        ]
        table = compare_table(devices, 1, job("52M", "2.5", "", ["t4", "l4", "h100"]))
        assert table.title == "On other devices (tokens/s per GPU)"
        assert table.header[4:] == ["tokens/s at 2 rows", "MFU", "hours", "cost"]
        assert table.rows[0] == ["small", "DOES NOT FIT", "19 GiB", "none", "", "", "", ""]
        assert [row[4] for row in table.rows[1:]] == ["1,234 (-30% to +5%)"] * 2
        assert all(all(row) for row in table.rows[1:])

    @pytest.mark.parametrize(
        ("config", "largest", "said"),
        [
            ("8B_full", 1, "It fits with batch_size=1. Run without --no-what-ifs to see what else"),
            (
                "8B_full",
                0,
                "try --seq-len 1024, --nproc 16, enable_activation_checkpointing=True, or",
            ),
            ("8B_full", 0, "or a LoRA or QLoRA config."),
            ("8B_lora", 0, "or a QLoRA config."),
            ("8B_qlora_single_device", 0, "try --seq-len 1024, or --nproc 16."),
        ],
    )
    def test_without_what_ifs_it_is_said_what_may_fit_instead(
        self, config: str, largest: int, said: str
    ) -> None:
        off = {"enable_activation_checkpointing": config.endswith("device")}
        plan = plan_request(OmegaConf.merge(load_config(f"llama3_1/{config}"), off), 8)  # type: ignore[arg-type]
        peak = replace(a_prediction().configured, reserved=90 << 30)
        report = a_report(plan, found=a_prediction(configured=peak, largest=largest))
        assert said in " ".join(as_text(details(report)).split())
        assert "--no-what-ifs" not in as_text(details(a_report(plan)))

    def test_a_what_if_that_does_not_fit_has_no_speed_and_gains_nothing(self) -> None:
        speed = Speed(10.0, 1000.0, 0.33, {"gemm": 1.0}, 0.0, (-0.3, 0.05))
        faster = replace(speed, tokens_per_second_per_gpu=2000.0)
        now = a_prediction(speed=speed)
        report = a_report(
            self.plan,
            WhatIfResult("faster", a_prediction(speed=faster, largest=3), override="a=1"),
            WhatIfResult("too large", a_prediction(speed=faster, largest=1), override="b=2"),
            found=now,
        )
        gain, none = (
            line.split() for line in as_text(details(report)).splitlines() if "->" in line
        )
        assert gain[0] == "faster" and gain[-1] == "2,000"
        assert none[:2] == ["too", "large"] and none[-3:] == ["does", "not", "fit"]

    def test_no_line_is_wider_than_a_terminal(self) -> None:
        override = shlex.join(["model=lora_llama", *["model.modules=[q, v, output]"] * 9])
        speed = Speed(1234.5, 1234567.8, 0.33, {"gemm": 1.0}, 0.2, (-0.45, 0.2))
        found = a_prediction(
            configured=replace(a_prediction().configured, reserved=int(73.6 * (1 << 30))),
            speed=speed,
        )
        devices = [replace(self.plan.device, name=name) for name in GPUS]
        change = Change("loss._component_", "torchtune.long.Name", "torch.long.Other", "rounding")
        fits = Candidate(self.plan.query().asked, (change,) * 9, 1.0, 2e6, 1 << 30, True)
        candidates = [fits, replace(fits, changes=(), tokens_per_second_per_gpu=1e6)]
        report = a_report(
            replace(self.plan, name="a/long/path/to/the/config/of/a/run.yaml", ranks=4096),
            *(
                WhatIfResult(
                    f"{gain} and everything else that a name can say " * 3, answer, "", override
                )
                for gain, answer in (("less", found), ("more", replace(found, largest=10**6)))
            ),
            WhatIfResult(
                "other", None, "It cannot be traced, for a reason that is long. " * 4, "d=4"
            ),
            found=found,
            last_rank=found,
            by_length=LengthLimits({1 << 20: 10**6}, 1 << 20, 1 << 20),
            job=job("123.4M", "1234.5"),
            fastest=Fastest(self.plan, candidates, "rounding"),
            compared=[
                Answer(one, found.configured, 10**6, speed, "DOES NOT FIT") for one in devices
            ],
        )
        blocks = [*headline(report.plan, found, report.job), *details(report)]
        lines = as_text(blocks).splitlines()
        assert max(map(len, lines)) <= 100, max(lines, key=len)
        assert any("everything else" in line for line in lines)
        first = next(at for at, line in enumerate(lines) if "model=lora_llama" in line)
        typed = lines[first : first + 1 + override.count("modules") // 3]
        assert shlex.split("\n".join(typed))[:3] == shlex.split(override)[:3]

    def test_a_headline_that_was_wrong_is_corrected(self) -> None:
        found = a_prediction(largest=9, traced_directly=True)
        first = as_text(details(a_report(self.plan, found=found)))
        assert first.startswith("Correction") and "fits: 9" in " ".join(first.split())

    def test_markdown(self) -> None:
        text = as_markdown(headline(self.plan, a_prediction()))
        assert text.startswith("**batch_size 2: FITS")
        assert "| activations | 10 GiB | 10 GiB | 10 GiB |" in text
        larger = WhatIfResult("larger", a_prediction(largest=40), override="c=3")
        text = as_markdown(details(a_report(self.plan, larger)))
        assert "| larger | 13 -> 40 | +0 B | 19 GiB | `c=3` |" in text
