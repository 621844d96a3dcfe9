"""Runs on torchtune's main branch, where it is installed (``make test-torchtune-main``)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torchtune import config
from torchtune.modules import loss

from tests.helpers import runs
from tests.helpers.context_parallel import kernels_of_the_cpu
from tests.helpers.recipes import run_ours, run_torchtunes, tiny_config
from tests.helpers.runs import Records
from tests.helpers.validating import VALIDATES, losses, validation_losses
from torchtune_adaptive.recipe.upstream import labels_are_shifted

pytestmark = [
    pytest.mark.runs,
    pytest.mark.skipif(
        not hasattr(loss, "LinearCrossEntropyLoss"), reason="needs torchtune's main branch"
    ),
]
LINEAR = {"loss._component_": "torchtune.modules.loss.LinearCrossEntropyLoss"}
SEARCHES = {"use_maximum_batch_size": True, "adaptive_batching.memory_limit": "24MiB"}


def train(kind: str, folder: Path, **changes: Any) -> Records:
    return runs.train(kind, folder, 2, **changes, **VALIDATES)


def test_datasets_shift_labels() -> None:
    assert labels_are_shifted()


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_both_losses(kind: str, tmp_path: Path) -> None:
    chunked = train(kind, tmp_path / "chunked")
    linear = train(kind, tmp_path / "linear", **LINEAR)
    for kept in (lambda records: dict(losses(records)), validation_losses):
        expected, actual = kept(chunked), kept(linear)
        assert expected
        assert actual == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_copies_of_shards_train_as_shards_do(kind: str, tmp_path: Path) -> None:
    """HSDP, whose size is searched for as well."""
    copies = {**VALIDATES, "data_parallel_replicate_dim": 2}
    found = runs.train(kind, tmp_path / "found", 4, **copies, **SEARCHES)
    size = int(found[0]["micro_batch_size"])
    assert size > 4 and len(losses(found)) == 3
    if kind == "full":  # new adapters are other ones
        plain = runs.train(kind, tmp_path / "plain", 4, **VALIDATES, batch_size=size)
        assert dict(losses(found)) == pytest.approx(dict(losses(plain)), rel=1e-5)
        assert validation_losses(found) == pytest.approx(validation_losses(plain), rel=1e-5)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_qwen3(kind: str, tmp_path: Path) -> None:
    """With tied embeddings, so the loss multiplies by the embeddings; searched, then trained."""
    checkpoint = tmp_path / "start"
    checkpoint.mkdir()
    builders = "torchtune.models.qwen3._component_builders"
    sizes = {"vocab_size": 512, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    sizes |= {"embed_dim": 64, "intermediate_dim": 160, "max_seq_len": 512, "head_dim": 16}
    sizes |= {"tie_word_embeddings": True, "q_norm": True, "k_norm": True}
    sizes |= {f"{name}_proj_bias": False for name in "qkv"}
    full = config.instantiate({"_component_": f"{builders}.qwen3", **sizes})
    torch.manual_seed(0)
    for parameter in full.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    torch.save(full.state_dict(), checkpoint / "model.pt")
    model = {"_component_": f"{builders}.qwen3", **sizes}
    if kind == "lora":
        model = {"_component_": f"{builders}.lora_qwen3", **sizes, "lora_rank": 4, "lora_alpha": 8}
        model |= {"lora_attn_modules": ["q_proj", "v_proj"], "apply_lora_to_mlp": True}
    checkpointer = {
        "_component_": "torchtune.training.FullModelTorchTuneCheckpointer",
        "checkpoint_dir": str(checkpoint),
        "checkpoint_files": ["model.pt"],
        "recipe_checkpoint": None,
        "output_dir": "${output_dir}",
        "model_type": "QWEN3",
    }
    blocks = {"model": model, "checkpointer": checkpointer, "save_adapter_weights_only": True}
    if kind == "full":
        del blocks["save_adapter_weights_only"]
    records = train(kind, tmp_path / "out", **blocks, **LINEAR, **SEARCHES)
    found = int(records[0]["batch_size"])
    assert found > 4 and len(losses(records)) == 3
    chunked = train(kind, tmp_path / "chunked", **blocks, batch_size=found)
    assert dict(losses(records)) == pytest.approx(dict(losses(chunked)), rel=1e-4)
    assert (tmp_path / "out" / "epoch_0").exists()


def in_context(run: Callable[..., Records], kind: str, cfg: DictConfig) -> Records:
    barrier = dist.barrier
    dist.barrier = lambda **_: barrier()  # torchtune's recipe names the GPU, and there is none
    with kernels_of_the_cpu():
        return run(kind, cfg)


@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize(("ranks", "copies"), [(2, 1), (4, 2)])
def test_context_parallelism_is_torchtunes(
    ranks: int, copies: int, kind: str, tmp_path: Path
) -> None:
    """Rows are split over two ranks. New adapters of LoRA are other ones, but the first loss is the same."""
    changes = {"context_parallel_dim": 2, "data_parallel_replicate_dim": copies, "shuffle": False}
    changes |= {"log_level": "ERROR"}  # torchtune's recipe insists on it
    logged = []
    for whose, run in (("theirs", run_torchtunes), ("ours", run_ours)):
        cfg = tiny_config(kind, tmp_path / whose, **changes)
        logged.append(dict(losses(runs.run_with(partial(in_context, run), kind, cfg, ranks))))
    theirs, ours = logged
    compared = theirs if kind == "full" else {1: theirs[1]}
    assert len(compared) >= 1
    assert {step: ours[step] for step in compared} == pytest.approx(compared, rel=1e-5)
