"""What every run takes of the cases of a test, and what it leaves to --exhaustive."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import pytest

from tests.selection import check_names, of_every_run

AXES = {"name": ("a", "b", "c"), "world": (1, 2), "cut": (0, 1), "device_type": ("cpu", "cuda")}


@dataclass(eq=False)
class Case:
    """As much of a pytest item as is looked at."""

    values: dict[str, Any]
    markers: tuple[pytest.MarkDecorator, ...]

    @property
    def nodeid(self) -> str:
        return f"tests/test_some.py::test_some[{'-'.join(map(str, self.values.values()))}]"

    @property
    def callspec(self) -> SimpleNamespace:
        return SimpleNamespace(params=self.values)

    def iter_markers(self, name: str) -> Iterator[pytest.Mark]:
        return (each.mark for each in self.markers if each.name == name)

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next(self.iter_markers(name), None)


def taken(*markers: pytest.MarkDecorator) -> list[dict[str, Any]]:
    """Values of the cases that every run takes of all combinations."""
    cases = [Case(dict(zip(AXES, values, strict=True)), markers) for values in product(*AXES.values())]
    kept, left = of_every_run(cases)  # type: ignore[arg-type]
    assert sorted(map(id, (*kept, *left))) == sorted(map(id, cases))
    return [case.values for case in kept]


def met(cases: list[dict[str, Any]], together: int) -> set[tuple]:
    """By device, values that meet."""
    return {
        (case["device_type"], *pairs)
        for case in cases
        for pairs in combinations([(name, value) for name, value in case.items() if name != "device_type"], together)
    }


def test_all_is_taken_where_nothing_is_said() -> None:
    assert len(taken()) == 24


@pytest.mark.parametrize(("marker", "together", "most"), [(pytest.mark.each_value, 1, 3), (pytest.mark.pairwise, 2, 7)])
def test_values_meet_in_few_cases_and_on_every_device(marker: Any, together: int, most: int) -> None:
    cases = taken(marker)
    assert met(cases, together) == met(taken(), together)
    assert len(cases) <= 2 * most


def test_values_that_are_named_are_taken() -> None:
    assert {case["name"] for case in taken(pytest.mark.every_run(name=("a", "c")))} == {"a", "c"}
    assert len(taken(pytest.mark.every_run(name=("a", "c")), pytest.mark.every_run(world=(1,)))) == 8
    assert {case["name"] for case in taken(pytest.mark.every_run(name=("a",)), pytest.mark.each_value)} == {"a"}


def test_a_case_that_is_asked_for_by_its_name_is_taken() -> None:
    cases = [Case({"name": name}, (pytest.mark.exhaustive,)) for name in "abc"]
    kept, _ = of_every_run(cases, ["tests/test_some.py::test_some[b]", "tests/test_other.py"])  # type: ignore[arg-type]
    assert [case.values for case in kept] == [{"name": "b"}]  # type: ignore[attr-defined]


def test_nothing_is_taken_of_what_runs_on_its_own() -> None:
    assert taken(pytest.mark.exhaustive) == []


def test_names_and_values_that_no_parameter_has_are_mistakes() -> None:
    with pytest.raises(KeyError, match="nome"):
        taken(pytest.mark.every_run(nome=("a",)))
    check_names([Case({"name": name}, (pytest.mark.every_run(name=("a", "b")),)) for name in "abc"])  # type: ignore[misc]
    with pytest.raises(pytest.UsageError, match=r"test_some: every_run names name=\['d'\], which no case has"):
        check_names([Case({"name": name}, (pytest.mark.every_run(name=("a", "d")),)) for name in "abc"])  # type: ignore[misc]
