"""Where the ranks stand: the mesh, and what the number of ranks makes of the batch."""

from __future__ import annotations

from dataclasses import dataclass

from te_dist.launch.config import Config
from te_dist.launch.errors import require

RANKS = "the number of ranks (torchrun --nproc-per-node, te-dist plan --world-size)"


@dataclass(frozen=True)
class Layout:
    """The number of ranks along each mesh axis and the share of the batch that follows.

    Attributes:
        dp: ranks that split the batch and the parameters.
        tp: ranks that split each matrix multiplication; all of them see the same sequences.
        ep: neighbours that share the experts, whole groups of tp ranks.
        accumulate: micro batches a rank runs in one step.
    """

    dp: int
    tp: int
    accumulate: int
    ep: int = 1

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank stands along every axis of the meshes (dp, tp) and (edp, ep)."""
        return dict(zip(("dp", "tp", "edp", "ep"), divmod(rank, self.tp) + divmod(rank, self.ep), strict=True))


def plan(config: Config, world_size: int) -> Layout:
    """The layout of `world_size` ranks.

    Raises:
        JobError: the mesh does not hold all ranks, or the batch, the heads or the experts do not divide.
    """
    tp = config.mesh.tp
    require(
        world_size % tp == 0,
        "mesh.tp",
        got=f"{tp} with {world_size} ranks",
        wanted="a divisor of the number of ranks",
        remedy=f"change mesh.tp or {RANKS}",
    )
    dp = world_size // tp if config.mesh.dp == "rest" else config.mesh.dp
    require(
        dp * tp == world_size,
        "mesh",
        got=f"dp {dp} x tp {tp} with {world_size} ranks",
        wanted="dp x tp equal to the number of ranks",
        remedy=f'set mesh.dp = "rest" or change {RANKS}',
    )
    require(
        config.model.kv_heads % tp == 0,
        "mesh.tp",
        got=f"{tp} with {config.model.kv_heads} key and value heads",
        wanted="a divisor of model.kv_heads",
        remedy="lower mesh.tp or raise model.kv_heads",
    )
    require(
        config.data.sequence_length % tp == 0,
        "mesh.tp",
        got=f"{tp} with sequences of {config.data.sequence_length} tokens",
        wanted="a divisor of data.sequence_length",
        remedy="change mesh.tp or data.sequence_length",
    )
    at_once = dp * config.train.micro_batch
    require(
        config.train.batch % at_once == 0,
        "train.batch",
        got=f"{config.train.batch} sequences with dp {dp} x micro_batch {config.train.micro_batch}",
        wanted=f"a multiple of {at_once}",
        remedy="change train.batch or train.micro_batch",
    )
    _check_experts(config, world_size)
    return Layout(dp, tp, config.train.batch // at_once, config.mesh.ep)


def _check_experts(config: Config, world_size: int) -> None:
    ep, tp, experts = config.mesh.ep, config.mesh.tp, config.model.experts
    require(
        ep == 1 or experts.count > 0,
        "mesh.ep",
        got=f"{ep} without experts",
        wanted="1, or a model with experts",
        remedy="set model.experts.count",
    )
    require(
        ep % tp == 0 or not experts.count,
        "mesh.ep",
        got=f"{ep} with mesh.tp = {tp} and {experts.count} experts",
        wanted="a multiple of mesh.tp, whose ranks have parts of the same sequences",
        remedy="raise mesh.ep or lower mesh.tp",
    )
    require(
        world_size % ep == 0 and experts.count % ep == 0,
        "mesh.ep",
        got=f"{ep} with {world_size} ranks and {experts.count} experts",
        wanted="a divisor of both",
        remedy="change mesh.ep or model.experts.count",
    )
    require(
        ep == 1 or config.recipe != "float8_delayed",
        "recipe",
        got=f"{config.recipe} with mesh.ep = {ep}",
        wanted="a recipe without histories, which experts of several ranks cannot keep",
        remedy='take "float8_current" or "float8_block", or set mesh.ep = 1',
    )
    require(
        ep > 1 or not experts.capacity_factor,
        "model.experts.capacity_factor",
        got=f"{experts.capacity_factor} with mesh.ep = {ep}",
        wanted="0 where rows are not sent to other ranks",
        remedy="set it to 0, or raise mesh.ep",
    )
    for name, plain in (("payload", "plain"), ("travels", "copies")):
        require(
            ep > 1 or getattr(experts, name) == plain,
            f"model.experts.{name}",
            got=f"{getattr(experts, name)} with mesh.ep = {ep}",
            wanted=f'"{plain}" where rows are not sent to other ranks',
            remedy="leave it out, or raise mesh.ep",
        )
