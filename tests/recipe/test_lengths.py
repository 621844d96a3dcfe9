"""Row lengths are looked up once, and cached as long as they are true."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.helpers.ranks import Alone
from torchtune_adaptive.recipe.data.row_lengths import RowLengths


class Rows(list[dict[str, list[int]]]):
    """Counts how often a row is looked at."""

    looked = 0

    def __getitem__(self, index: Any) -> Any:
        self.looked += 1
        return super().__getitem__(index)


def dataset(lengths: list[int]) -> Rows:
    return Rows({"tokens": list(range(length))} for length in lengths)


CFG = OmegaConf.create({"dataset": {"source": "a"}, "tokenizer": {"path": "b"}})


def look(rows: Rows, folder: Path, cfg: Any = CFG) -> list[int]:
    return RowLengths(rows, cfg, Alone(), str(folder)).all(say_progress=False)


def test_they_are_cached(tmp_path: Path) -> None:
    lengths = [n % 7 + 1 for n in range(1000)]
    first, second = dataset(lengths), dataset(lengths)
    assert look(first, tmp_path) == lengths and first.looked == 1000
    assert look(second, tmp_path) == lengths and second.looked < 100


def test_another_tokenizer_is_another_matter(tmp_path: Path) -> None:
    look(dataset([3, 4]), tmp_path)
    other = OmegaConf.create({**CFG, "tokenizer": {"path": "c"}})
    assert look(dataset([5, 6]), tmp_path, other) == [5, 6]


@pytest.mark.parametrize("several", [False, True], ids=["a dataset", "a list of datasets"])
def test_a_dataset_may_refer_to_the_rest_of_the_config(tmp_path: Path, several: bool) -> None:
    def cfg(assets: str) -> Any:
        one = {"source": "${assets}/data.json"}
        dataset = [one] if several else one
        return OmegaConf.create({**CFG, "assets": assets, "dataset": dataset})

    assert look(dataset([3, 4]), tmp_path, cfg("here")) == [3, 4]
    assert look(dataset([5, 6]), tmp_path, cfg("there")) == [5, 6]


def test_what_is_stale_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    look(dataset([3, 4, 5]), tmp_path)
    with caplog.at_level("WARNING"):
        assert look(dataset([3, 4, 6]), tmp_path) == [3, 4, 6]
    assert "row 2 had 5 tokens and now has 6" in caplog.text
    assert look(dataset([3, 4, 6]), tmp_path) == [3, 4, 6]


@pytest.mark.parametrize("spoilt", [b"", b"nonsense", b'{"value": [3, 5], "facts": {}}'])
def test_what_is_spoilt_is_looked_up_again(tmp_path: Path, spoilt: bytes) -> None:
    look(dataset([3, 4]), tmp_path)
    (path,) = tmp_path.rglob("*.json")
    path.write_bytes(spoilt)
    assert look(dataset([3, 4]), tmp_path) == [3, 4]
    assert json.loads(path.read_text())["value"] == [3, 4]


def test_nothing_is_cached_where_the_cache_is_off(tmp_path: Path) -> None:
    rows = dataset([3, 4])
    assert RowLengths(rows, CFG, Alone(), False).all(say_progress=False) == [3, 4]
