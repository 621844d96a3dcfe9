"""What stands in the output folder of a run may be links: nothing is written through them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.recipes import tiny_config
from tests.helpers.runs import RESUME, train
from torchtune_adaptive.recipe.record import CONFIG_NAME, REPORT_NAME
from torchtune_adaptive.recipe.train.attempts import ATTEMPTS_NAME, Attempt, Attempts
from torchtune_adaptive.recipe.train.curves import PLOT_NAME
from torchtune_adaptive.recipe.train.events import EVENTS_NAME, Events

WRITTEN = (
    *(ATTEMPTS_NAME, REPORT_NAME, CONFIG_NAME, EVENTS_NAME, PLOT_NAME),
    *("batch_size_search.json", "batch_size_search.png"),
)
SEARCHES = {
    "use_maximum_batch_size": True,
    "adaptive_batching.memory_limit": "12MiB",
    "adaptive_batching.ceiling": 2,
    "max_steps_per_epoch": 1,
}


@pytest.mark.runs
def test_a_run_writes_through_no_link_in_its_folder(tmp_path: Path) -> None:
    """Each leads to a file of the user's, which stays as it is; reports and config take the links' places."""
    pytest.importorskip("matplotlib")
    out, others = tmp_path / "out", tmp_path / "home"
    for folder in (out, others):
        folder.mkdir()
    for name in WRITTEN:
        (others / name).write_text("mine")
        (out / name).symlink_to(others / name)
    disk = {"metric_logger._component_": "torchtune.training.metric_logging.DiskLogger"}
    train("full", out, draws=True, **SEARCHES, **disk, **RESUME)
    assert {name: (others / name).read_text() for name in WRITTEN} == dict.fromkeys(WRITTEN, "mine")
    written = {name for name in WRITTEN if not (out / name).is_symlink()}
    assert written >= {REPORT_NAME, CONFIG_NAME, "batch_size_search.json", "batch_size_search.png"}
    assert tiny_config("full", out).output_dir in (out / CONFIG_NAME).read_text()


def test_what_is_appended_is_not_written_through_a_link(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    victim = tmp_path / "victim"
    victim.write_text('{"ranks": 7, "number": 9}')
    for name in (EVENTS_NAME, ATTEMPTS_NAME):
        (tmp_path / name).symlink_to(victim)
    Events(tmp_path).noticed(3, "something")
    attempts = Attempts(tmp_path, Attempt(1), resumes=True)
    assert attempts.before is None, "nor read"
    attempts.reached(4)
    attempts.close()
    assert victim.read_text() == '{"ranks": 7, "number": 9}'
    assert "was not written" in caplog.text
