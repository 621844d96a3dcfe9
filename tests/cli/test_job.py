"""What is to be trained, and what it costs."""

from __future__ import annotations

import pytest

from tests.helpers.planning import asked
from torchtune_adaptive.cli.job import Job, job
from torchtune_adaptive.cli.plan_options import plan_command
from torchtune_adaptive.common.errors import ConfigError
from torchtune_adaptive.planner.speed.speed import Speed


@pytest.mark.parametrize(("text", "tokens"), [("52M", 52e6), ("1.5b", 1.5e9), ("1,000", 1000.0)])
def test_numbers_of_tokens(text: str, tokens: float) -> None:
    assert job(text, None) == Job(tokens)


@pytest.mark.parametrize(
    ("tokens", "price"),
    [("many", None), ("5X", None), ("5M", "cheap"), ("5M", "nan"), ("5M", "-1"), ("5M", "1,,2")],
)
def test_what_cannot_be_read_is_refused(tokens: str, price: str | None) -> None:
    with pytest.raises(ConfigError, match="Write"):
        job(tokens, price, "h100-80gb", ["t4", "l4", "h100"])


@pytest.mark.parametrize(
    ("price", "gpu", "compared", "expected"),
    [
        ("2.5", "h100-80gb", (), 2.5),
        ("2.5", "h100-80gb", ("4090", "t4"), 2.5),  # one price is that of all
        ("0.4,$2.5", "h100-80gb", ("4090", " H100"), 2.5),
        ("0.4,2.5", "NVIDIA H100 80GB HBM3", ("4090", "h100-80"), 2.5),
        ("0.4,2.5", "rtx4090-24gb", ("GeForce RTX 4090", "h100"), 0.4),
        ("0.4,2.5", "h100-80gb", ("4090", "h100pcie"), None),  # another card
        ("0.4,2.5", "GPU with 70 GiB", ("4090", "h100"), None),
        ("2,2.5", "h100-80gb", ("h100", "h100-80gb"), None),  # which of the two?
        ("2.5,2.5", "h100-80gb", ("h100", "h100-80gb"), 2.5),
    ],
)
def test_the_price_of_the_planned_gpu_is_that_of_its_name(
    price: str, gpu: str, compared: tuple[str, ...], expected: float | None
) -> None:
    found = job("1M", price, gpu, compared)
    assert found.price == expected
    assert len(found.compared) == len(compared)
    speed = Speed(10.0, 1e6 / 3600, 0.33, {"gemm": 1.0}, 0.0, (-0.3, 0.05))
    assert found.cost(speed, 2, found.price) == (expected and pytest.approx(expected))


@pytest.mark.parametrize(
    ("compared", "complaint"),
    [("h100,4090,t4", "--compare has 3 GPUs"), ("", "there is no --compare")],
)
def test_prices_are_one_or_as_many_as_gpus(
    compared: str,
    complaint: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torchtune_adaptive.cli.plan_command.Answers", None)  # nothing is traced
    compare = ["--compare", compared] if compared else []
    line = ["tiny/full", *compare, "--price", "0.4,0.8", "device=cuda"]
    assert plan_command(asked(line)) == 2
    said = capsys.readouterr().err
    assert "--price: '0.4,0.8' has 2 prices, and " in said and complaint in said
    assert "Give one price for all GPUs, or one for each GPU of --compare" in said


@pytest.mark.exhaustive
def test_the_headline_has_the_price_of_the_planned_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["tiny/full", "--no-what-ifs", "--compare", "4090,h100", "--tokens", "1T"]
    line += [
        "--price",
        "1,4",
        "--seq-len",
        "64",
        "device=cuda",
        "adaptive_batching.memory_limit=null",
    ]
    assert plan_command(asked(line)) == 0
    said = capsys.readouterr().out
    headline, _, table = said.partition("On other devices")
    assert "(at 4.00 for a GPU hour)" in headline
    cost = float(headline.partition("and cost ")[2].split()[0].replace(",", ""))
    (row,) = (line.split() for line in table.splitlines() if "h100" in line)
    assert float(row[-1].replace(",", "")) == pytest.approx(cost, rel=0.01)
