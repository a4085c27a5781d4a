"""Cutting experts over ranks: what is refused alike on all of them, and what their parameters keep."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

import te_dist as te
from te_dist import fsdp2, recipe, testing
from te_dist.nn.moe import ExpertParallel, MoE, Routing
from te_dist.quantizers import Float8CurrentScalingQuantizer
from te_dist.recipe import QuantizerRole
from te_dist.testing import assert_bitwise

HIDDEN, EXPERTS, TOKENS = 128, 4, 16
DELAYED = recipe.DelayedScaling()


def make(**options: Any) -> MoE:
    torch.manual_seed(0)
    options = {"params_dtype": torch.bfloat16, "device": testing.device(), **options}
    return MoE(HIDDEN, HIDDEN, Routing(EXPERTS, 2), **options)


def cut(module: MoE, mesh: DeviceMesh) -> MoE:
    parallelize_module(module, mesh["ep"], ExpertParallel())
    return module


def tokens() -> torch.Tensor:
    return torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, device=testing.device())


def only_the_last(role: QuantizerRole) -> Any:
    """A history for the second map only, which rows reach after they were sent."""
    delayed = role.name.endswith("fc2") and role.tensor_type == "input"
    return DELAYED.quantizer(role) if delayed else Float8CurrentScalingQuantizer()


def delayed(rank: int, world: int) -> list[str]:
    mesh = testing.mesh((1, world), ("edp", "ep"))
    found = []
    for given in (DELAYED, recipe.CustomRecipe(only_the_last)):
        with pytest.raises(ValueError, match="histories of") as error:
            te.prepare(cut(make(), mesh), given)
        found.append(str(error.value))
        if rank == 0:  # alone: the others would be waited for
            with pytest.raises(ValueError, match="histories of"), te.autocast(recipe=given):
                cut(make(), mesh)(tokens())
    with te.quantized_model_init(recipe=DELAYED):
        module = make()
    with pytest.raises(ValueError, match="made for, or run with, delayed scaling"):
        cut(module, mesh)
    return found


def test_experts_of_several_ranks_keep_no_histories(ranks: Callable) -> None:
    first, second = ranks(2).run(delayed)
    assert first == second
    assert all("take Float8CurrentScaling" in message for message in first)


def delayed_alone(rank: int, world: int) -> None:
    mesh = testing.mesh((1, world), ("edp", "ep"))
    module = cut(make(), mesh)
    with te.autocast(recipe=DELAYED):
        module(tokens()).sum().backward()
    assert module.experts.fc1.gemm.scaling is not None


def test_experts_of_one_rank_keep_histories(ranks: Callable) -> None:
    ranks(1).run(delayed_alone)


def kept(rank: int, world: int) -> None:
    mesh = testing.mesh((1, world), ("edp", "ep"))
    for made_by in (None, recipe.Float8BlockScaling()):
        with te.quantized_model_init(enabled=made_by is not None, recipe=made_by):
            module = make()
        module.experts.fc1.requires_grad_(False)
        module.experts.fc1.weight.allreduce = False
        cut(module, mesh)
        wanted = {"experts.fc1.weight": False}
        assert {n: p.requires_grad for n, p in module.named_parameters()} == {
            n: wanted.get(n, True) for n, _ in module.named_parameters()
        }
        for fc in (module.experts.fc1, module.experts.fc2):
            assert (fc.weight.partition_dim, fc.weight.tensor_model_parallel) == (-1, False)
            assert fc.weight.skip_backward_post_hook is False
        assert module.experts.fc1.weight.allreduce is False


def test_parameters_keep_what_was_set(ranks: Callable) -> None:
    ranks(2).run(kept)


def refused(rank: int, world: int) -> list[str]:
    mesh = testing.mesh((1, world), ("edp", "ep"))
    found = []
    for module in (cut(make(), mesh), make(fuse_wgrad_accumulation=True)):
        dispatcher, weight = module.dispatcher, module.experts.fc1.weight
        with pytest.raises(ValueError) as error:
            cut(module, mesh)
        assert module.dispatcher is dispatcher and module.experts.fc1.weight is weight
        found.append(str(error.value))
    return found


def test_experts_are_cut_once_and_without_main_gradients(ranks: Callable) -> None:
    first, second = ranks(2).run(refused)
    assert first == second
    assert "apply ExpertParallel once, and before fully_shard" in first[0]
    assert "fuse_wgrad_accumulation is for weights that are no DTensors" in first[1]


def copied(rank: int, world: int) -> None:
    module = cut(make(), testing.mesh((1, world), ("edp", "ep")))
    other, x = copy.deepcopy(module), tokens()
    assert_bitwise(other(x).detach(), module(x).detach(), "out")
    assert other.dispatcher.num_host_syncs == 1


def test_a_model_can_be_copied(ranks: Callable) -> None:
    ranks(2).run(copied)


def wrapped_apart(rank: int, world: int) -> None:
    mesh = testing.mesh((world, 1), ("edp", "ep"))
    module = make()
    for fc in (module.experts.fc1, module.experts.fc2):
        fsdp2.fully_shard(fc, mesh=mesh["edp"])
    with pytest.raises(ValueError, match="wrap experts, not fc1 or fc2"):
        module(tokens())


def test_maps_that_are_wrapped_alone_are_named(ranks: Callable) -> None:
    ranks(2).run(wrapped_apart)
