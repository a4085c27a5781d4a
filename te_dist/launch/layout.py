"""Where the ranks stand: the mesh, and what the number of ranks makes of the batch."""

from __future__ import annotations

from dataclasses import dataclass

from te_dist.launch.config import Config
from te_dist.launch.errors import require


@dataclass(frozen=True)
class Layout:
    """The number of ranks along each mesh axis and the share of the batch that follows.

    Attributes:
        dp: ranks that split the batch and the parameters.
        tp: ranks that split each matrix multiplication; all of them see the same sequences.
        accumulate: micro batches a rank runs in one step.
    """

    dp: int
    tp: int
    accumulate: int


def plan(config: Config, world_size: int) -> Layout:
    """The layout of `world_size` ranks.

    Raises:
        JobError: the mesh does not hold all ranks, or the batch or the heads do not divide.
    """
    tp = config.mesh.tp
    require(
        world_size % tp == 0,
        "mesh.tp",
        got=f"{tp} with {world_size} ranks",
        wanted="a divisor of the number of ranks",
        remedy="change mesh.tp or --nproc-per-node",
    )
    dp = world_size // tp if config.mesh.dp == "rest" else config.mesh.dp
    require(
        dp * tp == world_size,
        "mesh",
        got=f"dp {dp} x tp {tp} with {world_size} ranks",
        wanted="dp x tp equal to the number of ranks",
        remedy='set mesh.dp = "rest" or change --nproc-per-node',
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
    return Layout(dp, tp, config.train.batch // at_once)
