"""As a user runs it: the stock command line, real processes, from a folder of their own."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torchtune._cli.tune import main as tune_main
from torchtune.training import FullModelHFCheckpointer

from tests.helpers.launched import QUICK, launch, losses
from tests.helpers.ranks import watch_ranks
from torchtune_adaptive.cli.command_line import _run
from torchtune_adaptive.cli.command_line import main as tune_adaptive_main
from torchtune_adaptive.common.errors import ConfigError
from torchtune_adaptive.recipe.registry import RECIPES

pytestmark = pytest.mark.runs


def launch_forked(*command: str, cwd: Path, expect: int = 0) -> str:
    """The same without launcher flags, in a process that starts with everything imported."""
    (process,) = watch_ranks(
        run_in_this_process, 1, str(cwd), *command, until_exit_of=[0], join=False
    )
    assert process.exit_code == expect, process.said
    return process.said


def run_in_this_process(cwd: str, *command: str) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        del os.environ[name]  # nobody launches this one
    del os.environ["MASTER_PORT"], os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    os.chdir(cwd)
    sys.argv = list(command)
    {"tune": tune_main, "tune-adaptive": tune_adaptive_main}[command[0]]()


@pytest.fixture(scope="module")
def launch_alone(exhaustive: bool) -> Callable[..., str]:
    """Runs a command without launcher flags; in the quick tier forked, which is ten times faster."""
    return launch if exhaustive else launch_forked


def test_full_finetuning_on_two_ranks(tmp_path: Path) -> None:
    said = launch(
        *("tune", "run", "--nproc_per_node", "2", "adaptive_full_finetune_distributed"),
        *("--config", "tiny/full", "epochs=1", "max_steps_per_epoch=20", "output_dir=out"),
        cwd=tmp_path,
    )
    # Trials as they happen, the choice and its reason, where everything is.
    assert re.search(r"micro-batch 1: fits, peak .* of 38 MiB \(rank 0\)", said)
    assert re.search(r"micro-batch 16: out of memory in \w+, peak", said)
    assert re.search(
        r"batch_size 2 -> 8 \(16 rows do not fit: out of memory in \w+ on rank \d\)", said
    )
    assert "global batch 4 -> 16 rows (micro-batch 8 x accumulation 1 x 2 ranks)" in said
    assert "batch_size=8 gradient_accumulation_steps=1 use_maximum_batch_size=False" in said
    assert "Checkpoint: out/epoch_0" in said
    out = tmp_path / "out"
    seen = losses(out)
    assert sum(seen[-5:]) < 0.7 * sum(seen[:5]), "the loss has visibly fallen"
    assert json.loads((out / "batch_size_search.json").read_text())["batch_size"] == 8
    assert (out / "batch_size_search.png").exists()
    assert (out / "report.html").read_text().count("<svg") == 5, "the search, and four curves"
    assert "batch_size: 8\n" in (out / "torchtune_config.yaml").read_text()
    for noise in ("torchao", "resolved config", "Profil", "it/s", "\x1b"):
        # What `tune` itself says comes before anything of ours is imported.
        assert noise not in said.partition("Running with torchrun...")[2]
    assert said.count("micro-batch 16:") == 1
    assert re.search(r"^Trained 20 steps in .*; loss 6\.\d+ -> ", said, re.MULTILINE)
    assert re.search(r"tokens/s \(.* per rank\), peak memory 21\.2 of 40 MiB, 0 steps retr", said)
    assert (
        said.rstrip().splitlines()[-1].startswith("Report: out/report.html. Everything else: out")
    )
    record = next((out / "logs").iterdir()).read_text().splitlines()[1]
    for key in ("loss", "lr", "tokens_per_second_per_gpu", "batch_size", "global_batch_size"):
        assert f"{key}:" in record
    checkpointer = FullModelHFCheckpointer(
        checkpoint_dir=str(out / "epoch_0"),
        checkpoint_files=["model-00001-of-00001.safetensors"],
        model_type="LLAMA2",
        output_dir=str(tmp_path / "unused"),
    )
    assert "tok_embeddings.weight" in checkpointer.load_checkpoint()["model"]


@pytest.mark.rotating
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_without_launcher_flags(recipe: str, tmp_path: Path) -> None:
    rollouts = {
        "grpo": ["num_steps=2", "~forward_batch_size"],
        "grpo_lora": ["num_steps=2", "~forward_batch_size"],
        "ppo": ["num_steps=64", "ppo_batch_size=32", "ppo_epochs=1"],
    }
    sizes = ["use_maximum_batch_size=False", "adaptive_batching.memory_limit=null"]
    more = rollouts.get(RECIPES[recipe])
    said = launch_forked(
        *("tune", "run", recipe, "--config", f"tiny/{RECIPES[recipe]}", "output_dir=out", *QUICK),
        *([*more, *sizes, "max_generated_tokens=4"] if more else ()),
        cwd=tmp_path,
    )
    assert "x accumulation 1 x 1 rank" in said
    assert len(losses(tmp_path / "out")) == 2


@pytest.mark.exhaustive
def test_lora_on_two_ranks(tmp_path: Path) -> None:
    said = launch(
        *("tune", "run", "--nproc_per_node", "2", "adaptive_lora_finetune_distributed"),
        *("--config", "tiny/lora", "output_dir=out", *QUICK),
        cwd=tmp_path,
    )
    assert "x accumulation 1 x 2 ranks)" in said
    assert len(losses(tmp_path / "out")) == 2


def test_torchtunes_own_configs(tmp_path: Path, launch_alone: Callable[..., str]) -> None:
    """``llama3_2/1B_full`` by its name, with the parts exchanged that would have to be downloaded."""
    said = launch_alone(
        *("tune", "run", "adaptive_full_finetune_distributed", "--config", "llama3_2/1B_full"),
        *("use_maximum_batch_size=True", "adaptive_batching.ceiling=2"),
        *("device=cpu", "adaptive_batching.memory_limit=64MiB", "output_dir=out", *QUICK),
        *("assets=${tiny_assets:}", "tokenizer=torchtune.models.llama2.llama2_tokenizer"),
        "tokenizer.path=${assets}/tokenizer.model",
        "dataset=torchtune.datasets.instruct_dataset",
        *("dataset.source=json", "dataset.data_files=${assets}/data.json"),
        *("model=torchtune.models.llama2.llama2", "model.vocab_size=512", "model.num_layers=4"),
        *("model.num_heads=4", "model.num_kv_heads=2", "model.embed_dim=64"),
        *("model.intermediate_dim=160", "model.max_seq_len=512"),
        *("checkpointer.checkpoint_dir=${assets}", "checkpointer.model_type=LLAMA2"),
        "checkpointer.checkpoint_files=[model-00001-of-00001.safetensors]",
        cwd=tmp_path,
    )
    assert "use_maximum_batch_size=False" in said
    assert len(losses(tmp_path / "out")) == 2


def test_find_searches_and_trains_nothing(
    tmp_path: Path, exhaustive: bool, launch_alone: Callable[..., str]
) -> None:
    flags, size = (["--nproc_per_node", "2"], 16) if exhaustive else ([], 8)
    said = launch_alone(
        *("tune-adaptive", "find", *flags, "adaptive_lora_finetune_distributed"),
        *("--config", "tiny/lora", "output_dir=out", *QUICK),
        cwd=tmp_path,
    )
    assert said.rstrip().splitlines()[-1] == (
        f"batch_size={size} gradient_accumulation_steps=1 use_maximum_batch_size=False"
    )
    assert not list((tmp_path / "out").glob("epoch_*"))


def cli(*command: str) -> None:
    """``tune-adaptive`` in this process, which is seconds faster."""
    _run(["tune-adaptive", *command])


def test_the_command_line_is_torchtunes_with_ours_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cli("ls")
    listed = capsys.readouterr().out
    for name in ("full_finetune_distributed", "llama3_1/8B_full"):
        assert name in listed
    for name in ("adaptive_lora_finetune_distributed", "tiny/lora", "llama3_1/8B_adaptive_lora"):
        assert name in listed
    cli("cp", "tiny/full", "mine.yaml")
    cli("cp", "adaptive_full_finetune_distributed", "mine.py")
    assert "class AdaptiveFullFinetuneRecipeDistributed" in (tmp_path / "mine.py").read_text()
    cli("cat", "tiny/full")
    assert "adaptive_batching:" in capsys.readouterr().out
    for name in ("tiny/full", "mine.yaml", "llama3_2/1B_full"):
        cli("validate", name)
        assert "well-formed" in capsys.readouterr().out
    mine = tmp_path / "mine.yaml"
    mine.write_text(mine.read_text().replace("search: extrapolate", "serch: extrapolate"))
    with pytest.raises(ConfigError, match=r"adaptive_batching.serch.*Did you mean search\?"):
        cli("validate", "mine.yaml")
    cli()
    assert "find" in capsys.readouterr().out


def test_a_copied_recipe_runs(
    tmp_path: Path, launch_alone: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cli("cp", "adaptive_full_finetune_distributed", "mine.py")
    launch_alone(
        "tune", "run", "mine.py", "--config", "tiny/full", "output_dir=out", *QUICK, cwd=tmp_path
    )
    assert len(losses(tmp_path / "out")) == 2


def test_a_config_that_exists_nowhere_says_which_do(
    tmp_path: Path, launch_alone: Callable[..., str]
) -> None:
    said = launch_alone(
        *("tune", "run", "adaptive_full_finetune_distributed", "--config", "tiny/ful"),
        cwd=tmp_path,
        expect=1,
    )
    assert "Did you mean tiny/full or " in said
    assert "Traceback" not in said


def test_a_wrong_setting_is_one_line_before_anything_is_built(
    tmp_path: Path, launch_alone: Callable[..., str]
) -> None:
    said = launch_alone(
        *("tune", "run", "adaptive_full_finetune_distributed", "--config", "tiny/full"),
        "adaptive_batching.headroom=2",
        cwd=tmp_path,
        expect=1,
    )
    assert "adaptive_batching.headroom: 2 is not valid. Must be at least 0 and less than 1" in said
    assert "Traceback" not in said and "Instantiating model" not in said


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "command",
    [
        ("tune", "run", "adaptive_full_finetune_distributed", "--config", "tiny/full"),
        ("tune-adaptive", "ls"),
    ],
    ids=["tune run", "tune-adaptive"],
)
def test_an_unsupported_library_is_one_line(command: tuple[str, ...], tmp_path: Path) -> None:
    fake = tmp_path / "site" / "torchao-0.16.0.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: torchao\nVersion: 0.16.0\n")
    said = launch(*command, cwd=tmp_path, expect=1, PYTHONPATH=str(tmp_path / "site"))
    assert "torchtune-adaptive does not work with torchao 0.16.0" in said
    assert "pip install 'torchao>=0.13,<0.16'" in said
    assert "Traceback" not in said
