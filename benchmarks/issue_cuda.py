"""How long does the CPU take to hand over a small pass of a Linear or a GroupedLinear, or a bare op on groups?

    python -m benchmarks.issue_cuda --out benchmarks/results

The GPU is idle when a call begins, and small enough work to be done by the next. Medians and minima of many calls in
rounds that walk over all lines; torch's bf16 Linear is a line among them. Wanted: less than 250 us for a Linear of 512
in FP8 blocks, 400 us for a GroupedLinear with one weight, 15 us for an op, whatever the number of groups.

Torch runs backward in a thread of its own, on another processor, whose caches know nothing of what forward read: to
spare that takes a quarter to a third off, torch's Linear as well. So some lines come by one thread too, as
`set_multithreading_enabled(False)` has it, and beside the time of the clock there is what processors spent on all
threads of this process. Hosts that others share take up to twice as long from one minute to the next.

    python -m benchmarks.issue_cuda --only "torch's" "Linear, block" "GroupedLinear"

What is recorded serves inputs of the same number of rows, and only what comes again is recorded. Experts over ranks get
another number in every step unless they have a capacity, and texts of their own lengths give another in every batch. So
there are lines for calls whose numbers of rows come in turn, 16 of them, and for another one in every call; of one
layer, which finds everything out itself, and of several, which record for one another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path
from statistics import median
from typing import Any

import torch
import tyro
from torch import Tensor, nn

import te_dist as te
from benchmarks.grouped_linear_cuda import Layer, module_pass, module_step
from benchmarks.linear_cuda import RECIPES, passes
from benchmarks.report import Report, number, text
from te_dist import ops, recipe

WIDTH, ROWS = 512, 4096
GROUPS = (8, 128)
LAYERS = 16  # of a model
CALLS, TOGETHER = 200, 20  # calls of a round, and how many are handed over before the GPU is waited for
ROUNDS, WARMUP = 9, 40
# Numbers of rows that come in turn, by name; as many as there are calls.
SEVERAL = {"16 numbers of rows in turn": 16, "another number of rows in every call": ROUNDS * (CALLS + WARMUP)}


@dataclass(frozen=True)
class Row:
    """A line, in microseconds of a call.

    Attributes:
        what: is called.
        best: the lowest of the medians of its rounds.
        usual: the middle one.
        worst: the highest.
        lowest: of all calls.
        processors: what the processors spent on it: the middle one of its rounds.
    """

    what: str
    best: float
    usual: float
    worst: float
    lowest: float
    processors: float


@dataclass(frozen=True)
class Round:
    """`CALLS` calls, in microseconds: of each by the clock, in order of size; and of one, what processors spent."""

    times: list[float]
    processors: float


def linears() -> Iterator[tuple[str, Callable[[], object]]]:
    """Forward and backward of torch's Linear, and of te_dist's in every recipe."""
    x = torch.randn(WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    options = {"bias": False, "device": "cuda"}
    yield "torch's Linear, bf16", passes(torch.nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16, **options), x, None)
    for name, made_by in RECIPES.items():
        for is_quantized in (False, True):
            with te.quantized_model_init(enabled=is_quantized, recipe=made_by):
                module = te.Linear(WIDTH, WIDTH, params_dtype=torch.bfloat16, **options)
            yield f"Linear, {name}, {'quantized' if is_quantized else 'plain'}", passes(module, x, made_by)


def grouped_linears() -> Iterator[tuple[str, Callable[[], object]]]:
    """Forward and backward of a GroupedLinear in FP8 blocks: one weight, or one for each group; fused wgrad or not."""
    for groups in GROUPS:
        layer = Layer.of((groups, ROWS, WIDTH, WIDTH), "ragged")
        for weights in ("quantized", "quantized, each", "quantized, main_grad", "quantized, each, main_grad"):
            yield f"GroupedLinear, {groups} groups, {weights}", module_pass(layer, RECIPES["block"], weights)


class _Handed(torch.autograd.Function):
    """Does nothing but hand a gradient to each of many weights (N, K), as part of one tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.options = len(weights), weights[0]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        count, weight = ctx.options
        return grad, *weight.new_empty(count, *weight.shape).unbind()


def gradients_of_torch(*, device: str = "cuda") -> Iterator[tuple[str, Callable[[], object]]]:
    """What autograd alone takes to hand gradients to as many parameters as there are groups."""
    for groups in GROUPS:
        options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        weights = [torch.nn.Parameter(torch.empty(WIDTH, WIDTH, **options)) for _ in range(groups)]
        x = torch.empty(ROWS, WIDTH, **options).requires_grad_()
        grad = torch.empty_like(x)

        def call(weights: Any = weights, x: Tensor = x, grad: Tensor = grad) -> None:
            _Handed.apply(x, *weights).backward(grad)
            for each in (x, *weights):
                each.grad = None

        yield f"torch's autograd alone, {groups} weights", call


class OtherRows:
    """Calls with inputs of several numbers of rows in turn, none less than `ROWS`; they lie in one another."""

    def __init__(self, call: Callable[[int], object], count: int) -> None:
        self._call = call
        self._places = cycle(range(count))

    def __call__(self) -> None:
        """The next one."""
        self._call(next(self._places))


def parts(tensor: Tensor, count: int) -> Sequence[Tensor]:
    """The first `ROWS` rows of a tensor, the first `ROWS` + 1, and so on."""
    return [tensor[: ROWS + more] for more in range(count)]


def grouped_linears_of_other_rows(*, device: str = "cuda") -> Iterator[tuple[str, Callable[[], object]]]:
    """The same with one weight and other numbers of rows."""
    for groups, (name, count) in product(GROUPS, SEVERAL.items()):
        step = module_step((groups, ROWS, WIDTH, WIDTH), RECIPES["block"], "quantized", device=device)
        splits = torch.full((groups,), ROWS // groups, device=device)
        whole = [torch.randn(ROWS + count, WIDTH, device=device, dtype=torch.bfloat16) for _ in range(2)]
        inputs = [part.requires_grad_() for part in parts(whole[0], count)]
        grads = parts(whole[1], count)

        def call(
            place: int, step: Any = step, inputs: Any = inputs, splits: Tensor = splits, grads: Any = grads
        ) -> None:
            step(inputs[place], splits, grads[place])
            inputs[place].grad = None

        yield f"GroupedLinear, {groups} groups, quantized, {name}", OtherRows(call, count)


def layers_of_other_rows(*, device: str = "cuda") -> Iterator[tuple[str, Callable[[], object]]]:
    """Forward and backward of several layers behind one another, torch's in bf16 and te_dist's by two recipes.

    Delayed scaling moves the histories of all layers on in one launch for 32 of them.
    """
    options: dict[str, Any] = {"bias": False, "device": device}
    models: dict[str, tuple[Any, Any]] = {
        "torch's Linears, bf16": (lambda: nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16, **options), None),
    }
    for name in ("block", "delayed"):
        made_by = RECIPES[name]
        models[f"Linears, {name}, quantized"] = (lambda made_by=made_by: _quantized(made_by, **options), made_by)
    for (name, (layer, by)), (rows, count) in product(models.items(), {"": 1, **SEVERAL}.items()):
        model = nn.Sequential(*(layer() for _ in range(LAYERS)))
        whole = [torch.randn(ROWS + count, WIDTH, device=device, dtype=torch.bfloat16) for _ in range(2)]
        inputs, grads = (parts(each, count) for each in whole)

        def call(place: int, model: Any = model, by: Any = by, inputs: Any = inputs, grads: Any = grads) -> None:
            model.zero_grad()
            with nullcontext() if by is None else te.autocast(recipe=by):
                out = model(inputs[place])
            out.backward(grads[place])

        yield f"{LAYERS} {name}{', ' if rows else ''}{rows}", OtherRows(call, count)


def _quantized(made_by: recipe.Recipe, **options: Any) -> te.Linear:
    with te.quantized_model_init(recipe=made_by):
        return te.Linear(WIDTH, WIDTH, params_dtype=torch.bfloat16, **options)


def bare_ops_of_other_rows(*, device: str = "cuda") -> Iterator[tuple[str, Callable[[], object]]]:
    """A product of FP8 blocks with other numbers of rows."""
    groups = GROUPS[0]
    for name, count in SEVERAL.items():
        codes = torch.randint(100, (ROWS + count, WIDTH), dtype=torch.uint8, device=device)
        products = [Product(groups, _table(groups, len(rows), device), rows) for rows in parts(codes, count)]
        yield (
            f"ops.grouped_gemm_float8_block, {groups} groups, {name}",
            OtherRows(lambda place, products=products: products[place](), count),
        )


def _table(groups: int, rows: int, device: str) -> Tensor:
    sizes = torch.full((groups,), ROWS // groups, device=device)
    table = torch.empty(4, groups + 1, dtype=torch.int32, device=device)
    ops.group_table(sizes, rows=rows, out=table, are_sizes=True)
    return table


def bare_ops() -> Iterator[tuple[str, Callable[[], object]]]:
    """The table of groups, and a product of FP8 blocks."""
    for groups in GROUPS:
        sizes, table = torch.full((groups,), ROWS // groups, device="cuda"), _table(groups, ROWS, "cuda")
        yield f"ops.group_table, {groups} groups", Table(sizes, table)
        codes = torch.randint(100, (ROWS, WIDTH), dtype=torch.uint8, device="cuda")
        yield f"ops.grouped_gemm_float8_block, {groups} groups", Product(groups, table, codes)


@dataclass(frozen=True)
class Table:
    """A call of `ops.group_table`."""

    sizes: Tensor
    table: Tensor

    def __call__(self) -> None:
        """Calls it."""
        ops.group_table(self.sizes, rows=ROWS, out=self.table, are_sizes=True)


class Product:
    """A call of `ops.grouped_gemm_float8_block`."""

    def __init__(self, groups: int, table: Tensor, codes: Tensor) -> None:
        (rows, _), tiles, options = codes.shape, WIDTH // 128, {"device": codes.device}
        weights = codes.repeat(-(-groups * WIDTH // rows), 1)[: groups * WIDTH]
        # Rows of scales are multiples of 16 bytes apart.
        scales = torch.ones(tiles, -(-rows // 4) * 4, **options), torch.ones(groups * tiles, tiles, **options)
        self.operands = codes, scales[0], weights, scales[1]
        self.table, self.out = table, torch.empty(rows, WIDTH, dtype=torch.bfloat16, **options)

    def __call__(self) -> None:
        """Calls it."""
        ops.grouped_gemm_float8_block(
            *self.operands,
            table=self.table,
            summed_dim=1,
            b_tile=(128, 128),
            fp8=("e4m3", "e4m3"),
            bias=None,
            row_factor=None,
            accumulate=False,
            out=self.out,
        )


def round_of(call: Callable[[], object]) -> Round:
    """A round of one line."""
    for _ in range(WARMUP):
        call()
    times, spent = [], []
    for _ in range(CALLS // TOGETHER):
        torch.cuda.synchronize()
        spent_before = time.process_time()
        for _ in range(TOGETHER):
            begin = time.perf_counter()
            call()
            times.append((time.perf_counter() - begin) * 1e6)
        spent.append((time.process_time() - spent_before) * 1e6 / TOGETHER)
    torch.cuda.synchronize()
    return Round(sorted(times), median(spent))


def in_one_thread(lines: Iterable[tuple[str, Callable[[], object]]]) -> Iterator[tuple[str, Callable[[], object]]]:
    """Every line, and behind it the same with backward in the thread that calls it."""
    for what, call in lines:

        def alone(call: Callable[[], object] = call) -> None:
            with torch.autograd.set_multithreading_enabled(False):
                call()

        yield what, call
        yield f"{what}, one thread", alone


def rows(only: Sequence[str]) -> Iterator[Row]:
    """All lines, or those with one of these texts in their names."""
    calls = [*in_one_thread([*linears(), *grouped_linears(), *gradients_of_torch()]), *grouped_linears_of_other_rows()]
    calls += [*layers_of_other_rows(), *bare_ops(), *bare_ops_of_other_rows()]
    calls = [line for line in calls if not only or any(part in line[0] for part in only)]
    rounds = [[round_of(call) for _, call in calls] for _ in range(ROUNDS)]
    for (what, _), *found in zip(calls, *rounds, strict=True):
        best, *_, worst = medians = sorted(median(each.times) for each in found)
        lowest, processors = min(each.times[0] for each in found), median(each.processors for each in found)
        yield Row(what, best, median(medians), worst, lowest, processors)


REPORT = Report(
    "issue_cuda",
    "CPU time to hand over small passes",
    f"Linears of {WIDTH} x {WIDTH} with {WIDTH} rows; groups of {ROWS} rows together, of the same width. Microseconds: "
    f"medians of {CALLS} calls, of {ROUNDS} rounds; processors: what they spent on all threads of the process.",
    {
        "what": text("what"),
        "best round": number("best", 1),
        "middle": number("usual", 1),
        "worst": number("worst", 1),
        "lowest call": number("lowest", 1),
        "processors": number("processors", 1),
    },
)


def main(out: Path | None = None, only: tuple[str, ...] = ()) -> None:
    """Prints the table, of lines with one of `only` in their names; writes it as Markdown and JSON into `out`."""
    REPORT.publish(rows(only), out)


if __name__ == "__main__":
    tyro.cli(main)
