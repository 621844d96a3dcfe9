"""``plan FILE`` of other trainers: what keys become, what is refused, and the answer; nothing is traced."""

from __future__ import annotations

import json
import runpy
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.hugging_face import LLAMA_1B, written
from tests.helpers.planning import asked
from tests.helpers.trainer_files import FOLDER, changed, given
from torchtune_adaptive.cli.other_trainers import accelerate, sharding
from torchtune_adaptive.cli.other_trainers.axolotl import AXOLOTL
from torchtune_adaptive.cli.other_trainers.files import read_file, recognized
from torchtune_adaptive.cli.other_trainers.keys import FileReading, Keys, Refused, Sets, Trainer
from torchtune_adaptive.cli.other_trainers.llama_factory import LLAMA_FACTORY
from torchtune_adaptive.cli.other_trainers.trl import DPO, SFT
from torchtune_adaptive.cli.other_trainers.trl_rollouts import GRPO, RLOO
from torchtune_adaptive.cli.plan_options import plan_command
from torchtune_adaptive.common import ConfigError, NoPrediction
from torchtune_adaptive.library import (
    Plan,
    TransformersRollouts,
    TransformersStep,
    transformers_step,
)

GIB = 1 << 30
ROOT = Path(__file__).parents[2]
TRAINERS = {"axolotl": AXOLOTL, "llama_factory": LLAMA_FACTORY, "trl_sft": SFT, "trl_dpo": DPO}
TRAINERS |= {"trl_grpo": GRPO, "trl_rloo": RLOO}
FILES = [path for name in TRAINERS for path in sorted((FOLDER / name).glob("*.yaml"))]
TABLES = [*((one.keys, one.ignored) for one in TRAINERS.values())]
TABLES += [(sharding.KEYS, sharding.IGNORED), (accelerate.KEYS, accelerate.IGNORED)]


def name(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def refusal(path: Path, *changes: str) -> str:
    with pytest.raises(NoPrediction) as raised:
        read_file(path, changes)
    return str(raised.value)


def settings(path: Path, *changes: str, **others: Any) -> Mapping[str, Any]:
    file = read_file(path, changes, **others)
    assert file is not None
    return file.settings


def test_each_trainer_has_examples() -> None:
    for folder in (*TRAINERS, "accelerate"):
        assert len(list((FOLDER / folder).glob("*.yaml"))) >= 3, folder


@pytest.mark.parametrize("path", FILES, ids=name)
def test_every_key_is_read_listed_or_refused(path: Path) -> None:
    trainer: Trainer = TRAINERS[path.parent.name]
    keys = given(path)
    reading = trainer.read(keys)
    assert not reading.unknown
    listed = {key for key in reading.not_read if "." not in key}
    assert listed == {key for key in keys if key not in trainer.keys}
    inside = {key.removeprefix("fsdp_") for key in keys.get("fsdp_config") or ()}
    assert inside <= {*sharding.KEYS, *sharding.IGNORED}
    refused = {line.partition(":")[0] for line in reading.refusals}
    off = {key for key, kind in trainer.keys.items() if isinstance(kind, Refused)}
    assert {key for key in off & set(keys) if keys[key] not in (None, False)} <= refused


@pytest.mark.parametrize("path", sorted((FOLDER / "accelerate").glob("*.yaml")), ids=name)
def test_every_key_of_accelerate_is_read_listed_or_refused(path: Path) -> None:
    reading = FileReading()
    accelerate.read_launch(given(path), reading)
    assert not reading.unknown


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (
            "axolotl/full",
            {"lora": False, "max_length": 2048, "padded": False, "dtype": "bfloat16", "bf16": True}
            | {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8},
        ),
        (
            "axolotl/lora",
            {"lora": True, "r": 32, "lora_dropout": 0.05, "target_modules": "linear-layers"}
            | {"optim": "adamw_torch", "padded": False, "gradient_checkpointing": True},
        ),
        (
            "axolotl/lora_fsdp2",
            {"fsdp": True, "gradient_checkpointing": True, "padded": True}
            | {"target_modules": ["q_proj", "v_proj"]},
        ),
        (
            "llama_factory/lora_sft",
            {"lora": True, "r": 16, "dtype": "bfloat16", "bf16": True, "padded": True}
            | {"trainer": "Trainer", "max_length": 2048, "gradient_checkpointing": True},
        ),
        (
            "llama_factory/full_sft",
            {
                "lora": False,
                "dtype": "bfloat16",
                "bf16": False,
                "padded": False,
                "max_grad_norm": 0.5,
            },
        ),
        (
            "llama_factory/pretraining",
            {"padded": False, "gradient_checkpointing": False, "per_device_train_batch_size": 8}
            | {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
        ),
        (
            "trl_sft/full",
            {"trainer": "SFTTrainer", "dtype": "float32", "bf16": None, "padded": True}
            | {
                "gradient_checkpointing": True,
                "per_device_train_batch_size": 8,
                "max_length": 1024,
            },
        ),
        (
            "trl_sft/lora",
            {"r": 32, "padded": False, "packing": True, "dtype": "bfloat16"}
            | {"target_modules": "all-linear"},
        ),
        ("trl_sft/qlora", {"lora": True, "load_in_4bit": True, "optim": "paged_adamw_8bit"}),
        (
            "trl_dpo/lora",
            {
                "trainer": "DPOTrainer",
                "r": 16,
                "lora_dropout": 0.05,
                "gradient_checkpointing": False,
            }
            | {"target_modules": ["q_proj", "v_proj"]},
        ),
        (
            "trl_dpo/full",
            {"precompute_ref_log_probs": True, "dtype": "bfloat16", "bf16": False},
        ),
        ("trl_dpo/fsdp", {"fsdp": True, "gradient_checkpointing": True}),
    ],
)
def test_what_a_file_becomes(path: str, expected: dict[str, Any]) -> None:
    found = settings(FOLDER / f"{path}.yaml")
    assert {key: found[key] for key in expected} == expected


def test_weights_of_4_bits_are_as_each_trainer_leaves_them() -> None:
    quantized = {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}
    loaded = {**quantized, "prepare_for_kbit_training": False, "trainer": "Trainer", "lora": True}
    path = FOLDER / "axolotl" / "lora.yaml"
    for found, expected in (
        (settings(path, "adapter=qlora", "load_in_4bit=true"), loaded),
        (settings(FOLDER / "llama_factory" / "lora_sft.yaml", "quantization_bit=4"), loaded),
        (settings(FOLDER / "trl_sft" / "qlora.yaml"), {**quantized, "trainer": "SFTTrainer"}),
    ):
        assert {key: found.get(key) for key in expected} == expected
        TransformersStep(folder="model", **found)
    single = "bnb_config_kwargs.bnb_4bit_use_double_quant=false"
    found = settings(path, "adapter=qlora", "load_in_4bit=true", single)
    assert found["bnb_4bit_use_double_quant"] is False


def test_weights_of_8_bits_are_as_each_trainer_leaves_them() -> None:
    axolotl, llama_factory = (
        FOLDER / path for path in ("axolotl/lora.yaml", "llama_factory/lora_sft.yaml")
    )
    not_prepared = {"load_in_8bit": True, "prepare_for_kbit_training": False, "lora": True}
    for found, expected in (
        (settings(axolotl, "load_in_8bit=true"), {**not_prepared, "trainer": "Trainer"}),
        (settings(llama_factory, "quantization_bit=8"), {**not_prepared, "trainer": "Trainer"}),
        (
            settings(FOLDER / "trl_sft" / "lora.yaml", "load_in_8bit=true"),
            {"load_in_8bit": True, "trainer": "SFTTrainer"},
        ),
    ):
        assert {key: found.get(key) for key in expected} == expected
        assert not found.get("load_in_4bit")
        TransformersStep(folder="model", **found)
    by_default = [f"lora_{name}_kernel=null" for name in ("mlp", "qkv", "o")]
    for change, has_kernels in (("load_in_8bit=true", False), ("load_in_8bit=false", True)):
        file = read_file(axolotl, [*by_default, change])
        assert file is not None
        assert any("LoRA kernels" in note for note in file.notes) == has_kernels


def test_experts_are_computed_as_each_trainer_has_them(tmp_path: Path) -> None:
    kernels = {"plugins": ["axolotl.integrations.kernels.KernelsPlugin"]}
    for changes, expected in (
        ({}, None),
        ({"experts_implementation": "batched_mm"}, "batched_mm"),
        (kernels, "eager"),
        ({**kernels, "experts_implementation": "grouped_mm"}, "grouped_mm"),
    ):
        found = settings(changed(tmp_path, "axolotl/lora", **changes))
        assert found.get("experts_implementation") == expected
    found = settings(changed(tmp_path, "llama_factory/lora_sft", moe_aux_loss_coef=0.001))
    assert found["output_router_logits"] is True
    assert "output_router_logits" not in settings(FOLDER / "llama_factory/lora_sft.yaml")
    more = {"router_aux_loss_coef": 0.0, "lora_target_parameters": ["experts.down_proj"]}
    found = settings(changed(tmp_path, "trl_sft/lora", **more))
    assert found["router_aux_loss_coef"] == 0.0
    assert found["target_parameters"] == ["experts.down_proj"]


def test_full_training_of_llama_factory_has_float32_weights() -> None:
    path = FOLDER / "llama_factory" / "full_sft.yaml"
    found = settings(path, "pure_bf16=false", "bf16=true")
    assert found["dtype"] == "float32" and found["bf16"]


@pytest.mark.parametrize("path", FILES, ids=name)
def test_the_step_takes_what_is_read(path: Path) -> None:
    reading = TRAINERS[path.parent.name].read(given(path))
    if not reading.refusals:
        ranks = 2 if reading.settings.get("fsdp") else 1
        generates = reading.settings["trainer"] in TransformersRollouts.STEPS
        kind = TransformersRollouts if generates else TransformersStep
        kind(folder="model", ranks=ranks, **reading.settings)


@pytest.mark.parametrize("keys", [keys for keys, _ in TABLES])
def test_each_value_that_a_table_allows_is_one_of_the_step(keys: Keys) -> None:
    step = (
        TransformersRollouts if "num_generations" in keys and "beta" in keys else TransformersStep
    )
    known = {one.name for one in fields(step)}
    for kind in keys.values():
        if isinstance(kind, Sets):
            assert kind.setting in known
            allowed = kind.values.values() if kind.values else [kind.default]
            for value in allowed:
                step(folder="model", **{"lora": True, kind.setting: value})


def test_a_key_is_in_one_place() -> None:
    for keys, ignored in TABLES:
        assert not set(keys) & ignored


def test_all_refusals_are_told_at_once() -> None:
    told = refusal(FOLDER / "axolotl" / "qlora_fsdp.yaml")
    for line in (
        "qlora_fsdp.yaml cannot be planned as Axolotl trains it:\n",
        "  optimizer: lion_8bit has a state or a step that is not planned. What can be planned: "
        "adamw_torch_fused, adamw_torch, sgd, adafactor, adamw_8bit",
        "  fsdp_version: 1 is FSDP1, whose flat parameters are not planned. To plan FSDP2, add "
        "fsdp_version=2.",
        "  fsdp_config.offload_params: true keeps weights on the host",
        "To plan without it, add fsdp_config.offload_params=false.",
    ):
        assert line in told
    for line in told.splitlines()[1:]:
        assert line.count(". ") >= 1 and line.endswith("."), "a reason and a remedy"


def test_what_is_advised_makes_a_plan() -> None:
    found = settings(
        FOLDER / "axolotl" / "qlora_fsdp.yaml",
        "optimizer=adamw_torch_fused",
        *("fsdp_version=2", "fsdp_config.offload_params=false"),
    )
    assert found["fsdp"] and found["lora"] and found["optim"] == "adamw_torch_fused"
    assert found["use_liger_kernel"] and found["liger_kernel_config"] == {
        **dict.fromkeys(("rope", "rms_norm", "swiglu", "geglu", "cross_entropy"), False),
        "fused_linear_cross_entropy": True,
    }
    found = settings(
        FOLDER / "llama_factory" / "qlora_dpo.yaml",
        *("deepspeed=null", "fsdp=full_shard", "fsdp_config.version=2", "stage=sft"),
    )
    assert found["fsdp"] and found["target_modules"] == ["q_proj", "v_proj"]
    assert found["load_in_4bit"]


def test_what_shards_weights_of_4_bits_is_what_each_trainer_stores_them_as() -> None:
    def storage(path: str, *changes: str) -> Any:
        return settings(FOLDER / path, *changes)["bnb_4bit_quant_storage"]

    assert storage("trl_sft/qlora.yaml", "fsdp=full_shard") == "uint8"
    given = "bnb_4bit_quant_storage=bfloat16"
    assert storage("trl_sft/qlora.yaml", "fsdp=full_shard", given) == "bfloat16"
    assert storage("llama_factory/qlora_dpo.yaml", "deepspeed=null", "stage=sft") == "bfloat16"
    planned = "optimizer=adamw_torch_fused", "fsdp_version=2", "fsdp_config.offload_params=false"
    assert storage("axolotl/qlora_fsdp.yaml", *planned) == "bfloat16"
    other = "bnb_config_kwargs.bnb_4bit_quant_storage=uint8"
    assert storage("axolotl/qlora_fsdp.yaml", *planned, other) == "uint8"


def test_kernels_of_liger_are_those_that_a_file_switches_on() -> None:
    for path, change in (
        ("trl_sft/lora", "use_liger_kernel=true"),
        ("llama_factory/lora_sft", "enable_liger_kernel=true"),
    ):
        path = FOLDER / f"{path}.yaml"
        assert settings(path, change)["use_liger_kernel"] is True
        assert settings(path)["use_liger_kernel"] is False
        found = settings(path, change, "liger_kernel_config={rope: false}")
        assert found["liger_kernel_config"] == {"rope": False}
    with_plugin = "plugins=[axolotl.integrations.liger.LigerPlugin]"
    path = FOLDER / "axolotl" / "lora.yaml"
    found = settings(path, with_plugin, "liger_glu_activation=true", "liger_rope=true")
    on = {name for name, is_on in found["liger_kernel_config"].items() if is_on}
    assert on == {"swiglu", "geglu", "rope"}
    assert "use_liger_kernel" not in settings(path, with_plugin)
    file = read_file(path, ["plugins=null", "liger_swiglu=true"])
    assert file is not None and "use_liger_kernel" not in file.settings
    assert any("liger_swiglu: not planned, because plugins has no" in one for one in file.notes)


@pytest.mark.parametrize(
    ("path", "changes", "complaint"),
    [
        (
            "axolotl/full",
            ["micro_batch_size=two"],
            "micro_batch_size: two is not a whole number of 1 or more",
        ),
        (
            "axolotl/full",
            ["micro_batch_size=0"],
            "micro_batch_size: 0 is not a whole number of 1 or more",
        ),
        ("axolotl/lora", ["lora_dropout=much"], "lora_dropout: much is not a number"),
        (
            "trl_sft/full",
            ["bf16=maybe"],
            "bf16: maybe is not planned. What can be planned: null, true, false",
        ),
        (
            "axolotl/full",
            ["attn_implementation=sdpa"],
            "sample_packing: true without flash attention",
        ),
        (
            "axolotl/full",
            ["gradient_checkpointing=offload"],
            "offload is neither true nor false, and activations on the host are not planned",
        ),
        (
            "axolotl/full",
            ["gradient_checkpointing_kwargs.every=2"],
            "has every, and every layer is planned",
        ),
        (
            "axolotl/full",
            ["plugins=[a.CutCrossEntropyPlugin]"],
            "plugins: a.CutCrossEntropyPlugin may change",
        ),
        ("axolotl/full", ["fsdp_version=2", "fsdp=[full_shard]"], "is Axolotl's own FSDP2"),
        ("axolotl/full", ["model_type=AutoModelForVision"], "is not a causal language model"),
        ("axolotl/lora", ["lora_target_linear=false"], "leaves the choice of layers to PEFT"),
        (
            "axolotl/lora",
            ["lora_target_linear=false", r"lora_target_modules=.*\.q_proj"],
            "is a pattern",
        ),
        ("axolotl/lora", ["adapter=qlora"], "adapter: qlora needs load_in_4bit: true"),
        ("axolotl/lora", ["load_in_4bit=true"], "load_in_4bit: true goes with adapter: qlora"),
        ("axolotl/full", ["load_in_4bit=true"], "load_in_4bit: true goes with adapter: qlora"),
        (
            "llama_factory/full_sft",
            ["quantization_bit=4"],
            "finetuning_type: full trains the weights",
        ),
        (
            "axolotl/lora",
            ["adapter=qlora", "load_in_4bit=true", "load_in_8bit=true"],
            "load_in_8bit: true goes with adapter: lora only",
        ),
        ("axolotl/full", ["load_in_8bit=true"], "those of 8 bits have no gradients"),
        (
            "axolotl/lora_fsdp2",
            ["load_in_8bit=true"],
            "weights of 8 bits with FSDP2, which cannot shard integers. Load them with 4 bits",
        ),
        ("llama_factory/lora_sft", ["quantization_bit=3"], "What can be planned: null, 4, 8"),
        ("llama_factory/lora_sft", ["quantization_method=hqq"], "bits in another format"),
        (
            "trl_sft/qlora",
            ["bnb_4bit_quant_storage=int8"],
            "bnb_4bit_quant_storage: int8 is a type for weights of 4 bits that is not planned",
        ),
        ("axolotl/lora", ["tensor_parallel_size=2"], "divides rows or layers over ranks"),
        (
            "axolotl/lora_fsdp2",
            ["fsdp_config.sharding_strategy=SHARD_GRAD_OP"],
            "shards less than weights",
        ),
        ("llama_factory/lora_sft", ["do_train=false"], "do_train: false does not train"),
        (
            "llama_factory/lora_sft",
            ["bf16=false"],
            "leaves the type of the weights to the model's config",
        ),
        ("llama_factory/lora_sft", ["neat_packing=true"], "has a mask for each row"),
        (
            "llama_factory/lora_sft",
            ["fsdp=shard_grad_op auto_wrap"],
            "fsdp: shard_grad_op shards less",
        ),
        (
            "llama_factory/lora_sft",
            ["fsdp=full_shard", "fsdp_config=fsdp.json"],
            "a file is not read",
        ),
        ("trl_sft/lora", ["attn_implementation=sdpa"], "packing: true without flash attention"),
        ("axolotl/lora", ["liger_layer_norm=true"], "replaces layers by kernels"),
        ("axolotl/lora", ["liger_use_token_scaling=true"], "computes the loss by other kernels"),
        ("trl_sft/qlora", ["loss_type=dft"], "loss_type: dft is a loss over all logits"),
        ("trl_sft/full", ["max_length=null"], "max_length: null leaves rows as long as they are"),
        ("trl_sft/full", ["dtype=null"], "dtype: null is the type that the checkpoint has"),
        ("trl_sft/lora", ["num_generations=4"], "generates the rows that it trains on"),
        (
            "trl_dpo/lora",
            ["loss_type=[sigmoid,sft]"],
            "loss_type: sft needs more than the log-probabilities",
        ),
    ],
)
def test_what_matters_and_cannot_be_planned(path: str, changes: list[str], complaint: str) -> None:
    assert complaint in refusal(FOLDER / f"{path}.yaml", *changes)


def test_keys_that_are_off_or_packed_rows_are_no_reason() -> None:
    found = settings(
        FOLDER / "axolotl" / "lora.yaml", "tensor_parallel_size=1", "rl=null", "fp8=false"
    )
    assert found["lora"]
    path = FOLDER / "trl_sft" / "lora.yaml"
    assert not settings(path, "attn_implementation=sdpa", "packing_strategy=wrapped")["padded"]
    assert settings(path, "attn_implementation=null", "packing=false")["padded"]


@pytest.mark.parametrize("trainer", TRAINERS.values(), ids=TRAINERS)
def test_nonsense_is_refused_or_read(trainer: Trainer) -> None:
    """Whatever a key has, nothing but a refusal or a step comes of it."""
    for key in trainer.keys:
        for nonsense in (-1, 1.5, "x", True, [], [1], ["x"], {}, {"a": 1}, {"version": "x"}):
            reading = trainer.read({key: nonsense, "fsdp": True})
            for refused in reading.refusals:
                assert refused.endswith(".") and ": " in refused


def test_nonsense_of_accelerate_is_refused_or_read() -> None:
    for key in accelerate.KEYS:
        for nonsense in (-1, 1.5, "x", True, [], [1], {}, {"a": 1}, {"a_size": 3}):
            accelerate.read_launch({"distributed_type": "FSDP", key: nonsense}, FileReading())


def test_unknown_keys_are_warned_of(tmp_path: Path) -> None:
    file = read_file(changed(tmp_path, "axolotl/lora", micro_batchsize=8, nonsense=1))
    assert file is not None and file.settings["per_device_train_batch_size"] == 4
    warnings = [line for line in file.notes if line.startswith("WARNING")]
    assert warnings == [
        "WARNING: micro_batchsize is unknown, and not read; did you mean micro_batch_size?",
        "WARNING: nonsense is unknown, and not read",
    ]


def test_whose_file_it_is(tmp_path: Path) -> None:
    for path in FILES:
        found = recognized(given(path), path)
        assert found is not None and TRAINERS[path.parent.name].name.startswith(found)
    torchtunes = {"model": {"_component_": "torchtune.models.llama3.llama3_8b"}, "base_model": "x"}
    assert recognized(torchtunes, tmp_path) is None
    assert recognized({"lists": [{"_component_": "a"}], "base_model": "x"}, tmp_path) is None
    assert recognized({"something": 1}, tmp_path) is None


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        (
            {"model_name_or_path": "x", "cutoff_len": 8, "use_peft": True},
            "has keys of several trainers",
        ),
        (
            {"model_name_or_path": "x", "bf16": True},
            "may be of several trainers, or of none. Looked for",
        ),
        ({"base_model": "x"}, "Looked for, Axolotl: base_model and one of"),
        ({"distributed_type": "FSDP"}, "Plan the trainer's file, with --accelerate"),
        ({"model": "x", "peft_config": {}}, "LLaMA-Factory's version 1, which is not planned"),
    ],
)
def test_files_that_are_refused(keys: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(yaml.safe_dump(keys))
    with pytest.raises(ConfigError) as raised:
        read_file(path)
    assert complaint in str(raised.value)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            "micro_batch=2",
            "micro_batch: '2' is not a key of Axolotl. Did you mean micro_batch_size?",
        ),
        ("gizmo=2", "gizmo: '2' is not a key of Axolotl"),
        ("adapter=[", "adapter: '[' is not YAML"),
        ("base_model=3", "base_model: 3 is not the name of a model"),
    ],
)
def test_overrides_that_make_no_sense(change: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_file(FOLDER / "axolotl" / "lora.yaml", [change])
    assert complaint in str(raised.value)


def test_accelerate_says_how_many_and_how() -> None:
    path, launch = FOLDER / "trl_sft" / "lora.yaml", FOLDER / "accelerate"
    file = read_file(path, ["gradient_checkpointing=false"], launch / "fsdp2.yaml")
    assert file is not None and file.ranks == 4
    assert file.settings["fsdp"] and file.settings["gradient_checkpointing"]
    file = read_file(path, (), launch / "ddp.yaml")
    assert file is not None and file.ranks == 2 and "fsdp" not in file.settings
    with pytest.raises(NoPrediction) as raised:
        read_file(path, (), launch / "zero3.yaml")
    for key in (
        "distributed_type: DEEPSPEED",
        "mixed_precision: fp16",
        "deepspeed_config",
        "cp_size",
    ):
        assert key in str(raised.value)


def test_the_first_fsdp_of_accelerate_is_refused(tmp_path: Path) -> None:
    launch = changed(
        tmp_path, "accelerate/fsdp2", fsdp_config={"fsdp_sharding_strategy": "FULL_SHARD"}
    )
    with pytest.raises(
        NoPrediction, match=r"write fsdp_config.fsdp_version: 2 in the accelerate file"
    ):
        read_file(FOLDER / "trl_sft" / "lora.yaml", (), launch)
    with pytest.raises(ConfigError, match="is not an accelerate configuration"):
        read_file(FOLDER / "trl_sft" / "lora.yaml", (), FOLDER / "trl_sft" / "full.yaml")


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[TransformersStep]:
    """The steps that are planned; all take 10 GiB, and 24 rows fit."""
    found: list[TransformersStep] = []

    def plan(step: TransformersStep, **_: Any) -> Plan:
        found.append(step)
        rows = step.per_device_train_batch_size
        return Plan(24, rows, 10 * GIB, {"parameters": 8 * GIB}, 20 * GIB, ())

    monkeypatch.setattr(TransformersStep, "plan", plan)
    monkeypatch.setattr(TransformersStep, "remembered", lambda step, **_: None)
    monkeypatch.setattr(transformers_step, "version", lambda name: "5.23.0")
    return found


def planned(path: Path, *words: str) -> int:
    return plan_command(asked([str(path), "--gpu", "4090", *words]))


def test_the_answer_is_in_the_words_of_the_file(
    tmp_path: Path, steps: list[TransformersStep], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(written(tmp_path, LLAMA_1B))
    path = FOLDER / "axolotl" / "lora.yaml"
    assert planned(path, "--hf", folder, "micro_batch_size=3", "--seq-len", "512") == 0
    [step] = steps
    assert (
        step.folder == folder and step.max_length == 512 and step.per_device_train_batch_size == 3
    )
    said = capsys.readouterr().out
    assert "micro_batch_size 3: FITS, peak 10 GiB" in said
    assert "lora.yaml as Axolotl trains example/small-llama on rtx4090" in said.replace(
        "on 1 ", "on "
    )
    assert "Write in lora.yaml: micro_batch_size: 12, gradient_accumulation_steps: 1" in said
    assert "not read: tokenizer_type" in said and "padded=" not in said


def test_a_model_may_be_a_folder(tmp_path: Path, steps: list[TransformersStep]) -> None:
    folder = str(written(tmp_path, LLAMA_1B))
    planned(changed(tmp_path, "llama_factory/lora_sft", model_name_or_path=folder))
    assert steps[0].folder == folder


def test_json_and_what_takes_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(written(tmp_path, LLAMA_1B))
    path = FOLDER / "trl_sft" / "full.yaml"
    planned(path, "--hf", folder, "--json", "--accelerate", str(FOLDER / "accelerate" / "ddp.yaml"))
    printed = json.loads(capsys.readouterr().out)
    assert printed["file"] == {"path": str(path), "trainer": "TRL (trl sft)"}
    assert printed["step"]["ranks"] == 2
    nothing = Plan(None, 8, 90 * GIB, {}, 20 * GIB, ())
    monkeypatch.setattr(TransformersStep, "plan", lambda step, **_: nothing)
    monkeypatch.setattr(TransformersStep, "remembered", lambda step, **_: None)
    assert planned(path, "--hf", folder, "gradient_checkpointing=false") == 1
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "What takes less, in full.yaml: use_peft: true, gradient_checkpointing: true, a shorter"
        in said
    )


@pytest.mark.parametrize(
    ("path", "words", "complaint"),
    [
        ("axolotl/lora_fsdp2", [], "shares the weights among GPUs, and one is planned"),
        ("axolotl/lora", ["--hf", "."], "no config.json"),
        (
            "axolotl/lora",
            ["--method", "lora"],
            "--method: 'lora' is for --hf. The file says the method",
        ),
        ("axolotl/lora", ["--trainer", "SFTTrainer"], "is not of a file of Axolotl"),
        ("axolotl/lora", ["--fastest"], "--fastest: True is not for this step"),
        (
            "trl_sft/lora",
            ["--nproc", "3", "--accelerate", str(FOLDER / "accelerate" / "ddp.yaml")],
            "--nproc: 3 GPUs contradict the 2 of num_processes",
        ),
    ],
)
def test_what_cannot_be_answered(
    path: str, words: list[str], complaint: str, steps: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert planned(FOLDER / f"{path}.yaml", *words) == 2
    assert complaint in capsys.readouterr().err and not steps


def test_a_launch_needs_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    launch = str(FOLDER / "accelerate" / "ddp.yaml")
    assert plan_command(asked(["tiny/full", "--accelerate", launch])) == 2
    assert "goes with a file of another trainer" in capsys.readouterr().err


def test_a_file_of_trl_may_be_of_either(tmp_path: Path) -> None:
    path = changed(tmp_path, "trl_sft/full")
    assert settings(path)["trainer"] == "SFTTrainer"
    assert settings(path, asked="DPOTrainer")["trainer"] == "DPOTrainer"
    assert settings(changed(tmp_path, "trl_sft/full", beta=0.2))["trainer"] == "DPOTrainer"
    generated = {"num_generations": 4, "beta": 0.2}
    assert settings(changed(tmp_path, "trl_sft/full", **generated))["trainer"] == "GRPOTrainer"
    generated["normalize_advantages"] = True
    assert settings(changed(tmp_path, "trl_sft/full", **generated))["trainer"] == "RLOOTrainer"
    with pytest.raises(ConfigError, match="--trainer: 'Trainer' is not of a file of TRL"):
        read_file(path, asked="Trainer")


def test_rows_without_padding_are_one_row_where_the_trainer_has_them(tmp_path: Path) -> None:
    flash = {"attn_implementation": "flash_attention_2"}
    alone = read_file(changed(tmp_path, "trl_sft/full", padding_free=True, **flash))
    assert alone is not None
    assert (alone.settings["padding_free"], alone.settings["packing"]) == (True, False)
    assert any("wants max_length: null" in note for note in alone.notes)
    packed = changed(tmp_path, "trl_sft/full", padding_free=True, packing=True, **flash)
    assert settings(packed)["padding_free"] and settings(packed)["packing"]
    pairs = read_file(changed(tmp_path, "trl_dpo/lora", padding_free=True))
    assert pairs is not None and not pairs.settings["padding_free"] and pairs.settings["padded"]
    assert any("switched it off for DPO" in note for note in pairs.notes)


def test_axolotl_flattens_batches_with_flash_attention(tmp_path: Path) -> None:
    for value in (True, "auto"):
        path = changed(tmp_path, "axolotl/lora_fsdp2", batch_flattening=value, flash_attention=True)
        assert settings(path)["padded"] is False
    with pytest.raises(NoPrediction, match="batch_flattening: true is for flash attention"):
        read_file(changed(tmp_path, "axolotl/lora_fsdp2", batch_flattening=True))
    path = changed(tmp_path, "axolotl/lora_fsdp2", batch_flattening="auto")
    assert settings(path)["padded"] is True


def test_the_page_has_the_tables() -> None:
    page = (ROOT / "docs" / "trainer-files.md").read_text()
    text = runpy.run_path(str(ROOT / "docs" / "make" / "trainer_files.py"))["text"]
    assert text() in page, "put there what python docs/make/trainer_files.py prints"
