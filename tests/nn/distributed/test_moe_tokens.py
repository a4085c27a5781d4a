"""Tokens that travel once to each rank with experts of theirs: experts see the same, and less is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor.parallel import parallelize_module

import te_dist as te
from te_dist import testing
from te_dist.nn.moe import ExpertParallel, MoE, Routing
from te_dist.testing import assert_bitwise
from tests.nn.distributed.test_moe_block import EXPERTS, FFN, HIDDEN, RECIPES, CountedMessages, build, tokens

ROUTING = Routing(EXPERTS, 4)  # several of the same rank, and others elsewhere
ROUNDING = 2**-7  # of sums in bf16, one for each rank


def passed(rank: int, world: int, name: str, ways: list[dict[str, Any]]) -> list[tuple[list[Tensor], int]]:
    """(output, gradients of tokens, of the router and of experts), bytes of messages, each way; of unlike ranks."""
    made_by, mesh = RECIPES[name], testing.mesh((1, world), ("edp", "ep"))
    x, results = tokens()[rank * 24 :][: 24 + 16 * rank].to(testing.device()), []
    for how in ways:
        model = build(made_by, mesh, routing=ROUTING, **how)
        asking = x.clone().requires_grad_()
        with CountedMessages() as messages:
            with te.autocast(enabled=made_by is not None, recipe=made_by):
                out = model(asking)
            out.backward(x.flip(0))
        grads = [model.moe.router.weight.grad, *(param.grad for param in model.moe.experts.parameters())]
        found = [out.detach(), asking.grad, *(grad.to_local() for grad in grads)]
        results.append(([each.cpu() for each in found], messages.num_bytes))
    return results


@pytest.mark.parametrize("name", ["bf16", "block", "current"])
def test_experts_see_the_same_and_sums_are_rounded_once_more(ranks: Callable, name: str) -> None:
    ways: list[dict[str, Any]] = [{"travels": "copies"}, {"travels": "tokens"}]
    for (want, of_copies), (got, of_tokens) in ranks(2).run(passed, name, ways):
        assert of_tokens < 0.6 * of_copies, "of four choices fewer than two messages are made"
        *sums, router, first, second = zip(got, want, strict=True)
        assert_bitwise(*router, "gradient of the router")
        assert_bitwise(*first, "gradient of fc1.weight")
        assert_bitwise(*second, "gradient of fc2.weight")
        for a, b in sums:
            assert not torch.equal(a, b)
            assert float((a.float() - b.float()).norm() / b.float().norm()) < ROUNDING


@pytest.mark.parametrize("name", ["bf16", "block"])
def test_on_one_rank_nothing_is_rounded_otherwise(ranks: Callable, name: str) -> None:
    ((want, _), (got, _)) = ranks(1).run(passed, name, [{}, {"travels": "tokens"}])[0]
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_bitwise(a, b, f"result {index}")


@pytest.mark.parametrize("name", ["block", "mxfp8"])
def test_tokens_sent_as_codes_are_multiplied_as_they_are(ranks: Callable, name: str) -> None:
    ways = [{"travels": "tokens", "payload": payload} for payload in ("plain", "quantized")]
    for (want, of_plain), (got, of_codes) in ranks(2).run(passed, name, ways):
        assert of_codes < of_plain
        for index in (0, 1, 2, 4):  # fc1.weight's is found from what the codes stand for
            assert_bitwise(got[index], want[index], f"result {index}")


WAYS: dict[str, dict[str, Any]] = {
    "copies": {},
    "slots": {"capacity": 256},
    "tokens": {"travels": "tokens"},
    "codes": {"payload": "quantized"},
    "tokens as codes": {"travels": "tokens", "payload": "quantized"},
    "batches": {"travels": "batches"},
    "batches into slots": {"travels": "batches", "capacity": 256},
}
every_way = pytest.mark.parametrize("way", WAYS)


def mixture(world: int, way: str) -> MoE:
    torch.manual_seed(0)
    moe = MoE(HIDDEN, FFN, ROUTING, params_dtype=torch.bfloat16).to(testing.device())
    return parallelize_module(moe, testing.mesh((world,), ("ep",)), ExpertParallel(**WAYS[way]))


def asked_by_one(rank: int, world: int, way: str, router_trains: bool) -> None:
    found = []
    for asking in (range(world), [world - 1]):
        moe, x = mixture(world, way), tokens().chunk(world)[rank].to(testing.device())
        moe.router.weight.requires_grad_(router_trains)
        with te.autocast(recipe=RECIPES["block"]):
            out = moe(x.requires_grad_(rank in asking))
        out.backward(x.detach().flip(0))
        weights = [moe.router.weight.grad] if router_trains else []
        weights += [part.weight.grad.to_local() for part in (moe.experts.fc1, moe.experts.fc2)]
        found.append([*weights, x.grad if rank == world - 1 else x.detach()])
    for index, (got, want) in enumerate(zip(found[1], found[0], strict=True)):
        assert_bitwise(got, want, f"gradient {index}")


@every_way
@pytest.mark.parametrize("router_trains", [True, False], ids=["", "frozen router"])
def test_gradients_that_one_rank_wants_come_back_to_it(ranks: Callable, way: str, router_trains: bool) -> None:
    ranks(2).run(asked_by_one, way, router_trains)


def differentiated_twice(rank: int, world: int, way: str) -> None:
    moe, x = mixture(world, way), tokens().chunk(world)[rank].to(testing.device()).requires_grad_()
    with te.autocast(recipe=RECIPES["block"]):
        out = x**2 + moe(x)
    (grad,) = torch.autograd.grad(out.float().pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()


@every_way
def test_gradients_have_no_gradient(ranks: Callable, way: str) -> None:
    ranks(2).run(differentiated_twice, way)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"travels: got 'rows', wanted one of \('copies', 'tokens', 'batches'\)"):
        ExpertParallel(travels="rows")
    with pytest.raises(ValueError, match='travels: got "tokens" with capacity=4'):
        ExpertParallel(travels="tokens", capacity=4)
