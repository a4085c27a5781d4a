"""From a plain decoder to a trained one: every call a job makes into te_dist's integrations is in this module.

Reading order: the recipe, the mesh, the model in its formats and cut over the mesh, the optimizer, the context of a
forward pass. A training script of one's own needs these five and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, parallelize_module

import te_dist as te
from te_dist import fsdp2, offload, optim, quantizers, recipe, recompute
from te_dist.launch.config import Config, OptimizerConfig, RecipeName
from te_dist.launch.errors import require
from te_dist.launch.layout import Layout
from te_dist.launch.model import Block, Decoder
from te_dist.nn.answers import quantizers_of
from te_dist.nn.grouped_site import GroupedSite
from te_dist.nn.moe import ExpertParallel
from te_dist.nn.moe.payload import check_rows
from te_dist.nn.site import LinearSite
from te_dist.tensor_parallel import ColumnParallel, GatherInput, RowParallel, SequenceParallel

SEQUENCE = Shard(1)  # of (batch, sequence, columns)


def float8_forward_mxfp8_backward(role: recipe.QuantizerRole) -> quantizers.Quantizer:
    """A hybrid: the forward multiplication by one scale per tensor, both of backward by MXFP8's scales."""
    if role.tensor_type == "grad_output":
        return quantizers.MXFP8Quantizer()
    return quantizers.HybridQuantizer(
        rowwise_quantizer=quantizers.Float8CurrentScalingQuantizer(), columnwise_quantizer=quantizers.MXFP8Quantizer()
    )


RECIPES: dict[RecipeName, recipe.Recipe | None] = {
    "bf16": None,
    "float8_current": recipe.Float8CurrentScaling(),
    "float8_delayed": recipe.DelayedScaling(),
    "float8_block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(),
    "hybrid_float8_mxfp8": recipe.CustomRecipe(float8_forward_mxfp8_backward),
}


def block_plan(*, has_experts: bool) -> dict[str, ParallelStyle]:
    """How ranks along tp share a block: each normalizes its part of every sequence, attends and multiplies for its
    heads and columns; what they exchange is gathered in the recipe's format. Experts get the parts as they are."""
    dense: dict[str, ParallelStyle] = {
        "feed_forward": GatherInput("gate"),
        "feed_forward.gate": ColumnParallel(),
        "feed_forward.up": ColumnParallel(),
        "feed_forward.down": RowParallel(output_layouts=SEQUENCE),
    }
    return {
        "attention_norm": SequenceParallel(),
        "attention": GatherInput("query"),
        "attention.query": ColumnParallel(),
        "attention.key": ColumnParallel(),
        "attention.value": ColumnParallel(),
        "attention.out": RowParallel(output_layouts=SEQUENCE),
        "feed_forward_norm": SequenceParallel(),
        **({} if has_experts else dense),
    }


def root_plan() -> dict[str, ParallelStyle]:
    """How ranks along tp share what surrounds the blocks: parts of the sequences, columns of the vocabulary."""
    return {
        "embedding": SequenceParallel(),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=SEQUENCE, output_layouts=Replicate()),
    }


def make_mesh(layout: Layout, device: torch.device, timeout_seconds: float) -> DeviceMesh:
    """The mesh (dp, tp), neighbours along tp; groups made here, since a mesh's own would not know the timeout."""
    ranks = torch.arange(layout.dp * layout.tp).view(layout.dp, layout.tp)
    timeout = timedelta(seconds=timeout_seconds)
    groups = [_group_of_this_rank(lines, timeout) for lines in (ranks.T, ranks)]
    return DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=("dp", "tp"))


def make_expert_mesh(layout: Layout, device: torch.device, timeout_seconds: float) -> DeviceMesh | None:
    """The same ranks as (edp, ep): `ep` neighbours share the experts, `edp` ranks have the same ones; None for one."""
    if layout.ep == 1:
        return None
    ranks = torch.arange(layout.dp * layout.tp).view(-1, layout.ep)
    timeout = timedelta(seconds=timeout_seconds)
    groups = [_group_of_this_rank(lines, timeout) for lines in (ranks.T, ranks)]
    return DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=("edp", "ep"))


def _group_of_this_rank(lines: Tensor, timeout: timedelta) -> dist.ProcessGroup:
    """Makes a group of each row of ranks. Called by every rank."""
    group, _ = dist.new_subgroups_by_enumeration(lines.tolist(), timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    return group


def build_model(
    config: Config, mesh: DeviceMesh, device: torch.device, *, expert_mesh: DeviceMesh | None = None
) -> Decoder:
    """The decoder in the recipe's format, cut over the mesh and initialized alike for every mesh."""
    model = shard_model(config, mesh, expert_mesh=expert_mesh)
    fsdp2.materialize(model, device=device, seed=config.seed)
    precision = RECIPES[config.recipe]
    if precision is not None:
        te.prepare(model, precision)  # sizes are checked for the device, and histories are there to be loaded
    return model


@contextmanager
def histories_of(model: nn.Module, saved: str, own: RecipeName) -> Iterator[None]:
    """While a checkpoint is read that was trained by the recipe `saved`, the model keeps what histories that has."""
    theirs, ours = RECIPES.get(saved), RECIPES[own]  # type: ignore[call-overload]
    if saved == own or not any(isinstance(each, recipe.DelayedScaling) for each in (theirs, ours)):
        yield
        return
    _keep_histories(model, theirs if isinstance(theirs, recipe.DelayedScaling) else None)
    yield
    _keep_histories(model, ours)


def _keep_histories(model: nn.Module, precision: recipe.Recipe | None) -> None:
    """Those of a recipe, new ones."""
    for module in model.modules():
        if isinstance(module, LinearSite):
            module.scaling = None
    if precision is not None:
        te.prepare(model, precision)


def shard_model(config: Config, mesh: DeviceMesh, *, expert_mesh: DeviceMesh | None = None) -> Decoder:
    """The decoder in the recipe's format, cut over the mesh, on the meta device.

    Blocks free their gathered parameters after forward and gather them again for backward; the root's embedding, norm
    and head stay in between, since backward starts with them.
    """
    precision = RECIPES[config.recipe]
    init = te.quantized_model_init(
        enabled=precision is not None, recipe=precision, preserve_high_precision_init_val=True
    )
    with init, torch.device("meta"):
        model = Decoder(config.model)
    recomputes = config.recompute == "full"
    for block in model.blocks:
        assert isinstance(block, Block)
        if recomputes:
            block.call = recompute.checkpoint
        if mesh["tp"].size() > 1:
            parallelize_module(block, mesh["tp"], block_plan(has_experts=config.model.experts.count > 0))
        if expert_mesh is not None:
            style = expert_style(config, mesh)
            parallelize_module(block, expert_mesh["ep"], {"feed_forward": style})
            experts = block.get_submodule("feed_forward.experts")
            fsdp2.fully_shard(experts, mesh=expert_mesh["edp"], recompute=recomputes)
    blocks, size = list(model.blocks), config.mesh.unit_blocks
    for first in range(0, len(blocks), size):
        fsdp2.fully_shard(blocks[first : first + size], mesh=mesh["dp"], recompute=recomputes)
    if mesh["tp"].size() > 1:
        parallelize_module(model, mesh["tp"], root_plan())
        model.embedding.register_forward_pre_hook(lambda _, args: (_part(args[0], mesh["tp"]),))
    fsdp2.fully_shard(model, mesh=mesh["dp"])
    return model


def expert_style(config: Config, mesh: DeviceMesh) -> ExpertParallel:
    """How experts are spread, over whole groups of the ranks along tp, which have parts of the same sequences.

    Raises:
        JobError: rows that are quantized by the recipe cannot travel.
    """
    if config.model.experts.payload == "quantized":
        _check_payload(config)
    experts, parts = config.model.experts, mesh["tp"] if mesh["tp"].size() > 1 else None
    return ExpertParallel(
        capacity=expert_capacity(config), payload=experts.payload, travels=experts.travels, sequence_mesh=parts
    )


def _check_payload(config: Config) -> None:
    precision, error = RECIPES[config.recipe], None
    if precision is not None:
        try:
            check_rows(quantizers_of(precision, "", GroupedSite.module_type)["input"], torch.bfloat16)
        except ValueError as found:
            error = found
    require(
        precision is not None and error is None,
        "model.experts.payload",
        got=f"quantized with recipe {config.recipe}",
        wanted="a recipe that quantizes each row of inputs by itself, such as float8_block or mxfp8",
        remedy='change recipe, or set payload = "plain"',
    )


def expert_capacity(config: Config) -> int | None:
    """Rows that a rank sends to each other one; None for as many as there are."""
    experts, tokens = config.model.experts, config.train.micro_batch * config.data.sequence_length // config.mesh.tp
    if not experts.capacity_factor:
        return None
    return math.ceil(experts.capacity_factor * tokens * experts.top_k / config.mesh.ep)


def _part(tokens: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's part of each sequence."""
    return tokens.chunk(mesh.size(), dim=SEQUENCE.dim)[mesh.get_local_rank()]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> optim.FusedAdam:
    """Adam over fp32 masters; matrices decay, the embedding and the norms do not."""
    decays = {True: [], False: []}
    for name, parameter in model.named_parameters():
        decays[parameter.ndim > 1 and not name.startswith("embedding.")].append(parameter)
    groups = [
        {"params": decays[True], "weight_decay": config.weight_decay},
        {"params": decays[False], "weight_decay": 0.0},
    ]
    return optim.FusedAdam(
        groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), eps=config.epsilon, master_weights=True
    )


class Precision:
    """What surrounds each forward pass: the recipe's matrix multiplications and the budget of saved activations."""

    def __init__(self, config: Config) -> None:
        self._recipe = RECIPES[config.recipe]
        self._budget = config.offload

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Enters the contexts the configuration asks for."""
        with ExitStack() as stack:
            group = dist.group.WORLD  # whose ranks share the scales of delayed scaling
            stack.enter_context(
                te.autocast(enabled=self._recipe is not None, recipe=self._recipe, amax_reduction_group=group)
            )
            if self._budget:
                stack.enter_context(offload.activations(budget=self._budget))
            yield
