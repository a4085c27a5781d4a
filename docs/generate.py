"""Writes the generated pages of the documentation: `python docs/generate.py`, or `--check` to compare only.

A generated page is a function from nothing to Markdown in `PAGES`. `tests/test_docs.py` fails when one is out of date.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from te_dist import env
from te_dist.catalog import FORMATS
from te_dist.formats import WHOLE, Field, Format, Region
from te_dist.fsdp2 import RESHARDED, Phase, plan_gather
from te_dist.grouped import OPS as OF_GROUPS
from te_dist.launch.measure import size
from te_dist.launch.parallelize import RECIPES
from te_dist.launch.plan import PLAIN, plan_job
from te_dist.launch.plan_tables import step_bytes
from te_dist.tensor import OPS
from te_dist.tensor.quantized_tensor import OpTable

FOLDER = Path(__file__).parent
HEADER = "<!-- Written by docs/generate.py; change the code it comes from. -->\n\n"


def environment() -> str:
    """The table of environment variables."""
    rows = [f"| `{variable.name}` | `{variable.default}` | {variable.meaning} |" for variable in env.variables()]
    return "\n".join(("# Environment variables", "", "| name | default | meaning |", "|---|---|---|", *rows, ""))


def formats() -> str:
    """What every format stores, and what FSDP2 sends of it."""
    lines = ["# Formats", "", *FORMATS_INTRODUCTION.splitlines(), ""]
    sizes = "bits of a shard | gathered | sent: forward | backward"
    lines += [f"| format | columnwise from rowwise | rows cut at | {sizes} |"]
    lines += ["|---|---|---|---|---|---|---|"]
    lines += [_format_row(name, format) for name, format in FORMATS.items()]
    for name, format in FORMATS.items():
        lines += ["", f"## {name}", "", *_codec_lines(format), ""]
        lines += ["| field | direction | dtype | one value covers | constant on | order | packed | padded to |"]
        lines += ["|---|---|---|---|---|---|---|---|"]
        lines += [_field_row(format, field) for field in format.fields]
    return "\n".join((*lines, ""))


FORMATS_INTRODUCTION = """\
A quantized tensor is a logical matrix of M rows and K columns. A format says, for each of the two directions a GEMM can
read it in, which tensors are stored; [vocabulary](vocabulary.md) defines the words. Whether the columnwise direction
is a relayout of the rowwise one follows from the declaration: then only rowwise fields are sharded, sent and saved.

Bits are per value of a 4096 x 4096 matrix: of a shard, which keeps no direction that can be derived; gathered, with
both directions in place; sent by FSDP2 over four ranks when a parameter is resharded after forward and not recomputed.
Where a shard keeps two directions of 8 bits it takes the memory of bf16: such formats save traffic and time."""


def _format_row(name: str, format: Format) -> str:
    region = Region.whole(4096, 4096)
    parts = region.chunk(4)
    sent = [plan_gather(format, parts, policy=RESHARDED, phase=phase).nbytes * 8 * 4 / 4096**2 for phase in Phase]
    derived = "yes" if format.columnwise_is_derivable else "no" if format.columnwise else "has none"
    kept = (format.canonical.allocated_bytes(region), format.allocated_bytes(region))
    stored = [nbytes * 8 / 4096**2 for nbytes in kept]
    cells = (f"[{name}](#{name})", derived, f"multiples of {format.alignment(0)}" if format.alignment(0) > 1 else "any")
    return "| " + " | ".join((*cells, *(f"{bits:.3f}" for bits in (*stored, *sent)))) + " |"


def _codec_lines(format: Format) -> list[str]:
    codecs = {repr(format[d].codec): d.value for d in reversed(format.directions)}
    if len(codecs) == 1:
        return [f"Codec: `{next(iter(codecs))}`."]
    return [" ".join(f"{direction.capitalize()} codec: `{codec}`." for codec, direction in reversed(codecs.items()))]


def _field_row(format: Format, field: Field) -> str:
    directions = " and ".join(d.value for d in format.directions if field in format[d].fields)
    order = "rows outermost" if field.order == "mk" else "columns outermost"
    packed = f"{field.pack} a byte" if field.pack > 1 else ""
    padded = f"{field.pad[0]} x {field.pad[1]}" if field.pad != (1, 1) else ""
    dtype = str(field.dtype).removeprefix("torch.")
    tile = "" if field.tile == field.grain else _block(field.tile)
    cells = (f"`{field.name}`", directions, dtype, _block(field.grain), tile, order, packed, padded)
    return "| " + " | ".join(cells) + " |"


def _block(block: tuple[int, int]) -> str:
    if block == (WHOLE, WHOLE):
        return "the tensor"
    rows, cols = (f"{n}" if n != WHOLE else "all" for n in block)
    return "one value" if block == (1, 1) else f"{rows} x {cols}"


def tensor() -> str:
    """What a QuantizedTensor is, and every op it supports."""
    return "\n".join(["# Quantized tensors", "", *TENSOR_INTRODUCTION.splitlines(), "", *_ops(OPS)])


def grouped() -> str:
    """What a GroupedTensor is, and every op it supports."""
    return "\n".join(["# Groups of quantized matrices", "", *GROUPED_INTRODUCTION.splitlines(), "", *_ops(OF_GROUPS)])


def _ops(table: OpTable) -> list[str]:
    """Lines on all ops of a table, by what is done with them."""
    by_rule: dict[str, list[str]] = {}
    for name, rule in table.names().items():
        by_rule.setdefault(rule, []).append(name.removeprefix("aten.").removesuffix(".default"))
    lines = []
    for rule, names in by_rule.items():
        lines += [f"**{rule}**", "", *textwrap.wrap(", ".join(f"`{name}`" for name in sorted(names)), 120), ""]
    return lines


TENSOR_INTRODUCTION = """\
A `QuantizedTensor` is a `torch.Tensor` that stands for the values of a `QuantizedStorage`: the buffers that its
[format](formats.md) declares. Its nominal shape and dtype are those of the values, and so is `nbytes`
(`q.storage.nbytes()` is that of the buffers); buffers can be read by the names of their fields. Views share the storage
object, so that bytes which are gathered, freed and filled again in place are seen by all of them.

```python
from te_dist.catalog import FORMATS
from te_dist.tensor import quantize

q = quantize(x, FORMATS["float8_block_2d"])  # any leading dimensions, the last is K
q.row_data, q.row_scale                      # buffers
q.dequantize()                               # a plain tensor; of a parameter, autograd goes on
q[:64], q.split(64), q.view(2, -1, 512)      # parts and views, in bytes
q.update_usage(columnwise_usage=False)       # frees a direction; True derives it where it is a relayout
q.copy_(y)                                   # quantizes values, or takes over bytes of the same format
```

Ordinary code runs on parameters: a norm in a log line, an average of weights in high precision, `model.bfloat16()`
(which changes the nominal dtype only), the initializers of `torch.nn.init` but for `eye_`, `sparse_` and, before torch
2.13 and without `preserve_high_precision_init_val`, `trunc_normal_`. While values before quantization are kept,
`<`, `>` and `torch.where` see them where gradients are off, as initializers have to; all other ops see what is stored.
Assigning to `.data` quantizes; of a
sharded parameter it changes nothing, as of any DTensor: load the values. An optimizer that knows nothing of
quantization refuses to step: each update would be rounded to a code; [optimizers.md](optimizers.md) has those that
keep masters.

What is not listed below raises with the name of the op, so that nothing is dequantized behind your back. Products of
matrices are not listed: they belong to the modules. `torch.compile` traces views, parts and ops on values, and linear
maps ([recipes.md](recipes.md) says which), in one graph. After `import te_dist`, `torch.load` loads files with
quantized tensors; `te_dist.checkpoints` writes plain ones, and `checkpoints.high_precision_state_dict` gives such to
other programs.

A part (a slice, a chunk, a matrix of a stack by its index; not a member of a group, which is a
[view](grouped.md)) has bytes of its own. Writing into one (`q[:64] = 0`,
`q.chunk(2)[0].zero_()`) raises while the whole is there, because the whole would not change. Change the values and
`q.copy_(values)`, or clone a part to write into it alone. Parts that `torch.distributed.checkpoint` fills are written
through ([checkpoints](checkpoints.md#torchs-own-calls)).

An average of weights that is itself quantized rounds every update away, as an optimizer would, so that `lerp_` and
`_foreach_lerp_` into quantized tensors are refused: `torch.optim.swa_utils.AveragedModel(model)`, which averages into
a copy of the model, raises at its second update where it uses them, and at once under FSDP2, whose modules torch does
not copy. Its default function does not use them on CPUs: it copies what it computes, see below, and goes wrong in
silence. Adding a tensor to a quantized one (`add_`, `addcmul_` and their like) runs, is rounded, and warns once for
each line of code that does, unless it is a weight of which an [optimizer](optimizers.md#fusedadam) has a master: ops in
place change that. `avg_fn=`, and `average.copy_(decay * average + (1 - decay) * weight)` by hand, copy what they
compute, as loading does: nothing can tell them, they are rounded at every update, and stand still, or (NVFP4) go
elsewhere. Ops on values give plain tensors, and an average that begins as one stays in high precision:

```python
average = {key: value.detach() * 1.0 for key, value in model.state_dict().items()}
for key, value in model.state_dict().items():
    average[key].lerp_(value, 1 - decay)
own = {key: value.detach().clone() for key, value in model.state_dict().items()}
model.load_state_dict(average)               # quantized again
model.load_state_dict(own)                   # back: codes, with which masters of an optimizer stay as they are
```

A module of such values can be given to `AveragedModel`:

```python
class Values(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.values = torch.nn.ParameterList([param.detach() * 1.0 for param in model.parameters()])

average = AveragedModel(Values(model), multi_avg_fn=get_ema_multi_avg_fn(decay))
average.update_parameters(model)             # after each step
```

It works for shards as well: make and update it when `model.parameters()` are shards, so call `model.reshard()` first
where an evaluation has left the root gathered. [Checkpoints](checkpoints.md#averages-of-weights) has how it is saved
and exported.

## Supported ops
"""


GROUPED_INTRODUCTION = """\
A `GroupedTensor` holds matrices of one [format](formats.md), such as the weights of a layer's experts, in one buffer
per field. Each member is quantized on its own: per-tensor scales are one for each member, and no tile crosses from
one member to the next. Members are views of the buffers, and the buffers are what products in groups read.

```python
from te_dist import grouped
from te_dist.catalog import FORMATS

g = grouped.quantize(x, FORMATS["float8_block_2d"])          # x: (members, rows, cols); or a list of matrices
g = grouped.empty([(512, 256)] * 8, g.format)                # uninitialised; device="meta" for none
g = grouped.join([q0, q1])                                   # from quantized matrices
g.members, g[0], g.unbind()                                  # QuantizedTensors around views: nothing is copied
g.row_data, g.dequantize(), g.dequantize_members()           # (members, outer, inner) codes; values
g[2:4], g.narrow(1, 0, 64), g.chunk(4)                       # members, or rows of each, with buffers of their own
g.quantize_(y); g.copy_(y); g.mul_(2)                        # written back, each member by its own scales
```

The shape is (members, rows, cols). Members of different sizes lie one behind the other in flat buffers; then the
shape is (rows of all, cols), or (values of all,) where columns differ too. `detach` gives another object around the
same storage. What is not listed below raises with the name of the op.

A three-dimensional `QuantizedTensor` is something else: one matrix of all its rows, as activations are. Weights of
experts are groups.

## Supported ops
"""


def matrix() -> str:
    """Every format in every situation of FSDP2, as the tests recorded it in `fsdp2_matrix.json`."""
    recorded: dict[str, dict[str, Any]] = json.loads((FOLDER / "fsdp2_matrix.json").read_text())
    rows = list(recorded.values())
    columns: dict[tuple[str, ...], list[str]] = {}  # formats that fare alike everywhere share a column
    for name in FORMATS:
        columns.setdefault(tuple(row["cells"][name] for row in rows), []).append(name)
    reasons = list(dict.fromkeys(state for row in rows for state in row["cells"].values() if state != GREEN))
    letters = [chr(ord("A") + number) for number in range(len(columns))]
    cells = sum(len(row["cells"]) for row in rows)
    green = sum(state == GREEN for row in rows for state in row["cells"].values())
    lines = [
        f"{cells} cells: {green} green (✓), {cells - green} refused for a reason that torch imposes (its number).",
        "",
    ]
    for letter, names in zip(letters, columns.values(), strict=True):
        lines += textwrap.wrap(
            f"- **{letter}**: {', '.join(f'`{name}`' for name in names)}", 118, subsequent_indent="  "
        )
    for group in dict.fromkeys(row["group"] for row in rows):
        lines += ["", f"| {group} | ranks | torch | {' | '.join(letters)} |", f"|---|---|---|{'---|' * len(letters)}"]
        for number, row in enumerate(rows):
            if row["group"] == group:
                states = [state[number] for state in columns]
                shown = ["✓" if state == GREEN else str(reasons.index(state) + 1) for state in states]
                lines.append(f"| {row['title']} | {row['world']} | {row['torch']} | {' | '.join(shown)} |")
    lines.append("")
    for number, reason in enumerate(reasons, 1):
        lines += textwrap.wrap(f"{number}. {reason[0].upper()}{reason[1:]}.", 120, subsequent_indent="   ")
    return "\n".join(lines)


GREEN = "green"

# By page, what is written between `<!-- NAME -->` and `<!-- end of NAME -->`.
SECTIONS: dict[str, dict[str, Callable[[], str]]] = {"fsdp2.md": {"matrix": matrix}}


def plan() -> str:
    """What a step sends in every recipe, beside bf16."""
    jobs = {
        "One decoder block of Llama 3's 8B sizes over eight ranks": ("llama_8gpu.toml", "8", "--train.batch", "8"),
        "The same, its forward run again in backward": ("llama_8gpu.toml", "8", "--train.batch", "8", *RECOMPUTED),
    }
    lines = ["# Bytes of a job", "", *PLAN_INTRODUCTION.splitlines(), ""]
    for title, (config, world_size, *overrides) in jobs.items():
        lines += [f"## {title}", "", "| recipe | forward | backward | gradients | scales | sum | beside bf16 |"]
        lines += ["|---|---|---|---|---|---|---|"]
        own = {recipe: _block_bytes(config, int(world_size), recipe, overrides) for recipe in RECIPES}
        for recipe, sent in own.items():
            cells = (recipe, *map(size, sent.values()), f"{sent['sum'] / own[PLAIN]['sum']:.2f}")
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


RECOMPUTED = ("--recompute", "full")


def _block_bytes(config: str, world_size: int, recipe: str, overrides: Sequence[str]) -> dict[str, int]:
    path = str(FOLDER.parent / "launch" / "configs" / config)
    found = plan_job([path, "--model.layers", "1", "--recipe", recipe, *overrides], world_size, ranks=[0], plain=False)
    return step_bytes(found.ranks[0].sent("blocks.0"))


PLAN_INTRODUCTION = """\
`te-dist plan CONFIG.toml --world-size 8` prints what a job of `te_dist.launch` stores and sends, by parameter, layer
and rank, and the sums beside those of bf16; `--json` has every figure of every rank in bytes, `--rank 3` chooses whose
parameters are listed, and overrides are those of the job (`--recipe mxfp8 --mesh.tp 2`). It starts no process and
allocates nothing: the model is built on the meta device as each kind of rank would have it, and what is printed is
`fsdp2.footprints` of that, which tests hold to what jobs store, send and allocate. A job prints at its end what a rank
stores of weights and gathers of them in a step; in a model of your own `fsdp2.count_traffic` counts every column.

| column | bytes |
|---|---|
| codes, scales | of a shard, as it lies in memory between steps |
| stored | codes and scales, of all parameters of a layer or rank |
| masters, moments | of the optimizer's state of it |
| forward, backward | that arrive in gathers, a rank's own part included, over all micro batches of a step |
| gradients | that go into the reduce-scatter, and into the all-reduce over replicas; once a step |
| scales (of a step) | of amaxes on which ranks agree when the optimizer quantizes |
| sum | of the four before: what is sent of parameters in a step |
| sum in bf16 | the same, of the layer with its weights in bf16 |
| peak of parameters | allocated at once: shards, gathered units, buffers of gathers; no activations, no gradients |

Over a ring each rank sends and receives (n - 1) / n of what is gathered or reduced, and twice that in an all-reduce.
Not counted are activations and their gradients, which ranks exchange for tensor parallelism and for experts; where a
job has ranks for these, the tables say so.

The tables below are for one micro batch on rank 0. FSDP2 sizes its buffers once, so both passes send as much as the
larger one needs: a forward that is run again in backward costs formats whose directions are independent both planes."""


PAGES: dict[str, Callable[[], str]] = {
    "environment.md": environment,
    "formats.md": formats,
    "grouped.md": grouped,
    "plan.md": plan,
    "tensor.md": tensor,
}


def outdated() -> list[str]:
    """Generated pages that differ from what stands in the folder."""
    return [name for name, text in _texts().items() if not _is_current(FOLDER / name, text)]


def write() -> None:
    """Writes all generated pages."""
    for name, text in _texts().items():
        (FOLDER / name).write_text(text)


def _texts() -> dict[str, str]:
    pages = {name: HEADER + make() for name, make in PAGES.items()}
    for name, sections in SECTIONS.items():
        text = (FOLDER / name).read_text()
        for section, make in sections.items():
            start, end = f"<!-- {section}: written by docs/generate.py -->\n", f"\n<!-- end of {section} -->"
            before, _, rest = text.partition(start)
            text = f"{before}{start}\n{make()}\n{end}{rest.partition(end)[2]}"
        pages[name] = text
    return pages


def _is_current(page: Path, text: str) -> bool:
    return page.exists() and page.read_text() == text


def main(arguments: list[str]) -> None:
    """Writes the pages, or with `--check` exits with the names of those that are out of date."""
    if arguments == ["--check"]:
        if pages := outdated():
            sys.exit(f"out of date: {', '.join(pages)}; run `make docs`")
    else:
        write()


if __name__ == "__main__":
    main(sys.argv[1:])
