"""How `te-dist plan` shows a job: as tables in which what is alike stands once, or as JSON with everything."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from te_dist.fsdp2 import Purpose
from te_dist.launch.layout import Layout
from te_dist.launch.measure import size
from te_dist.launch.plan import PLAIN, JobPlan, ParameterPlan, RankPlan, format_name

T = TypeVar("T")
GRADIENTS = (Purpose.REDUCE_SCATTER, Purpose.ALL_REDUCE)
_NUMBER = re.compile(r"\.(\d+)(?=\.|$)")


def show(plan: JobPlan, rank: int, console: Console) -> None:
    """Prints the parameters and layers of one rank, and the sums of every rank."""
    console.print(_parameters(plan.ranks[rank], rank))
    console.print(_layers(plan, rank))
    console.print(_ranks(plan))
    console.print(
        "Bytes of one step. A gather counts what arrives, a rank's own part included; a reduction counts what goes in. "
        f"Gathers happen in each of {plan.ranks[rank].micro_batches} micro batches, the rest once. "
        f"A row of several names has the figures of each.{_left_out(plan.layout)}",
        highlight=False,
    )


def _left_out(layout: Layout) -> str:
    """What ranks of this layout send besides parameters and their gradients."""
    among = {"tensor parallelism": layout.tp, "experts": layout.ep}
    names = " and ".join(name for name, num_ranks in among.items() if num_ranks > 1)
    return f" Activations and their gradients, which ranks exchange for {names}, are not counted." if names else ""


def as_json(plan: JobPlan) -> str:
    """Every figure in bytes, of every rank, layer and parameter, beside bf16's."""
    mesh = {"dp": plan.layout.dp, "tp": plan.layout.tp, "ep": plan.layout.ep}
    both = {"ranks": plan.ranks, PLAIN: plan.plain}
    found = {name: [_rank_record(index, each) for index, each in enumerate(ranks)] for name, ranks in both.items()}
    micro_batches = plan.ranks[0].micro_batches
    return json.dumps({"recipe": plan.recipe, "mesh": mesh, "micro_batches": micro_batches, **found}, indent=2)


def step_bytes(sent: dict[Purpose, int]) -> dict[str, int]:
    """A step's bytes in the columns of all tables."""
    return {
        "forward": sent[Purpose.FORWARD_GATHER],
        "backward": sent[Purpose.BACKWARD_GATHER],
        "gradients": sum(sent[purpose] for purpose in GRADIENTS),
        "scales": sent[Purpose.OPTIMIZER],
        "sum": sum(sent.values()),
    }


def _rank_record(index: int, rank: RankPlan) -> dict[str, Any]:
    layers = {layer: step_bytes(rank.sent(layer)) for layer in rank.layers}
    return {
        "rank": index,
        "stored": sum(each.stored for each in rank.parameters),
        "masters": sum(each.masters for each in rank.parameters),
        "moments": sum(each.moments for each in rank.parameters),
        "peak": {"forward": rank.peak.forward, "backward": rank.peak.backward},
        "step": step_bytes(rank.sent()),
        "layers": layers,
        "parameters": [_parameter_record(each, rank) for each in rank.parameters],
    }


def _parameter_record(each: ParameterPlan, rank: RankPlan) -> dict[str, Any]:
    own = RankPlan((each,), rank.peak, rank.micro_batches)
    return {
        "name": each.footprint.name,
        "shape": each.footprint.shape,
        "format": format_name(each.footprint.format, each.footprint.dtype),
        "shard": each.footprint.part,
        "codes": sum(each.footprint.codes),
        "scales": sum(each.footprint.scales),
        "masters": each.masters,
        "moments": each.moments,
        "step": step_bytes(own.sent()),
    }


def _parameters(rank: RankPlan, index: int) -> Table:
    columns = ("parameter", "shape", "format", "shard", "codes", "scales", "masters", "moments")
    table = _table(f"parameters of rank {index}", *columns, "forward", "backward", "gradients")
    records = [_parameter_record(each, rank) for each in rank.parameters]
    for names, record in _alike(records, lambda record: {**record, "name": _NUMBER.sub(".*", record["name"])}):
        name = _joined([each["name"] for each in names])
        shape, shard = ("x".join(map(str, record[key])) for key in ("shape", "shard"))
        stored = [size(record[key]) for key in ("codes", "scales", "masters", "moments")]
        sent = [size(record["step"][key]) for key in ("forward", "backward", "gradients")]
        table.add_row(name, shape, record["format"], shard, *stored, *sent)
    return table


def _layers(plan: JobPlan, index: int) -> Table:
    rank, plain = plan.ranks[index], plan.plain[index]
    table = _table(f"layers of rank {index}", "layer", "stored", "masters, moments", *_STEP_COLUMNS, f"sum in {PLAIN}")
    rows = []
    for layer in rank.layers:
        own = [each for each in rank.parameters if each.layer == layer]
        stored = sum(each.stored for each in own), sum(each.masters + each.moments for each in own)
        sent = step_bytes(rank.sent(layer)).values()
        rows.append((layer, *stored, *sent, step_bytes(plain.sent(layer))["sum"]))
    for alike, row in _alike(rows, lambda row: (_NUMBER.sub(".*", row[0]), *row[1:])):
        table.add_row(_joined([each[0] for each in alike]), *map(size, row[1:]))
    return table


def _ranks(plan: JobPlan) -> Table:
    shape = f"dp {plan.layout.dp} x tp {plan.layout.tp}, experts over {plan.layout.ep}"
    columns = ("stored", "masters, moments", *_STEP_COLUMNS, "peak of parameters")
    table = _table(f"{plan.recipe} beside {PLAIN}, {shape}", "ranks", "", *columns)
    shown = {plan.recipe: plan.ranks, PLAIN: plan.plain}
    rows = [(index, name, *_sums(rank)) for name, ranks in shown.items() for index, rank in enumerate(ranks)]
    for alike, row in _alike(rows, lambda row: row[1:]):
        table.add_row(_ranges([each[0] for each in alike]), row[1], *map(size, row[2:]))
    return table


_STEP_COLUMNS = ("forward", "backward", "gradients", "scales", "sum")


def _sums(rank: RankPlan) -> tuple[int, ...]:
    stored = sum(each.stored for each in rank.parameters)
    state = sum(each.masters + each.moments for each in rank.parameters)
    return stored, state, *step_bytes(rank.sent()).values(), rank.peak.bytes


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        words = column in ("parameter", "shape", "format", "shard", "layer", "ranks", "")
        table.add_column(column, justify="left" if words else "right")
    return table


def _alike(rows: Iterable[T], key: Callable[[T], Any]) -> list[tuple[list[T], T]]:
    """Rows of equal keys together, with the first of them."""
    groups: dict[str, list[T]] = {}
    for row in rows:
        groups.setdefault(json.dumps(key(row)), []).append(row)
    return [(group, group[0]) for group in groups.values()]


def _joined(names: Sequence[str]) -> str:
    """Names that differ in one number as one: blocks.0 and blocks.1 are blocks.0-1."""
    numbers = [int(found.group(1)) for name in names if (found := _NUMBER.search(name))]
    return _NUMBER.sub("." + _ranges(numbers), names[0], count=1) if len(names) > 1 else names[0]


def _ranges(numbers: Sequence[int]) -> str:
    """0, 1, 2 and 5 are "0-2,5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
