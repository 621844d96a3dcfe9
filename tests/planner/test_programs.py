"""Plans of programs: what they do on a GPU that is not there, unchanged, and what they do not do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.programs import MEMORY, PROGRAM, ROWS, STEP, TOKENS, WIDTH, planned, written
from torchtune_adaptive import plan_batch_size
from torchtune_adaptive.common import NoPrediction
from torchtune_adaptive.planner.programs import ProgramPlan

pytestmark = [pytest.mark.runs, pytest.mark.alternating]


def reserved(plan: ProgramPlan) -> int:
    return plan.answers[0].peak.reserved


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


def build() -> nn.Module:
    layers = (Block() for _ in range(3))
    return nn.Sequential(nn.Embedding(100, WIDTH), *layers, nn.Linear(WIDTH, 100))


def forward(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    tokens, labels = batch
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
    return loss, 1


def worst_case(rows: int) -> Any:
    tokens = torch.zeros(rows, TOKENS, dtype=torch.long)
    return tokens, tokens.clone()


def test_a_loop_takes_what_the_same_step_takes(tmp_path: Path) -> None:
    """As one plans a loop of one's own by its functions."""
    plan = planned(written(tmp_path))
    assert plan.about.seen is not None
    assert (plan.about.seen.rows, plan.about.seen.tokens, plan.micro_batches) == (ROWS, TOKENS, 1)
    assert not plan.about.compiles
    known = plan_batch_size(
        build,
        optimizer=torch.optim.AdamW,
        forward=forward,
        worst_case=worst_case,
        rows=ROWS,
        memory=MEMORY,
    )
    assert plan.answers[0].peak.allocated == pytest.approx(known.allocated, rel=0.001)
    assert reserved(plan) - known.peak in (0, 1 << 21)  # the loss of the step before is still there
    assert plan.answers[0].largest == pytest.approx(known.largest, rel=0.02)  # that has searched


def test_a_deep_model_takes_what_all_of_its_layers_take(tmp_path: Path) -> None:
    """Fewer of its layers are run."""
    few = [planned(written(tmp_path, layers=layers)) for layers in (12, 13, 40)]
    parameters = [plan.answers[0].peak.parts["parameters"] for plan in few]
    assert parameters[2] - parameters[0] == 28 * (parameters[1] - parameters[0])
    each = 4 * (2 * 4 * WIDTH * WIDTH + 5 * WIDTH)
    assert parameters[1] - parameters[0] == each
    of_state = [plan.answers[0].peak.parts["optimizer state"] for plan in few]
    assert of_state[2] - of_state[0] == 28 * 2 * each


def test_rows_and_tokens_are_those_that_are_asked_for(tmp_path: Path) -> None:
    path = written(tmp_path)
    most = planned(path, rows=2 * ROWS)
    longest = planned(path, length=2 * TOKENS)
    assert most.answers[0].peak.rows == 2 * ROWS
    assert longest.about.seen is not None and longest.about.seen.tokens == 2 * TOKENS
    parts = [plan.answers[0].peak.parts["activations"] for plan in (most, longest)]
    assert parts[0] == pytest.approx(parts[1], rel=0.01)


AUTOCAST = """
with torch.autocast("cuda", dtype=torch.bfloat16):
    logits = model(tokens)
    assert logits.dtype == torch.bfloat16 and logits.is_cuda and str(logits.device) == "cuda:0"
    loss = loss_of(logits.flatten(0, 1), labels.flatten())
assert loss.dtype == torch.float32
scaler.scale(loss / 2).backward()
if number % 2:
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""


def test_autocast_a_scaler_and_accumulation(tmp_path: Path) -> None:
    path = written(tmp_path, AUTOCAST, "scaler = torch.amp.GradScaler('cuda')")
    assert planned(path).micro_batches == 2


OF_DATA = """
mask = labels != -100
kept = model(tokens)[mask]
assert kept.shape[0] == mask.sum() == len(labels[mask].tolist())
assert labels[..., [-1]].tolist() == labels[:, -1:].tolist()
if mask.all():
    raise AssertionError("one row is shorter")
else:
    kept = kept[:: 2]
assert len(labels) * labels.shape[1] - mask.sum() == 1
loss = kept.square().mean()
print(f"loss {loss.item():.3f}", torch.cuda.max_memory_allocated() / torch.cuda.mem_get_info()[1])
losses.append(loss.item())
average = sum(losses) / len(losses)
optimizer.zero_grad()
loss.backward()
optimizer.step()
"""


def test_what_follows_from_data_is_known(tmp_path: Path) -> None:
    """Logged losses are not, and need not be."""
    assert planned(written(tmp_path, OF_DATA, "losses = []")).about.seen is not None


STOPS = """
loss = loss_of(model(tokens).flatten(0, 1), labels.flatten())
if loss.item() < best:
    best = 0.5
optimizer.zero_grad()
loss.backward()
optimizer.step()
"""


def test_what_follows_from_weights_is_asked_for_with_its_place(tmp_path: Path) -> None:
    path = written(tmp_path, STOPS, "best = 100")
    line = 1 + path.read_text().splitlines().index("    if loss.item() < best:")
    with pytest.raises(NoPrediction, match=rf"train.py:{line}: .*--assume train.py:{line}=VALUE"):
        planned(path)
    assert planned(path, assumed={f"train.py:{line}": True}).about.seen is not None


OWN_BATCHES = """
tokens = torch.randint(0, 100, (4, 32)).pin_memory().to(device, non_blocking=True)
loss = model(tokens).float().logsumexp(-1).mean()
optimizer.zero_grad(set_to_none=True)
loss.backward()
optimizer.step()
"""


def test_batches_without_a_loader_are_as_they_are(tmp_path: Path) -> None:
    text = PROGRAM.partition("for number, batch")[0] + "for number in range(9):\n{step}\n"
    path = written(tmp_path, OWN_BATCHES, text=text)
    plan = planned(path)
    assert plan.about.seen is None and plan.answers[0].fits
    with pytest.raises(NoPrediction, match="--rows: 3, but no DataLoader makes the batches"):
        planned(path, rows=3)


WRITES = """
import os, pathlib, socket
folder = pathlib.Path(sys.argv[1])
(folder / "logs").mkdir()
with open(folder / "logs" / "log.txt", "w") as file:
    file.write("begun")
assert (folder / "logs" / "log.txt").read_text() == "begun"
(folder / "kept.txt").write_text("changed")
assert open(folder / "kept.txt").read() == "changed" and (folder / "other.txt").read_text() == "there"
(folder / "other.txt").unlink()
os.rename(folder / "logs" / "log.txt", folder / "log.txt")
torch.save(model.state_dict(), folder / "model.pt")
try:
    socket.create_connection(("192.0.2.1", 80), timeout=5)
except OSError as error:
    assert "a plan does not connect" in str(error), error
else:
    raise AssertionError("connected")
"""


def test_nothing_is_written_and_nobody_is_called(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "kept.txt").write_text("as it was")
    (folder / "other.txt").write_text("there")
    planned(written(tmp_path, before=WRITES), str(folder))
    assert {path.name for path in folder.iterdir()} == {"kept.txt", "other.txt"}
    assert (folder / "kept.txt").read_text() == "as it was"
    assert not [*tmp_path.glob("**/__pycache__")]


def test_what_fails_is_said_with_its_place(tmp_path: Path) -> None:
    path = written(tmp_path, "raise ValueError('no such thing')")
    line = len(path.read_text().splitlines())
    with pytest.raises(NoPrediction, match=rf"train.py:{line}\): ValueError: no such thing"):
        planned(path)


@pytest.mark.parametrize(
    ("step", "before", "reason"),
    [
        (STEP, "sys.exit()", "ended before it put a model on the GPU|ended after 0 steps"),
        (f"{STEP}\nif number == 1: break", "", "ended after 2 steps"),
        (STEP, "sys.exit(3)", "SystemExit: 3"),
        ("pass", "", "ended after 0 steps"),
    ],
)
def test_what_does_not_train_is_said(tmp_path: Path, step: str, before: str, reason: str) -> None:
    with pytest.raises(NoPrediction, match=reason):
        planned(written(tmp_path, step, before))


def test_what_is_compiled_is_an_upper_bound(tmp_path: Path) -> None:
    plan = planned(written(tmp_path, before="model = torch.compile(model)"))
    as_written = planned(written(tmp_path))
    assert plan.about.compiles and reserved(plan) == reserved(as_written)


READS = """
import json, pathlib
from datasets import load_dataset

rows = load_dataset("json", data_files=sys.argv[1], split="train")


def encoded(row):
    ids = [1] * sum(len(one["content"]) for one in row["messages"])
    return dict(input_ids=ids, labels=ids)


rows = rows.map(encoded, remove_columns=rows.column_names).with_format("torch")
loader = DataLoader(rows, batch_size=3, collate_fn=collate, shuffle=True)
"""


def test_of_many_rows_some_are_read_and_the_longest(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    lengths = [2 + number % 7 for number in range(5000)]
    lengths[4321] = 77
    messages = (
        [{"role": "user", "content": "x" * (length - 1)}, {"content": "y"}] for length in lengths
    )
    data.write_text("\n".join(json.dumps({"messages": one}) for one in messages))
    seen = planned(written(tmp_path, before=READS), str(data)).about.seen
    assert seen is not None and (seen.rows, seen.tokens, seen.there) == (3, 77, 5000)
    assert seen.read < 2100


def test_layers_that_are_made_different_are_all_run(tmp_path: Path) -> None:
    """The model's layers are alike when it is made, and some are frozen then."""
    freezes = "for layer in model.layers[:{}]: layer.requires_grad_(False)"
    plans = [planned(written(tmp_path, before=freezes.format(n), layers=12)) for n in (0, 8, 12)]
    states = [plan.answers[0].peak.parts["optimizer state"] for plan in plans]
    each = 2 * 4 * (2 * 4 * WIDTH * WIDTH + 5 * WIDTH)
    assert states[0] - states[1] == 8 * each and states[1] - states[2] == 4 * each
    one = "model.layers[10].requires_grad_(False)"  # which is not there where there are few
    plan = planned(written(tmp_path, before=one, layers=12))
    assert states[0] - plan.answers[0].peak.parts["optimizer state"] == each


TWO_KINDS = f"""
extra = model(tokens).logsumexp(-1) if number % 2 else None
{STEP}
del extra
"""


def test_steps_that_differ_are_run_to_the_same_one(tmp_path: Path) -> None:
    """Where they do not, fewer are run with other rows."""
    answers = [planned(written(tmp_path, step)).answers[0] for step in (STEP, TWO_KINDS)]
    assert answers[0] == answers[1]


AHEAD = """
def ahead():
    for _ in range(9):
        before = None
        for batch in loader:
            batch = {name: one.to(device) for name, one in batch.items()}
            if before is not None:
                yield before
            before = batch
        yield before


"""


def test_epochs_may_have_fewer_steps_than_are_run(tmp_path: Path) -> None:
    """Batches are made ahead, but for the last of an epoch."""
    text = PROGRAM.replace("enumerate(loader)", "enumerate(ahead())")
    text = text.replace(
        "for number, batch", AHEAD.replace("{", "{{").replace("}", "}}") + "for number, batch"
    )
    plans = []
    for rows in (200, ROWS, 2 * ROWS, 3 * ROWS):
        of_rows = text.replace("range(200)", f"range({rows})")
        of_rows = of_rows.replace("number % {tokens} + 1", "{tokens} - number % 2")
        plans.append(planned(written(tmp_path, text=of_rows)).answers[0].peak.allocated)
    assert plans[0] == pytest.approx(max(plans), rel=0.001)
    assert plans[0] == pytest.approx(min(plans), rel=0.001)


ROUTES = """
scores = model(tokens)
chosen = scores.topk(2, dim=-1)[1]
assert str(chosen.sum().item()) == "unknown"
parts = [scores[(chosen == one).any(-1)] for one in chosen.unique()]
assert len(parts) == int(sys.argv[1])
loss = sum(part.square().mean() for part in parts)
optimizer.zero_grad()
loss.backward()
optimizer.step()
"""


def test_what_a_router_chooses_is_assumed_and_said(tmp_path: Path) -> None:
    path = written(tmp_path, ROUTES)
    line = 1 + path.read_text().splitlines().index("    chosen = scores.topk(2, dim=-1)[1]")
    place = f"train.py:{line}"
    even, worst = (
        planned(path, number, assumed=assumed)
        for number, assumed in (("100", {}), ("2", {place: "worst"}))
    )
    assert (
        f"--assume {place}=worst" in dict(even.about.choices)[place]
        and len(even.about.choices) == 1
    )
    assert worst.about.choices == ((place, "the same each time"),)
    assert not planned(written(tmp_path)).about.choices


NEXT = """
def moved():
    batches = iter(loader)
    batch = next(batches)
    while True:
        batch = {name: one.to(device) for name, one in batch.items()}
        following = next(batches)
        yield batch
        batch = following


"""


def test_what_is_made_ahead_is_there_in_the_next_step(tmp_path: Path) -> None:
    """A batch is moved to the device before the one after it is asked for, as accelerate does."""
    text = PROGRAM.replace("enumerate(loader)", "enumerate(moved())")
    text = text.replace(
        "for number, batch", NEXT.replace("{", "{{").replace("}", "}}") + "for number, batch"
    )
    parts = planned(written(tmp_path, text=text)).answers[0].peak.parts
    assert parts["inputs"] >= 2 * ROWS * TOKENS * 8
