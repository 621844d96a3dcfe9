"""What everybody gets wrong first: components, their arguments and the data, each said in one line."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from torchtune import training
from torchtune.datasets import instruct_dataset

from tests.helpers.configs import config
from tests.helpers.recipes import tiny_config
from tests.helpers.restarted import launched, said
from torchtune_adaptive.common.errors import ConfigError
from torchtune_adaptive.core import Generators
from torchtune_adaptive.recipe.adaptive_recipe import AdaptiveRecipe
from torchtune_adaptive.recipe.components import check_components, make
from torchtune_adaptive.recipe.data.dataset import load_rows
from torchtune_adaptive.recipe.registry import our_configs
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.settings.checks import check
from torchtune_adaptive.recipe.settings.kind_table import KINDS, Kind, kind_of
from torchtune_adaptive.recipe.settings.rules import rule_of_argument

FILES = "a list of names of files"

WRONG: list[tuple[str, str, str]] = [
    # The kind, an override, and the line: the key and its value, and what comes at the end.
    ("full", "optimizer.learning_rate=1e-4", "optimizer.learning_rate: 0.0001 ... optimizer.lr?"),
    ("full", "optimizer.weight_decy=1", "optimizer.weight_decy: 1 ... optimizer.weight_decay?"),
    ("full", "optimizer.lr=null", "optimizer.lr: None ... Must be a number."),
    ("full", "optimizer.betas=3", "optimizer.betas: 3 ... Must be a list, each of them a number."),
    ("full", "optimizer.fused=yes please", "optimizer.fused: 'yes please' ... True, False, null."),
    ("full", "optimizer._component_=nope.A", "optimizer._component_: 'nope.A' ... nope is not ins"),
    ("full", "optimizer._component_=torch.optim.Adamw", "optimizer._component_: ... .AdamW?"),
    ("full", "loss.chunks=3", "loss.chunks: 3 ... It takes num_output_chunks, ignore_index."),
    ("full", "loss.num_output_chunks=0", "loss.num_output_chunks: 0 ... from 1 to"),
    ("full", "lr_scheduler.warmup_steps=3", "lr_scheduler.warmup_steps: 3 ... num_warmup_steps?"),
    ("full", "tokenizer.max_len=3", "tokenizer.max_len: 3 ... Did you mean tokenizer.max_seq_len?"),
    ("full", "tokenizer.path=null", "tokenizer.path: None ... Must be a text."),
    ("full", "collate_fn=torchtune.data.nope", "collate_fn: 'torchtune.data.nope' cannot be found"),
    ("full", "model.nlayers=3", "model.nlayers: 3 ... Did you mean model.num_layers?"),
    ("full", "model.num_heads=0", "model.num_heads: 0 ... an integer >= 1."),
    ("full", "model.embed_dim=null", "model.embed_dim: None ... Must be an integer."),
    ("full", "model.norm_eps=abc", "model.norm_eps: 'abc' ... Must be a number."),
    ("lora", "model.lora_rank=0", "model.lora_rank: 0 ... an integer >= 1."),
    ("lora", "model.lora_rank=abc", "model.lora_rank: 'abc' ... an integer >= 1."),
    ("lora", "model.lora_rank=null", "model.lora_rank: None ... Must be an integer."),
    ("lora", "model.lora_alpha=0", "model.lora_alpha: 0 ... a number greater than 0."),
    ("lora", "model.lora_dropout=2", "model.lora_dropout: 2 ... less than 1"),
    ("lora", "model.lora_attn_modules=[q]", "model.lora_attn_modules: ['q'] ... q_proj or k_proj"),
    ("lora", "model.apply_lora_to_mlp=3", "model.apply_lora_to_mlp: 3 ... True, False."),
    ("full_dpo", "loss.beta=null", "loss.beta: None ... Must be a number."),
    ("full_dpo", "loss.beta=abc", "loss.beta: 'abc' ... a number greater than 0."),
    ("full_dpo", "loss.beta=.nan", "loss.beta: nan ... a number greater than 0."),
    ("full_dpo", "loss.label_smoothing=2", "loss.label_smoothing: 2 ... from 0 to 1."),
    ("full_dpo", "ref_checkpointer.checkpoint_files=[]", f"ref_checkpointer.check ... {FILES}"),
    ("full_dpo", "ref_checkpointer.output_dir=null", "ref_checkpointer.output_dir: None ... text."),
    ("kd", "teacher_checkpointer.checkpoint_files=3", f"teacher_checkpointer.check ... {FILES}"),
    ("kd", "teacher_model.num_layers=-1", "teacher_model.num_layers: -1 ... an integer >= 1."),
    ("kd", "kd_loss.num_output_chunks=0", "kd_loss.num_output_chunks: 0 ... from 1 to"),
    ("qat", "quantizer.groupsize=0", "quantizer.groupsize: 0 ... an integer >= 1."),
    ("qat", "quantizer.groupsize=abc", "quantizer.groupsize: 'abc' ... an integer >= 1."),
    ("qat_lora", "quantizer.groupsize=null", "quantizer.groupsize: None ... Must be an integer."),
    ("full", "checkpointer.output_dir=null", "checkpointer.output_dir: None ... of a folder."),
    ("full", "checkpointer.checkpoint_dir=3", "checkpointer.checkpoint_dir: 3 ... of a folder."),
    ("full", "checkpointer.recipe_checkpoint=1", "checkpointer.recipe_checkpoint: 1 ... a file."),
    ("full", "checkpointer.recipe_checkpoint=[1]", "checkpointer.recipe_checkpoint: [1] ... file."),
    (
        "full",
        "checkpointer.checkpoint_files=[3]",
        f"checkpointer.checkpoint_files: [3] ... {FILES}",
    ),
    ("full", "checkpointer.model_type=LAMA2", "checkpointer.model_type: 'LAMA2' ... LLAMA2"),
    ("full", "checkpointer.output=x", "checkpointer.output: 'x' ... checkpointer.output_dir?"),
    ("full", "profiler=abc", "profiler: 'abc' ... a block of keys."),
    ("full", "profiler=[1]", "profiler: [1] ... a block of keys."),
    ("full", "profiler.wait_steps=abc", "profiler.wait_steps: 'abc' ... an integer >= 0."),
    ("full", "dataset_val=abc", "dataset_val: 'abc' ... a block whose _component_"),
    ("full", "dataset_val=[1]", "dataset_val[0]: 1 ... a block whose _component_"),
    ("full", "metric_logger.log_dir=null", "metric_logger.log_dir: None ... Must be a text."),
    ("full", "loss=${nope}", "loss: '${nope}' cannot be read: Interpolation key 'nope' not found"),
    ("full", "optimizer.lr=${no.pe}", "optimizer.lr: '${no.pe}' cannot be read"),
    ("full", "custom_sharded_layers=[a,'${nope}']", "custom_sharded_layers[1]: '${nope}' cannot"),
]


@pytest.mark.parametrize(("kind", "override", "line"), WRONG)
def test_a_wrong_argument_is_named_before_anything_is_built(
    kind: str, override: str, line: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        check_all(config(f"tiny/{kind}", override), KINDS[kind])
    assert_line(str(raised.value), line)


def check_all(cfg: DictConfig, kind: Kind) -> None:
    check(cfg, kind)
    check_components(cfg, kind)


def assert_line(said: str, line: str) -> None:
    begins, _, has = line.partition(" ... ")
    assert said.startswith(begins) and has in said and "\n" not in said


class CheckpointerOfMain:
    """One with the types of torchtune's main branch."""

    def __init__(
        self,
        checkpoint_dir: str,
        checkpoint_files: list[str],
        model_type: str,
        output_dir: str | None = None,
        adapter_checkpoint: str = "adapter_model.pt",
        recipe_checkpoint: str = "recipe_state.pt",
        should_load_recipe_state: bool = False,
    ) -> None: ...


def test_null_is_no_checkpoint_to_resume_from(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config("tiny/full", "checkpointer.adapter_checkpoint=null")
    monkeypatch.setattr(training, "FullModelHFCheckpointer", CheckpointerOfMain)
    check_components(cfg, KINDS["full"])


def test_an_argument_that_is_missing_is_named() -> None:
    cfg = config("tiny/full")
    del cfg.model.num_layers
    with pytest.raises(ConfigError, match=r"^model.num_layers: None is missing, and torchtune"):
        check_components(cfg, KINDS["full"])


@pytest.mark.parametrize("name", [one for one in our_configs() if not one.endswith("vision")])
def test_our_configs_have_what_their_components_take(name: str) -> None:
    cfg = config(name)
    check_components(cfg, kind_of(cfg))


def own(lr: int, **more: Any) -> dict[str, Any]:
    """A component of the user's own, which may not mean what its types say."""
    if "fails" in more:
        raise more["fails"]
    return {"lr": lr, **more}


def test_a_component_of_the_users_own_gets_what_is_written_and_keeps_its_traceback() -> None:
    block = OmegaConf.create({"_component_": f"{__name__}.own", "lr": "high", "other": 1})
    cfg = config("tiny/full")
    cfg.tokenizer = block
    check_components(cfg, KINDS["full"])
    assert make(block, "tokenizer", more=2) == {"lr": "high", "other": 1, "more": 2}
    with pytest.raises(ZeroDivisionError):
        make(block, "tokenizer", fails=ZeroDivisionError())
    with pytest.raises(ConfigError, match=r"tokenizer: .*No such file"):
        make(block, "tokenizer", fails=FileNotFoundError(2, "No such file", "x"))
    with pytest.raises(torch.OutOfMemoryError):
        make(block, "tokenizer", fails=torch.OutOfMemoryError())


def because_of(error: OSError, cause: BaseException | None, status: int | None = None) -> OSError:
    """An error that a library raises for another one, which a server may have answered."""
    error.__cause__ = cause
    if status is not None:
        error.response = SimpleNamespace(status_code=status)  # type: ignore[attr-defined]
    return error


NOT_THERE = FileNotFoundError(2, "No such file", "x")
MAY_PASS: dict[str, tuple[OSError, bool]] = {
    "no network": (ConnectionError("no route"), True),
    "stale handle": (OSError(errno.ESTALE, "Stale file handle"), True),
    "no answer": (because_of(FileNotFoundError("not cached"), ConnectionRefusedError()), True),
    "busy": (because_of(FileNotFoundError("not cached"), because_of(OSError(), None, 503)), True),
    "unknown": (because_of(FileNotFoundError("none"), because_of(OSError(), None, 404)), False),
    "private": (because_of(OSError("gated"), None, 401), False),
    "no file": (NOT_THERE, False),
    "no folder": (NotADirectoryError(errno.ENOTDIR, "Not a directory"), False),
}


@pytest.mark.parametrize(("error", "passes"), MAY_PASS.values(), ids=MAY_PASS)
def test_a_restart_is_in_vain_where_a_path_is_wrong_and_not_where_a_network_is_down(
    error: OSError, passes: bool
) -> None:
    block = OmegaConf.create({"_component_": f"{__name__}.own", "lr": 1})
    with pytest.raises(ConfigError) as refused:
        make(block, "dataset", fails=error)
    assert (refused.value.repeats, refused.value.everywhere) == (not passes, not passes)


ASK = """
from omegaconf import OmegaConf
from torchtune_adaptive.common import ConfigError
from torchtune_adaptive.recipe.components import make
try:
    make(OmegaConf.create({"_component_": "datasets.load_dataset", "path": "some/rows"}), "dataset")
except ConfigError as error:
    print("again" if error.repeats else "once")
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(("status", "said"), [(503, "once"), (404, "again")])
def test_what_datasets_makes_of_a_hub_that_does_not_answer(
    status: int, said: str, tmp_path: Path
) -> None:
    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        there = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(tmp_path)}
        there |= {"HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0"}
        command = [sys.executable, "-c", ASK]
        done = subprocess.run(
            command, env=os.environ | there, capture_output=True, text=True, timeout=200
        )
        hub.shutdown()
    assert done.stdout.strip() == said, done.stderr


def rows_of_the_second_attempt(*given: Any, **settings: Any) -> Any:
    """Rows that cannot be reached in the first attempt of a run; on one rank, which is enough."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
        raise ConnectionError("503 Service Unavailable")
    return instruct_dataset(*given, **settings)


@pytest.mark.exhaustive
def test_rows_that_cannot_be_reached_once_cost_one_attempt(tmp_path: Path) -> None:
    quick: dict[str, Any] = {"epochs": 1, "max_steps_per_epoch": 1}
    quick["dataset._component_"] = f"{__name__}.rows_of_the_second_attempt"
    with launched(tmp_path, [], "--max-restarts", "1", **quick) as run:
        assert run.wait(timeout=300) == 0, said(tmp_path)
    assert "cannot be made: ConnectionError: 503 Service Unavailable" in said(tmp_path)
    assert "Restart 1 of 1." in said(tmp_path)


def test_what_a_component_refuses_is_one_line() -> None:
    cfg = config("tiny/full", "model.num_heads=3")
    with pytest.raises(
        ConfigError, match=r"\(2\)\. Look at model.num_heads, model.num_kv_heads\.$"
    ):
        make(cfg.model, "model")


@pytest.mark.parametrize(
    ("annotation", "valid", "wrong"),
    [
        (int, [3, -1, 1e6], [None, "3", 1.5, True, [3]]),
        (float, [3, 0.5], [None, "3", True]),
        (bool, [True], [None, 1, "True"]),
        (str, ["", "a", 3], [None, True, ["a"], {}]),
        (int | None, [3, None], ["3"]),
        (list[str], [["a"], []], ["a", [None]]),
        (dict[str, str], [{"a": "b"}], ["a", ["a"]]),
        (float | torch.Tensor, [0.5], ["a", None]),
        (tuple[float, float], [[0.9, 0.95]], [0.9]),
    ],
)
def test_types_of_arguments(annotation: Any, valid: list[Any], wrong: list[Any]) -> None:
    rule = rule_of_argument(annotation)
    assert rule is not None
    for value in valid:
        rule.read("key", value)
    for value in wrong:
        with pytest.raises(ConfigError):
            rule.read("key", value)


def test_types_that_no_config_can_have_say_nothing() -> None:
    for annotation in (Any, torch.Tensor, torch.dtype, torch.Tensor | None):
        assert rule_of_argument(annotation) is None


# --- data -----------------------------------------------------------------------------------------

ROWS: list[tuple[dict[str, Any], str]] = [
    ({"tokenizer.path": "/nope/x.model"}, "tokenizer.path: '/nope/x.model' ... No such file"),
    ({"dataset.data_files": "/nope.json"}, "dataset.data_files: '/nope.json' ... Unable to find"),
    ({"dataset.data_files": "{}/empty.json"}, "dataset: ... has no rows. Look at dataset.source"),
    ({"dataset.data_files": "{}/none.json"}, "dataset: ... has no rows. Look at dataset.source"),
    (
        {"dataset.data_files": "{}/others.json"},
        "dataset: ... 'input', but the data has question, a",
    ),
    ({"dataset.split": "nope"}, "dataset.split: 'nope' ... Should be one of ['train']"),
    ({"dataset.pack": True}, "dataset.pack: True ... Did you mean dataset.packed?"),
    ({"tokenizer.prompt_template": "no.x"}, "tokenizer.prompt_template: 'no.x' cannot be used"),
    ({"run_val_every_n_steps": 1, "dataset_val.data_files": "/nope.json"}, "dataset_val.data_fi"),
]


@pytest.mark.parametrize(("changes", "line"), ROWS)
def test_data_that_is_not_there_is_named(
    changes: dict[str, Any], line: str, tmp_path: Path
) -> None:
    (tmp_path / "empty.json").write_text("")
    (tmp_path / "none.json").write_text("[]")
    (tmp_path / "others.json").write_text(json.dumps([{"question": "a", "answer": "b"}]))
    cfg = tiny_config("full", tmp_path)
    OmegaConf.update(cfg, "dataset_val", cfg.dataset, force_add=True)
    for key, value in changes.items():
        value = value.format(tmp_path) if isinstance(value, str) else value
        OmegaConf.update(cfg, key, value, force_add=True)
    with pytest.raises(ConfigError) as raised:
        load_rows(Asked.of(cfg))
    assert_line(str(raised.value), line)


class Drawn:
    """Rows that draw random numbers when they are made, and when one is read."""

    made = 0

    def __init__(self, tokenizer: Any, when_made: bool = False) -> None:
        Drawn.made += 1
        self.when_made = torch.rand(1) if when_made else None

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"tokens": [1, 2, int(torch.rand(1) < 2)], "labels": [1, 2, 3]}


@pytest.mark.parametrize("when_made", [False, True])
def test_data_is_made_before_the_model_and_draws_when_torchtunes_does(
    when_made: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    monkeypatch.setattr(Drawn, "made", 0)
    block = {"_component_": f"{__name__}.Drawn", "when_made": when_made}
    cfg = tiny_config("full", tmp_path)
    cfg.dataset = block

    class Stops(AdaptiveRecipe):
        kind = "full"

    recipe = Stops(cfg)
    with recipe.run as run:
        monkeypatch.setattr(run.kind, "checkpoints", lambda: order.append("model") or 1 / 0)
        before = torch.get_rng_state()
        with pytest.raises(ZeroDivisionError):
            recipe.setup(cfg)
        assert order == ["model"] and Drawn.made == 1
        assert torch.equal(torch.get_rng_state(), before)
        assert (run._rows is None) is when_made, "what has drawn is made again in its place"
    run.ranks.close()
    torch.distributed.destroy_process_group()


def test_generators_know_whether_a_number_was_drawn() -> None:
    generators = Generators(torch.device("cpu"))
    assert not generators.have_moved()
    torch.rand(1)
    assert generators.have_moved()
    generators.restore()
    assert not generators.have_moved()
