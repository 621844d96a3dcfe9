"""Settings: what is wrong is said with its key, value, reason and remedy, before anything is built."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.registry import CONFIGS, find_config, our_configs, torchtune_configs
from torchtune_adaptive.settings.adaptive import AdaptiveSettings
from torchtune_adaptive.settings.checks import check
from torchtune_adaptive.settings.kinds import unused_keys


def config(name: str = "tiny/full", *overrides: str) -> DictConfig:
    base = OmegaConf.load(find_config(name))
    return OmegaConf.merge(base, OmegaConf.from_dotlist(list(overrides)))  # type: ignore[return-value]


def settings(**block: Any) -> AdaptiveSettings:
    return AdaptiveSettings.from_config(OmegaConf.create({"adaptive_batching": block}))


def test_without_a_word_everything_is_off() -> None:
    assert AdaptiveSettings.from_config(OmegaConf.create({})) == AdaptiveSettings()
    assert (
        AdaptiveSettings.from_config(OmegaConf.create({"adaptive_batching": None}))
        == AdaptiveSettings()
    )
    assert not AdaptiveSettings().use_maximum_batch_size


def test_the_defaults_are_those_that_the_docs_promise() -> None:
    default = AdaptiveSettings()
    assert (default.search, default.rounding, default.headroom) == (
        "extrapolate",
        "power_of_two",
        0.05,
    )
    assert (default.ceiling, default.memory_limit, default.probe_length) == (None, None, None)
    assert (default.keep_global_batch, default.cache) == (False, True)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("24GiB", 24 * 1024**3),
        ("24 GiB", 24 * 1024**3),
        ("1.5MiB", 1536 * 1024),
        ("2GB", 2 * 1000**3),
        ("512B", 512),
        (1000, 1000),
        ("1000", 1000),
        (None, None),
    ],
)
def test_memory_is_written_with_units_or_in_bytes(written: Any, expected: int | None) -> None:
    assert settings(memory_limit=written).memory_limit == expected


def test_none_on_the_command_line_means_no_rounding() -> None:
    # torchtune turns it into null
    assert settings(rounding=None).rounding == "none"
    assert settings(rounding="none").rounding == "none"


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        ("search", "fibonacci", "extrapolate, bisect, halve"),
        ("search", True, "extrapolate"),
        ("rounding", "nearest", "power_of_two, divisor, none"),
        ("ceiling", 0, "1 or more"),
        ("ceiling", 2.5, "1 or more"),
        ("ceiling", True, "1 or more"),
        ("ceiling", "many", "1 or more"),
        ("headroom", 1, "0.05"),
        ("headroom", -0.1, "0.05"),
        ("headroom", "5%", "0.05"),
        ("headroom", float("nan"), "0.05"),
        ("memory_limit", "24Gi", "24GiB"),
        ("memory_limit", "lots", "24GiB"),
        ("memory_limit", 0, "24GiB"),
        ("memory_limit", -5, "24GiB"),
        ("memory_limit", True, "24GiB"),
        ("probe_length", 1, "2 or more"),
        ("keep_global_batch", "yes", "True or False"),
        ("keep_global_batch", 1, "True or False"),
        ("cache", 3, "a folder"),
        ("cache", "", "a folder"),
        ("rank_timeout", 0, "seconds"),
        ("search_only", "no", "True or False"),
        ("on_out_of_memory", "ignore", "shrink, raise"),
        ("grow_back_after", 0, "1 or more"),
        ("step_timeout", -1, "seconds"),
        ("grow_past_memory", 1, "True or False"),
        ("lr_scaling", "cubic", "none, sqrt, linear, gain"),
        ("beta2", 0.99, "fixed, half_life"),
        ("gradient_noise", "loud", "off, observe, act"),
        ("workers", -1, "0 or more"),
    ],
)
def test_a_wrong_value_is_named_with_its_remedy(key: str, value: Any, remedy: str) -> None:
    with pytest.raises(ConfigError) as raised:
        settings(**{key: value})
    message = str(raised.value)
    assert message.startswith(f"adaptive_batching.{key}: {value!r} ")
    assert remedy in message


def test_a_misspelt_setting_is_an_error_that_knows_better() -> None:
    with pytest.raises(
        ConfigError, match=r"adaptive_batching.headrom: 0.1 .* Did you mean headroom\?"
    ):
        settings(headrom=0.1)
    with pytest.raises(ConfigError, match="The settings are beta2, cache, ceiling, "):
        settings(zzz=1)


def test_a_block_that_is_no_block() -> None:
    with pytest.raises(ConfigError, match="adaptive_batching: True is not a block"):
        AdaptiveSettings.from_config(OmegaConf.create({"adaptive_batching": True}))


def test_the_switch_is_typed_as_well() -> None:
    with pytest.raises(ConfigError, match="use_maximum_batch_size: 'yes please' is not a boolean"):
        AdaptiveSettings.from_config(OmegaConf.create({"use_maximum_batch_size": "yes please"}))


def test_everything_can_be_said_on_the_command_line() -> None:
    cfg = config(
        "tiny/full", "adaptive_batching.search=halve", "adaptive_batching.memory_limit=1GiB"
    )
    assert AdaptiveSettings.from_config(cfg).search == "halve"
    assert AdaptiveSettings.from_config(cfg).memory_limit == 1024**3


@pytest.mark.parametrize("name", our_configs())
def test_our_configs_are_without_fault(name: str) -> None:
    cfg = config(name)
    kind = "lora" if "lora" in name else "full"
    assert unused_keys(cfg, kind) == []
    assert check(cfg, kind).searches
    assert name in (CONFIGS / f"{name}.yaml").read_text(), "a config says how it is run"


def test_no_key_of_torchtunes_own_configs_is_an_error() -> None:
    for name, path in torchtune_configs().items():
        kind = "lora" if "lora" in name else "full"
        unused = unused_keys(OmegaConf.load(path), kind)  # type: ignore[arg-type]
        # Two keys that older recipes knew, and that torchtune's present ones ignore as well.
        assert set(unused) <= {"low_cpu_ram", "fsdp"}, name


def test_a_misspelt_torchtune_key_is_an_error() -> None:
    with pytest.raises(ConfigError, match="looks like gradient_accumulation_steps"):
        check(config("tiny/full", "gradient_acumulation_steps=3"), "full")


def test_variables_for_interpolation_and_foreign_keys_are_not_errors() -> None:
    cfg = OmegaConf.merge(config(), {"my_length": 99, "tokenizer": {"max_seq_len": "${my_length}"}})
    assert unused_keys(cfg, "full") == []  # type: ignore[arg-type]
    assert unused_keys(config("tiny/full", "my_notes=hello"), "full") == ["my_notes"]


IMPOSSIBLE: list[tuple[str, list[str], str, str]] = [
    ("full", ["batch_size=0"], "batch_size", "1 or more"),
    ("full", ["gradient_accumulation_steps=1.5"], "gradient_accumulation_steps", "1 or more"),
    ("full", ["max_steps_per_epoch=0"], "max_steps_per_epoch", "1 or more"),
    ("full", ["dtype=fp16"], "dtype", "bf16 or fp32"),
    ("full", ["fsdp_cpu_offload=True"], "fsdp_cpu_offload", "accelerator"),
    ("full", ["enable_activation_offloading=True"], "enable_activation_offloading", "False"),
    (
        "full",
        ["device=cuda", "enable_activation_offloading=True"],
        "enable_activation_offloading",
        "enable_activation_checkpointing=True",
    ),
    ("full", ["collate_fn=torchtune.data.left_pad_sequence"], "collate_fn", "padded_collate_sft"),
    ("full", ["optimizer_in_bwd=True"], "clip_grad_norm", "optimizer_in_bwd=False"),
    (
        "full",
        ["optimizer_in_bwd=True", "clip_grad_norm=null", "gradient_accumulation_steps=2"],
        "gradient_accumulation_steps",
        "gradient_accumulation_steps=1",
    ),
    ("full", ["tensor_parallel_dim=2"], "tensor_parallel_dim", "tensor_parallel_plan"),
    (
        "full",
        ["tensor_parallel_dim=2", "tensor_parallel_plan._component_=x", "optimizer.fused=True"],
        "optimizer.fused",
        "fused=False",
    ),
    (
        "full",
        ["tensor_parallel_dim=2", "tensor_parallel_plan._component_=x"],
        "tensor_parallel_dim",
        "use_maximum_batch_size=False",
    ),
    (
        "full",
        [
            "optimizer_in_bwd=True",
            "clip_grad_norm=null",
            "adaptive_batching.keep_global_batch=True",
        ],
        "adaptive_batching.keep_global_batch",
        "False",
    ),
    (
        "full",
        ["use_maximum_batch_size=False", "adaptive_batching.search_only=True"],
        "adaptive_batching.search_only",
        "use_maximum_batch_size=True",
    ),
    (
        "full",
        [
            "optimizer_in_bwd=True",
            "clip_grad_norm=null",
            "adaptive_batching.on_out_of_memory=shrink",
        ],
        "adaptive_batching.on_out_of_memory",
        "raise",
    ),
    (
        "full",
        ["optimizer_in_bwd=True", "clip_grad_norm=null", "adaptive_batching.grow_past_memory=True"],
        "adaptive_batching.grow_past_memory",
        "False",
    ),
    (
        "full",
        [
            "optimizer_in_bwd=True",
            "clip_grad_norm=null",
            "adaptive_batching.gradient_noise=observe",
        ],
        "adaptive_batching.gradient_noise",
        "optimizer_in_bwd=False",
    ),
    (
        "full",
        ["batch_increase_function=m.grow", "adaptive_batching.gradient_noise=act"],
        "adaptive_batching.gradient_noise",
        "observe",
    ),
    ("full", ["adaptive_batching.lr_scaling=gain"], "adaptive_batching.lr_scaling", "observe"),
    (
        "full",
        ["optimizer._component_=torch.optim.SGD", "adaptive_batching.beta2=half_life"],
        "adaptive_batching.beta2",
        "AdamW",
    ),
    ("full", ["save_every_n_steps=0"], "save_every_n_steps", "1 or more"),
    (
        "full",
        ["save_every_n_steps=5", "enable_async_checkpointing=True"],
        "save_every_n_steps",
        "enable_async_checkpointing=False",
    ),
    ("lora", ["optimizer_in_bwd=True"], "optimizer_in_bwd", "Remove"),
]


@pytest.mark.parametrize(("kind", "overrides", "key", "remedy"), IMPOSSIBLE)
def test_what_cannot_work_together_stops_here(
    kind: str, overrides: list[str], key: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        check(config(f"tiny/{kind}", *overrides), kind)
    assert raised.value.key == key
    assert remedy in str(raised.value)
