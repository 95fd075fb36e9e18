"""Checks of arrays and tables: messages name the wrong value and its index."""

import pickle
from dataclasses import dataclass

import numpy as np
import pytest

from model.base import checks, table_records
from model.base.checks import ParameterError, TableError


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([0.0, -1.0], r"x\[1\] must be at least 0, got -1.0"),
        ([[0.0, 1.0], [np.nan, -1.0]], r"x\[1, 0\] must be at least 0, got nan"),
        ([1.0, np.inf], r"x\[1\] must be at least 0, got inf"),
        (None, "x must be at least 0, got nan"),
        ("many", "x must be numbers, got 'many'"),
        ([[1.0], [1.0, 2.0]], "x must be numbers"),
        (1j, "x must be numbers"),
    ],
)
def test_first_bad_element_is_named(values: object, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        checks.array("x", values, 0)  # type: ignore[arg-type]


def test_bounds_are_inclusive() -> None:
    assert checks.array("x", [0, 1], 0, 1).tolist() == [0.0, 1.0]
    assert checks.array("x", [], 0, 1).shape == (0,)
    assert checks.whole_array("x", [1.0, 2.0], 1).tolist() == [1.0, 2.0]
    with pytest.raises(ParameterError, match=r"x\[1\] must be a whole number, got 2\.5"):
        checks.whole_array("x", [1.0, 2.5], 1)


def test_first_fraction_is_named() -> None:
    with pytest.raises(ParameterError, match=r"x\[1\] must be a whole number, got 2.5"):
        checks.whole_array("x", [1.0, 2.5], 1)


@pytest.mark.parametrize("values", [np.inf, [-np.inf, -np.inf], [1.7e308, -1.7e308]])
def test_infinite_numbers_are_refused_and_large_numbers_accepted(values: float | list[float]) -> None:
    if np.isfinite(values).all():
        assert checks.array("x", values).tolist() == values
        return
    with pytest.raises(ParameterError, match=r"must be a finite number, got -?inf"):
        checks.array("x", values)


@dataclass(frozen=True)
class _Law:
    cost: float = 1.0

    def __post_init__(self) -> None:
        if self.cost < 0:
            raise ParameterError("cost must be at least 0")
        if self.cost > 1:
            raise TableError("law", ".cost is not of this kind")


@pytest.mark.parametrize("where", ["cost", "law", "method.law"])
def test_message_names_the_table_once(where: str) -> None:
    """The message of a `TableError` continues the table's name; other messages follow the name and a colon."""
    with pytest.raises(ParameterError, match=f"^{where}: cost must be at least 0$"):
        table_records.build(_Law, {"cost": -1}, where)
    with pytest.raises(ParameterError, match=rf"^{where}\.cost is not of this kind$") as caught:
        table_records.build(_Law, {"cost": 2}, where)
    again = pickle.loads(pickle.dumps(caught.value))  # as from a worker
    assert (type(again), str(again)) == (TableError, str(caught.value))
