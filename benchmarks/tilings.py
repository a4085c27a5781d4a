"""What a product reaches with each of the ways to cut it, and which of them te_dist chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

from benchmarks.report import Report, number, text
from benchmarks.timing import median_time
from te_dist.kernels import tape


@dataclass(frozen=True)
class Row:
    """A line of the table; `chosen`: what te_dist takes where nobody else decides, beside its own lines."""

    shape: str
    product: str
    tiling: str
    chosen: bool
    time: float
    tflops: float


@dataclass(frozen=True)
class Case:
    """A call, and what may be chosen for it.

    Attributes:
        shape: as the table shows it.
        product: likewise.
        call: issues it.
        flops: of it.
        module: in which `functions` choose.
        candidates: what they may return, by name.
    """

    shape: str
    product: str
    call: Callable[[], object]
    flops: int
    module: ModuleType
    functions: Sequence[str]
    candidates: Mapping[str, Any]

    def rows(self, repeats: int) -> Iterator[Row]:
        """A line for each candidate."""
        with untaped():
            chosen = self._chosen()
            for name, candidate in self.calls():
                time = median_time(self.call, repeats)
                yield Row(self.shape, self.product, name, candidate in chosen, time, self.flops / time / 1e6)

    def calls(self) -> Iterator[tuple[str, Any]]:
        """Each candidate and its name, once it was called; while the caller looks at it, it is what is chosen."""
        for name, candidate in self.candidates.items():
            choose = mock.Mock(return_value=candidate)
            with mock.patch.multiple(self.module, **dict.fromkeys(self.functions, choose)):
                self.call()
                yield name, candidate

    def _chosen(self) -> list[Any]:
        """What the functions return for the call."""
        found: list[Any] = []

        def spy(function: Callable[..., Any]) -> Callable[..., Any]:
            def choose(*args: Any, **keywords: Any) -> Any:
                found.append(function(*args, **keywords))
                return found[-1]

            return choose

        spies = {name: spy(getattr(self.module, name)) for name in self.functions}
        with mock.patch.multiple(self.module, **spies):
            self.call()
        return found


def untaped() -> Any:
    """A block in which nothing is recorded or played, so that every call chooses anew."""
    return mock.patch.object(tape, "is_recordable", return_value=False)


def report(name: str, title: str) -> Report:
    """Of such lines."""
    columns = {
        "shape": text("shape"),
        "product": text("product"),
        "tiling": text("tiling"),
        "chosen": lambda row: "yes" if row.chosen else "",
        "us": number("time", 1),
        "TFLOP/s": number("tflops"),
    }
    return Report(name, title, "Cold L2, medians. Chosen: what te_dist takes.", columns)
