"""Plans of programs that generate what they train on: the longest texts, by few passes over the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.programs import planned
from torchtune_adaptive.planner.memory.peak import Peak
from torchtune_adaptive.planner.programs import GENERATION

pytestmark = [pytest.mark.runs, pytest.mark.alternating]

LAYERS, HEADS, WIDTH, ROWS, PROMPT, EOS, PAD = 4, 8, 32, 4, 16, 1, 0
VOCABULARY = 512
PROGRAM = """
import sys
import torch
from torch.utils.data import DataLoader, Sampler
from transformers import LlamaConfig, LlamaForCausalLM

shape = dict(hidden_size=256, intermediate_size=512, num_attention_heads=8, vocab_size=512)
shape |= dict(num_hidden_layers={layers}, num_key_value_heads={heads}, head_dim={width})
model = LlamaForCausalLM(LlamaConfig(**shape, eos_token_id={eos}, pad_token_id={pad})).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)


class Again(Sampler):
    def __iter__(self):
        for first in range(0, 200, 2):
            for _ in range({again}):
                yield [first] * {half} + [first + 1] * {half}


rows = [dict(input_ids=torch.arange(2, 2 + {prompt} - number % 2)) for number in range(200)]


def collate(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    pad = torch.nn.functional.pad
    return torch.stack([pad(one["input_ids"], (longest - len(one["input_ids"]), 0)) for one in rows])


for number, prompts in enumerate(DataLoader(rows, batch_sampler=Again(), collate_fn=collate)):
    if number % {again} == 0:
        prompts = prompts.to("cuda")
        texts = model.generate(
            prompts, attention_mask=(prompts != {pad}).int(), do_sample=True, top_p=0.9, {how}
        )
        new = texts[:, prompts.shape[1] :]
        assert texts.is_cuda and new.shape == (len(prompts), {new}), new.shape
        assert (texts[:, : prompts.shape[1]] == prompts).all()
        ends = (new == {eos}).int().sum(-1).tolist()
        assert ends == [0] + [1] * (len(prompts) - 1) and new[1, -1] == {pad}, new
    del prompts
    part = texts.chunk({again})[number % {again}]
    mask = (part != {pad}).int()
    loss = model(input_ids=part, attention_mask=mask, labels=part).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def written(folder: Path, new: int = 40, how: str = "", again: int = 1) -> Path:
    path = folder / "train.py"
    how = how or f"max_new_tokens={new}"
    sizes = {"layers": LAYERS, "heads": HEADS, "width": WIDTH, "half": ROWS // 2, "prompt": PROMPT}
    path.write_text(PROGRAM.format(**sizes, eos=EOS, pad=PAD, new=new, how=how, again=again))
    return path


def peak(folder: Path, new: int) -> Peak:
    plan = planned(written(folder, new))
    assert plan.about.generated == new
    return plan.answers[0].peak


def test_the_cache_is_as_long_as_texts_may_be(tmp_path: Path) -> None:
    few, many = (peak(tmp_path, new).by_phase[GENERATION] for new in (400, 1400))
    # Keys and values of each token but the last, and those that a layer copies as it gets one more.
    of_a_token = ROWS * 2 * HEADS * WIDTH * 4 * (LAYERS + 1 / 2)
    assert many - few == pytest.approx(1000 * of_a_token, rel=0.01)


def test_texts_have_the_length_that_is_asked_for_in_any_way(tmp_path: Path) -> None:
    for new, how in ((2, "max_new_tokens=2"), (24, "max_length=40")):
        assert planned(written(tmp_path, new, how)).about.generated == new


def test_rows_that_belong_together_stay_together(tmp_path: Path) -> None:
    """As a trainer has several texts for each prompt, and trains on them in several steps."""
    plan = planned(written(tmp_path, again=4))
    assert plan.about.seen is not None
    assert (plan.about.seen.rows, plan.about.seen.unit, plan.about.seen.shared) == (ROWS, 4, 4)
    answer = plan.answers[0]
    assert answer.peak.rows == ROWS and answer.largest % 4 == 0 and answer.largest > ROWS
    assert GENERATION in answer.peak.by_phase


def test_the_scores_of_all_tokens_are_kept(tmp_path: Path) -> None:
    new = 400
    without = peak(tmp_path, new).by_phase[GENERATION]
    how = f"max_new_tokens={new}, return_dict_in_generate=True, output_scores=True"
    path = written(tmp_path, new, how)
    kept = "    found = texts.scores, texts.sequences\n        texts = found[1]\n"
    kept += f"        assert len(found[0]) == {new}\n        del found\n"
    path.write_text(path.read_text().replace("    new = texts", f"{kept}        new = texts"))
    scores = planned(path).answers[0].peak.by_phase[GENERATION] - without
    assert scores == pytest.approx(new * ROWS * VOCABULARY * 4, rel=0.05)


def test_many_steps_may_be_about_what_one_generates(tmp_path: Path) -> None:
    path = written(tmp_path, again=12)
    path.write_text(path.read_text().replace("texts.chunk(12)[number % 12]", "texts"))
    assert GENERATION in planned(path).answers[0].peak.by_phase
