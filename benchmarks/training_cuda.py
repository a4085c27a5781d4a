"""How fast does a decoder train under FSDP2 in each recipe beside torch in bf16, in how much memory, and why?

    torchrun --standalone --nproc-per-node 8 -m benchmarks.training_cuda --out benchmarks/results --shares

The peer is plain torch: parameters in fp32 that `fully_shard` casts to bf16, gradients reduced in bf16, a fused AdamW.
te_dist's weights are quantized from the start, the masters of `FusedAdam` are fp32. Both run the same norms, rotary
embedding, attention and loss, on random tokens, and backward in the thread that calls it: a rank has one GPU, and
nothing to gain from another thread. Step times are those of the slowest rank, medians; memory is the largest of all
ranks. Bytes are what one step gathers and reduces, as `fsdp2.count_traffic` counts it. With `--travels`, lines
follow in which experts lie over all ranks, and FSDP2 gathers the rest: torch's copies travel by an all-to-all
(`PlainExpertParallel`), te_dist's tokens in each of these ways.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import tyro
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel

import te_dist as te
from benchmarks.decoder import LLAMA, QWEN, Decoder, in_bf16
from benchmarks.linear_cuda import RECIPES
from benchmarks.plain_moe import PlainExpertParallel
from benchmarks.ranks import all_gpus, over_ranks, publish
from benchmarks.report import Report, number, text
from benchmarks.shares import shares_of
from te_dist import fsdp2, optim, recipe
from te_dist.nn.moe import ExpertParallel, MoE
from te_dist.nn.moe.block import Travels

MODELS = {"llama": LLAMA, "qwen_moe": QWEN}
TORCH_TRAVELS: Travels = "copies"
WARM_STEPS, STEPS = 4, 15
# Whatever torch calls fastest here; the same for all.
BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
GATHERS = fsdp2.Purpose.FORWARD_GATHER, fsdp2.Purpose.BACKWARD_GATHER


@dataclass(frozen=True)
class Case:
    """A line to be: which model, on what, and how."""

    model: str
    sequences: int
    length: int
    recipe: str = ""
    compiled: bool = False
    unit: int = 1  # blocks
    travels: Travels | None = None  # how tokens come to experts that lie over all ranks; None: FSDP2 gathers them

    @property
    def label(self) -> str:
        """What the table calls it."""
        travels = f", {self.travels} to experts" if self.travels else ""
        return (self.recipe or "torch bf16") + travels + (", compiled" if self.compiled else "")

    @property
    def made_by(self) -> recipe.Recipe | None:
        """The recipe; None for the peer."""
        return RECIPES[self.recipe] if self.recipe else None


@dataclass(frozen=True)
class Row:
    """A line: tokens a second, a step in ms, TFLOP/s, GiB at the peak, MiB sent; the peer's step over this one."""

    model: str
    batch: str
    label: str
    tokens: float
    step: float
    issue: float
    tflops: float
    peak: float
    gathered: float
    reduced: float
    speedup: float | None


class Job:
    """A model of a case, its optimizer, and a step of both."""

    def __init__(self, case: Case, mesh: DeviceMesh) -> None:
        self.case, self.group = case, mesh.get_group()
        shape, device, made_by = MODELS[case.model], torch.device(mesh.device_type), case.made_by
        self.model = plain(case, mesh) if made_by is None else quantized(case, made_by, mesh)
        if case.compiled:
            for block in self.model.blocks:
                block.compile()
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.AdamW(groups_of(self.model), 1e-4, fused=True)
            if made_by is None
            else optim.FusedAdam(self.model.parameters(), 1e-4)
        )
        tokens = torch.randint(shape.vocabulary, (case.sequences, case.length + 1), device=device)
        self.inputs, self.targets = tokens[:, :-1], tokens[:, 1:]

    def __call__(self) -> Tensor:
        """A step; its loss."""
        made_by = self.case.made_by
        with te.autocast(enabled=made_by is not None, recipe=made_by, amax_reduction_group=self.group):
            loss = self.model(self.inputs, self.targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def units_of(model: Decoder, size: int) -> Iterator[list[nn.Module]]:
    """Blocks that are gathered together, `size` of them, and the rest."""
    blocks = list(model.blocks)
    yield from (blocks[first : first + size] for first in range(0, len(blocks), size))
    yield [model]


def groups_of(model: nn.Module) -> list[dict[str, list[nn.Parameter]]]:
    """Parameters of each mesh: torch's optimizers take one in a list."""
    groups: dict[DeviceMesh, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        groups.setdefault(parameter.device_mesh, []).append(parameter)
    return [{"params": parameters} for parameters in groups.values()]


def expert_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The same ranks, all of which share the experts, and none has those of another."""
    return init_device_mesh(mesh.device_type, (1, mesh.size()), mesh_dim_names=("edp", "ep"))


def plain(case: Case, mesh: DeviceMesh) -> Decoder:
    """The peer."""
    over = expert_mesh(mesh) if case.travels else None
    with torch.device(mesh.device_type):
        model = Decoder(MODELS[case.model], quantized=False, group=None if over is None else over["ep"].get_group())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for module in list(model.modules()):
        if over is not None and isinstance(module, PlainExpertParallel):
            torch_fully_shard(module.experts, mesh=over["edp"], mp_policy=policy)
            module.experts.set_gradient_divide_factor(mesh.size())  # of all ranks' tokens, as of the other parameters
    for modules in units_of(model, case.unit):
        torch_fully_shard(modules, mesh=mesh, mp_policy=policy)
    return model


def quantized(case: Case, made_by: recipe.Recipe, mesh: DeviceMesh) -> Decoder:
    """te_dist's, made on meta and filled once it is cut."""
    with in_bf16(), te.quantized_model_init(recipe=made_by), torch.device("meta"):
        model = Decoder(MODELS[case.model], quantized=True)
    over = expert_mesh(mesh) if case.travels else None
    for module in list(model.modules()):
        if over is not None and isinstance(module, MoE):
            parallelize_module(module, over["ep"], ExpertParallel(travels=case.travels))
            fsdp2.fully_shard(module.experts, mesh=over["edp"])
    for modules in units_of(model, case.unit):
        fsdp2.fully_shard(modules, mesh=mesh)
    fsdp2.materialize(model, device=mesh.device_type, seed=0)
    te.prepare(model, made_by)
    return model


def times_of(job: Callable[[], object], steps: int) -> tuple[float, float]:
    """Milliseconds of a step, on the device and to hand it over; medians, of the slowest rank."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    host = []
    events[0].record()
    for event in events[1:]:
        started = time.perf_counter()
        job()
        host.append(time.perf_counter() - started)
        event.record()
    torch.cuda.synchronize()
    device = sorted(a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False))
    return over_ranks(device[steps // 2]), over_ranks(sorted(host)[steps // 2] * 1e3)


def row_of(case: Case, mesh: DeviceMesh, *, peer: float | None, parts: list[str] | None) -> Row:
    """Builds, trains, measures and throws away."""
    shape = MODELS[case.model]
    job = Job(case, mesh)
    for _ in range(WARM_STEPS):
        job()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step, issue = times_of(job, STEPS)
    peak = over_ranks(torch.cuda.max_memory_allocated() / 2**30)
    with fsdp2.count_traffic(job.model) as counted:
        loss = job()
    assert bool(loss.isfinite()), f"{case}: the loss is {loss}"
    gathered, every = (counted.nbytes(*purposes) / 2**20 for purposes in (GATHERS, ()))
    if parts is not None and not case.compiled:
        parts += [f"\n## {case.model}, {case.sequences} x {case.length}, {case.label}\n", *shares_of(job)]
    tokens = case.sequences * case.length / step * 1e3
    rate = tokens * shape.flops(case.length) / 1e12
    batch, speedup = f"{case.sequences} x {case.length}", None if peer is None else peer / step
    return Row(case.model, batch, case.label, tokens, step, issue, rate, peak, gathered, every - gathered, speedup)


def rows_of(cases: list[Case], mesh: DeviceMesh, *, parts: list[str] | None) -> Iterator[Row]:
    """Every case; the first of a model and batch is the peer."""
    peers: dict[tuple[str, str], float] = {}
    for case in cases:
        key = case.model, f"{case.sequences} x {case.length}"
        row = row_of(case, mesh, peer=peers.get(key), parts=parts)
        peers.setdefault(key, row.step)
        yield row
        gc.collect()
        torch.cuda.empty_cache()
        torch.compiler.reset()


def cases_of(
    model: str, chosen: tuple[str, ...], *, compiled: bool, unit: int, travels: tuple[str, ...]
) -> Iterator[Case]:
    """The peer and each recipe: of many tokens, then of few, where communication and the CPU count."""
    for sequences, length in {"llama": ((1, 8192), (1, 2048)), "qwen_moe": ((4, 4096), (1, 4096))}[model]:
        for name in ("", *chosen):
            case = Case(model, sequences, length, name, unit=unit)
            yield case
            if compiled:
                yield replace(case, compiled=True)
        for name in ("", *chosen) if MODELS[model].experts else ():
            for way in travels if name else travels and (TORCH_TRAVELS,):
                yield Case(model, sequences, length, name, unit=unit, travels=way)


def report_on(model: str) -> Report:
    """The page of a model."""
    return Report(
        f"training_{model}_cuda",
        f"Training under FSDP2: {model}",
        f"{MODELS[model]}. Tokens a second of each GPU; a step with its optimizer, and the CPU's time to hand it over; "
        "TFLOP/s of products and attention; what a rank gathers and reduces in a step, in MiB. Speedup: torch's step "
        "in bf16 over this one's.",
        {
            "batch of a GPU": text("batch"),
            "recipe": text("label"),
            "tokens/s": number("tokens"),
            "step ms": number("step", 1),
            "CPU ms": number("issue", 1),
            "TFLOP/s": number("tflops"),
            "peak GiB": number("peak", 1),
            "gathered": number("gathered"),
            "reduced": number("reduced"),
            "speedup": number("speedup", 2),
        },
    )


def main(  # noqa: PLR0913  (options of a command)
    out: Path | None = None,
    models: tuple[str, ...] = tuple(MODELS),
    lengths: tuple[int, ...] = (),
    recipes: tuple[str, ...] = ("block", "current", "delayed"),
    compiled: bool = False,
    shares: bool = False,
    unit: int = 1,
    travels: tuple[Travels, ...] = (),
) -> None:
    """Prints a table for each model, of sequences of some `lengths` or of all; writes them as Markdown and JSON.

    `unit`: how many blocks are wrapped, and so gathered, as one; of all lines. `travels`: ways to experts that lie over
    all ranks, a line more for each recipe.
    """
    with sdpa_kernel(BACKENDS, set_priority=True), all_gpus("dp") as mesh:
        torch.manual_seed(mesh.get_rank())
        for model in models:
            parts: list[str] = []
            every = cases_of(model, recipes, compiled=compiled, unit=unit, travels=travels)
            cases = [case for case in every if not lengths or case.length in lengths]
            rows = rows_of(cases, mesh, parts=parts if shares else None)
            publish(report_on(model), rows, out, mesh=mesh, end=parts)


if __name__ == "__main__":
    tyro.cli(main)
