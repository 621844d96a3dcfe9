"""What is noted of operations for the time model."""

from __future__ import annotations

import pytest
import torch

from torchtune_adaptive.planner.trace.operation_log import OperationLog

SQUARE = torch.ones(8, 8)
CUBE = torch.ones(2, 4, 8)


def shape_of(func: object, *args: object, **kwargs: object) -> tuple[float, ...]:
    log = OperationLog("cpu", lambda storage: storage.data_ptr(), lambda: "forward", lambda: 0)
    log.note(func, args, kwargs, func(*args, **kwargs))  # type: ignore[operator]
    ((operation, _),) = log.entries
    return operation.shape


@pytest.mark.parametrize(("values", "along"), [(SQUARE, [0]), (CUBE, [0, 1]), (CUBE, [-3, -2])])
def test_a_sum_down_the_columns_has_rows_and_columns(
    values: torch.Tensor, along: list[int]
) -> None:
    assert shape_of(torch.ops.aten.sum.dim_IntList, values, along) == (8, 8)
    assert shape_of(torch.ops.aten.sum.dim_IntList, values, dim=along) == (8, 8)


@pytest.mark.parametrize(
    ("values", "along"), [(SQUARE, [1]), (SQUARE, [-1]), (CUBE, [2]), (CUBE, [0])]
)
def test_a_sum_along_rows_is_none_even_if_there_are_as_many_as_columns(
    values: torch.Tensor, along: list[int]
) -> None:
    assert shape_of(torch.ops.aten.sum.dim_IntList, values, along) == ()


def test_a_sum_of_everything_has_none() -> None:
    assert shape_of(torch.ops.aten.sum.default, SQUARE) == ()
    assert shape_of(torch.ops.aten.sum.dim_IntList, SQUARE, None) == ()
