"""Lightning's trainer on a tiny Llama: what is logged, and the weights, are those of the plain module."""

from __future__ import annotations

import logging
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from tests.integrations.real.trainers import (
    AS_CONFIGURED,
    SEARCHING,
    Loss,
    Padding,
    Result,
    distance,
    llama,
    on_ranks,
    rank,
    tokens,
)
from torchtune_adaptive import UsageError
from torchtune_adaptive.integrations import Adaptive
from torchtune_adaptive.integrations.lightning import adaptive

pl = pytest.importorskip("lightning.pytorch")
pytestmark = [pytest.mark.exhaustive, pytest.mark.ranks]
CLOSE = 1e-6


class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
    num_items = 96  # of a catalog, say: the module's own

    def __init__(self) -> None:
        super().__init__()
        self.model, self.calls = llama(), 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        loss = self.model(**batch).loss
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return {"loss": loss}

    def validation_step(self, batch: Any) -> None:
        self.log("val_loss", self.model(**batch).loss)

    def adaptive_num_items(self, batch: Any) -> int:
        return int((batch["labels"][:, 1:] != -100).sum())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Normalized(Module):
    """Has a layer that normalizes over a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(self.model.config.hidden_size)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        made = super().training_step(batch, batch_idx)
        embedded = self.model.model.embed_tokens(batch["input_ids"]).mean(1)
        return {"loss": made["loss"] + self.norm(embedded).relu().mean()}


class Sharded(Module):
    def configure_model(self) -> None:
        for layer in (*self.model.model.layers, self.model):
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])


class Seeing(pl.Callback):  # type: ignore[misc, name-defined]
    """What a callback sees of each step after those that were taken before."""

    def __init__(self, begun: int) -> None:
        self.begun = begun
        self.steps: list[dict[str, float]] = []
        self.norm = 0.0
        self.outputs = 0.0

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        norm = torch.nn.utils.get_total_norm(
            [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
        )
        self.norm = float(getattr(norm, "full_tensor", lambda: norm)())

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, _: int
    ) -> None:
        self.outputs += float(outputs["loss"])
        if trainer.global_step > self.begun + len(self.steps):
            [group] = trainer.optimizers[0].param_groups
            logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
            rows = {"rows": len(batch["input_ids"]), "outputs": self.outputs}
            self.steps.append(
                logged | rows | {"grad_norm": self.norm, "learning_rate": group["lr"]}
            )
            self.outputs = 0.0


def fit(
    options: Adaptive | None,
    lost: Loss | None = None,
    *,
    kind: type[Module] = Module,
    folder: str | None = None,
    resume: str | None = None,
    data: Any = None,
    rows: int = 4,
    workers: int = 0,
    **settings: Any,
) -> Result:
    """The result of a training; plain without options."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    begun = int(Path(resume).stem.partition("=")[2]) if resume else 0
    seeing = Seeing(begun)
    module = kind() if options is None else adaptive(kind, options)()
    callbacks: list[Any] = [seeing]
    if folder:
        callbacks.append(
            pl.callbacks.ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=3)
        )
    arguments = {"max_epochs": 2, "gradient_clip_val": 0.5, "accelerator": "cpu"} | settings
    trainer = pl.Trainer(
        **arguments,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=bool(folder),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    left = 0 if lost is None or lost.rank != rank() else lost.times

    def lose(*_: Any) -> None:
        nonlocal left
        if left and trainer.training and trainer.global_step == lost.step:  # type: ignore[union-attr]
            left -= 1
            raise torch.OutOfMemoryError("CUDA out of memory (injected)")

    module.model.model.layers[1].register_forward_pre_hook(lose)
    data = tokens(24) if data is None else data
    loading = {"collate_fn": Padding(), "num_workers": workers}
    loader = torch.utils.data.DataLoader(data, batch_size=rows, **loading)
    validating = torch.utils.data.DataLoader(tokens(8), batch_size=4, collate_fn=Padding())
    trainer.fit(module, loader, validating, ckpt_path=resume)
    assert not left and trainer.global_step == len(seeing.steps) + begun
    whole = [getattr(p, "full_tensor", lambda p=p: p)() for p in module.parameters()]
    step = getattr(module, "_step", None)
    sizes = (step._size, step._step._runner.size) if step else None
    weights = torch.cat([p.detach().float().flatten() for p in whole])
    return Result(seeing.steps, weights, sizes, {"calls": module.calls})


SEEN = ("loss", "grad_norm", "learning_rate", "val_loss", "rows", "outputs")
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"accumulate_grad_batches": 2},
    "accumulated, a short end": {"accumulate_grad_batches": 4},
    "no clipping": {"gradient_clip_val": None},
    "clipped by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "validated within an epoch": {"val_check_interval": 2},
    "workers": {"workers": 2},
    "autocast": {"precision": "bf16-mixed"},
    "ragged": {"data": "ragged"},
}


def compare(settings: dict[str, Any]) -> dict[str, Any]:
    if settings.get("data") == "ragged":
        settings = settings | {"data": tokens(24, ragged=True)}
    plain = fit(None, **settings)
    equal = fit(AS_CONFIGURED, **settings)
    searched = fit(SEARCHING, **settings)
    lost = fit(AS_CONFIGURED, Loss(), **settings)
    budget = fit(replace(AS_CONFIGURED, token_budget=True), **settings)
    accumulated = settings.get("accumulate_grad_batches", 1) > 1
    names = [name for name in SEEN if not (accumulated and name in ("loss", "val_loss"))]
    if not accumulated:
        ours = {"adaptive/micro_batch", "adaptive/retried_steps"}
        assert [name for name in equal.logs[-1] if name not in ours] == [*plain.logs[-1]]
    epochs = [
        [entry["loss_epoch"] for entry in one.logs if "loss_epoch" in entry]
        for one in (plain, equal, lost)
    ]
    return {
        "equal": distance(equal, plain, *names[:3]),
        "far": [distance(one, plain, *names[:3]) for one in (searched, lost, budget)],
        "outputs": distance(equal, plain, "outputs"),
        "same weights": torch.equal(equal.weights, plain.weights),
        "steps": len(plain.logs) == len(equal.logs) == len(lost.logs),
        "epochs": max(
            abs(a / b - 1) for one in epochs[1:] for a, b in zip(one, epochs[0], strict=True)
        ),
        "sizes": [searched.sizes, lost.sizes],
    }


@pytest.mark.parametrize("name", SETTINGS)
def test_one_process(name: str) -> None:
    [seen] = on_ranks(compare, 1, SETTINGS[name])
    loose = 2e-3 if name == "autocast" else CLOSE
    assert seen["steps"], seen
    assert seen["equal"] <= (loose if name == "autocast" else CLOSE), seen
    assert max(*seen["far"], seen["outputs"], seen["epochs"]) <= loose, seen
    assert seen["sizes"][0][0] >= 4 and seen["sizes"][1] == (4, 1), seen


class Comparing(Module):
    """Tells the rows of a batch apart: the loss of one alone is 0."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows = self.model.model.embed_tokens(batch["input_ids"]).mean(1)
        similar = rows @ torch.roll(rows, 1, 1).T * 1e3
        return torch.nn.functional.cross_entropy(similar, torch.arange(len(rows)))


def undivided(kind: type[Module]) -> list[Any]:
    settings = {"kind": kind, "accumulate_grad_batches": 2}
    runs = [fit(each, **settings) for each in (None, AS_CONFIGURED, SEARCHING)]
    plain, equal, searched = runs
    same = [torch.equal(each.weights, plain.weights) for each in (equal, searched)]
    return [*same, searched.sizes]


@pytest.mark.parametrize("kind", [Normalized, Comparing])
def test_what_is_of_a_whole_batch_is_not_divided(kind: type[Module]) -> None:
    assert on_ranks(undivided, 1, kind) == [[True, True, (4, 4)]]


def compare_on_ranks(way: str) -> dict[str, Any]:
    os.environ["NODE_RANK"] = "0"
    if way == "ddp":
        settings: dict[str, Any] = {"strategy": "ddp", "kind": Module}
    else:
        strategy = pl.strategies.ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        settings = {"strategy": strategy, "kind": Sharded}

    def once(*args: Any, **named: Any) -> Result:
        if way != "ddp":
            named["strategy"] = pl.strategies.ModelParallelStrategy(
                data_parallel_size=2, tensor_parallel_size=1
            )
        return fit(*args, **settings | named, devices=2, accumulate_grad_batches=2, data=tokens(64))

    plain = once(None)
    ours = [once(AS_CONFIGURED), once(SEARCHING), once(replace(SEARCHING, token_budget=True))]
    ours += [once(AS_CONFIGURED, Loss(1 + on, on)) for on in (0, 1)]
    assert dist.get_world_size() == 2
    return {
        "far": [distance(one, plain, "grad_norm", "learning_rate") for one in ours],
        "sizes": [one.sizes for one in ours],
        "weights": [float((one.weights - plain.weights).abs().max()) for one in ours],
    }


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_two_ranks(way: str) -> None:
    for seen in on_ranks(compare_on_ranks, 2, way):
        assert max(seen["far"]) <= CLOSE, seen
        assert max(seen["weights"]) <= 1e-4, seen  # a step moves them by 1e-2
        configured, searched, _, *lost = seen["sizes"]
        assert configured == (4, 4) and searched[0] == 8 and lost == [(4, 1)] * 2, seen


def resumed() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        whole = fit(SEARCHING, Loss(), folder=folder, accumulate_grad_batches=1)
        again = fit(SEARCHING, resume=f"{folder}/step=6.ckpt")
        plain = fit(None, resume=f"{folder}/step=6.ckpt")
    rest = replace(whole, logs=whole.logs[6:])
    return {
        "sizes": (whole.sizes, again.sizes),
        "far": [distance(one, rest, *SEEN[:3]) for one in (again, plain)],
        "same weights": torch.equal(whole.weights, again.weights),
    }


def test_a_resumed_run_is_the_uninterrupted_one() -> None:
    [seen] = on_ranks(resumed, 1)
    assert seen["sizes"] == ((4, 1), (4, 1)) and seen["same weights"], seen
    assert max(seen["far"]) <= CLOSE, seen


def on_processes(folder: str, resume: str | None = None) -> str:
    """Train, or say why that is refused."""
    os.environ["NODE_RANK"] = "0"
    count = int(os.environ.get("WORLD_SIZE", 1))
    settings = {"devices": count, "strategy": "ddp"} if count > 1 else {}
    try:
        fit(AS_CONFIGURED, folder=folder, resume=resume, **settings)
    except UsageError as refused:
        return str(refused)
    return ""


@pytest.mark.parametrize(("first", "then"), [(2, 1), (1, 2)])
def test_another_number_of_processes_is_refused(first: int, then: int, tmp_path: Path) -> None:
    assert on_ranks(on_processes, first, str(tmp_path)) == [""] * first
    checkpoint = f"{tmp_path}/step=3.ckpt"
    for said in on_ranks(on_processes, then, str(tmp_path), checkpoint):
        assert said.startswith(f"ckpt_path: of a run on {first} process"), said
    assert on_ranks(on_processes, first, str(tmp_path), checkpoint) == [""] * first


class Counting(Module):
    """A module with what the trainer does not see: metrics, a loss of its own, random numbers."""

    restored = ("counted",)

    def __init__(self) -> None:
        super().__init__()
        self.counted, self.relieved = [0], [0]
        model = self.model
        self.activation_checkpointing = (
            model.gradient_checkpointing_enable,
            model.gradient_checkpointing_disable,
        )

    def training_step(self, batch: Any) -> Any:  # type: ignore[override]
        self.counted[0] += len(batch["input_ids"])
        everyones = self.all_gather(torch.tensor(float(self.counted[0])))
        self.log("counted", everyones.sum(), reduce_fx="max")
        return self.model(**batch).loss


def what_the_module_counts() -> list[Any]:
    kind = Counting
    found = []
    for options, lost in ((None, None), (SEARCHING, Loss(times=1)), (AS_CONFIGURED, Loss(step=3))):
        seen: list[Any] = []
        init = kind.__init__

        def watched(self: Any, own: Any = init, seen: list[Any] = seen) -> None:
            own(self)
            seen.append(self)

        kind.__init__ = watched  # type: ignore[method-assign]
        one = fit(options, lost, kind=kind)
        kind.__init__ = init  # type: ignore[method-assign]
        found.append([seen[0].counted[0], seen[0].model.is_gradient_checkpointing, one.sizes])
    return found


def test_what_a_module_counts_is_set_back_and_checkpointing_comes_first() -> None:
    [(plain, relieved, halved)] = on_ranks(what_the_module_counts, 1)
    assert plain == [48, False, None]
    assert relieved[:2] == [48, True] and relieved[2][0] == relieved[2][1]
    assert halved == [48, True, (4, 2)]


def refusals() -> list[str]:
    class Manual(Module):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    class Iterating(Module):
        def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
            return None

    class Skipping(Module):
        def training_step(self, batch: Any) -> Any:  # type: ignore[override]
            return None

    class GoingBackward(Module):
        def backward(self, loss: torch.Tensor) -> None:
            (2 * loss).backward()

    class OfBefore(pl.LightningModule):  # type: ignore[misc, name-defined]
        num_items, training_step = Module.adaptive_num_items, Module.training_step
        configure_optimizers = Module.configure_optimizers

        def __init__(self) -> None:
            super().__init__()
            self.model, self.calls = llama(), 0

    said = []
    for kind, settings in (
        (Manual, {"gradient_clip_val": None}),
        (Iterating, {}),
        (Skipping, {}),
        (GoingBackward, {}),
        (OfBefore, {}),
    ):
        with pytest.raises(UsageError) as refused:
            fit(AS_CONFIGURED, kind=kind, **settings)
        said.append(str(refused.value))
    with pytest.raises(UsageError) as refused:
        fit(Adaptive(memory_limit="1GiB", fastest=True))
    return [*said, str(refused.value)]


def test_what_cannot_be_kept_is_refused_by_name() -> None:
    [said] = on_ranks(refusals, 1)
    names = (
        "automatic_optimization: ",
        "training_step: ",
        "training_step: ",
        "backward: ",
        "num_items: ",
        "fastest: only trainers",
    )
    assert all(each.startswith(name) for each, name in zip(said, names, strict=True)), said
    assert not any("\n" in each for each in said)
