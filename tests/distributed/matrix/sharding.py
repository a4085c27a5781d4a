"""Situations of sharding: how units are wrapped, and what is called between and around their passes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.utils.checkpoint import checkpoint

from te_dist import fsdp2, testing
from tests.distributed.matrix.catalog import Formats, situation
from tests.distributed.matrix.model import WIDTH, Beside, Net, batch, forward_backward, linear, net

UNITS, PASSES, PLACES = "Units", "Passes", "Meshes"


def over(*shape: int, names: tuple[str, ...] = ("dp",)) -> DeviceMesh:
    """A mesh of this shape, all ranks in one dimension by default."""
    return testing.mesh(shape or (dist.get_world_size(),), names)


def wrap(model: Net, mesh: DeviceMesh | None = None, *, how: Any = fsdp2.fully_shard, **options: Any) -> Net:
    """Every block a unit, and the root."""
    mesh = mesh or over()
    for block in model.blocks:
        how(block, mesh=mesh, **options)
    how(model, mesh=mesh, **options)
    return model


def beside(
    formats: Formats, mesh: DeviceMesh | None = None, *, each: int = 1, how: Any = fsdp2.fully_shard, **options: Any
) -> Beside:
    """A model wrapped so, beside the same one alone; every rank has an input of its own."""
    sharded, alone = (net(formats, each=each) for _ in range(2))
    return Beside(wrap(sharded, mesh, how=how, **options), alone, dist.get_world_size(), dist.get_rank())


def pairs_of(model: Net) -> list[tuple[nn.Module, nn.Module]]:
    """Of a model with two blocks of every format, those of one format."""
    return list(zip(model.blocks[::2], model.blocks[1::2], strict=True))


# -- units ---------------------------------------------------------------------------------------------------------


@situation("resharded after forward", UNITS)
def resharded(formats: Formats) -> None:
    beside(formats, reshard_after_forward=True).follow(steps=2)


@situation("kept after forward", UNITS)
def kept(formats: Formats) -> None:
    beside(formats, reshard_after_forward=False).follow()


@situation("one root unit", UNITS)
def one_root(formats: Formats) -> None:
    model = net(formats)
    fsdp2.fully_shard(model, mesh=over())
    Beside(model, net(formats), 2, dist.get_rank()).follow()


@situation("one unit of several modules", UNITS)
def grouped_modules(formats: Formats) -> None:
    model = net(formats, each=2)
    for pair in pairs_of(model):
        fsdp2.fully_shard(list(pair), mesh=over())
    fsdp2.fully_shard(model, mesh=over())
    Beside(model, net(formats, each=2), 2, dist.get_rank()).follow()


@situation("plain `torch.distributed.fsdp.fully_shard`", UNITS)
def plain_torch(formats: Formats) -> None:
    beside(formats, how=torch_fully_shard).follow()


@situation("plain `fully_shard`, kept", UNITS)
def plain_torch_kept(formats: Formats) -> None:
    beside(formats, how=torch_fully_shard, reshard_after_forward=False).follow()


@situation("resharding changed per layer, from kept", UNITS)
def changed_from_kept(formats: Formats) -> None:
    both = beside(formats, each=2, reshard_after_forward=False)
    for step, reshards in enumerate((False, True, False)):
        for first, _ in pairs_of(both.sharded):
            first.set_reshard_after_forward(reshards)
        both.step(step, forward_backward)


@situation("resharding changed per layer before the first pass", UNITS)
def changed_before(formats: Formats) -> None:
    both = beside(formats, each=2, reshard_after_forward=True)
    for first, _ in pairs_of(both.sharded):
        first.set_reshard_after_forward(False)
    both.follow()


@situation("kept only after passes were resharded", UNITS, together=False)
def changed_from_resharded(formats: Formats) -> str | None:
    both = beside(formats, each=2, reshard_after_forward=True)
    both.step(0, forward_backward)
    both.sharded.blocks[0].set_reshard_after_forward(False)
    try:
        both.step(1, forward_backward)
    except RuntimeError as error:
        return str(error)
    return None


@situation("`reshard_after_forward=` an integer", UNITS, world=4, together=False)
def integer_reshard(formats: Formats) -> str | None:
    model = net(formats)
    try:
        fsdp2.fully_shard(model.blocks[0], mesh=over(), reshard_after_forward=2)
    except ValueError as error:
        return str(error)
    return None


@situation("tied weights", UNITS)
def tied(formats: Formats) -> None:
    def make() -> Net:
        model = net(formats, each=2)
        for first, second in pairs_of(model):
            second.up.weight = first.up.weight
        return model

    model = make()
    for pair in pairs_of(model):
        fsdp2.fully_shard(list(pair), mesh=over())
    fsdp2.fully_shard(model, mesh=over())
    assert all(second.up.weight is first.up.weight for first, second in pairs_of(model))
    Beside(model, make(), 2, dist.get_rank()).follow()


@situation("frozen parameters", UNITS)
def frozen(formats: Formats) -> None:
    models = [net(formats, each=2) for _ in range(2)]
    for first, second in (pair for model in models for pair in pairs_of(model)):
        for param in (first.up.weight, second.down.weight, second.up.bias):
            param.requires_grad_(False)
    Beside(wrap(models[0]), models[1], 2, dist.get_rank()).follow()


@situation("several dtypes in a unit", UNITS, together=False)
def several_dtypes(formats: Formats) -> str | None:
    models = [net(formats) for _ in range(2)]
    for model in models:
        model.blocks[0].norm.to(torch.bfloat16)
    try:
        sharded = wrap(models[0])
    except ValueError as error:
        return str(error)
    Beside(sharded, models[1], 2, dist.get_rank()).follow()
    return None


# -- passes --------------------------------------------------------------------------------------------------------


def checkpointed(formats: Formats, *, use_reentrant: bool, **options: Any) -> None:
    both = beside(formats, **options)
    both.sharded.around = lambda block, x: checkpoint(block, x, use_reentrant=use_reentrant)
    both.follow()


@situation("activation checkpointing", PASSES)
def recomputed(formats: Formats) -> None:
    checkpointed(formats, use_reentrant=False, recompute=True)


@situation("activation checkpointing, reentrant", PASSES)
def recomputed_reentrant(formats: Formats) -> None:
    checkpointed(formats, use_reentrant=True, recompute=True)


@situation("activation checkpointing under plain `fully_shard`", PASSES)
def recomputed_by_torch(formats: Formats) -> None:
    checkpointed(formats, use_reentrant=False, how=torch_fully_shard)


@situation("activation checkpointing inside of a unit", PASSES)
def recomputed_inside(formats: Formats) -> None:
    both = beside(formats, recompute=True)
    for block in both.sharded.blocks:
        block.up.forward = Recomputed(block.up.forward)
    both.follow()


class Recomputed:
    """A function that runs again in backward."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def __call__(self, x: Tensor) -> Tensor:
        return checkpoint(self.run, x, use_reentrant=False)


def accumulated(formats: Formats, *, syncs: bool, mesh: DeviceMesh | None = None) -> Beside:
    """Three microbatches a step; in backward of the second FSDP2 gathers ahead for forward of the third."""

    def run(model: nn.Module, x: Tensor) -> Tensor:
        for turn in range(3):
            if model is both.sharded:
                prepare(turn == 2)
            out = model(x * (turn + 1))
            (out.square().mean() / 8).backward()
        return out

    def prepare(is_last: bool) -> None:
        if not syncs:
            both.sharded.set_requires_gradient_sync(is_last)
            both.sharded.set_is_last_backward(is_last)

    both = beside(formats, mesh, each=2 if len(formats) == 1 else 1)
    both.sums_alike = not syncs
    both.follow(run=run)
    return both


@situation("accumulation, gradients reduced each time", PASSES)
def accumulated_with_sync(formats: Formats) -> None:
    accumulated(formats, syncs=True)


# One format at a time: of a model, FSDP2 gathers the last unit ahead.
@situation("accumulation without synchronization", PASSES, together=False)
def accumulated_without_sync(formats: Formats) -> None:
    accumulated(formats, syncs=False)


@situation("accumulation, parameters kept in between", PASSES)
def accumulated_kept(formats: Formats) -> None:
    both = beside(formats, reshard_after_forward=False)

    def run(model: nn.Module, x: Tensor) -> Tensor:
        for turn in range(2):
            if model is both.sharded:
                model.set_reshard_after_backward(turn == 1)
                model.set_requires_gradient_sync(turn == 1)
            out = model(x * (turn + 1))
            (out.square().mean() / 2).backward()
        return out

    both.follow(run=run)


@situation("prefetching", PASSES)
def prefetched(formats: Formats) -> None:
    both = beside(formats)
    blocks = list(both.sharded.blocks)
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 3])
        block.set_modules_to_backward_prefetch(blocks[max(index - 2, 0) : index][::-1])
    both.follow()


@situation("`unshard()` ahead of the pass", PASSES)
def unsharded_ahead(formats: Formats) -> None:
    both = beside(formats)

    def run(model: nn.Module, x: Tensor) -> Tensor:
        if model is both.sharded:
            handles = [block.unshard(async_op=True) for block in model.blocks]
            for handle in handles:
                handle.wait()
        return forward_backward(model, x)

    both.follow(run=run)


@situation("`no_grad`", PASSES)
def without_gradients(formats: Formats) -> None:
    evaluated_in_turn(formats, torch.no_grad)


@situation("`inference_mode` after a step", PASSES)
def in_inference_mode(formats: Formats) -> None:
    evaluated_in_turn(formats, torch.inference_mode, steps_before=1)


@situation("`inference_mode` before any step", PASSES, together=False)
def in_inference_mode_first(formats: Formats) -> str | None:
    try:
        evaluated_in_turn(formats, torch.inference_mode)
    except RuntimeError as error:
        return str(error)
    return None


def evaluated_in_turn(formats: Formats, mode: Any, *, steps_before: int = 0) -> None:
    """Evaluation after so many steps of training, and after each further one."""
    both = beside(formats)
    for step in range(steps_before):
        both.step(step, forward_backward)
    for step in range(steps_before, 2):
        with mode():
            outs = [model.eval()(batch(50 + step).detach()) for model in (both.sharded, both.alone)]
        both.compare(*outs, "the output in evaluation")
        for model in (both.sharded, both.alone):
            model.train()
        both.step(step, forward_backward)


@situation("`MixedPrecisionPolicy`", PASSES)
def mixed_precision(formats: Formats) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    both = beside(formats, mp_policy=policy)
    for block in both.sharded.blocks:
        block.register_forward_hook(lambda _, args, out: seen.append(out.dtype))
    seen: list[torch.dtype] = []

    def run(model: nn.Module, x: Tensor) -> Tensor:
        if model is both.sharded:
            return forward_backward(model, x)
        low = as_bf16(model, formats)
        out = forward_backward(low, x.to(torch.bfloat16))
        for got, other in zip(model.parameters(), low.parameters(), strict=True):
            got.grad = other.grad.to(got.dtype)
        return out

    both.follow(run=run)
    assert set(seen) == {torch.bfloat16}


def as_bf16(model: Net, formats: Formats) -> Net:
    """The same bytes, nominally bf16; plain parameters rounded to it."""
    low = net(formats)
    low.load_state_dict(model.state_dict())
    return low.to(torch.bfloat16)


@situation("`CPUOffloadPolicy`", PASSES)
def offloaded(formats: Formats) -> None:
    # NOTE: torch pins memory for an accelerator only.
    policy = CPUOffloadPolicy(pin_memory=testing.device().type != "cpu")
    both = beside(formats, offload_policy=policy)
    assert all(param.device.type == "cpu" for param in both.sharded.parameters())
    both.follow()


def compiled(formats: Formats, **options: Any) -> None:
    """Blocks of one linear map, compiled, since compiling takes long; those of the model alone are not."""
    torch.compiler.reset()
    (format,) = formats
    models = [Net([nn.Sequential(linear(format, (WIDTH, WIDTH), seed=1), nn.SiLU())]) for _ in range(2)]
    for block in models[0].blocks:
        block.compile(backend="aot_eager")
    Beside(wrap(models[0], **options), models[1], 2, dist.get_rank()).follow()


@situation("`torch.compile` of every block, kept", PASSES, together=False)
def compiled_kept(formats: Formats) -> None:
    compiled(formats, reshard_after_forward=False)


@situation("`torch.compile` of every block, resharded", PASSES, together=False)
def compiled_resharded(formats: Formats) -> None:
    compiled(formats, reshard_after_forward=True)
