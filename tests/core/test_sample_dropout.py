"""Dropout by sample: a row's mask is its own, whatever is computed beside it, and how."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchtune_adaptive.common import UsageError
from torchtune_adaptive.core.step.sample_dropout import (
    DropoutKeys,
    SampleDropout,
    drop,
    drop_by_kernel,
    drop_by_sample,
    drop_in_parts,
)

CPU = torch.device("cpu")
SHARES = (0.1, 0.5, 0.3)


def keyed(model: nn.Module, seed: int = 0, sequences: int = 1) -> DropoutKeys:
    drop_by_sample(model, compiled=False)
    return DropoutKeys(model, seed, sequences, CPU)


def masks(
    share: float = 0.1,
    samples: tuple[int, ...] = tuple(range(8)),
    step: tuple[int, int] = (0, 0),
    seed: int = 0,
    length: int = 64,
    width: int = 256,
) -> torch.Tensor:
    """What two layers keep of rows, by the layer first."""
    model = nn.ModuleDict({"a": nn.Dropout(share), "b": nn.Dropout(share)})
    keys = keyed(model, seed)
    rows = torch.ones(len(samples), length, width)
    with keys.running(*step, samples):
        return torch.stack([layer(rows) != 0 for layer in model.values()])


# --- statistics: each bound is five standard deviations of independent numbers ----------------------------


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9])
def test_the_share_is_dropped_of_each_row_position_and_column(share: float) -> None:
    kept = masks(share, samples=tuple(range(32))).float()
    deviation = (share * (1 - share)) ** 0.5
    for dims, bound in (((0, 1, 2, 3), 5), ((2, 3), 5), ((1, 2), 6), ((1, 3), 6)):
        mean = kept.mean(dim=dims)
        count = kept.numel() / mean.numel()
        assert (mean - (1 - share)).abs().max() < bound * deviation / count**0.5


@pytest.mark.parametrize("share", SHARES)
def test_rows_layers_steps_seeds_and_places_are_independent(share: float) -> None:
    kept = masks(share)
    other = {
        "layer": kept.flip(0),
        "row": kept.roll(1, dims=1),
        "position": kept.roll(1, dims=2),
        "column": kept.roll(1, dims=3),
        "both": kept.roll((1, -1), dims=(2, 3)),
        "power of two": kept.roll(128, dims=3),
        "step": masks(share, step=(0, 8)),
        "epoch": masks(share, step=(1, 0)),
        "seed": masks(share, seed=1),
        "samples": masks(share, samples=tuple(range(8, 16))),
    }
    same = share**2 + (1 - share) ** 2
    bound = 5 * (same * (1 - same) / kept.numel()) ** 0.5
    for name, each in other.items():
        assert abs((kept == each).double().mean() - same) < 2 * bound, name


def test_what_is_kept_is_scaled_and_nothing_is_drawn() -> None:
    before = torch.get_rng_state()
    layer = SampleDropout(0.2, drop_in_parts)
    dropped = layer(torch.ones(4, 32, 64))
    assert set(dropped.unique().tolist()) == {0.0, 1.25}
    assert torch.equal(torch.get_rng_state(), before)


def test_all_or_nothing() -> None:
    rows = torch.randn(2, 3, 4)
    assert not SampleDropout(1.0, drop_in_parts)(rows).any()
    layer = SampleDropout(0.5, drop_in_parts)
    assert layer.eval()(rows) is rows
    assert layer.train()(rows[:, :0]).shape == (2, 0, 4)
    assert layer(rows[:0]).shape == (0, 3, 4)


# --- a row's own ------------------------------------------------------------------------------------------


def test_a_row_does_not_depend_on_the_rows_beside_it_or_on_padding() -> None:
    whole = masks(samples=(5, 2, 9, 7), length=48)
    alone = [masks(samples=(sample,), length=48) for sample in (5, 2, 9, 7)]
    assert torch.equal(whole, torch.cat(alone, dim=1))
    pairs = [masks(samples=pair, length=48) for pair in ((5, 2), (9, 7))]
    assert torch.equal(whole, torch.cat(pairs, dim=1))
    assert torch.equal(whole, masks(samples=(5, 2, 9, 7), length=80)[:, :, :48])


def test_the_sequences_of_a_sample_differ() -> None:
    keys = DropoutKeys(nn.Sequential(SampleDropout(0.1, drop)), 0, 2, CPU)
    (both,) = keys.of(0, 0, [3, 4])
    (one,) = keys.of(0, 0, [4])
    assert len(both) == 4 and len(both.unique(dim=0)) == 4
    assert torch.equal(both[1::2], one), "the second sample's, first and second sequence"


def test_a_layer_keeps_its_numbers_where_others_are_added() -> None:
    few = DropoutKeys(nn.ModuleDict({"b": SampleDropout(0.1, drop)}), 0, 1, CPU)
    more = DropoutKeys(nn.ModuleDict({n: SampleDropout(0.1, drop) for n in "abc"}), 0, 1, CPU)
    assert torch.equal(few.of(0, 0, [1, 2])[0], more.of(0, 0, [1, 2])[1])


def test_numbers_stay_what_they_are_from_version_to_version() -> None:
    """A resumed run relies on it."""
    keys = DropoutKeys(nn.ModuleDict({"a": SampleDropout(0.1, drop)}), 7, 1, CPU)
    of_row = keys.of(1, 64, [3])
    assert of_row.tolist() == [[[821171225, 1389519471]]]
    kept = drop(torch.ones(1, 2, 16), of_row[0], 0, 1.0).int().flatten().tolist()
    assert "".join(map(str, kept)) == "10011010100111010011011101111101"


# --- gradients, and other ways to compute the same --------------------------------------------------------


class Layers(nn.Module):
    def __init__(self, shares: tuple[float, ...] = (0.1, 0.5)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Dropout(share), nn.Linear(24, 24), nn.GELU()) for share in shares
        )
        self.recomputed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputed else layer(x)
        return x


def trained(
    model: nn.Module, keys: DropoutKeys, samples: list[int], rows: torch.Tensor
) -> list[torch.Tensor]:
    """The output and the gradients."""
    model.zero_grad()
    rows = rows.clone().requires_grad_()
    with keys.running(0, 0, samples):
        out = model(rows)
        out.square().sum().backward()
    return [out.detach(), rows.grad, *(p.grad.clone() for p in model.parameters())]  # type: ignore


def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, some, others))


def test_a_gradient_is_dropped_where_its_value_was() -> None:
    layer = SampleDropout(0.3, drop_in_parts)
    rows = torch.randn(4, 32, 16, requires_grad=True)
    dropped = layer(rows)
    dropped.sum().backward()
    assert rows.grad is not None
    assert torch.equal(rows.grad * rows, dropped)
    double = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, double) and torch.autograd.gradgradcheck(layer, double)


def test_checkpointing_changes_no_bit() -> None:
    model, rows = Layers(), torch.randn(4, 32, 24)
    keys = keyed(model)
    plain = trained(model, keys, [1, 2, 3, 4], rows)
    model.recomputed = True
    assert same(plain, trained(model, keys, [1, 2, 3, 4], rows))
    assert not same(plain, trained(model, keys, [1, 2, 3, 5], rows))


@pytest.mark.parametrize("shape", [(3, 5), (2, 7, 5), (2, 700, 130), (3, 2, 5, 7), (2, 1, 200_000)])
def test_parts_are_the_whole(shape: tuple[int, ...]) -> None:
    keys = torch.randint(-(2**31), 2**31, (shape[0], 2), dtype=torch.int32)
    rows = torch.randn(shape)
    for view in (rows, rows.to(torch.bfloat16), rows.transpose(1, -1)):
        arguments = view, keys, 12345, 1.1
        assert torch.equal(drop(*arguments), drop_in_parts(*arguments))


needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile needs a C++ compiler, and there is no g++"
)


@needs_compiler
@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("share", SHARES)
def test_compiled_is_eager_to_the_bit(share: float, dtype: torch.dtype) -> None:
    torch.compiler.reset()
    kernel, eager = SampleDropout(share, drop_by_kernel()), SampleDropout(share, drop_in_parts)
    for shape in [(4, 33, 24), (4, 64, 130), (1, 33, 24), (6, 24)]:
        rows = torch.randn(shape, dtype=dtype)
        upstream = torch.randn_like(rows)
        found = []
        for layer in (kernel, eager):
            own = rows.clone().requires_grad_()
            out = layer(own)
            out.backward(upstream)
            found.append([out.detach(), own.grad])
        assert same(*found), shape


def test_a_kernel_is_compiled_for_each_width_and_for_one_row_and_more() -> None:
    """torch compiles a function 8 times, and then runs it without: with temporaries of many sizes."""
    torch.compiler.reset()
    compilations = CountCompilations()
    layer = SampleDropout(0.1, drop_by_kernel(compilations))
    for rows, length, width in itertools.product((3, 1, 2, 8), (7, 100, 13), (16, 24)):
        x = torch.randn(rows, width, length).transpose(1, 2).requires_grad_()
        dropped = layer(x)
        dropped.sum().backward()  # whose gradient is one number, expanded
        assert x.grad is not None and torch.equal(x.grad == 0, dropped == 0)
    assert compilations.count == 4


@needs_compiler
@pytest.mark.exhaustive
def test_layers_that_are_compiled_drop_the_same_and_are_compiled_once() -> None:
    torch.compiler.reset()
    model, rows = Layers((0.1,) * 12), torch.randn(4, 32, 24)
    keys = keyed(model)
    with torch.no_grad():
        eager = trained_output(model, keys, rows)
    compilations = CountCompilations()
    for layer in model.layers:
        layer.forward = torch.compile(layer.forward, backend=compilations)
    with torch.no_grad():
        assert torch.equal(eager, trained_output(model, keys, rows))
        trained_output(model, keys, rows.flip(0))
    assert compilations.count == 1


class CountCompilations:
    """A compiler that counts, and compiles nothing."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.count += 1
        return graph.forward  # type: ignore[no-any-return]


def trained_output(model: nn.Module, keys: DropoutKeys, rows: torch.Tensor) -> torch.Tensor:
    with keys.running(0, 0, [1, 2, 3, 4]):
        out: torch.Tensor = model(rows)
    return out


# --- what has no sample -----------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn_dropout = 0.1


class Own(nn.Dropout): ...


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (Attention(), "inner.attn_dropout"),
        (nn.MultiheadAttention(4, 2, dropout=0.1), "inner.dropout"),
        (nn.LSTM(4, 4, 2, dropout=0.1), "inner.dropout"),
        (nn.AlphaDropout(0.1), r"inner \(AlphaDropout\)"),
        (nn.Dropout2d(0.1), r"inner \(Dropout2d\)"),
        (Own(0.1), r"inner \(Own\)"),
    ],
)
def test_other_ways_to_drop_are_refused_by_name(module: nn.Module, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        drop_by_sample(nn.ModuleDict({"inner": module}), compiled=False)


def test_those_that_drop_nothing_stay() -> None:
    model = nn.Sequential(nn.Dropout(0.0), nn.AlphaDropout(0.0), nn.MultiheadAttention(4, 2))
    before = list(model.modules())
    drop_by_sample(model, compiled=False)
    assert list(model.modules()) == before


def test_other_random_numbers_are_noticed_in_the_first_micro_batch() -> None:
    model, rows = Layers(), torch.randn(2, 4, 24)
    keys = keyed(model)
    said = "in other ways than by nn.Dropout"
    with pytest.raises(UsageError, match=said), keys.running(0, 0, [1, 2]):
        F.dropout(model(rows), 0.1)


def test_rows_must_come_first() -> None:
    model, tokens = Layers(), torch.randn(6, 24)
    keys = keyed(model)
    with keys.running(0, 0, [1, 2, 3]), pytest.raises(UsageError, match=r"the 3 rows .* 6 x 24"):
        model(tokens)


def test_rows_without_a_sample_are_dropped_as_well() -> None:
    """Those of trials, and those that only keep a rank with the others."""
    model, rows = Layers((0.5,)), torch.ones(4, 16, 24)
    keys = keyed(model)
    layer = model.layers[0][0]  # type: ignore[index]
    kept = [layer(rows) != 0]
    with keys.running(0, 0, [1, 2, 3, 4]):
        kept.append(layer(rows) != 0)
    with keys.running(0, 0, []):
        kept.append(layer(rows) != 0)
    assert torch.equal(kept[0], kept[2]) and not torch.equal(kept[0], kept[1])
    assert all(0.4 < each.float().mean() < 0.6 for each in kept)


def test_a_step_that_fails_leaves_no_keys() -> None:
    model = Layers()
    keys = keyed(model)
    with pytest.raises(torch.OutOfMemoryError), keys.running(0, 0, [1, 2]):
        raise torch.OutOfMemoryError
    model(torch.randn(6, 24))
