"""``plan --hf ORG/NAME``: from a cache, from a Hub on this machine, and what is said where neither has it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.helpers.hub import cached, hub
from tests.helpers.hugging_face import LLAMA_1B
from tests.helpers.runs import BIN
from torchtune_adaptive.cli.hub import GivenModel, model_of, require_config
from torchtune_adaptive.common import ConfigError

ROOT = Path(__file__).parents[2]
TINY = {
    **LLAMA_1B,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "vocab_size": 128,
    "rope_scaling": None,
}
TINY |= {
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def plan(
    *words: str,
    home: Path,
    endpoint: str = "http://127.0.0.1:9",
    command: Sequence[str] = (str(BIN / "tune-adaptive"),),
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """The command, with a cache of its own and without the settings of this process."""
    outer = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    mine = {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "NO_PROXY": "127.0.0.1", **environment}
    return subprocess.run(
        [*command, "plan", *words],
        cwd=home,
        env=outer | mine,
        capture_output=True,
        text=True,
        timeout=300,
    )


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    """The error, which is one line."""
    assert done.returncode == 2 and not done.stdout
    errors = [line for line in done.stderr.splitlines() if "tune-adaptive plan: error:" in line]
    assert len(errors) == 1 and "Traceback" not in done.stderr, done.stderr
    return errors[0]


def test_a_folder_comes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("org/one")
    folder.mkdir(parents=True)
    for given in ("org/one", "org/one/config.json", str(tmp_path / "org" / "one")):
        assert model_of(given).folder.samefile(folder)
        assert model_of(given).name == "one" and not model_of(given).about
    assert model_of("no/such/folder") == GivenModel("folder", Path("no/such/folder"))


def test_what_is_in_the_cache_is_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folder = cached(tmp_path, "meta-llama/Llama-3.2-1B", LLAMA_1B)
    found = model_of("meta-llama/Llama-3.2-1B")
    assert found.folder == folder
    source, configs = found.about
    assert source == (
        "config.json: of meta-llama/Llama-3.2-1B, in the Hub's local cache, revision 0123456"
    )
    assert "has configs for meta-llama/Llama-3.2-1B: llama3_2/1B_" in configs
    cached(tmp_path, "org/other", LLAMA_1B)
    assert len(model_of("org/other").about) == 1, "torchtune has no config of that name"


def test_without_the_client_its_name_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"'org/one' is no folder here.* pip install hugging"):
        model_of("org/one")


@pytest.mark.parametrize("name", ["org/a--b", f"org/{'x' * 97}"])
def test_what_cannot_be_a_name(name: str) -> None:
    with pytest.raises(ConfigError, match=r"nor a name that the Hub can have .* or give a folder"):
        model_of(name)


def test_only_the_config_is_downloaded_and_only_once(tmp_path: Path) -> None:
    """The client is real; it reads its variables when it is imported."""
    program = (
        "import sys; from torchtune_adaptive.cli.hub import model_of\n"
        "found = model_of('org/one'); print(found.folder, found.source, sep='|')\n"
        "assert 'torch' not in sys.modules"
    )
    with hub(one=TINY) as server:
        names = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": server.address, "HF_TOKEN": "hf_secret"}
        outer = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        said = [
            subprocess.check_output(
                [sys.executable, "-c", program], env=outer | names, text=True, timeout=120
            ).strip()
            for _ in range(2)
        ]
    first, second = (line.split("|") for line in said)
    assert first[0] == second[0] and Path(first[0]).is_relative_to(tmp_path)
    assert [*map(str, Path(first[0]).iterdir())] == [f"{first[0]}/config.json"]
    assert (first[1], second[1]) == (
        "from the Hub, revision 0123456",
        "in the Hub's local cache, revision 0123456",
    )
    assert {one.partition(" ")[2] for one in server.asked} == {"/org/one/resolve/main/config.json"}
    assert server.tokens == {"Bearer hf_secret"}
    assert sum(one.startswith("GET") for one in server.asked) == 1


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("GatedRepo", "'org/one' is gated, and no token gives no access to it. Ask for access at "),
        ("RepoNotFound", "is neither a folder here nor a model that http://127.0.0.1"),
        ("EntryNotFound", "has no config.json, as repositories of adapters or GGUF files. Name"),
        ("", "answers with status 503. Try again later"),
        ("silent", "cannot be reached (ReadTimeout: "),
        pytest.param(
            "slow",
            "cannot be reached (TimeoutError: no answer in 20 s). Look at the network",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_what_the_hub_refuses_is_one_line(code: str, complaint: str, tmp_path: Path) -> None:
    with hub(one=code) as server:
        line = refusal(plan("--hf", "org/one", home=tmp_path, endpoint=server.address))
    assert complaint in line
    assert "(`hf download org/one config.json --local-dir DIR`) and give --hf DIR." in line
    assert len(server.asked) <= 3, "it tries again and again"


def test_a_token_without_access(tmp_path: Path) -> None:
    with hub(one="GatedRepo") as server:
        done = plan("--hf", "org/one", home=tmp_path, endpoint=server.address, HF_TOKEN="hf_secret")
    assert "is gated, and your token gives no access to it" in refusal(done)
    assert "hf_secret" not in done.stderr


def test_without_a_network(tmp_path: Path) -> None:
    with socket.socket() as unused:  # bound, but nobody listens
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        line = refusal(plan("--hf", "Qwen/Qwen2.5-7B", home=tmp_path, endpoint=endpoint))
    assert f"and {endpoint} cannot be reached (ConnectError: " in line
    assert "torchtune's configs of this model: qwen2_5/7B_full_single_device, " in line


def test_offline(tmp_path: Path) -> None:
    line = refusal(plan("--hf", "org/one", home=tmp_path, HF_HUB_OFFLINE="1"))
    assert f"is not in the local cache ({tmp_path}/hub), and HF_HUB_OFFLINE is set. Unset" in line


@pytest.mark.exhaustive
@pytest.mark.runs
def test_a_name_is_all_that_a_plan_needs(tmp_path: Path, beside_trl: Path) -> None:
    command = (str(beside_trl), "-m", "torchtune_adaptive")
    with hub(one=TINY) as server:
        words = ("--hf", "org/one", "--seq-len", "32", "--memory", "1GiB")
        own = {"endpoint": server.address, "PYTHONPATH": str(ROOT)}
        done = plan(*words, home=tmp_path, command=command, **own)
    assert done.returncode == 0, done.stderr
    assert "config.json: of org/one, from the Hub, revision 0123456" in done.stdout


@pytest.mark.parametrize(("text", "complaint"), [("{", "is not JSON"), ("[]", "JSON object")])
def test_a_file_that_makes_no_sense(text: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        require_config(tmp_path)
