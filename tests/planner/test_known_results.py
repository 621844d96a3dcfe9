"""Results of operations on fake tensors that are made without calling them: like those of the call itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from torchtune_adaptive.planner.trace.known_results import KnownResults


class Through(TorchDispatchMode):
    """Calls every operation through ``results``."""

    def __init__(self, results: Callable[..., Any]) -> None:
        super().__init__()
        self._results = results

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return self._results(func, args, kwargs or {})


def facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    assert type(tensor) is FakeTensor
    return (
        *(tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype),
        *(tensor.fake_device, tensor.untyped_storage().nbytes()),
    )


def program(x: torch.Tensor) -> list[torch.Tensor]:
    """Operations that give new tensors, views and their own arguments; all with one result or several."""
    w = torch.empty(8, 6, dtype=torch.bfloat16)
    made = [x, w, x @ w.to(x.dtype), x.t(), x[1:], x[:, 2:4].contiguous(), x.t().reshape(-1)]
    made += [*x.split(2), *torch.topk(x, 2), *torch.var_mean(x, 1), x.expand(3, *x.shape)]
    made += [x.add_(1), x.mul(2), x.mul(2.0), x.to(torch.float16), torch.empty(0, 3)]
    made += [torch.cat([x, x]), torch.nn.functional.layer_norm(x, (8,)), x.sum(), x.new_zeros(2)]
    made += [torch.ones(2, dtype=torch.int64) * True, torch.ones(2, dtype=torch.int64) * 1.0]
    return made


def run(*rows: int, known: bool) -> tuple[list[Any], list[torch.Tensor]]:
    """The facts of all results of the program at each number of rows, and the tensors of the last."""
    with FakeTensorMode() as mode:
        results = KnownResults(mode) if known else lambda func, args, named: func(*args, **named)
        found, made = [], []
        with Through(results):
            for number in rows:
                made = program(torch.empty(number, 8, requires_grad=False))
                found.append([facts(tensor) for tensor in made])
        return found, made


def test_results_are_those_of_the_call() -> None:
    rows = (4, 4, 6, 4, 6)
    assert run(*rows, known=True)[0] == run(*rows, known=False)[0]


def shared(tensors: list[torch.Tensor]) -> list[list[int]]:
    """Which tensors share a storage with which, by number."""
    storages = [tensor.untyped_storage()._cdata for tensor in tensors]
    return [[n for n, other in enumerate(storages) if other == one] for one in storages]


def test_views_share_the_storage_and_new_tensors_have_their_own() -> None:
    assert shared(run(4, 4, known=True)[1]) == shared(run(4, known=False)[1])


def test_a_change_in_place_returns_its_argument() -> None:
    with FakeTensorMode() as mode, Through(KnownResults(mode)):
        for _ in range(2):
            x = torch.empty(4)
            assert x.add_(1) is x


def test_gradients_flow_as_before() -> None:
    def gradients(known: bool) -> list[Any]:
        with FakeTensorMode() as mode:
            results = (
                KnownResults(mode) if known else lambda func, args, named: func(*args, **named)
            )
            weight = torch.empty(8, 8, requires_grad=True)
            found = []
            with Through(results):
                for _ in range(2):
                    hidden = torch.nn.functional.silu(torch.empty(4, 8) @ weight.t())
                    (hidden.view(2, 2, 8).transpose(0, 1) * hidden[0]).sum().backward()
                    assert weight.grad is not None
                    found.append(facts(weight.grad))
                    weight.grad = None
            return found

    assert gradients(known=True) == gradients(known=False)


def test_parameters_on_meta_are_split_as_before() -> None:
    """As they are sharded: each is another tensor."""

    def chunks(known: bool) -> list[Any]:
        weights = [torch.nn.Parameter(torch.empty(6, 4, device="meta")) for _ in range(3)]
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            results = (
                KnownResults(mode) if known else lambda func, args, named: func(*args, **named)
            )
            with Through(results):
                made = [part for weight in weights for part in weight.detach().chunk(2)]
                made += [weight.new_zeros(2, 2) for weight in weights]
        assert shared(made) == [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5], [6], [7], [8]]
        return [facts(tensor) for tensor in made]

    assert chunks(known=True) == chunks(known=False)


def test_a_repetition_does_not_call_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    dispatch = FakeTensorMode.dispatch

    def counted(mode: Any, func: Any, *arguments: Any) -> Any:
        calls.append(func)
        return dispatch(mode, func, *arguments)

    monkeypatch.setattr(FakeTensorMode, "dispatch", counted)
    with FakeTensorMode() as mode, Through(KnownResults(mode)):
        x = torch.empty(4, 8)
        for expected in (1, 0):
            calls.clear()
            x.relu()
            assert len(calls) == expected
        for _ in range(2):  # depends on values, or changes what it is given
            calls.clear()
            torch.empty(3).resize_(5)
            with pytest.raises(Exception, match=r"data-dependent|dynamic|nonzero"):
                x.nonzero()
            assert len(calls) >= 2
