"""Experts beside tensor parallelism: ranks with parts of the same sequences, against all tokens on one rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import te_dist as te
from te_dist import fsdp2, recipe, testing
from te_dist.nn.moe import ExpertParallel, Routing, TopKRouter, scale_aux_losses, update_expert_biases
from te_dist.nn.moe.routing import next_bias
from te_dist.recipe import Recipe
from te_dist.tensor_parallel import SequenceParallel
from te_dist.testing import assert_bitwise
from tests.nn.distributed.test_moe_block import HIDDEN, Model

TOKENS = 64
RECIPES: dict[str, Recipe | None] = {"bf16": None, "block": recipe.Float8BlockScaling()}
TRAVELS = ("copies", "tokens", "batches")
CLOSE = {"rtol": 2e-2, "atol": 1e-4}  # sums of bf16 in another order; a missing factor is 2


def build(made_by: Recipe | None, *, aux: float = 0.0) -> Model:
    with te.quantized_model_init(enabled=made_by is not None, recipe=made_by), torch.device("meta"):
        return Model(Routing(8, 2, aux_loss_coefficient=aux))


def passed(model: Model, x: Tensor, made_by: Recipe | None, *, rows: int) -> tuple[Tensor, Tensor]:
    """Output and gradient of `x`, of a loss that is a mean over `rows` rows; gradients of weights are added."""
    x = x.clone().requires_grad_()
    with te.autocast(enabled=made_by is not None, recipe=made_by):
        out = model(x)
    (out.float().square().sum() / (rows * HIDDEN)).backward()
    assert x.grad is not None
    return out.detach(), x.grad


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: testing.full_tensor(param.grad) for name, param in model.named_parameters()}


def tokens(seed: int = 1) -> Tensor:
    made = torch.randn(1, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(seed))
    return made.bfloat16().to(testing.device())


def compare_parts(rank: int, world: int, name: str, travels: Any) -> None:
    made_by, mesh = RECIPES[name], testing.mesh((world,), ("tp",))
    whole, parts = build(made_by), build(made_by)
    style = ExpertParallel(travels=travels, sequence_mesh=mesh)
    parallelize_module(parts, mesh, {"moe": style})
    for model in (whole, parts):
        fsdp2.materialize(model, device=testing.device(), seed=3)
    x = tokens()
    wanted = passed(whole, x, made_by, rows=TOKENS)
    found = passed(parts, x.chunk(world, 1)[rank], made_by, rows=TOKENS)
    want, got = gradients(whole), gradients(parts)
    for value, expected in zip(found, wanted, strict=True):
        own = expected.chunk(world, 1)[rank]
        if travels == "copies":
            assert_bitwise(value, own.contiguous(), f"{name}, {travels}")
        torch.testing.assert_close(value, own, **CLOSE)
    for key, grad in got.items():
        if ".experts." in key and travels == "copies":
            assert_bitwise(grad, want[key], key)
        torch.testing.assert_close(grad, want[key], **CLOSE)


@pytest.mark.parametrize("travels", TRAVELS)
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("world", [2, 4])
def test_parts_of_a_sequence_are_the_whole(ranks: Callable, world: int, name: str, travels: str) -> None:
    ranks(world).run(compare_parts, name, travels)


def compare_with_data_parallelism(rank: int, world: int, name: str, ep: int) -> None:
    """(dp, tp) of 2 x 2, experts over tp or over all: means over the batches of dp, sums over parts."""
    made_by, mesh, of_experts = (
        RECIPES[name],
        testing.mesh((2, 2), ("dp", "tp")),
        testing.mesh((world // ep, ep), ("edp", "ep")),
    )
    whole, parts = build(made_by), build(made_by)
    parallelize_module(parts, of_experts["ep"], {"moe": ExpertParallel(sequence_mesh=mesh["tp"])})
    fsdp2.fully_shard(parts.moe.experts, mesh=of_experts["edp"])
    fsdp2.fully_shard(parts, mesh=mesh["dp"])
    for model in (whole, parts):
        fsdp2.materialize(model, device=testing.device(), seed=3)
    for seed in (1, 2):
        passed(whole, tokens(seed), made_by, rows=2 * TOKENS)
    x = tokens(1 + mesh["dp"].get_local_rank()).chunk(2, 1)[mesh["tp"].get_local_rank()]
    passed(parts, x, made_by, rows=TOKENS)
    want = gradients(whole)
    for key, grad in gradients(parts).items():
        torch.testing.assert_close(grad, want[key], **CLOSE)


@pytest.mark.parametrize("ep", [2, 4])
@pytest.mark.parametrize("name", RECIPES)
def test_data_parallelism_takes_the_mean_around_it(ranks: Callable, name: str, ep: int) -> None:
    ranks(4).run(compare_with_data_parallelism, name, ep)


def compare_balancing(rank: int, world: int) -> None:
    """The balancing loss is the mean of those of the parts, which the reference runs one after the other."""
    mesh = testing.mesh((world,), ("tp",))
    whole, parts = build(None, aux=10.0), build(None, aux=10.0)
    parallelize_module(parts, mesh, {"moe": ExpertParallel(sequence_mesh=mesh)})
    for model in (whole, parts):
        fsdp2.materialize(model, device=testing.device(), seed=3)
    scale_aux_losses(whole, 1 / world)
    for part in tokens().chunk(world, 1):
        passed(whole, part, None, rows=TOKENS)
    passed(parts, tokens().chunk(world, 1)[rank], None, rows=TOKENS)
    key = "moe.router.weight"
    torch.testing.assert_close(gradients(parts)[key], gradients(whole)[key], **CLOSE)


def test_balancing_losses_of_parts_are_averaged(ranks: Callable) -> None:
    ranks(2).run(compare_balancing)


def count_together(rank: int, world: int) -> list[Tensor]:
    """Biases after choices that differ by rank: by default of all that share the router, parts of sequences too."""
    mesh = testing.mesh((2, 2), ("dp", "tp"))
    model = Model(Routing(8, 2, bias_update_rate=0.5))
    parallelize_module(model, mesh["tp"], {"moe": ExpertParallel(sequence_mesh=mesh["tp"])})
    fsdp2.fully_shard(model.moe.experts, mesh=mesh["dp"])
    fsdp2.fully_shard(model, mesh=mesh["dp"])
    router = model.moe.router
    counts = router.counted(router.expert_bias.device)
    counts += torch.eye(8, device=counts.device)[: 1 + rank].sum(0)
    for some in ("dp", "tp"):
        with pytest.raises(ValueError, match="and a router over .*leave mesh out"):
            update_expert_biases(model, mesh=mesh[some])
    assert update_expert_biases(model) == 1
    return [router.expert_bias.cpu()]


def test_biases_move_by_the_choices_of_all_that_share_a_router(ranks: Callable) -> None:
    found = [each[0] for each in ranks(4).run(count_together)]
    wanted = next_bias(torch.zeros(8), torch.tensor([4.0, 3, 2, 1, 0, 0, 0, 0]), 0.5)
    for bias in found:
        assert_bitwise(bias, wanted, "expert_bias")


def move_alone(rank: int, world: int) -> list[str]:
    router = TopKRouter(8, Routing(4, 2, bias_update_rate=0.5))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        update_expert_biases(router)
        update_expert_biases(router, mesh=testing.mesh((world,), ("dp",)))
    return [str(each.message) for each in caught]


def test_a_router_that_knows_no_other_ranks_is_told_of(ranks: Callable) -> None:
    for (message,) in ranks(2).run(move_alone):
        assert message.startswith("update_expert_biases: got no mesh, and a router whose weight is no shard, on 1 of 2")


def refuse(rank: int, world: int) -> list[str]:
    mesh = testing.mesh((2, 2), ("dp", "tp"))
    messages = []
    for style, over, said in (
        (ExpertParallel(sequence_mesh=mesh["tp"]), mesh["dp"], "wanted the former among the latter"),
        (ExpertParallel(sequence_mesh=mesh), mesh["tp"], "sequence_mesh: got 2 dimensions"),
        (
            SequenceParallel(),
            mesh["tp"],
            r"MoE, whose parameters are those of modules.*ExpertParallel\(sequence_mesh=mesh\)",
        ),
    ):
        model = build(None)
        with pytest.raises(ValueError, match=said) as error:
            parallelize_module(model, over, {"moe": style})
        assert not any(isinstance(param, DTensor) for param in model.parameters())
        messages.append(str(error.value))
    fused = te.Linear(8, 8, fuse_wgrad_accumulation=True)
    with pytest.raises(ValueError, match="got Linear with fuse_wgrad_accumulation") as error:
        parallelize_module(fused, mesh["tp"], SequenceParallel())
    return [*messages, str(error.value)]


def test_other_ranks_are_refused(ranks: Callable) -> None:
    found = ranks(4).run(refuse)
    assert all(len(each) == len(found[0]) for each in found)
