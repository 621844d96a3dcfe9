"""What a plan prints, what it assumes, and its what-ifs."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.helpers.ranks import Alone
from torchtune_adaptive.cli.candidates_report import Fastest, draw_fastest
from torchtune_adaptive.cli.job import job
from torchtune_adaptive.cli.plan_plot import draw
from torchtune_adaptive.cli.plan_report import (
    PlanReport,
    WhatIfResult,
    as_dict,
    details,
    headline,
)
from torchtune_adaptive.cli.speed_report import DeviceAnswer, compare_table
from torchtune_adaptive.cli.what_if import splits, what_ifs
from torchtune_adaptive.common import plots
from torchtune_adaptive.common.document import as_markdown, as_text
from torchtune_adaptive.common.errors import ConfigError, NoPrediction
from torchtune_adaptive.planner import Answer
from torchtune_adaptive.planner.memory.gpus import GPUS, gpu
from torchtune_adaptive.planner.memory.peak import Peak
from torchtune_adaptive.planner.speed.speed import Speed
from torchtune_adaptive.recipe.data.row_lengths import RowLengths
from torchtune_adaptive.recipe.plan.calibration import Calibration, Calibrations
from torchtune_adaptive.recipe.plan.limits import LengthLimits
from torchtune_adaptive.recipe.plan.predict import Prediction
from torchtune_adaptive.recipe.plan.ranking import Candidate
from torchtune_adaptive.recipe.plan.request import plan_request
from torchtune_adaptive.recipe.registry import find_config, load_config, with_overrides
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.settings.knob_table import Change


def a_prediction(**changes: Any) -> Prediction:
    peak = Peak(
        2, 2048, 10 << 30, 11 << 30, 19 << 30, {"activations": 10 << 30}, "backward", "aten.mm"
    )
    return Prediction(
        **{
            **dict(rows=2, length=2048, ranks=8, rank=0, largest=13, configured=peak),
            **dict(at_largest=replace(peak, rows=13, phase="optimizer step"), curve=[]),
            **dict(rounding="power_of_two", picked=replace(peak, rows=8)),
            **dict(timeline=[], traced_directly=False, uneven=False, seconds=1.0, tool_bytes=1),
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
    plan = plan_request(OmegaConf.load(find_config("llama3_1/8B_full")), 8, name="8B")  # type: ignore[arg-type]

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
        alone = plan_request(OmegaConf.load(find_config("llama3_1/8B_full")), 1).device  # type: ignore[arg-type]
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
        plan = plan_request(stock(f"llama3_1/{config}", **off), 8)
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

    def test_candidates_that_take_as_much_and_as_long_are_drawn(self) -> None:
        own = Candidate(self.plan.query().asked, (), 1.0, 1e6, 1 << 30, True)
        other = replace(own, changes=(Change("optimizer.fused", False, True, "rounding"),))
        figure = plots.new_figure(4, 4)
        assert figure is not None
        draw_fastest(figure.subplots(), Fastest(self.plan, [own, other], "rounding"))

    def test_a_plot_without_matplotlib(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(ConfigError, match="pip install matplotlib"):
            draw(a_report(self.plan), Path("plan.png"))


def stock(name: str, **changes: Any) -> Any:
    return OmegaConf.merge(OmegaConf.load(find_config(name)), changes)


SPLIT = {
    "tensor_parallel_dim": 2,
    "tensor_parallel_plan": {"_component_": "torchtune.models.llama3.base_llama_tp_plan"},
    "optimizer": {"fused": False},
}


class TestWhatIsAssumed:
    def test_a_device_by_name(self) -> None:
        plan = plan_request(stock("llama3_1/8B_full"), 8, "a100-40gb")
        assert plan.device.usable_bytes == int(GPUS["a100-40gb"].capacity(8) * 0.95)
        assert plan.assumptions[:2] == (
            "a100-40gb: 39.5 GiB in total, less 1.5 GiB for the CUDA context and NCCL",
            "38 GiB capacity; 36.1 GiB usable (5% headroom)",
        )
        alone = plan_request(stock("llama3_1/8B_full"), 1, "a100-40gb")
        assert alone.assumptions[0].endswith("less 512 MiB for the CUDA context")

    def test_memory_is_what_a_process_can_get(self) -> None:
        plan = plan_request(stock("llama3_1/8B_full"), 8, memory=76 << 30)
        assert plan.device.usable_bytes == int((76 << 30) * 0.95)
        assert plan.device.name == "GPU with 76 GiB"
        sold_as = plan_request(stock("llama3_1/8B_full"), 8, memory=24 * 10**9)
        assert sold_as.device.name == "GPU with 24 GB (22.35 GiB)"
        assert "the capacity is 22.2 GiB (--gpu rtx3090-24gb)" in sold_as.assumptions[0]

    def test_this_machine_is_as_searches_found_it(self, tmp_path: Path) -> None:
        cfg = stock("llama3_1/8B_full", adaptive_batching={"cache": str(tmp_path)})
        with pytest.raises(ConfigError, match="there was none"):
            plan_request(cfg, 8, "here")
        compiled = OmegaConf.merge(cfg, {"compile": True})
        for device, when, run, ranks in (
            ("Old", 1e9, cfg, 8),
            ("New", 2e9, cfg, 8),
            ("One", 3e9, cfg, 1),
            ("Compiled", 4e9, compiled, 8),
        ):
            kept = Calibrations(Calibration, Asked.of(run), ranks)
            kept.keep(Calibration(device, 20 << 30, 1.02, 1.01, when))
        plan = plan_request(cfg, 4, "here")
        assert (plan.device.name, plan.device.correction) == ("New", 1.02)
        assert plan.device.usable_bytes == int((20 << 30) * 0.95)
        assert "2033-05-18: the measured peak was 2.00% above the prediction" in plan.assumptions[0]
        assert plan_request(cfg, 1, "here").device.name == "One"
        assert plan_request(compiled, 2, "here").device.name == "Compiled"
        absurd = Calibration("Absurd", 20 << 30, reserved_ratio=3.0, allocated_ratio=1.0, when=5e9)
        Calibrations(Calibration, Asked.of(cfg), 8).keep(absurd)
        assert plan_request(cfg, 4, "here").device.name == "New"
        cards = (("NVIDIA H200", 32), ("NVIDIA A100-SXM4-80GB", 8.125), ("Tesla T4", 8.125))
        for when, (name, mebibytes) in enumerate(cards, 6_000_000_000):
            kept = Calibration(name, 20 << 30, 1.0, 1.0, when)
            Calibrations(Calibration, Asked.of(cfg), 8).keep(kept)
            device = plan_request(cfg, 8, "here").device
            assert device.workspaces == (mebibytes * (1 << 20),) * 2
            assert device.before_ampere == (name == "Tesla T4")

    @pytest.mark.parametrize(
        ("reserved", "allocated", "text"),
        [
            (1.0, 1.0, "the measured peak was as predicted"),
            (0.995, 1.0, "was 0.50% below the prediction (reserved; allocated: equal to it)"),
            (1.012, 1.02, "was 1.20% above the prediction (reserved; allocated: 2.00% above it)"),
        ],
    )
    def test_a_trial_is_compared_with_its_prediction(
        self, reserved: float, allocated: float, text: str
    ) -> None:
        assert Calibration("", 1, reserved, allocated, 0.0).comparison().endswith(text)

    def test_the_allocator_is_that_of_the_environment(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        assert plan_request(stock("llama3_1/8B_full"), 8).device.expandable

    def test_the_length_of_rows(self) -> None:
        assert plan_request(stock("llama3_1/8B_full"), 8).length_source.startswith("assumed")
        longer = stock("llama3_1/8B_full", tokenizer={"max_seq_len": 4096})
        assert plan_request(longer, 8).length == 4096

    @pytest.mark.parametrize(
        ("lengths", "expected"),
        [
            ((512, 1024), (1024, "dataset.max_seq_len")),
            (
                (512, None),
                (4096, "tokenizer.max_seq_len"),
            ),  # any sample of the second may be longer
        ],
    )
    @pytest.mark.parametrize("packed", [False, True])
    def test_a_list_of_datasets(
        self, lengths: tuple[int | None, ...], expected: tuple[int, str], packed: bool
    ) -> None:
        cfg = stock("llama3_1/8B_full", tokenizer={"max_seq_len": 4096})
        cfg.dataset = [{**cfg.dataset, "packed": packed, "max_seq_len": n} for n in lengths]
        plan = plan_request(cfg, 8)
        assert (plan.length, plan.length_source) == expected
        assert any("packed rows" in line for line in plan.assumptions) is packed
        Calibrations(Calibration, Asked.of(cfg), 8)

    def test_what_cannot_be_predicted_is_refused(self) -> None:
        compiled = stock("llama3_1/8B_full", **SPLIT, compile=True)
        compiled.adaptive_batching = {"on_out_of_memory": "raise"}
        with pytest.raises(NoPrediction, match="cannot be traced"):
            plan_request(compiled, 8)

    def test_ranks_that_share_rows_are_told_and_counted(self) -> None:
        plan = plan_request(stock("llama3_1/8B_full", **SPLIT), 8)
        assert any("2 ranks have the same rows" in line for line in plan.assumptions)
        pace = plan.query().pace
        assert pace is not None and pace.holders == 2
        alone = plan_request(stock("llama3_1/8B_full"), 8)
        assert not any("same rows" in line for line in alone.assumptions)

    def test_bitsandbytes_is_planned_with_what_can_be_traced(self) -> None:
        plan = plan_request(stock("llama3_2/1B_full_single_device"), 1)
        assert plan.cfg.optimizer._component_ == "torchao.optim.AdamW8bit"
        assert any("PagedAdamW8bit is planned as torchao" in line for line in plan.assumptions)
        assert plan.query().asked["optimizer_in_bwd"] is True

    def test_lengths_that_a_run_remembered(self, tmp_path: Path) -> None:
        cfg = stock("llama3_1/8B_full", adaptive_batching={"cache": str(tmp_path)})
        rows = [{"tokens": [1] * n} for n in (3, 700, 20)]
        RowLengths(rows, cfg, Alone(), str(tmp_path)).all(say_progress=False)
        plan = plan_request(cfg, 8)
        assert (plan.length, "an earlier run" in plan.length_source) == (700, True)
        other = OmegaConf.merge(cfg, {"tokenizer": {"path": "elsewhere"}})
        assert plan_request(other, 8).length == 2048  # type: ignore[arg-type]
        assert plan_request(cfg, 8, length=512).length_source == "--seq-len"

    def test_a_package_that_is_missing_is_named_with_the_remedy(self) -> None:
        cfg = stock("llama3_1/8B_full", optimizer={"_component_": "no_such_package.AdamW"})
        with pytest.raises(NoPrediction, match=r"no_such_package is not installed.*AdamW8bit"):
            plan_request(cfg, 1)

    def test_compiling_itself_is_not_predicted(self) -> None:
        plan = plan_request(stock("llama3_1/8B_full", compile=True), 8)
        assert any(
            "compiling itself" in line and "underestimates" in line for line in plan.assumptions
        )


def test_what_ifs_change_one_thing_each() -> None:
    plan = plan_request(stock("llama3_1/8B_full"), 8)
    changed = {one.name: one.query for one in what_ifs(plan)}
    configs = {name: query.asked.cfg for name, query in changed.items()}
    assert configs["no activation checkpointing"]["enable_activation_checkpointing"] is False
    assert configs["QLoRA (rank 8)"]["model"]["_component_"].endswith("lora_llama3_1_8b")
    assert configs["QLoRA (rank 8)"]["model"]["quantize_base"] is True
    assert configs["8-bit optimizer (torchao)"]["optimizer"].keys() == {"_component_", "lr"}
    assert changed["16 ranks"].ranks == 16
    assert changed["expandable segments"].device.expandable
    for query in changed.values():  # each is a config that a recipe would take
        plan_request(query.asked.cfg, query.ranks)


@pytest.mark.parametrize(
    ("name", "ranks", "expected"),
    [
        ("llama3_1/8B_full", 8, [2, 4, 8]),
        ("llama3_1/8B_full", 6, [2]),
        ("llama3_1/8B_full", 1, []),
        ("llama3_1/8B_lora", 8, []),  # for which torchtune has no tensor parallelism
        ("qwen2_5/7B_full", 8, []),  # for whose layers it has no plan
    ],
)
def test_layers_are_split_over_numbers_of_ranks_that_divide_all(
    name: str, ranks: int, expected: list[int]
) -> None:
    plan = plan_request(stock(name), ranks)
    queries = [one.query for one in splits(plan)]
    assert [query.asked["tensor_parallel_dim"] for query in queries] == expected
    assert all(query.pace is not None and query.pace.holders > 1 for query in queries)
    for one in splits(plan):  # each is a config that a recipe would take, as it is printed
        pasted = with_overrides(load_config(name), shlex.split(one.override))
        assert plan_request(pasted, ranks).query().asked == one.query.asked


def test_what_cannot_be_combined_with_split_layers_is_no_what_if() -> None:
    plan = plan_request(stock("llama3_1/8B_full", **SPLIT), 2)
    names = {one.name for one in what_ifs(plan)}
    assert {"no activation checkpointing", "LoRA (rank 8)", "4 ranks"} <= names
    assert not names & {"fused optimizer", "optimizer in backward", "1 rank"}
    assert not any("after forward" in name for name in names), "nothing is sharded"
    lora = next(one.query.asked.cfg for one in what_ifs(plan) if one.name == "LoRA (rank 8)")
    assert lora["tensor_parallel_dim"] is None


@pytest.mark.parametrize("name", ["llama3_1/8B_full", "llama3_1/8B_lora", "tiny/full"])
def test_what_is_printed_to_paste_makes_the_what_if(name: str) -> None:
    plan = plan_request(stock(name), 2)
    for one in what_ifs(plan):
        words = shlex.split(one.override)
        if one.query.ranks == plan.ranks and "=" in one.override and "ALLOC_CONF" not in words[0]:
            pasted = plan_request(with_overrides(load_config(name), words), 2).query()
            clean = {key: value for key, value in one.query.asked.cfg.items() if value is not None}
            assert clean == {
                key: value for key, value in pasted.asked.cfg.items() if value is not None
            }
    names = {one.name for one in what_ifs(plan)}
    assert ("QLoRA" in names) == ("lora" in name)


def test_several_ranks_leave_less_of_a_device() -> None:
    assert gpu("H100-80GB").capacity(1) > gpu("h100-80gb").capacity(2)
