"""The memory that control groups leave, on trees of files like those of Linux."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchtune_adaptive.recipe.setup.cgroups import limiting_groups

GIB = 1 << 30
NO_LIMIT = 9223372036854771712  # as version 1 says it


def made(root: Path, membership: str, files: dict[str, object]) -> list[tuple[int, int]]:
    """What is available and the limit of each limiting group, in GiB."""
    for path, text in {"proc/self/cgroup": membership, **files}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(f"{text}\n")
    return [(group.available // GIB, group.total // GIB) for group in limiting_groups(root)]


def second(group: str, limit: object, used: int, cached: int = 0) -> dict[str, object]:
    folder = f"sys/fs/cgroup{group}"
    stat = f"anon 1\nfile {2 * cached}\ninactive_file {cached}\nactive_file {cached}"
    return {
        f"{folder}/memory.max": limit,
        f"{folder}/memory.current": used,
        f"{folder}/memory.stat": stat,
    }


def first(group: str, limit: int, used: int, cached: int = 0) -> dict[str, object]:
    folder = f"sys/fs/cgroup/memory{group}"
    stat = f"inactive_file 5\ntotal_inactive_file {cached}\ntotal_active_file {cached}"
    return {
        f"{folder}/memory.limit_in_bytes": limit,
        f"{folder}/memory.usage_in_bytes": used,
        f"{folder}/memory.stat": stat,
    }


def test_each_group_above_limits_too_and_cached_files_are_given_back(tmp_path: Path) -> None:
    files = second("/kubepods/pod/container", 16 * GIB, 10 * GIB, cached=2 * GIB)
    files |= second("/kubepods/pod", "max", 12 * GIB)
    files |= second("/kubepods", 64 * GIB, 60 * GIB)
    assert made(tmp_path, "0::/kubepods/pod/container", files) == [(10, 16), (4, 64)]


def test_version_1(tmp_path: Path) -> None:
    files = first("/slurm/job", 32 * GIB, 8 * GIB, cached=GIB) | first("/slurm", NO_LIMIT, GIB)
    membership = "9:cpu,cpuacct:/elsewhere\n4:memory:/slurm/job\n0::/"
    assert made(tmp_path, membership, files) == [(26, 32)]


@pytest.mark.parametrize("path", ["/", "/docker/of_the_machine", "/../sibling"])
def test_in_a_container_only_the_top_may_be_there(tmp_path: Path, path: str) -> None:
    found = made(tmp_path, f"0::{path}", second("", 8 * GIB, 9 * GIB, cached=GIB))
    assert found == [(1, 8)]


def test_no_limit_and_no_groups(tmp_path: Path) -> None:
    assert limiting_groups(tmp_path) == []
    assert made(tmp_path, "0::/", {}) == []
    assert made(tmp_path, "0::/", second("", "max", GIB)) == []
