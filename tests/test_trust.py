"""What ``SECURITY.md`` promises: for each input that others may have written, a hostile one."""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import re
import shlex
import shutil
import subprocess
import sys
import time
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from tests.helpers.configs import config
from tests.helpers.hugging_face import LLAMA_1B, written
from tests.helpers.trainer_files import FOLDER
from torchtune_adaptive.cli import plan_command, plan_options
from torchtune_adaptive.cli.hub import require_config
from torchtune_adaptive.cli.other_trainers.files import read_file as read_trainer_file
from torchtune_adaptive.cli.plan_page import page_of
from torchtune_adaptive.common import (
    Block,
    Cache,
    CheckpointError,
    ConfigError,
    Damaged,
    FolderLock,
    Listing,
    Manifest,
    NoPrediction,
    Paragraph,
    Table,
    Verbatim,
    as_markdown,
    as_page,
    as_text,
    cache_folder,
    durable,
    make_own_folder,
)
from torchtune_adaptive.planner.programs import hub as programs_hub
from torchtune_adaptive.recipe import load_config
from torchtune_adaptive.recipe.checkpoints.all_or_none import read_file
from torchtune_adaptive.recipe.checkpoints.config_changes import resumed, training_config
from torchtune_adaptive.recipe.checkpoints.torch_reader import Planner, Reader
from torchtune_adaptive.recipe.data.length_files import LengthFile, LengthFiles, facts_of_config
from torchtune_adaptive.recipe.origin import Origin, data_in_words
from torchtune_adaptive.recipe.record import Record
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.settings.fingerprint import step_facts
from torchtune_adaptive.recipe.settings.kind_table import KINDS
from torchtune_adaptive.recipe.shadowing import stop_if_shadowed
from torchtune_adaptive.recipe.tracing.traces import Traces

ROOT = Path(__file__).parents[1]
SECRET = "hf_from_the_environment"
ESCAPES = "\x1b]0;owned\x07\x1b[2J\u202e"
TAG = "<img src=x onerror=alert(1)></script><script>alert(1)</script>"


class Program:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return eval, (f"open({str(self.mark)!r}, 'w').close()",)


def saved(value: Any) -> io.BytesIO:
    content = io.BytesIO()
    torch.save(value, content)
    content.seek(0)
    return content


def quickly(refused: Callable[[], Any], said: str, error: type[Exception] = ConfigError) -> str:
    """The line with which something is refused at once."""
    began = time.monotonic()
    with pytest.raises(error) as raised:
        refused()
    line = str(raised.value)
    assert said in line and "\n" not in line and len(line) < 500
    assert time.monotonic() - began < 10  # not for ever
    return line


def test_each_part_of_the_document_has_a_test_here() -> None:
    covered = {
        "The working directory": test_the_server_of_ranks_runs_nothing_of_the_working_directory,
        "Checkpoints": test_no_program_in_a_checkpoint_is_run,
        "Output folders": test_a_lock_that_is_a_link_is_not_written_through,
        "Snapshots": test_a_folder_in_shared_memory_is_used_only_by_its_owner,
        "What `plan` reads": test_files_of_trainers_that_explode,
        "The cache": test_files_of_the_cache_that_are_none,
        "Reports": test_pages_run_no_scripts_of_names,
        "Secrets": test_secrets_are_in_no_report_checkpoint_or_cache,
    }
    text, _, _ = (ROOT / "SECURITY.md").read_text().partition("## Ports")
    told = set(re.findall(r"^\*\*(.+?)\.?\*\*", text, re.MULTILINE))
    assert told == {*covered, "Configs and command lines"}  # which are code


# --- checkpoints ------------------------------------------------------------------------------------------


def in_metadata(folder: Path, mark: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Program(mark)))
    Reader(folder, lambda _: None)


def in_a_value(folder: Path, mark: Path) -> None:
    Planner().load_bytes(None, saved({"lr": Program(mark)}))


def in_the_state(folder: Path, mark: Path) -> None:
    (folder / "recipe_state.pt").write_bytes(saved({"seed": Program(mark)}).getvalue())
    read_file(str(folder / "recipe_state.pt"))


@pytest.mark.parametrize("hidden", [in_metadata, in_a_value, in_the_state])
def test_no_program_in_a_checkpoint_is_run(
    hidden: Callable[[Path, Path], None], tmp_path: Path
) -> None:
    with pytest.raises((pickle.UnpicklingError, CheckpointError), match=r"eval|Weights only"):
        hidden(tmp_path, mark := tmp_path / "mark")
    assert not mark.exists()


@pytest.mark.parametrize("name", ["../other/file", "/etc/passwd", "original/../../file"])
def test_a_manifest_names_nothing_outside_of_its_folder(name: str, tmp_path: Path) -> None:
    files = {name: {"bytes": 0, "sha256": "0"}}
    about = {"format": 1, "id": "1", "files": files}
    (tmp_path / durable.MANIFEST).write_text(json.dumps(about))
    with pytest.raises(Damaged, match="which is outside of it"):
        durable.read_manifest(tmp_path)


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        with pytest.raises(Damaged, match="is no file"):
            durable.check_sizes(tmp_path, Manifest({}, {name: (0, "")}))


# --- folders that others can write to ---------------------------------------------------------------------


def test_a_lock_that_is_a_link_is_not_written_through(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("kept")
    (tmp_path / ".lock").symlink_to(victim)
    FolderLock(tmp_path).release()
    assert victim.read_text() == "kept" and "cannot be locked" in caplog.text


def test_a_folder_in_shared_memory_is_used_only_by_its_owner(tmp_path: Path) -> None:
    (link := tmp_path / "link").symlink_to(tmp_path)
    (shared := tmp_path / "open").mkdir(mode=0o755)
    for folder, why in ((link, "a link"), (shared, "may enter")):
        with pytest.raises(PermissionError, match=why):
            make_own_folder(folder)
    if os.geteuid() == 0:
        (foreign := tmp_path / "foreign").mkdir(mode=0o700)
        os.chown(foreign, 12345, -1)
        with pytest.raises(PermissionError, match="belongs to another user"):
            make_own_folder(foreign)
    make_own_folder(own := tmp_path / "own")
    assert own.stat().st_mode & 0o777 == 0o700


# --- the working directory --------------------------------------------------------------------------------

_LAUNCHER = """
import argparse, os, sys
from torchtune_adaptive.cli import run_command

def require_nothing_left():
    sys.exit("PYTHONSAFEPATH" in os.environ)

if __name__ == "__main__":
    sys.path.append(os.getcwd())  # as tune-adaptive run
    asked = argparse.Namespace(start_method="forkserver")
    run_command._choose_start_method(asked, 1)
    rank = run_command._context(asked).Process(target=require_nothing_left)
    rank.start()
    rank.join()
    sys.exit(rank.exitcode or asked.start_method != "forkserver" or "PYTHONSAFEPATH" in os.environ)
"""


@pytest.mark.runs
def test_the_server_of_ranks_runs_nothing_of_the_working_directory(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for name in ("datasets", "matplotlib", "pandas", "queue", "yaml"):
        (tmp_path / f"{name}.py").write_text(f"open({str(mark)!r}, 'a').write('{name} ')")
    (folder := tmp_path / "elsewhere").mkdir()
    (folder / "launcher.py").write_text(_LAUNCHER)
    done = subprocess.run(
        [sys.executable, folder / "launcher.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert not mark.exists(), mark.read_text()
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["matplotlib", "huggingface_hub", "pandas"])
def test_a_file_with_a_librarys_name_stops_a_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    stop_if_shadowed()
    (tmp_path / f"{name}.py").write_text("")
    with pytest.raises(SystemExit):
        stop_if_shadowed()
    assert f"hides the library {name}" in capsys.readouterr().err


# --- what plan reads --------------------------------------------------------------------------------------

_TRAINER = (FOLDER / "axolotl" / "lora.yaml").read_text()
_NINEFOLD = "a0: &a0 [x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)
_MERGED = "m0: &m0 {a: 1}\n" + "".join(
    f"m{n}: &m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 9)}]}}\n" for n in range(1, 9)
)
YAML = {
    "aliases": (_NINEFOLD, "more than 100,000 values"),
    "merge keys": (_MERGED, "more than 100,000 values"),
    "itself": ("x: &x [*x]\n", "more than 100,000 values"),
    "itself in a block": ("x: &x {y: *x}\n", "more than 100,000 values"),
    "depth": (f"x: {'[' * 20_000}{']' * 20_000}\n", "nested more than 50 deep"),
    "a function": ("x: !!python/object/apply:os.system ['exit']\n", "python/object/apply:os.sys"),
    "a file": ("x: !include /etc/passwd\n", "constructor for the tag '!include'"),
    "digits": (f"x: {'9' * 5000}\n", "cannot be read (Exceeds the limit"),
}


@pytest.mark.parametrize(("added", "said"), YAML.values(), ids=YAML)
def test_files_of_trainers_that_explode(added: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "trainer.yaml"
    path.write_text(f"{_TRAINER}\n{added}")
    quickly(lambda: read_trainer_file(path), said)


@pytest.mark.parametrize("of", ["aliases", "itself", "depth", "a function"])
def test_configs_of_torchtune_that_explode(
    of: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are planned as configs, and what is wrong with the file is said, not that it may be a model."""
    added, said = YAML[of]
    (path := tmp_path / "config.yaml").write_text(f"model:\n  _component_: a.b\n{added}")
    quickly(lambda: load_config(str(path)), said)
    assert read_trainer_file(path) is None
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    shutil.copy(path, "org/name")
    quickly(lambda: plan_command._config_or_advice("org/name"), said)


def test_aliases_that_only_repeat_are_read(tmp_path: Path) -> None:
    path = tmp_path / "trainer.yaml"
    path.write_text(
        f"{_TRAINER}\nbase: &base {{a: 1}}\nother: {{<<: *base}}\nlist: [*base, *base]\n"
    )
    found = read_trainer_file(path)
    assert found is not None and found.given["list"] == [{"a": 1}] * 2


MODELS: dict[str, Any] = {
    "many layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers: 1000000000, which is not"),
    "layers of a part": ({"text_config": {"num_hidden_layers": 10**5}}, "from 1 to 10,000"),
    "many experts": ({"num_local_experts": 10**6}, "num_local_experts: 1000000"),
    "no heads": ({"num_attention_heads": 0}, "num_attention_heads: 0"),
    "less than nothing": ({"hidden_size": -64}, "hidden_size: -64"),
    "wide": ({"hidden_size": 10**15}, "from 1 to 2,147,483,648"),
    "NaN": ({"num_hidden_layers": float("nan")}, "num_hidden_layers: nan"),
    "text": ({"head_dim": "16"}, "head_dim: '16'"),
    "truth": ({"vocab_size": True}, "vocab_size: True"),
    "a block": ({"hidden_size": {"a": [1]}}, "hidden_size: {'a': [1]}"),
    "a number for a name": ({"architectures": 7}, "architectures: 7, which is not a name"),
    "a list for a name": ({"architectures": [["x"]]}, "architectures: [['x']]"),
}


@pytest.mark.parametrize(("keys", "said"), MODELS.values(), ids=MODELS)
def test_models_that_cannot_be(keys: dict[str, Any], said: str, tmp_path: Path) -> None:
    quickly(lambda: require_config(written(tmp_path, {**LLAMA_1B, **keys})), said)


@pytest.mark.parametrize(
    "text", ["[" * 200_000 + "]" * 200_000, '{"a":' * 100_000 + "1" + "}" * 100_000]
)
def test_models_that_are_nested(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    quickly(lambda: require_config(tmp_path), "is not JSON")


def test_models_as_they_are(tmp_path: Path) -> None:
    others: dict[str, Any] = {
        "head_dim": None,
        "intermediate_size": [64, 128],
        "rope_theta": 10**11,
    }
    others |= {"feature_layer": -2, "n_inner": None, "layer_types": ["full_attention"] * 3}
    require_config(written(tmp_path, {**LLAMA_1B, **others, "time_step_limit": [0, float("inf")]}))


def test_a_plan_runs_no_code_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's config may name kernels of the Hub, which transformers would load."""
    kernels = types.ModuleType("kernels")
    kernels.get_kernel = lambda *_: "code"  # type: ignore[attr-defined]
    monkeypatch.setattr(programs_hub, "put", monkeypatch.setattr)
    programs_hub.refuse_kernels(kernels)
    with pytest.raises(
        NoPrediction, match="org/kernel: code of the Hub, which a plan does not run"
    ):
        kernels.get_kernel("org/kernel")


def test_nothing_that_plan_prints_controls_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks: list[Block] = [
        *(Paragraph([ESCAPES]), Listing(ESCAPES, [ESCAPES]), Verbatim(ESCAPES)),
        Table(ESCAPES, (ESCAPES,), [(ESCAPES,)]),
    ]
    for render in (as_text, as_markdown):
        assert all(one.isprintable() or one == "\n" for one in render(blocks))
    assert r"\x1b]0;owned\x07\x1b[2J\u202e" in as_text(blocks)
    path = tmp_path / "trainer.yaml"
    path.write_text(_TRAINER.replace("adapter: lora", 'adapter: lora\n"\\e]0;owned\\a": 1'))
    plan_options.add_arguments(parser := argparse.ArgumentParser())
    missing = f"base_model={tmp_path}/none\x1b[2J"
    assert plan_options.plan_command(plan_options.parsed(parser, [str(path), missing])) == 2
    said = capsys.readouterr().err
    assert r"\x1b[2J" in said and "\x1b" not in said


# --- the cache --------------------------------------------------------------------------------------------


def cache(setting: bool | str) -> Cache[int]:
    return Cache(cache_folder(setting, "speeds"), "speed", lambda _: True)


def test_files_of_the_cache_that_are_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lengths = LengthFiles(str(tmp_path))
    file, _ = lengths.put({"a": 1}, np.arange(5, dtype=np.int32))
    array = tmp_path / "row_lengths" / file.name
    whole = array.read_bytes()
    with zipfile.ZipFile(array, "w") as archive:
        archive.writestr("a.npy", whole)
    assert lengths.get({"a": 1}) is None and "Ignoring cached row lengths" in caplog.text
    for content in (whole[:-4], pickle.dumps([1]), b"", whole[:-1] + b"\xff"):
        array.write_bytes(content)
        assert lengths.mapped(LengthFile(*file)) is None
    sizes = cache(str(tmp_path))
    sizes.put({"a": 1}, 8)
    (entry,) = (tmp_path / "speeds").iterdir()
    for text in (entry.read_text().replace("8", "9"), "[" * 100_000, "[]", '{"facts": 1}'):
        entry.write_text(text)
        assert sizes.get({"a": 1}) is None


def test_the_users_cache_is_his_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    base = tmp_path / "torchtune_adaptive"
    for keep in (
        lambda: cache(True).put({}, 1),
        lambda: LengthFiles(True).put({}, np.arange(3, dtype=np.int32)),
    ):
        base.mkdir(mode=0o755)  # as earlier versions have made it
        keep()
        assert base.stat().st_mode & 0o777 == 0o700
        shutil.rmtree(base)
    (shared := tmp_path / "shared").mkdir(mode=0o775)
    shared.chmod(0o775)
    cache(str(shared)).put({}, 1)
    assert shared.stat().st_mode & 0o777 == 0o775


# --- reports and secrets ----------------------------------------------------------------------------------


def test_pages_run_no_scripts_of_names() -> None:
    blocks: list[Block] = [
        Paragraph([TAG]),
        Listing(TAG, [TAG]),
        Table(TAG, (TAG,), [(TAG,)]),
        Verbatim(TAG, TAG),
    ]
    report = as_page(TAG, {TAG: blocks})
    plan = page_of(TAG, {"name": TAG}, TAG)
    for page, scripts in ((report, "default-src 'none'; style-src"), (plan, "script-src 'unsafe")):
        assert "<img" not in page and "<script>alert" not in page
        (policy,) = re.findall(r'Content-Security-Policy"\s+content="([^"]+)"', page)
        assert scripts in policy and policy.startswith("default-src 'none'")
    assert "script-src" not in report


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A config with a secret of the environment, to which other keys refer."""
    monkeypatch.setenv("SECRET_TOKEN", SECRET)
    cfg = config(output_dir="out")
    cfg.mine = "${oc.env:SECRET_TOKEN}"
    cfg.dataset = {
        **{"_component_": "a.b", "source": "x", "data_files": "${mine}", "token": "${mine}"},
        **{"url": "https://${oc.env:SECRET_TOKEN}@host", "again": "${oc.decode:${mine}}"},
        **{"api_key": "typed", "sort_key": "length"},
    }
    return cfg


def test_secrets_are_in_no_report_checkpoint_or_cache(secret: Any, tmp_path: Path) -> None:
    kind = KINDS["full"]
    typed = ["api_key=typed", "--dataset.token=typed", "dataset.password=typed", "epochs=3"]
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(secret))
    origin = Origin.of(["tune", "--config", str(tmp_path / "config.yaml"), *typed], kind.recipe)
    words = ["api_key=***", "--dataset.token=***", "dataset.password=***", "epochs=3"]
    assert shlex.split(origin.command)[-4:] == words
    changed = OmegaConf.merge(secret, {"dataset": {"api_key": "typed too"}})
    record = Record(changed, "full", 1, None, origin)  # type: ignore[arg-type]
    record.made_of = {"data": data_in_words(secret, 1, "row")}
    report = record.html()
    assert "token: ${oc.env:SECRET_TOKEN}" in report and "sort_key" in report
    assert "<td>dataset.api_key</td><td>***</td><td>***</td>" in report
    saved = training_config(secret, kind)
    facts = [saved, facts_of_config(secret), step_facts(secret)]
    for text in (report, json.dumps(facts), origin.command):
        assert SECRET not in text
    assert "typed" not in report and "typed" not in origin.command
    assert saved["dataset.token"].startswith("${oc.env:SECRET_TOKEN} (sha256 ")


def test_secrets_are_in_no_trace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where a process of the planner was given a config without references."""
    monkeypatch.setenv("SECRET_TOKEN", SECRET)
    asked = Asked.of(config(**{"adaptive_batching.cache": str(tmp_path)}), "full")
    asked.cfg.model.mine = "${oc.env:SECRET_TOKEN}"
    kept: list[str] = []
    monkeypatch.setattr(Cache, "get", lambda _, facts: kept.append(json.dumps(facts)))
    for one in (asked, asked.resolved()):
        Traces(one, 1, 0)
    assert kept[0] == kept[1] and SECRET not in kept[0]
    monkeypatch.setenv("SECRET_TOKEN", "another")
    Traces(asked, 1, 0)
    assert kept[2] != kept[0]


def test_a_secret_that_changes_is_seen_and_one_that_stays_is_not(
    secret: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = KINDS["full"]
    saved = training_config(secret, kind)
    assert not resumed(saved, training_config(secret, kind)).changes
    plain: Any = OmegaConf.create(OmegaConf.to_container(secret, resolve=True))
    earlier = training_config(plain, kind)  # as versions before have saved it
    assert SECRET in json.dumps(earlier)
    assert not resumed(earlier, saved).changes and not resumed(saved, earlier).changes
    monkeypatch.setenv("SECRET_TOKEN", "another")
    changes = resumed(saved, training_config(secret, kind)).changes
    keys = ("again", "data_files", "token", "url")
    assert [line.partition(" ")[0] for line in changes] == [f"dataset.{key}" for key in keys]
    assert SECRET not in str(changes) and "another" not in str(changes)
    secret.dataset.api_key = "typed too"
    changes = resumed(saved, training_config(secret, kind)).changes
    assert "dataset.api_key *** -> *** (the config's)" in changes


def test_what_a_run_follows_is_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORDER", "streaming")
    monkeypatch.setenv("RATE", "0.5")
    cfg = config(**{"adaptive_batching.sample_order": "${oc.env:ORDER}"})
    cfg.optimizer.lr = "${oc.decode:${oc.env:RATE}}"
    saved = training_config(cfg, KINDS["full"])
    assert saved["adaptive_batching.sample_order"] == "streaming" and saved["optimizer.lr"] == 0.5
