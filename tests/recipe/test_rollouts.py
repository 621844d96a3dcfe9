"""Rollouts without models: their settings, prompts, rewards, and the rows that become steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from torchtune.models.llama2 import llama2_tokenizer

from tests.helpers.configs import config
from tests.helpers.rollout_loops import of, rollouts
from torchtune_adaptive.common.errors import ConfigError
from torchtune_adaptive.core.rows.micro_batches import ByTokens
from torchtune_adaptive.core.sizes.packing import Budget
from torchtune_adaptive.recipe import rewards, tiny
from torchtune_adaptive.recipe.components import check_components
from torchtune_adaptive.recipe.data.prompts import PromptDataset, gsm8k_dataset
from torchtune_adaptive.recipe.registry import our_recipe_for
from torchtune_adaptive.recipe.rewards import BadReward
from torchtune_adaptive.recipe.rollout.phases import RolloutSizes
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.settings.checks import check
from torchtune_adaptive.recipe.settings.kind_table import KINDS, kind_of, unused_keys
from torchtune_adaptive.recipe.train.rollouts import RolloutRows

GRPO = KINDS["grpo"]
MAIN = "torchtune.dev.grpo"

# --- settings -------------------------------------------------------------------------------------


def as_on_main(**changes: Any) -> DictConfig:
    """A config with the keys of those of torchtune's main branch."""
    cfg = config("tiny/grpo", "log_level=INFO", "name=mine")
    for key in ("gradient_accumulation_steps", "use_maximum_batch_size", "reward_functions"):
        del cfg[key]
    cfg.dataset = {"_component_": f"{MAIN}.gsm8k.gsm8k_dataset", "partition": "1-9/10"}
    cfg.loss = {"_component_": f"{MAIN}.loss.GRPOSimpleLoss", "kl_coeff": 0.01, "epsilon": 0.2}
    merged = OmegaConf.merge(cfg, changes)
    assert isinstance(merged, DictConfig)
    return merged


def test_configs_of_torchtunes_main_branch_are_ours() -> None:
    cfg = as_on_main()
    assert kind_of(cfg) is GRPO
    assert our_recipe_for("dev/grpo_full_finetune_distributed") == GRPO.recipe
    assert GRPO.recipe == "adaptive_grpo_full_finetune_distributed"
    assert unused_keys(cfg, GRPO) == ["log_level", "name"]
    check(cfg, GRPO)
    check_components(cfg, GRPO)
    formats = {
        "_component_": "torchtune.dev.rl.rewards.ThinkingAnswerFormattingReward",
        **{"think_tag": "think", "answer_tag": "answer", "positive_reward": 1.0},
    }
    check_components(as_on_main(reward_functions=[formats]), GRPO)
    wrong = {**formats, "positive_rewards": 2}
    with pytest.raises(ConfigError, match="positive_rewards: 2 is no argument"):
        check_components(as_on_main(reward_functions=[wrong]), GRPO)
    with pytest.raises(ConfigError, match=r"reward_functions\[0\]: 'mine.reward' cannot be found"):
        check_components(as_on_main(reward_functions=["mine.reward"]), GRPO)


def test_asynchronous_grpo_is_refused_by_name() -> None:
    cfg = as_on_main(orchestration={"num_steps": 3})
    with pytest.raises(ConfigError, match="dev/async_grpo_full_finetune_distributed"):
        kind_of(cfg)


def test_a_step_has_all_rows_of_a_rollout() -> None:
    assert Asked.of(as_on_main(batch_size=3, grpo_samples=5)).batch(2).rows == 15
    cfg = as_on_main(batch_size=3, grpo_samples=5, gradient_accumulation_steps=4)
    split = Asked.of(cfg).batch(2)
    assert (split.micro_batch, split.accumulation, split.global_batch) == (4, 4, 30)


@pytest.mark.parametrize(
    "override",
    [
        "adaptive_batching.scoring_token_budget=64 adaptive_batching.scoring_batch_size=4",
        "use_fastest_configuration=True",
        "batch_increase_function=torchtune_adaptive.recipe.tiny.two_more_rows",
        "adaptive_batching.gradient_noise=observe",
        "adaptive_batching.search=predict",
        "adaptive_batching.probe_length=64",
        "optimizer_in_bwd=True",
        "tensor_parallel_dim=2",
        "grpo_samples=0",
        "temperature=0",
        "reward_functions=[3]",
        "stop_token_ids=[a]",
    ],
)
def test_what_rollouts_cannot_do_is_refused_by_its_key(override: str) -> None:
    cfg = config("tiny/grpo", "use_maximum_batch_size=False", *override.split())
    with pytest.raises(ConfigError) as raised:
        check(cfg, GRPO)
    assert raised.value.key.startswith(override.partition("=")[0])


def test_what_rollouts_need_is_named() -> None:
    cfg = config("tiny/grpo")
    del cfg["max_generated_tokens"]
    with pytest.raises(ConfigError, match="max_generated_tokens: None is not valid"):
        check(cfg, GRPO)
    with pytest.raises(ConfigError, match="makes rollouts of 8 prompts, and the data has 7"):
        RolloutSizes(4, 2, 1, 8, began=2).require_prompts(7)
    with pytest.raises(ConfigError, match="of 2 prompts, and not one for each of 3 ranks"):
        RolloutSizes(1, 2, 1, 8, began=2, ranks=3).require_prompts(7)


# --- prompts --------------------------------------------------------------------------------------


def tokenizer() -> Any:
    return llama2_tokenizer(str(tiny.assets() / "tokenizer.model"))


def test_prompts_are_made_of_columns(tmp_path: Any) -> None:
    file = tmp_path / "rows.json"
    file.write_text('[{"q": "Say river.", "a": "river"}]')
    made = PromptDataset(
        tokenizer(),
        source="json",
        data_files=str(file),
        split="train",
        prompt="Q: {q} A:",
        answer="a",
    )
    row = made[0]
    assert len(made) == 1 and row["answer"] == "river" and row["question"] == "Q: Say river. A:"
    assert tokenizer().decode(row["tokens"]) == "Q: Say river. A:"


def test_gsm8k_has_numbers_as_answers_and_can_be_parted(tmp_path: Any) -> None:
    file = tmp_path / "rows.json"
    lines = (f'{{"question": "{n}?", "answer": "so #### 1,{n:03}"}}' for n in range(20))
    file.write_text("\n".join(lines))
    given = {"source": "json", "name": None, "data_files": str(file)}
    made = gsm8k_dataset(tokenizer(), **given, partition="1-9/10")
    assert len(made) == 18 and made[0]["answer"] == "1,001"
    assert len(gsm8k_dataset(tokenizer(), **given)) == 20
    with pytest.raises(ValueError, match="partition '1/2' is not first-last/parts"):
        gsm8k_dataset(tokenizer(), **given, partition="1/2")


# --- rewards --------------------------------------------------------------------------------------


def right(ids: torch.Tensor, texts: list[str], answers: list[Any], worth: float = 1.0) -> Any:
    found = torch.tensor(
        [float(text == answer) for text, answer in zip(texts, answers, strict=True)]
    )
    return rewards.RewardOutput(worth * found, found)


def bad(kind: str) -> Any:
    given = {"few": [1.0], "nan": [1.0, float("nan")], "none": None}[kind]
    return lambda ids, texts, answers: given


RESPONSES = [torch.tensor([3, 1]), torch.tensor([2, 2, 1])]


def test_rewards_are_sums_over_functions_of_texts() -> None:
    worth = {"_component_": f"{__name__}.right", "worth": 10.0}
    found = of("tests.helpers.rollout_loops.length", worth).of(RESPONSES, ["c", "x"])
    assert found.rewards.tolist() == [11.0, 2.0] and found.successes.tolist() == [1.0, 0.0]
    assert {name: each.tolist() for name, each in found.each.items()} == {
        "length": [1.0, 2.0],
        "right": [10.0, 0.0],
    }


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("few", "gave 1 number for 2 responses"),
        ("nan", "gave nan for response 1"),
        ("none", "gave NoneType, not numbers"),
    ],
)
def test_a_reward_that_is_no_number_for_each_response_is_named(
    kind: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewards, "component", lambda path: bad(kind))
    with pytest.raises(BadReward, match=f"reward_functions: function {said}"):
        of("mine.function").of(RESPONSES, ["a", "b"])


@pytest.mark.parametrize(
    ("answer", "attempt", "same"),
    [
        ("5", "5", True),
        ("1,000", "$1000", True),
        ("0.5", "1/2", True),
        ("5", "6", False),
        ("", "", False),
    ],
)
def test_answers_are_the_same_text_or_number(answer: str, attempt: str, same: bool) -> None:
    assert rewards.is_same(answer, attempt) is same


def test_rewards_of_torchtunes_main_branch() -> None:
    texts = ["thinks</think><answer>5</answer>", "<answer>is 5</answer>", "</think>", "5"]
    answers, ids = ["5"] * 4, torch.zeros(4, 1)
    assert rewards.thought(ids, texts, answers).total_reward.tolist() == [1, 0, 0, 0]
    assert rewards.answered(ids, texts, answers).total_reward.tolist() == [100, 50, 0, 0]
    correct = rewards.FormattedMathCorrectnessReward("answer", 10.0)
    assert correct(ids, texts, answers).total_reward.tolist() == [10, 5, 0, 5]
    formatted = rewards.ThinkingAnswerFormattingReward("think", "answer", 1.0)
    strict = "<think>\na\n</think>\n<answer>\n5\n</answer>\n"
    loose = strict.replace("\n", "")
    swapped = "<answer>5</answer><think>a</think>"
    found = formatted(ids, [strict, loose, swapped, loose + loose], answers)
    assert found.total_reward.tolist() == [2, 1, 0, 0]


# --- rows of rollouts -----------------------------------------------------------------------------


def made(rows: RolloutRows, share: int = 8) -> list[tuple[str, float, list[float]]]:
    assert rows.begin_step()
    batches = [*rows.step(8, share)]
    assert sum(each.rows for each in rows.loaded) == sum(len(b["tokens"]) for b in batches)
    return [(row.data, row.draws.sum().item(), list(row.prompt)) for row in rows._rows]


def test_a_rollout_is_the_same_on_any_number_of_ranks() -> None:
    alone = made(rollouts().epoch(0, 0))
    shared = [made(rollouts(rank, 2, prompts=2).epoch(0, 0), share=4) for rank in (0, 1)]
    assert sorted(alone) == sorted(shared[0] + shared[1])
    assert len({draws for _, draws, _ in alone}) == 8
    assert len({answer for answer, *_ in alone}) == 4


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("mini_batch", [None, 1, 2, 4])
@pytest.mark.parametrize("budget", [False, True])
def test_on_other_ranks_each_step_has_the_same_rows(
    ranks: int, mini_batch: int | None, budget: bool
) -> None:
    micro_batches = ByTokens.of_own_rows(Budget.of_tokens(16, 8), 0, 0) if budget else None
    how: dict[str, Any] = {"mini_batch": mini_batch, "micro_batches": micro_batches, "epochs": 2}

    def steps(size: int, ranks: int) -> list[set[int]]:
        """The rows of each step of a rollout, and as many micro-batches on every rank."""
        each = [rollouts(rank, ranks, prompts=2, began=2, **how) for rank in range(ranks)]
        of_ranks = [one._prompts(0, 1) for one in each]
        assert max(map(len, of_ranks)) == each[0].sizes.rows
        for row in (row for rows in of_ranks for row in rows):
            row.response = torch.ones(1 + row.index % 5, dtype=torch.int64)
        for one in each:
            one._lengths = [[row.length for row in rows] for rows in of_ranks]
        found = []
        for used in range(0, each[0].trained_rows, each[0].sizes.all_step_rows):
            batches = [
                one.mini_batch(rows, 1, used) for one, rows in zip(each, of_ranks, strict=True)
            ]
            parts = [[*one.parts(of, size)] for one, of in zip(each, batches, strict=True)]
            assert len({*map(len, parts)}) == 1
            rows = [row for of_rank in parts for part in of_rank for row in part]
            assert len(rows) == each[0].sizes.all_step_rows
            found.append({row.index for row in rows})
        return found

    for size in (1, 2, 3) if not budget else (8, 16):
        assert steps(size, ranks) == steps(size, 2)


def test_rows_go_on_where_a_run_was_left() -> None:
    first, second = (rollouts().epoch(0, used) for used in (0, 8))
    before = made(first)
    assert not first.are_over
    first.advance(8)
    assert made(first) == made(second) != before
    assert made(rollouts().epoch(1, 0)) not in (before, made(second))


def test_a_rollout_is_left_when_it_has_been_trained_on() -> None:
    rows = rollouts(epochs=2, limit=1).epoch(0, 0)
    assert rows.can_be_left and not rows.are_over
    first = made(rows)
    rows.advance(8)
    assert not rows.can_be_left and made(rows) == first
    rows.advance(8)
    assert rows.can_be_left and rows.are_over


def test_mini_batches_in_tokens_have_as_many_rows_on_each_rank() -> None:
    budget = ByTokens.of_own_rows(Budget.of_tokens(16, 8), 0, 0)
    ranks = [rollouts(rank, 2, 3, mini_batch=3, micro_batches=budget) for rank in (0, 1)]
    rows = [each._prompts(0, 0) for each in ranks]
    for number, row in enumerate([*rows[0], *rows[1]]):
        row.response = torch.ones(1 + number % 5, dtype=torch.int64)
    for each in ranks:
        each._lengths = [[row.length for row in of] for of in rows]
    for used in (0, 6):
        batches = [each.mini_batch(of, 0, used) for each, of in zip(ranks, rows, strict=True)]
        assert batches[0].lengths == batches[1].lengths, "what others have is known"
        parts = [[*each.parts(of, 16)] for each, of in zip(ranks, batches, strict=True)]
        assert [*map(len, parts[0])] == [*map(len, parts[1])]
        for batch, of_rank, lengths in zip(batches, parts, batches[0].lengths, strict=True):
            assert [row.length for row in batch.rows] == lengths
            assert sorted(row.index for part in of_rank for row in part) == sorted(
                row.index for row in batch.rows
            )
            assert max(len(part) * max(row.length for row in part) for part in of_rank) <= 16
        assert [len(part) for part in ranks[0].parts(batches[0], 1)] == [1, 1, 1]


def test_a_stop_while_a_rollout_is_made_leaves_it_out() -> None:
    rows = rollouts(stop_requested=lambda: True).epoch(0, 0)
    assert not rows.begin_step() and rows.can_be_left and rows.used == 0


def test_a_rollout_says_what_it_came_to() -> None:
    rows = rollouts().epoch(0, 0)
    made(rows)
    found = rows.metrics()
    assert found["rewards"] == 1.0 and found["successes"] == 0.0 and found["batch_size"] == 4
    assert found["response_lengths"] == 2.0 and found["num_stop_tokens"] == 8
    assert all(row.advantages == 0.0 for row in rows._rows), "of a group of equal rewards"


def test_the_time_of_a_rollout_is_that_before_its_first_step() -> None:
    rows = rollouts(epochs=2).epoch(0, 0)
    made(rows)
    found = rows.metrics()
    assert rows.spent == {
        "generation": found["generation_seconds"],
        "scoring": found["scoring_seconds"],
        "rewards": found["reward_seconds"],
    }
    rows.advance(8)
    made(rows)
    assert rows.spent == {} and rows.metrics()["scoring_seconds"] == found["scoring_seconds"]
