"""A factor by which gradients are divided is that of all parameters, experts over ranks among them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import te_dist as te
from te_dist import fsdp2, recipe, testing
from te_dist.nn.moe import ExpertParallel, MoE, Routing
from te_dist.testing import assert_bitwise

HIDDEN = 128
FP8 = recipe.Float8BlockScaling()


def gradients(sizes: tuple[int, int], rank: int, *factors: float | None, ignores: bool = False) -> dict[str, Tensor]:
    """Of experts over (edp, ep) and what is around them; units are told the factors, one after the other.

    `ignores`: whether no unit has the experts, which lie over all ranks.
    """
    mesh = testing.mesh(sizes, ("edp", "ep"))
    with te.quantized_model_init(recipe=FP8), torch.device("meta"):
        norm, mixture = nn.LayerNorm(HIDDEN, dtype=torch.float32), MoE(HIDDEN, HIDDEN, Routing(8, 2))
        model = nn.Sequential(norm, mixture)
    parallelize_module(model, mesh["ep"], {"1": ExpertParallel()})
    ignored = set(mixture.experts.parameters()) if ignores else set()
    if not ignores:
        fsdp2.fully_shard(mixture.experts, mesh=mesh["edp"])
    everyone = init_device_mesh(testing.device().type, (mesh.size(),))
    fsdp2.fully_shard(model, mesh=everyone, ignored_params=ignored)
    fsdp2.materialize(model, device=testing.device(), seed=3)
    for unit in model.modules() if factors else ():
        if isinstance(unit, FSDPModule):
            unit.set_force_sum_reduction_for_comms(True)
            for factor in factors:
                unit.set_gradient_divide_factor(factor)
    x = torch.randn(64, HIDDEN, generator=torch.Generator().manual_seed(rank)).to(testing.device())
    with te.autocast(recipe=FP8):
        model(x).square().mean().backward()
    found = {name: param.grad for name, param in model.named_parameters()}
    return {name: grad.full_tensor() for name, grad in found.items() if isinstance(grad, DTensor)}


def compare(rank: int, world: int, sizes: tuple[int, int], factor: float) -> None:
    means = gradients(sizes, rank)
    assert len(means) == 5  # noqa: PLR2004  (the norm's, the router's and two of experts)
    found = {
        "": (gradients(sizes, rank, factor), world / factor),
        "None": (gradients(sizes, rank, factor, None), 1),
    }
    if sizes[0] == 1:
        found["ignored"] = gradients(sizes, rank, factor, ignores=True), world / factor
    for case, (divided, times) in found.items():
        for name, mean in means.items():
            assert_bitwise(divided[name], mean * times, f"{name} {case}")  # by powers of two


@pytest.mark.parametrize("factor", [1.0, 8.0])
@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (2, 2), (1, 4)], ids=str)
def test_a_factor_divides_gradients_of_experts_too(ranks: Callable, sizes: tuple[int, int], factor: float) -> None:
    ranks(sizes[0] * sizes[1]).run(compare, sizes, factor)


def refuse(rank: int, world: int) -> list[str]:
    messages = []
    for factor in (0.0, -1.0, "2"):
        with pytest.raises(ValueError, match="set_gradient_divide_factor: got .*, wanted a positive number") as error:
            gradients((1, 2), rank, factor)  # type: ignore[arg-type]
        messages.append(str(error.value))
    return messages


def test_factors_that_are_none_are_refused(ranks: Callable) -> None:
    first, second = ranks(2).run(refuse)
    assert first == second
