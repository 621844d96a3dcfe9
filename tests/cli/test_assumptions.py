"""What a plan assumes of a run and its device, and its what-ifs."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.helpers.ranks import Alone
from torchtune_adaptive.cli.what_if import splits, what_ifs
from torchtune_adaptive.common.errors import ConfigError, NoPrediction
from torchtune_adaptive.planner.memory.gpus import GPUS, gpu
from torchtune_adaptive.recipe.data.row_lengths import RowLengths
from torchtune_adaptive.recipe.plan.calibration import Calibration, Calibrations
from torchtune_adaptive.recipe.plan.request import plan_request
from torchtune_adaptive.recipe.registry import load_config, with_overrides
from torchtune_adaptive.recipe.settings.asked import Asked


def stock(name: str, **changes: Any) -> Any:
    return OmegaConf.merge(load_config(name), changes)


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
