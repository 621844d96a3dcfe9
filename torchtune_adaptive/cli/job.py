"""The job that ``--tokens`` and ``--price`` describe: how much is to be trained, and what a GPU costs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from torchtune_adaptive.common import ConfigError, counted
from torchtune_adaptive.planner import Speed, gpus

TOKENS_IN = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


@dataclass(frozen=True)
class Job:
    """The tokens, or rows, to train on, and the prices of one GPU for an hour."""

    tokens: float | None = None
    price: float | None = None
    """Price of the planned GPU, if it is known."""
    compared: tuple[float, ...] = ()
    """Price of each GPU that the plan is compared with, if they are known."""
    unit: str = "tokens"
    """What is counted: rows, where these are not of tokens."""

    def hours(self, speed: Speed, ranks: int) -> float | None:
        """The hours that the job takes; None if it has no tokens."""
        return None if self.tokens is None else speed.hours(self.tokens, ranks)

    def cost(self, speed: Speed, ranks: int, price: float | None) -> float | None:
        """What the job costs at a price; None for what is not asked or not known."""
        hours = self.hours(speed, ranks)
        return None if hours is None or price is None else price * hours * ranks


def job(tokens: str | None, price: str | None, gpu: str = "", compared: Sequence[str] = ()) -> Job:
    """The job that ``--tokens 52M --price 2.5`` gives; a price is for all GPUs, or one for each ``compared``.

    Raises:
        ConfigError: it cannot be read, or the number of prices is not that of the GPUs.
    """
    number = _tokens(tokens) if tokens is not None else None
    prices = _prices(price) if price else []
    if len(prices) < 2:
        return Job(number, next(iter(prices), None), tuple(prices * len(compared)))
    if len(prices) != len(compared):
        those = f"--compare has {counted(len(compared), 'GPU')}"
        against = those if compared else "there is no --compare"
        reason = f"has {len(prices)} prices, and {against}"
        remedy = "Give one price for all GPUs, or one for each GPU of --compare"
        raise ConfigError("--price", price, reason, remedy)
    # The same GPU at two prices has no price.
    own = {one for one, name in zip(prices, compared, strict=True) if gpus.is_same(name, gpu)}
    return Job(number, own.pop() if len(own) == 1 else None, tuple(prices))


def _tokens(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?)", text.upper().replace(",", ""))
    if not found:
        raise ConfigError("--tokens", text, "is not a number of tokens", "Write 52M or 1.5B")
    return float(found[1]) * TOKENS_IN[found[2]]


def _prices(text: str) -> list[float]:
    try:
        prices = [float(one.strip().strip("$")) for one in text.split(",")]
        if not all(isfinite(one) and one >= 0 for one in prices):
            raise ValueError
    except ValueError:
        remedy = "Write the price of one GPU for an hour, e.g. 2.5"
        raise ConfigError("--price", text, "is not a price", remedy) from None
    return prices
