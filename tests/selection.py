"""Which cases of a test every run takes; the others, thousands, run with `--exhaustive`.

    @pytest.mark.each_value                          # cases in which every value of every parameter is met
    @pytest.mark.pairwise                            # cases in which every two values of two parameters meet
    @pytest.mark.every_run(name=("mxfp8", "nvfp4"))  # only these values of a parameter
    @pytest.mark.exhaustive                          # none: of a test, or of one `pytest.param`

Most mistakes show with one value of a parameter or with two together, so these are what every change is tested with.
A case that is asked for by its name runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

MARKERS = (
    "exhaustive: runs with --exhaustive only",
    "every_run(**values): with other values of these parameters with --exhaustive only",
    "each_value: every run takes cases in which every value of every parameter is met",
    "pairwise: every run takes cases in which every two values of two parameters meet",
)
_TOGETHER = {"each_value": 1, "pairwise": 2}  # how many values have to meet
_DEVICE = "device_type"  # what runs on one device runs on all


def of_every_run(
    items: Sequence[pytest.Item], arguments: Sequence[str] = ()
) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """(what every run takes, what is left to `--exhaustive`), each in the order of `items`.

    Args:
        arguments: of the command line; a case that one of them names is taken.
    """
    asked = {_name(argument) for argument in arguments if "[" in argument}
    left = {item for item in items if item.get_closest_marker("exhaustive") or not _is_named(item)}
    alike: dict[tuple, list[pytest.Item]] = {}
    for item in items:
        if item not in left:
            for marker in filter(item.get_closest_marker, _TOGETHER):
                test = item.nodeid.partition("[")[0]
                alike.setdefault((marker, test, _values(item).get(_DEVICE)), []).append(item)
    for (marker, *_), cases in alike.items():
        left.update(_not_needed(cases, _TOGETHER[marker]))
    left = {item for item in left if _name(item.nodeid) not in asked}
    return [item for item in items if item not in left], [item for item in items if item in left]


def _name(nodeid: str) -> tuple[str, str]:
    """File and case, wherever that lies."""
    path, _, case = nodeid.partition("::")
    return Path(path).name, case


def check_names(items: Sequence[pytest.Item]) -> None:
    """Raises UsageError where `every_run` names a value that no case of its test has, all of which are in `items`."""
    values: dict[tuple[str, str], list[object]] = {}
    wanted: dict[tuple[str, str], Sequence[object]] = {}
    for item in items:
        test = item.nodeid.partition("[")[0]
        for marker in item.iter_markers("every_run"):
            for name, named in marker.kwargs.items():
                if isinstance(named, str):
                    raise pytest.UsageError(f"{test}: every_run names {name}={named!r}; write ({named!r},)")
                values.setdefault((test, name), []).append(_values(item)[name])
                wanted[test, name] = named
    for (test, name), named in wanted.items():
        if missing := [value for value in named if value not in values[test, name]]:
            raise pytest.UsageError(
                f"{test}: every_run names {name}={missing}, which no case has; correct or remove it"
            )


def _values(item: pytest.Item) -> dict[str, object]:
    """By name of a parameter, its value."""
    return item.callspec.params if hasattr(item, "callspec") else {}


def _is_named(item: pytest.Item) -> bool:
    """Whether all markers `every_run` name the values of this case."""
    values = _values(item)
    named = (pair for marker in item.iter_markers("every_run") for pair in marker.kwargs.items())
    return all(values[name] in wanted for name, wanted in named)


def _not_needed(cases: Sequence[pytest.Item], together: int) -> Iterable[pytest.Item]:
    """Cases without which so many values meet all the same; greedy: the case with most new ones stays, and so on."""
    met = {case: set(_combinations(case, together)) for case in cases}
    unseen = set().union(*met.values())
    while unseen:
        best = max(met, key=lambda case: len(met[case] & unseen))
        unseen -= met.pop(best)
    return met


def _combinations(case: pytest.Item, together: int) -> Iterable[tuple]:
    """So many parameters of a case with their values, or all where it has fewer."""
    values = sorted((name, str(value)) for name, value in _values(case).items() if name != _DEVICE)
    return itertools.combinations(values, min(together, len(values)))
