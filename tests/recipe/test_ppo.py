"""PPO without whole runs: its settings, rewards and mini-batches, and the files of two models."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from torchtune.rlhf import get_reward_penalty_mask

from tests.helpers.configs import config
from tests.helpers.ranks import Alone
from tests.helpers.rollout_loops import rollouts
from torchtune_adaptive.common.errors import CheckpointError, ConfigError
from torchtune_adaptive.recipe.checkpoints.policy_and_value import _Both, joined, of_model
from torchtune_adaptive.recipe.registry import load_config, our_recipe_for
from torchtune_adaptive.recipe.rollout.judging import ByModel
from torchtune_adaptive.recipe.rollout.rows import Row, draws, shuffled
from torchtune_adaptive.recipe.rollout_run import RolloutRun
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.settings.checks import check
from torchtune_adaptive.recipe.settings.kind_table import KINDS, kind_of, unused_keys

PPO = KINDS["ppo"]

# --- settings -------------------------------------------------------------------------------------


def theirs(**changes: Any) -> DictConfig:
    """torchtune's config, with changes."""
    cfg = OmegaConf.merge(load_config("mistral/7B_full_ppo_low_memory"), changes)
    assert isinstance(cfg, DictConfig)
    return cfg


def test_torchtunes_config_is_ours() -> None:
    cfg = theirs()
    assert kind_of(cfg) is PPO and unused_keys(cfg, PPO) == []
    assert our_recipe_for("ppo_full_finetune_single_device") == PPO.recipe
    assert PPO.recipe == "adaptive_ppo_full_finetune"
    check(cfg, PPO)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("ppo_batch_size=5", "does not divide the batch_size 32"),
        ("ppo_batch_size=null", "None is not valid"),
        ("num_steps=null", "None is not valid"),
        ("kl_coeff=null", "None is not valid"),
        ("gamma=2", "a number from 0 to 1"),
        ("reward_penalty=low", "a number"),
        ("whiten_rewards=True", "is read by torchtune's recipe and changes nothing there"),
        ("value_checkpointer.output_dir=${output_dir}", "is the policy's, whose files have"),
        ("value_checkpointer.output_dir=null", "None is not valid"),
        ("enable_async_checkpointing=True", "where two models are trained"),
    ],
)
def test_what_ppo_cannot_do_is_refused_by_its_key(override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{override.partition('=')[0]}.*{said}"):
        check(config("tiny/ppo", "use_maximum_batch_size=False", override), PPO)


def test_a_step_has_the_rows_of_a_mini_batch() -> None:
    split = Asked.of(config("tiny/ppo", "gradient_accumulation_steps=3")).batch(2)
    assert (split.rows, split.micro_batch, split.accumulation) == (16, 6, 3)


@pytest.mark.parametrize(("ranks", "epochs"), [(1, 3), (2, 2)])
def test_the_number_of_prompts_says_how_many_epochs_there_are(
    ranks: int, epochs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = config("tiny/ppo", "batch_size=8", "num_steps=40")
    run: Any = object.__new__(RolloutRun)
    run.asked, run.kind = Asked.of(cfg, "ppo"), SimpleNamespace()
    run.ranks, run.progress = Alone(ranks), SimpleNamespace()
    rows = SimpleNamespace(training=range(23))
    monkeypatch.setattr(RolloutRun.__mro__[1], "read_rows", lambda self: rows)
    assert run.read_rows() is rows and "epochs" not in cfg
    assert (
        run._limit(8 * ranks) == 5 // ranks
        and run.progress.total_epochs == run.kind.epochs == epochs
    )
    cfg.num_steps = 7
    with pytest.raises(ConfigError, match="num_steps: 7 counts prompts, and a rollout has"):
        run.read_rows()


def test_a_resumed_run_needs_rollouts_and_steps_of_the_same_size() -> None:
    run: Any = object.__new__(RolloutRun)
    run.ranks = Alone(2)
    run.asked = Asked.of(config("tiny/ppo", "batch_size=8", "ppo_batch_size=4"), "ppo")
    for rows, batch, said in (
        (32, 8, "rollouts have 32 rows, and the config's 16: batch_size 8 x 2 ranks"),
        (16, 16, "steps have 16 rows, and the config's 8: 4 x 2 ranks"),
    ):
        growth, rollouts = SimpleNamespace(global_batch=batch), {"rows": rows}
        run.progress = SimpleNamespace(training=SimpleNamespace(growth=growth, rollouts=rollouts))
        with pytest.raises(CheckpointError, match=said):
            run._rollout_sizes(2)
    growth.global_batch = 8
    same = run._rollout_sizes(2)
    assert (same.prompts, same.mini_batch, same.rows, same.step_rows) == (8, 4, 8, 4)
    for ranks, rows in ((1, 16), (3, 6), (4, 4)):
        run.ranks = Alone(ranks)
        other = run._rollout_sizes(2)
        assert (other.all_rows, other.all_step_rows, other.rows) == (16, 8, rows)
    # The config may also have been changed so that as many ranks as there are now make the same.
    run.asked = Asked.of(config("tiny/ppo", "batch_size=4", "ppo_batch_size=2"), "ppo")
    assert run._rollout_sizes(2) == other


# --- rewards --------------------------------------------------------------------------------------


def row(length: int, stopped: bool, score: float) -> Row:
    numbers = torch.full((length,), -1.0)
    return Row(
        0,
        prompt=[1],
        draws=torch.zeros(0),
        response=torch.arange(length),
        stopped=stopped,
        old=numbers,
        reference=numbers - 0.5,
        values=torch.zeros(length + 1),
        scores=torch.full((length + 1,), score),
    )


def test_short_and_unended_responses_are_penalized() -> None:
    rows = [row(2, True, 1.0), row(4, True, 2.0), row(6, False, 3.0), row(5, True, 4.0)]
    judge = ByModel(6, 0.1, 1.0, 0.95, penalty=-7.0, min_length=4, must_stop=True)
    found = judge(rows)
    assert found["scores"].tolist() == [-7.0, 2.0, -7.0, 4.0] == [each.reward for each in rows]
    assert found["kl"].tolist() == [1.0, 2.0, 3.0, 2.5]
    torch.testing.assert_close(found["kl_reward"], -0.1 * found["kl"])
    torch.testing.assert_close(found["rlhf_reward"], found["scores"] - 0.1 * found["kl"])
    assert all(each.advantages is not None and each.returns is not None for each in rows)
    # As in torchtune, apart from its shortest length, which is one more.
    padding = torch.tensor([[at >= len(each.response) for at in range(6)] for each in rows])  # type: ignore[arg-type]
    last = torch.tensor([len(each.response) - 1 for each in rows])  # type: ignore[arg-type]
    assert get_reward_penalty_mask(padding, last, True, 3).tolist() == [True, False, True, False]
    judge(more := [row(2, False, 1.0)])
    assert more[0].reward == -7.0
    ByModel(6, 0.1, 1.0, 0.95)(more)
    assert more[0].reward == 1.0


# --- mini-batches ---------------------------------------------------------------------------------


def test_each_row_is_trained_on_once_in_each_epoch_of_a_rollout() -> None:
    made = rollouts(prompts=6, epochs=2, mini_batch=4, begun=(begun := []))
    rows = made.epoch(0, 0)
    orders: list[list[int]] = [[], []]
    for epoch in orders:
        for _ in range(3):
            assert rows.begin_step()
            batches = [*rows.step(4, 3)]
            assert [len(each["tokens"]) for each in batches] == [3, 1]
            assert not rows.can_be_left or rows.used == 0
            epoch += [each.index for each in begun[-1]]
            rows.advance(4)
    assert rows.can_be_left
    assert sorted(orders[0]) == sorted(orders[1]) == [*range(12)]
    assert orders[0] != orders[1] != [*range(12)]


def test_orders_are_functions_of_their_place() -> None:
    place = (7, 3, 1, 0, 50)
    assert shuffled(*place) == shuffled(*place)
    others = [(8, 3, 1, 0, 50), (7, 4, 1, 0, 50), (7, 3, 0, 0, 50), (7, 3, 1, 1, 50)]
    assert len({*map(tuple, (shuffled(*each) for each in (place, *others)))}) == 5
    assert draws(7, 3, 0, 4).tolist() != draws(7, 3, 1, 4).tolist()


# --- files ----------------------------------------------------------------------------------------


class Checkpointer:
    """torchtune's, as far as it is used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load_checkpoint(self) -> dict[str, Any]:
        return {"model": {"w": self.folder.name}}

    def save_checkpoint(self, state: dict[str, Any], epoch: str, **how: Any) -> None:
        place = self.folder / f"epoch_{epoch}"
        (place / "value").mkdir(parents=True)  # as where it starts from a checkpoint of ours
        (place / "weights").write_text(json.dumps({**state, **how}))


def test_two_checkpointers_write_one_folder(tmp_path: Path) -> None:
    both = _Both(Checkpointer(tmp_path), Checkpointer(tmp_path / "value"), tmp_path)
    assert both.load_checkpoint()["model"] == {"policy.w": tmp_path.name, "value.w": "value"}
    weights = joined({"policy": {"a.b": 1}, "value": {"a.b": 2, "c": 3}})
    assert of_model("value", weights) == {"a.b": 2, "c": 3}
    state = {"model": weights, "seed": 5}
    both.save_checkpoint(state, epoch="0", intermediate_checkpoint=True)
    folder = tmp_path / "epoch_0"
    assert [path.name for path in tmp_path.iterdir()] == ["epoch_0"]
    policy, value = (json.loads((folder / p / "weights").read_text()) for p in (".", "value"))
    assert policy == {"model": {"a.b": 1}, "seed": 5, "intermediate_checkpoint": True}
    assert value == {"model": {"a.b": 2, "c": 3}}


def test_a_save_that_fails_leaves_nothing_beside_its_folder(tmp_path: Path) -> None:
    class Full(Checkpointer):
        def save_checkpoint(self, state: dict[str, Any], epoch: str, **how: Any) -> None:
            super().save_checkpoint(state, epoch)
            raise OSError("no space left on device")

    both = _Both(Checkpointer(tmp_path), Full(tmp_path / "value"), tmp_path)
    with pytest.raises(OSError, match="no space"):
        both.save_checkpoint({"model": {}}, epoch="0")
    assert [path.name for path in tmp_path.iterdir()] == ["epoch_0"]
