"""A folder that is locked: for which processes, for how long, and what is said of another machine's lock."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from torchtune_adaptive.common import FolderInUse, FolderLock, folder_lock

TAKE = """
import sys
from pathlib import Path
from torchtune_adaptive.common import FolderInUse, FolderLock
try:
    FolderLock(Path(sys.argv[1]))
    print("taken", flush=True)
    sys.stdin.readline()
except FolderInUse as error:
    print(error, flush=True)
"""


@contextmanager
def elsewhere(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Another process that takes the folder, and what it says."""
    command = [sys.executable, "-c", TAKE, str(folder)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        try:
            yield other, other.stdout.readline().strip()
        finally:
            other.kill()


def is_free(folder: Path) -> bool:
    with elsewhere(folder) as (_, said):
        assert said == "taken" or "another run is using it (process " in said
        return said == "taken"


def test_it_is_kept_until_all_have_released_it_and_only_then_is_free(tmp_path: Path) -> None:
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    second.release()
    second.release()
    assert not is_free(tmp_path)
    first.release()
    assert is_free(tmp_path)


def test_two_names_of_a_folder_are_one(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to("out")
    first, second = FolderLock(tmp_path / "out"), FolderLock(tmp_path / "link")
    first.release()
    assert not is_free(tmp_path / "out")
    second.release()
    assert is_free(tmp_path / "out")


def test_who_reads_the_file_does_not_free_the_folder(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    said = (tmp_path / ".lock").read_text()
    assert said == f"process {os.getpid()} on {socket.gethostname()}"
    assert not is_free(tmp_path)
    lock.release()


def test_a_folder_made_anew_is_another(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    before = FolderLock(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "moved")
    (tmp_path / "out").mkdir()
    after = FolderLock(tmp_path / "out")
    assert not is_free(tmp_path / "out")
    before.release()
    assert not is_free(tmp_path / "out")
    after.release()


def test_a_forked_process_neither_has_it_nor_keeps_it(tmp_path: Path) -> None:
    """As one that loads data, and ends a moment after the run."""
    lock = FolderLock(tmp_path)
    release, wait = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            lock.release()
            try:
                FolderLock(tmp_path)
            except FolderInUse:
                status = 0
            os.close(wait)
            os.read(release, 1)
        finally:
            os._exit(status)
    os.close(release)
    assert not is_free(tmp_path)
    lock.release()
    assert is_free(tmp_path), "although the child still runs"
    os.close(wait)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_link_in_its_place_is_not_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "out/.lock").symlink_to(tmp_path / "precious")
    FolderLock(tmp_path / "out").release()
    assert (tmp_path / "precious").read_text() == "precious"
    (line,) = caplog.messages
    assert "cannot be locked (Too many levels of symbolic links)" in line


def test_the_lock_of_another_machine_is_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with elsewhere(tmp_path) as (other, said):
        assert said == "taken"
        (tmp_path / ".lock").write_text("process 7 on node17")
        threading.Timer(0.5, other.kill).start()
        lock = FolderLock(tmp_path)
    (line,) = caplog.messages
    assert "process 7 on node17 has locked it. Waiting up to 180 s" in line
    assert not is_free(tmp_path)
    lock.release()


def test_who_lives_on_another_machine_is_named_after_the_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_lock, "LEASE", 0.5)
    with elsewhere(tmp_path):
        (tmp_path / ".lock").write_text("process 7 on node17")
        began = time.monotonic()
        with pytest.raises(FolderInUse, match=r"another run is using it \(process 7 on node17\)"):
            FolderLock(tmp_path)
        assert time.monotonic() - began >= 0.5
        (tmp_path / ".lock").write_text("")
        with pytest.raises(FolderInUse, match=r"is using it \(unknown\)"):
            FolderLock(tmp_path)


def test_no_file_stays_open_where_it_is_in_use(tmp_path: Path) -> None:
    def files() -> int:
        return len(os.listdir("/proc/self/fd"))

    with elsewhere(tmp_path):
        before = files()
        for _ in range(3):
            with pytest.raises(FolderInUse):
                FolderLock(tmp_path)
        assert files() == before
