"""Settings: what is wrong is said with its key, value, reason and remedy, before anything is built."""

from __future__ import annotations

import math
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf
from torchtune._recipe_registry import get_all_recipes

from tests.helpers.configs import config
from tests.helpers.torchvision import use_torchvision
from torchtune_adaptive.common.errors import ConfigError
from torchtune_adaptive.recipe.components import check_components
from torchtune_adaptive.recipe.registry import (
    CONFIGS,
    RECIPES,
    load_config,
    our_configs,
    torchtune_configs,
)
from torchtune_adaptive.recipe.settings import checks
from torchtune_adaptive.recipe.settings.adaptive import (
    BLOCK,
    AdaptiveSettings,
    block_keys,
    top_level_keys,
)
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.settings.checks import (
    check,
    missing_torchvision,
    require_torchvision,
    warn_of_unused_keys,
)
from torchtune_adaptive.recipe.settings.keys import KEYS
from torchtune_adaptive.recipe.settings.kind_table import (
    _ELSEWHERE,
    KINDS,
    KNOWN_KEYS,
    has_images,
    kind_of,
    unused_keys,
)
from torchtune_adaptive.recipe.settings.rules import ANY_NUMBER, rule_of, rule_of_argument

CHECKPOINTING = "enable_activation_checkpointing"


def settings(**block: Any) -> AdaptiveSettings:
    return AdaptiveSettings.from_config(OmegaConf.create({"adaptive_batching": block}))


def test_without_a_word_everything_is_off() -> None:
    off = AdaptiveSettings()
    assert AdaptiveSettings.from_config(OmegaConf.create({})) == off
    assert AdaptiveSettings.from_config(OmegaConf.create({"adaptive_batching": None})) == off
    assert not off.adapts


@pytest.mark.parametrize(
    ("config", "retried"),
    [
        ({}, True),
        ({"adaptive_batching": {"on_out_of_memory": "raise"}}, False),
        ({"optimizer_in_bwd": True}, False),
        ({"optimizer_in_bwd": True, "use_maximum_batch_size": True}, False),
        ({"tensor_parallel_dim": 2}, True),
        ({"tensor_parallel_dim": 2, "compile": True}, False),
        ({"tensor_parallel_dim": 1}, True),
        ({"context_parallel_dim": 2}, True),
        ({"context_parallel_dim": 2, "compile": True}, False),
    ],
)
def test_a_step_is_retried_by_default_wherever_it_can_be(
    config: dict[str, Any], retried: bool
) -> None:
    settings = Asked.of(OmegaConf.create(config), "full").settings
    assert settings.shrinks is retried
    assert settings.survives is (retried or settings.adapts)


@pytest.mark.parametrize("name", ["TORCH_COMPILE_BACKEND=cudagraphs", "TORCHINDUCTOR_CUDAGRAPHS=1"])
def test_cuda_graphs_are_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variable, _, value = name.partition("=")
    monkeypatch.setenv(variable, value)
    compiled = ["compile=True", "use_maximum_batch_size=False"]
    for overrides in ([], [*compiled, "adaptive_batching.on_out_of_memory=raise"]):
        check(config("tiny/full", *overrides), KINDS["full"])
    with pytest.raises(ConfigError, match=f"{name} in the environment captures") as error:
        check(config("tiny/full", *compiled), KINDS["full"])
    assert f"Unset {variable}" in str(error.value)


def test_a_key_that_a_kind_does_not_know_turns_no_retry_off() -> None:
    ignored = {"tensor_parallel_dim": 2, "compile": True}
    assert check(config("tiny/lora", **ignored), KINDS["lora"]).settings.shrinks


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


def test_null_means_the_default() -> None:
    null = dict.fromkeys(top_level_keys()) | {BLOCK: dict.fromkeys(block_keys())}
    read = AdaptiveSettings.from_config(OmegaConf.create(null))
    assert read == AdaptiveSettings()


def test_never_is_an_answer_to_after_how_many_steps() -> None:
    assert settings(grow_back_after="never").grow_back_after is None


def test_a_bare_off_is_false_in_yaml() -> None:
    assert settings(gradient_noise=False).gradient_noise == "off"


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        ("search", "fibonacci", "extrapolate, bisect, halve"),
        ("search", True, "extrapolate"),
        ("rounding", "nearest", "power_of_two, divisor, none"),
        ("ceiling", 0, "an integer >= 1"),
        ("ceiling", 2.5, "an integer >= 1"),
        ("ceiling", True, "an integer >= 1"),
        ("ceiling", "many", "an integer >= 1"),
        ("headroom", 1, "0.05"),
        ("headroom", -0.1, "0.05"),
        ("headroom", "5%", "0.05"),
        ("headroom", float("nan"), "0.05"),
        ("memory_limit", "24Gi", "24GiB"),
        ("memory_limit", "lots", "24GiB"),
        ("memory_limit", 0, "24GiB"),
        ("memory_limit", -5, "24GiB"),
        ("memory_limit", True, "24GiB"),
        ("probe_length", 1, "an integer from 2 to 16777216"),
        ("probe_length", 10**9, "an integer from 2 to 16777216"),
        ("keep_global_batch", "yes", "True, False"),
        ("keep_global_batch", 1, "True, False"),
        ("cache", 3, "the path of a folder"),
        ("cache", "", "the path of a folder"),
        ("rank_timeout", 0, "seconds"),
        ("search_only", "no", "True, False"),
        ("on_out_of_memory", "ignore", "shrink, raise"),
        ("grow_back_after", 0, "an integer >= 1, never"),
        ("step_timeout", -1, "seconds"),
        ("grow_past_memory", 1, "True, False"),
        ("lr_scaling", "cubic", "none, sqrt, linear, gain"),
        ("beta2", 0.99, "fixed, half_life"),
        ("sample_order", "stream", "torchtune, streaming"),
        ("sample_order", True, "torchtune, streaming"),
        ("gradient_noise", "loud", "off, observe, act"),
        ("num_workers", -1, "an integer from 0 to 256"),
        ("num_workers", 100_000, "an integer from 0 to 256"),
    ],
)
def test_a_wrong_value_is_named_with_its_remedy(key: str, value: Any, remedy: str) -> None:
    with pytest.raises(ConfigError) as raised:
        settings(**{key: value})
    message = str(raised.value)
    assert message.startswith(f"adaptive_batching.{key}: {value!r} is not valid. Must be ")
    assert remedy in message


def test_the_former_name_of_a_setting_is_read_with_its_rule() -> None:
    assert settings(workers=2) == settings(num_workers=2)
    with pytest.raises(ConfigError, match=r"workers: -1 .* an integer from 0 to 256"):
        settings(workers=-1)
    with pytest.raises(ConfigError, match="the former name of num_workers, which is set too"):
        settings(workers=2, num_workers=2)


def test_a_misspelt_setting_is_an_error_that_knows_better() -> None:
    with pytest.raises(
        ConfigError, match=r"adaptive_batching.headrom: 0.1 .* Did you mean headroom\?"
    ):
        settings(headrom=0.1)
    with pytest.raises(ConfigError, match=r"Did you mean headroom\?"):
        settings(HEADROOM=0.1)
    with pytest.raises(ConfigError, match="Known are activation_checkpointing, beta2, cache, "):
        settings(zzz=1)


@pytest.mark.parametrize(
    ("written", "key", "remedy"),
    [
        ({"token_budget": True}, "token_budget", "adaptive_batching.token_budget=True"),
        ({"Search": "halve"}, "Search", "adaptive_batching.search=halve"),
        ({"USE_MAXIMUM_BATCH_SIZE": True}, "USE_MAXIMUM_BATCH_SIZE", "use_maximum_batch_size"),
        ({"Epochs": 3}, "Epochs", "Rename it to epochs"),
        (
            {"adaptive_batching": {"use_maximum_batch_size": True}},
            "adaptive_batching.use_maximum_batch_size",
            "at top level",
        ),
        (
            {"adaptive_batching": {"SAVE_EVERY_N_STEPS": 3}},
            "adaptive_batching.SAVE_EVERY_N_STEPS",
            "save_every_n_steps=3",
        ),
    ],
)
def test_a_setting_in_the_wrong_place_or_letters_says_where_it_belongs(
    written: dict[str, Any], key: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        check(OmegaConf.merge(config(), written), KINDS["full"])  # type: ignore[arg-type]
    assert raised.value.key == key
    assert remedy in str(raised.value)


def test_a_variable_may_have_the_name_of_a_setting() -> None:
    written = {"headroom": 0.2, BLOCK: {"headroom": "${headroom}"}}
    assert check(OmegaConf.merge(config(), written), KINDS["full"]).settings.headroom == 0.2  # type: ignore[arg-type]


def test_a_block_that_is_no_block() -> None:
    with pytest.raises(ConfigError, match="adaptive_batching: True is not a block"):
        AdaptiveSettings.from_config(OmegaConf.create({"adaptive_batching": True}))


def test_the_switch_is_typed_as_well() -> None:
    with pytest.raises(ConfigError, match="use_maximum_batch_size: 'yes please' is not valid"):
        AdaptiveSettings.from_config(OmegaConf.create({"use_maximum_batch_size": "yes please"}))


def test_everything_can_be_said_on_the_command_line() -> None:
    cfg = config(
        "tiny/full", "adaptive_batching.search=halve", "adaptive_batching.memory_limit=1GiB"
    )
    assert AdaptiveSettings.from_config(cfg).search == "halve"
    assert AdaptiveSettings.from_config(cfg).memory_limit == 1024**3


@pytest.mark.parametrize("name", our_configs())
def test_our_configs_are_without_fault(name: str) -> None:
    if "vision" in name:
        use_torchvision()
    cfg = config(name)
    kind = kind_of(cfg)
    assert unused_keys(cfg, kind) == []
    assert check(cfg, kind).settings.searches
    assert name in (CONFIGS / f"{name}.yaml").read_text(), "a config says how it is run"


def test_torchtunes_own_configs_are_ours_or_are_refused_by_the_name_of_their_recipe(
    exhaustive: bool, shard: int
) -> None:
    every = 1 if exhaustive else 5
    ours = {kind.torchtunes: kind for kind in KINDS.values()}
    for recipe in get_all_recipes():
        if recipe.name in RECIPES:
            continue
        theirs = recipe.name.replace("_single_device", "_distributed")
        for each in recipe.configs:
            if each.name not in torchtune_configs():
                continue  # it is not shipped
            cfg = load_config(each.name)
            if (mine := ours.get(recipe.name) or ours.get(theirs)) is not None:
                kind = kind_of(cfg)
                assert kind is mine, each.name
                # Two keys that older recipes knew, and that torchtune's present ones ignore as well.
                assert set(unused_keys(cfg, kind)) <= {"low_cpu_ram", "fsdp"}, each.name
                more = {"optimizer_in_bwd": False} if "optimizer_in_bwd" in cfg else {}
                if kind.generates:
                    more["compile"] = False
                check(OmegaConf.merge(cfg, {**more, CHECKPOINTING: True}), kind)  # type: ignore[arg-type]
                if not has_images(cfg) and "bitsandbytes" not in cfg.optimizer._component_:
                    check_components(cfg, kind)
            else:
                named = f"{theirs}|{recipe.name}|generate"  # of which there are three
                with pytest.raises(
                    ConfigError, match=f"a config for ({named}), not for any of ours"
                ):
                    kind_of(cfg)
            for number, kind in enumerate(KINDS.values(), shard):
                if kind is not mine and number % every == 0:
                    with pytest.raises(ConfigError, match=f"not for {kind.recipe}"):
                        check(cfg, kind)


def test_a_loss_of_the_users_own_may_be_for_any_recipe() -> None:
    own = ["loss._component_=mine.loss"]
    check(config("tiny/full", *own), KINDS["full"])
    with pytest.raises(ConfigError, match="not for adaptive_lora_finetune_distributed"):
        check(config("tiny/full", *own), KINDS["lora"])


def test_a_misspelt_torchtune_key_is_an_error() -> None:
    with pytest.raises(ConfigError, match="looks like gradient_accumulation_steps"):
        check(config("tiny/full", "gradient_acumulation_steps=3"), KINDS["full"])


def test_variables_for_interpolation_and_foreign_keys_are_not_errors() -> None:
    cfg = OmegaConf.merge(config(), {"my_length": 99, "tokenizer": {"max_seq_len": "${my_length}"}})
    assert unused_keys(cfg, KINDS["full"]) == []  # type: ignore[arg-type]
    assert unused_keys(config("tiny/full", "my_notes=hello"), KINDS["full"]) == ["my_notes"]


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("batch_increase_fn", "it looks like batch_increase_function. Rename it"),
        ("use_fastest_config", "it looks like use_fastest_configuration. Rename it"),
        ("keep_last_n", "it looks like keep_last_n_checkpoints. Rename it"),
        ("save_steps", "it looks like save_every_n_steps. Rename it"),
        ("run_val_steps", "it looks like run_val_every_n_steps. Rename it"),
        ("adaptive_batch", "it looks like adaptive_batching. Rename it"),
        ("token_budgets", "no such key. Remove it (~token_budgets on the command line)"),
        ("USE_MAX", "no such key"),
        ("use_cache", "no such key"),
    ],
)
def test_what_begins_like_a_key_of_ours_and_is_none_is_an_error(key: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(meant)) as raised:
        check(config("tiny/full", f"{key}=1"), KINDS["full"])
    assert raised.value.key == key


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("learning_rate", "optimizer.lr"),
        ("max_batch_size", "use_maximum_batch_size"),
        ("max_grad_norm", "clip_grad_norm"),
        ("resume", "resume_from_checkpoint"),
        ("log_n_steps", "log_every_n_steps"),
        ("save_adapter_weights_only", None),
        ("my_notes", None),
    ],
)
def test_a_key_that_no_recipe_knows_is_a_warning_that_names_the_nearest(
    key: str, meant: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(checks.log, "warning", said.append)
    cfg, kind = config("tiny/full", f"{key}=True"), KINDS["full"]
    check(cfg, kind)
    warn_of_unused_keys(cfg, kind)
    question = f" Did you mean {meant}?" if meant else ""
    line = f"Warning: {key}: {kind.recipe} has no such key, so it changes nothing.{question}"
    assert said == [line]
    monkeypatch.setenv("RANK", "1")
    warn_of_unused_keys(cfg, kind)
    assert said == [line], "one rank says it"


def test_the_warning_names_only_keys_that_there_are() -> None:
    for key in _ELSEWHERE.values():
        block, _, argument = key.rpartition(".")
        assert (block or argument) in KNOWN_KEYS, key


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_config_of_another_tool_is_told_so(kind: str) -> None:
    foreign = OmegaConf.create({"base_model": "a/b", "datasets": [{"path": "c"}], "lora_r": 16})
    for look in (kind_of, lambda cfg: check(cfg, KINDS[kind])):
        with pytest.raises(ConfigError, match="this is not a torchtune config") as raised:
            look(foreign)
        assert raised.value.key == "model._component_"


def test_torchvision_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = OmegaConf.create({"collate_fn": "torchtune.data.padded_collate_tiled_images_and_mask"})
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"which is not installed. .*pip install torchvision torch=="
    ):
        require_torchvision(cfg)
    monkeypatch.setattr(checks, "find_spec", lambda name: object())
    require_torchvision(cfg)
    other_build = RuntimeError("operator torchvision::nms does not exist\nmore")
    said = str(missing_torchvision("assets", "${x:}", other_build))
    assert "nms does not exist): it was built for another torch. Install" in said
    assert "+" not in said and "\n" not in said


IMPOSSIBLE: list[tuple[str, list[str], str, str]] = [
    ("full", ["batch_size=0"], "batch_size", "an integer >= 1"),
    ("full", ["gradient_accumulation_steps=1.5"], "gradient_accumulation_steps", "an integer >= 1"),
    ("full", ["max_steps_per_epoch=0"], "max_steps_per_epoch", "an integer >= 1"),
    ("full", ["batch_size=auto"], "batch_size", "use_maximum_batch_size=True"),
    ("full", ["epochs=0"], "epochs", "an integer >= 1"),
    ("full", ["clip_grad_norm=-1"], "clip_grad_norm", "greater than 0"),
    ("full", ["tokenizer.max_seq_len=1"], "tokenizer.max_seq_len", "an integer >= 2"),
    ("full", ["batch_increase_function=3"], "batch_increase_function", "dotted path"),
    ("full", ["batch_increase_function=True"], "batch_increase_function", "_component_"),
    ("full", ["adaptive_batching.probe_length=513"], "adaptive_batching.probe_length", "512"),
    (
        "full",
        ["adaptive_batching.sample_order=streaming", "shuffle=False"],
        "adaptive_batching.sample_order",
        "Set shuffle=True",
    ),
    ("full", ["epochs=${nothing}"], "epochs", "Correct it"),
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
    (
        "full",
        [
            "collate_fn=torchtune.data.padded_collate_tiled_images_and_mask",
            "use_maximum_batch_size=False",
            "adaptive_batching.token_budget=True",
        ],
        "adaptive_batching.token_budget",
        "use_maximum_batch_size=True accounts for images",
    ),
    ("full", ["dataset.streaming=True"], "dataset.streaming", "streaming=False"),
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
        [
            "tensor_parallel_dim=2",
            "tensor_parallel_plan._component_=m.plan",
            "optimizer.fused=True",
        ],
        "optimizer.fused",
        "fused=False",
    ),
    (
        "full",
        ["tensor_parallel_dim=2", "tensor_parallel_plan._component_=m.plan", "compile=True"],
        "compile",
        "use_maximum_batch_size=False",
    ),
    (
        "full",
        [
            "tensor_parallel_dim=2",
            "tensor_parallel_plan._component_=m.plan",
            "optimizer_in_bwd=True",
            "clip_grad_norm=null",
        ],
        "optimizer_in_bwd",
        "choose batch_size yourself",
    ),
    (
        "full",
        [
            "tensor_parallel_dim=2",
            "tensor_parallel_plan._component_=m.plan",
            "adaptive_batching.gradient_noise=observe",
        ],
        "adaptive_batching.gradient_noise",
        "tensor_parallel_dim=1",
    ),
    (
        "full",
        [
            "tensor_parallel_dim=2",
            "tensor_parallel_plan._component_=m.plan",
            "adaptive_batching.recompute_loss=True",
        ],
        "adaptive_batching.recompute_loss",
        "tensor_parallel_dim=1",
    ),
    (
        "full",
        [
            "tensor_parallel_dim=2",
            "tensor_parallel_plan._component_=m.plan",
            "use_fastest_configuration=True",
            "use_maximum_batch_size=False",
            "compile=True",
        ],
        "compile",
        "choose batch_size yourself",
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
    ("full", ["save_every_n_steps=0"], "save_every_n_steps", "an integer >= 1"),
    ("lora", ["optimizer_in_bwd=True"], "optimizer_in_bwd", "Remove"),
    ("full", ["run_val_every_n_steps=5"], "run_val_every_n_steps", "Set dataset_val"),
    ("full", ["enable_fp8_training=True"], "enable_fp8_training", "enable_fp8_training=False"),
    ("kd", ["context_parallel_dim=2"], "context_parallel_dim", "context_parallel_dim=1"),
    ("full", ["context_parallel_dim=0"], "context_parallel_dim", "an integer >= 1"),
    (
        "full",
        ["context_parallel_rotate_method=ring"],
        "context_parallel_rotate_method",
        "allgather",
    ),
    (
        "full",
        ["context_parallel_dim=2", "dataset.packed=True"],
        "dataset.packed",
        "context_parallel_dim=1",
    ),
    (
        "lora",
        [
            "context_parallel_dim=2",
            "run_val_every_n_steps=2",
            "dataset_val._component_=torchtune.datasets.instruct_dataset",
            "dataset_val.packed=True",
        ],
        "dataset_val.packed",
        "dataset_val.packed=False",
    ),
    ("lora", ["context_parallel_dim=2", "compile=True"], "compile", "use_maximum_batch_size=False"),
    (
        "lora",
        ["context_parallel_dim=2", "adaptive_batching.gradient_noise=observe"],
        "adaptive_batching.gradient_noise",
        "context_parallel_dim=1",
    ),
    (
        "qat",
        ["data_parallel_replicate_dim=2"],
        "data_parallel_replicate_dim",
        "data_parallel_replicate_dim=1",
    ),
]


@pytest.mark.parametrize(("kind", "overrides", "key", "remedy"), IMPOSSIBLE)
def test_what_cannot_work_together_stops_here(
    kind: str, overrides: list[str], key: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        check(config(f"tiny/{kind}", *overrides), KINDS[kind])
    assert raised.value.key == key
    assert remedy in str(raised.value)


def test_a_list_of_datasets_is_told_of_as_one_is() -> None:
    cfg = config("tiny/full", "context_parallel_dim=2", "dataset.packed=True")
    cfg.dataset = [cfg.dataset, cfg.dataset]
    with pytest.raises(ConfigError, match=r"^dataset\.packed: True goes into attention"):
        check(cfg, KINDS["full"])


def test_the_reference_is_up_to_date() -> None:
    docs = Path(__file__).parents[2] / "docs"
    page = (docs / "settings.md").read_text()
    tables = runpy.run_path(str(docs / "make" / "settings.py"))["tables"]
    for table in tables():
        assert table in page, "put there what python docs/make/settings.py prints"


def test_an_integer_that_no_float_holds_is_not_a_number() -> None:
    for rule in (ANY_NUMBER, rule_of_argument(int)):
        assert rule is not None
        with pytest.raises(ConfigError, match="Must be a"):
            rule.read("reward_penalty", 10**400)


def test_a_type_without_a_rule_is_refused() -> None:
    with pytest.raises(TypeError, match="no rule"):
        rule_of(complex)


NONSENSE: list[Any] = [
    None,
    *(True, False, 0, 1, -1, 2, 10**400, -(10**30), 0.5, 1.0, 1.5, -0.1),
    *(math.nan, math.inf, -math.inf, "", " ", "1", "auto", "none", "None", "yes", "a.b", "é\n2"),
    *("24GiB", "9" * 400, "0GiB", "-1GiB", "~nobody/x", "${nothing}", "${batch_size}", "???"),
    *([], [1], ["a"], {}, {"a": 1}, {"_component_": 3}, {"_component_": "a.b"}),
    *({"_component_": "a.b", "c": "${nothing}"}, {1: 2}),
]
OTHERS = ["tokenizer.max_seq_len", "dataset.max_seq_len", "dataset.packed", "optimizer.lr"]
OTHERS += ["model.max_seq_len", "optimizer.weight_decay", "lr_scheduler.num_warmup_steps"]


NUMBERS_OF = ("batch_size", "epochs", "gradient_accumulation_steps")
NEVER_VALID: dict[str, list[Any]] = {
    **{key: [None, 0, -1, 1.5, True] for key in NUMBERS_OF},
    "tokenizer.max_seq_len": [0, True, 1.5, "24GiB"],
    "clip_grad_norm": [0, -1, True, "1"],
    "batch_increase_function": [0, True, False, 0.5, "auto", ""],
    "shuffle": [0, "yes", 2],
    "seed": [-1, True, 1.5, 10**400],
    f"{BLOCK}.num_workers": [-1, True, 10**400],
    f"{BLOCK}.token_budget": [-1, 0.5, "auto"],
}


@pytest.mark.parametrize(
    "key", sorted(KNOWN_KEYS) + [f"{BLOCK}.{key}" for key in sorted(block_keys())] + OTHERS
)
def test_any_value_of_any_key_is_valid_or_an_error_of_one_line(
    key: str, exhaustive: bool, shard: int
) -> None:
    never_valid = NEVER_VALID.get(key, [])
    good = OmegaConf.create(OmegaConf.to_container(config("tiny/full"), resolve=True))
    assert isinstance(good, DictConfig)
    for value in NONSENSE if exhaustive else [*never_valid, *NONSENSE[shard % 8 :: 8]]:
        cfg = good.copy()
        OmegaConf.update(cfg, key, value, merge=False)
        error = fault(cfg)
        assert "\n" not in (error or ""), value
        if any(type(value) is type(never) and value == never for never in never_valid):
            assert error is not None, value


MUST_BE_THERE = [key for key, row in KEYS.items() if "full" in row.needed | row.given]


@pytest.mark.parametrize("key", [*MUST_BE_THERE, "dtype", "dataset"])
def test_a_key_that_is_missing_is_named(key: str) -> None:
    cfg = OmegaConf.create(OmegaConf.to_container(config(), resolve=True))
    assert isinstance(cfg, DictConfig)
    del cfg[key]
    assert (fault(cfg) or "").startswith(f"{key}: None ")


def fault(cfg: DictConfig) -> str | None:
    try:
        check(cfg, KINDS["full"])
    except ConfigError as error:
        return str(error)
    return None
