"""What a configured job stores and sends, by parameter and rank, without starting it.

The model is built on the meta device once for each kind of rank, by the calls that a job makes, in a process group of
which this process alone is there. Everything else is `fsdp2.footprints`, and the optimizer's own state without memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from te_dist import catalog, fsdp2
from te_dist._torch_private import pretended_ranks
from te_dist.formats import Format
from te_dist.fsdp2 import Footprint, Purpose, Unit
from te_dist.fsdp2.footprint import kinds_of_ranks
from te_dist.kernels.runtime import target_of
from te_dist.launch import config_file, layout, parallelize
from te_dist.launch.config import Config
from te_dist.launch.errors import JobError, require
from te_dist.launch.layout import Layout
from te_dist.nn import LinearSite
from te_dist.optim import FusedAdam
from te_dist.tensor.placement import local_tensor

PLAIN = "bf16"
_STEP = "step"  # a count that optimizers keep beside the state of each parameter


@dataclass(frozen=True)
class ParameterPlan:
    """One parameter on one rank.

    Attributes:
        layer: what it is summed up with: a block, or a module of its own beside them.
        footprint: what is stored and sent.
        masters, moments: bytes that the optimizer keeps of it on this rank.
    """

    layer: str
    footprint: Footprint
    masters: int
    moments: int

    @property
    def stored(self) -> int:
        """Bytes of the shard."""
        return sum(self.footprint.stored)


@dataclass(frozen=True)
class RankPlan:
    """One rank.

    Attributes:
        parameters: of the model, in its order.
        peak: bytes of parameters that are allocated at once.
        micro_batches: of a step.
    """

    parameters: tuple[ParameterPlan, ...]
    peak: fsdp2.Peak
    micro_batches: int

    def sent(self, layer: str | None = None) -> dict[Purpose, int]:
        """Bytes of a step by purpose, of one layer or all."""
        found = [each.footprint for each in self.parameters if layer in (None, each.layer)]
        return fsdp2.sent_per_step(found, micro_batches=self.micro_batches)

    @property
    def layers(self) -> tuple[str, ...]:
        """In the order of the model."""
        return tuple(dict.fromkeys(each.layer for each in self.parameters))


@dataclass(frozen=True)
class JobPlan:
    """A job.

    Attributes:
        recipe: of the configuration.
        layout: of the ranks.
        ranks: plans of the ranks that were asked for.
        plain: the same without a recipe: bf16; empty where it was not asked for.
    """

    recipe: str
    layout: Layout
    ranks: tuple[RankPlan, ...]
    plain: tuple[RankPlan, ...]


def _unwatched(ranks: Sequence[int], _: str) -> Iterable[int]:
    return ranks


def plan_job(
    arguments: Sequence[str],
    world_size: int = 0,
    *,
    ranks: Sequence[int] = (),
    plain: bool = True,
    watch: Callable[[Sequence[int], str], Iterable[int]] = _unwatched,
) -> JobPlan:
    """The plan of a job.

    Args:
        arguments: its command line: a TOML file, then overrides.
        world_size: ranks; 0 for as many as the configuration's mesh has.
        ranks: which of them to plan; all where none is named.
        plain: whether to plan the same job in bf16 as well.
        watch: shows how far it is: gets ranks and in which recipe they are planned, yields them one by one.

    Raises:
        JobError: the configuration cannot be read or does not fit the ranks.
    """
    require(
        world_size >= 0,
        "--world-size",
        got=str(world_size),
        wanted="a number of ranks, or 0 for as many as the mesh has",
        remedy="correct it",
    )
    config = config_file.load(arguments)
    dp, tp = config.mesh.dp, config.mesh.tp
    require(
        world_size > 0 or dp != "rest",
        "--world-size",
        got='none, with mesh.dp = "rest"',
        wanted="a number of ranks",
        remedy="name it, or a configuration file that sets mesh.dp",
    )
    world_size = world_size or int(dp) * tp
    found = layout.plan(config, world_size)
    ranks = ranks or range(world_size)
    own = _plan_ranks(config, found, watch(ranks, config.recipe), world_size=world_size)
    if not plain:
        return JobPlan(config.recipe, found, own, ())
    beside = own
    if config.recipe != PLAIN:
        beside = _plan_ranks(_in_bf16(config), found, watch(ranks, PLAIN), world_size=world_size)
    return JobPlan(config.recipe, found, own, beside)


def _in_bf16(config: Config) -> Config:
    experts = replace(config.model.experts, payload="plain")
    return replace(config, recipe=PLAIN, model=replace(config.model, experts=experts))


def format_name(format: Format | None, dtype: torch.dtype) -> str:
    """As the catalog calls it, or by its codecs; without a format the type of plain values."""
    return str(dtype).removeprefix("torch.") if format is None else catalog.name_of(format)


def _of_no_model(coordinates: Mapping[str, int]) -> object:
    """The kind of a rank before there is any model."""
    return None


def _plan_ranks(config: Config, layout: Layout, ranks: Iterable[int], *, world_size: int) -> tuple[RankPlan, ...]:
    """Of every rank; those of a kind have the same one. See [Note: Kinds of ranks] in `fsdp2.footprint`."""
    plans: dict[object, RankPlan] = {}
    found = []
    kind_of: Callable[[Mapping[str, int]], object] = _of_no_model
    try:
        for rank in ranks:
            place = layout.coordinates(rank)
            kind = kind_of(place)
            if kind not in plans:
                model, plan = _plan_rank(config, layout, world_size, rank)
                kind_of = kinds_of_ranks(model)
                kind = kind_of(place)
                plans[kind] = plan
            found.append(plans[kind])
    except ValueError as error:
        raise JobError(
            f"recipe {config.recipe}",
            got=error,
            wanted="sizes that its format can hold and the mesh can cut",
            remedy="change [model], mesh or recipe",
        ) from error
    return tuple(found)


def _plan_rank(config: Config, layout: Layout, world_size: int, rank: int) -> tuple[nn.Module, RankPlan]:
    cpu = torch.device("cpu")  # of the mesh; the model is on meta
    with pretended_ranks(world_size, rank):
        mesh = parallelize.make_mesh(layout, cpu, config.timeout_seconds)
        experts = parallelize.make_expert_mesh(layout, cpu, config.timeout_seconds)
        model = parallelize.shard_model(config, mesh, expert_mesh=experts)
        _check_sizes(model, config)
        unit = fsdp2.footprints(model)
        state = _optimizer_bytes(model, parallelize.build_optimizer(model, config.optimizer))
    layers = _layers(unit)
    order = [name for name, _ in model.named_parameters()]
    by_name = {each.name: each for own in unit.flat() for each in own.parameters}
    plans = (ParameterPlan(layers[name], by_name[name], *state[name]) for name in order)
    return model, RankPlan(tuple(plans), fsdp2.peak_bytes(unit), layout.accumulate)


def _check_sizes(model: nn.Module, config: Config) -> None:
    """As the job does once it has the device; of "auto" the CPU, whose products take what those of GPUs do, and more.

    Raises:
        ValueError: some are none that the recipe takes.
    """
    precision = parallelize.RECIPES[config.recipe]
    target = target_of(torch.device("meta" if config.device == "cuda" else "cpu"))
    for module in model.modules():
        if precision is not None and isinstance(module, LinearSite):
            module.check(precision, target)


def _optimizer_bytes(model: nn.Module, optimizer: FusedAdam) -> dict[str, tuple[int, int]]:
    """By parameter, bytes of its master and of its moments."""
    found = {}
    for name, param in model.named_parameters():
        optimizer.initialize_state(param)
        sizes = {key: local_tensor(value).nbytes for key, value in optimizer.state[param].items() if key != _STEP}
        masters = sum(size for key, size in sizes.items() if "master" in key)
        found[name] = masters, sum(sizes.values()) - masters
    return found


def _layers(root: Unit) -> dict[str, str]:
    """Of each parameter: the outermost unit in the root that it is in, or the root's own module."""
    layers = {each.name: each.name.partition(".")[0] for each in root.parameters}
    for unit in root.inner:
        layers |= {each.name: unit.name for own in unit.flat() for each in own.parameters}
    return layers
