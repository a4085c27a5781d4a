"""The router: scores and choices against their formulas written out, balancing by a loss and by biases."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import te_dist as te
from te_dist.nn import forgotten
from te_dist.nn.moe import Routing, TopKRouter, attach_loss, scale_aux_losses, update_expert_biases
from te_dist.nn.moe import routing as rules
from te_dist.nn.moe.router import Routed
from te_dist.testing import assert_bitwise

TOKENS, HIDDEN, EXPERTS = 40, 16, 8


def make(routing: Routing, dtype: torch.dtype = torch.float32) -> TopKRouter:
    torch.manual_seed(1)
    router = TopKRouter(HIDDEN, routing, params_dtype=dtype)
    nn.init.normal_(router.weight)
    return router


def tokens(count: int = TOKENS, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(2)).to(dtype)


def count_choices(experts: Tensor, num_experts: int) -> Tensor:
    return torch.bincount(experts.flatten(), minlength=num_experts).float()


def expected(router: TopKRouter, x: Tensor) -> list[dict[int, float]]:
    """Of each token, probability by expert; in float64, one token after the other."""
    routing, found = router.routing, []
    for logits in x.double() @ router.weight.detach().double().T:
        scores = logits.softmax(0) if routing.score_function == "softmax" else logits.sigmoid()
        biased = scores if router.expert_bias is None else scores + router.expert_bias
        size = routing.num_experts // routing.num_groups
        of_group = {g: sum(sorted(biased[g * size : (g + 1) * size].tolist())[-2:]) for g in range(routing.num_groups)}
        groups = sorted(of_group, key=lambda g: -of_group[g])[: routing.top_groups]
        reachable = [e for e in range(routing.num_experts) if e // size in groups]
        experts = sorted(reachable, key=lambda e: -biased[e])[: routing.top_k]
        total = sum(float(scores[e]) for e in experts) if routing.normalizes else 1.0
        found.append({e: float(scores[e]) / total * routing.scaling_factor for e in experts})
    return found


@pytest.mark.parametrize(
    ("function", "normalizes", "groups"), [*product(("softmax", "sigmoid"), (False, True), ((1, 1), (4, 2)))]
)
def test_choices_and_probabilities_are_those_of_the_formulas(
    function: str, normalizes: bool, groups: tuple[int, int]
) -> None:
    num_groups, top_groups = groups
    routing = Routing(EXPERTS, 3, function, normalizes, 2.5, bias_update_rate=0.1)
    router, x = make(replace(routing, num_groups=num_groups, top_groups=top_groups)), tokens()
    router.expert_bias.copy_(torch.linspace(-0.2, 0.2, EXPERTS))
    probabilities, experts = router(x)
    for row, (chosen, weights) in enumerate(zip(experts.tolist(), probabilities.tolist(), strict=True)):
        want = expected(router, x)[row]
        assert chosen == list(want), row
        assert weights == pytest.approx(list(want.values()), rel=1e-5)


def test_what_is_chosen_does_not_depend_on_autocast_of_torch() -> None:
    router, x = make(Routing(EXPERTS, 2), torch.bfloat16), tokens(dtype=torch.bfloat16)
    want = router(x)
    with torch.autocast("cpu", torch.bfloat16):
        got = router(x)
    assert_bitwise(got.experts, want.experts, "experts")
    assert_bitwise(got.probabilities.detach(), want.probabilities.detach(), "probabilities")
    assert got.probabilities.dtype == torch.float32


def test_the_balancing_loss_is_its_coefficient_where_all_experts_are_chosen_alike() -> None:
    routing = Routing(EXPERTS, 2, aux_loss_coefficient=0.3)
    scores = torch.full((TOKENS, EXPERTS), 1 / EXPERTS)
    counts = torch.full((EXPERTS,), TOKENS * 2 / EXPERTS)
    loss = (rules.balancing_weights(counts, TOKENS, routing) * scores.sum(0)).sum()
    assert float(loss) == pytest.approx(0.3)


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
def test_the_balancing_loss_reaches_the_router_by_autograd(function: str) -> None:
    routing = Routing(EXPERTS, 2, function, aux_loss_coefficient=0.5)
    plain, balanced, x = make(replace(routing, aux_loss_coefficient=0.0)), make(routing), tokens()
    balanced.aux_loss_scale = 0.25
    down = torch.linspace(-1, 1, TOKENS * 2).view(TOKENS, 2)
    (plain(x).probabilities * down).sum().backward()
    (balanced(x).probabilities * down).sum().backward()
    weight = plain.weight.detach().double().requires_grad_()
    logits = x.double() @ weight.T
    scores = logits.softmax(-1) if function == "softmax" else logits.sigmoid()
    parts = torch.bincount(scores.topk(2).indices.flatten(), minlength=EXPERTS) / (TOKENS * 2)
    means = (scores / scores.sum(-1, keepdim=True)).mean(0)
    loss = 0.5 * EXPERTS * (parts * means).sum()
    loss.backward()
    assert float(balanced.last_aux_loss) == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close(
        balanced.weight.grad - plain.weight.grad, 0.25 * weight.grad.float(), rtol=1e-3, atol=1e-6
    )


def test_an_attached_loss_changes_no_value() -> None:
    x, loss = torch.randn(3, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    out = attach_loss(x, loss, scale=0.5)
    assert_bitwise(out.detach(), x.detach(), "out")
    out.backward(torch.ones(3))
    assert (x.grad.tolist(), float(loss.grad)) == ([1.0] * 3, 0.5)


def test_biases_even_out_what_a_router_chooses() -> None:
    router, x = make(Routing(EXPERTS, 2, "sigmoid", bias_update_rate=0.01)), tokens(400)
    router.weight.data *= torch.linspace(0.1, 0.5, EXPERTS)[:, None]
    first = count_choices(router(x).experts, EXPERTS)
    for _ in range(60):
        assert update_expert_biases(router) == 1
        last = count_choices(router(x).experts, EXPERTS)
    assert first.max() / first.mean() > 1.4
    assert last.max() / last.mean() < 1.1


def test_biases_that_nobody_moves_are_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forgotten, "_has_warned_of_biases", False)
    monkeypatch.setattr(forgotten, "_MANY_PASSES", 3)
    router, x = make(Routing(EXPERTS, 2, bias_update_rate=0.1)), tokens().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            te.checkpoint(router, x).probabilities.sum().backward()  # runs twice, and counts once
            router(x)
            update_expert_biases(router)
            router.eval()(x)
            router.train()
        for _ in range(2):
            router(x)
    with pytest.warns(UserWarning, match="3 training passes have counted choices, .*update_expert_biases"):
        router(x)


def test_losses_of_all_routers_are_scaled() -> None:
    model = torch.nn.ModuleList(make(Routing(EXPERTS, 2, aux_loss_coefficient=0.1)) for _ in range(2))
    assert scale_aux_losses(model, 0.25) == 2
    assert [router.aux_loss_scale for router in model] == [0.25] * 2
    with pytest.raises(TypeError, match="aux_loss_scale: got None"):
        scale_aux_losses(model, None)
    assert scale_aux_losses(torch.nn.Linear(2, 2), 0.5) == 0


def test_biases_choose_and_do_not_weigh() -> None:
    router, x = make(Routing(EXPERTS, 2, "sigmoid", bias_update_rate=0.1)), tokens()
    router.expert_bias[5] = 10.0
    probabilities, experts = router(x)
    assert (experts[:, 0] == 5).all()
    assert float(probabilities.detach().sum(-1).max()) == pytest.approx(1.0)


def test_choices_are_counted_in_training_once() -> None:
    router, x = make(Routing(EXPERTS, 2, bias_update_rate=0.1)), tokens().requires_grad_()
    te.checkpoint(router, x).probabilities.sum().backward()
    counted = router.tokens_per_expert.clone()
    assert_bitwise(counted, count_choices(router(x.detach()).experts, EXPERTS), "counts")
    router.eval()
    router(x)
    assert float(router.tokens_per_expert.sum()) == 2 * 2 * TOKENS


@pytest.mark.parametrize("assigns", [False, True])
def test_a_router_from_the_meta_device_counts_from_zero(assigns: bool) -> None:
    whole, x = make(Routing(EXPERTS, 2, bias_update_rate=0.1)), tokens()
    with torch.device("meta"):
        router = TopKRouter(whole.hidden_size, whole.routing)
    if not assigns:
        router.to_empty(device="cpu")
    router.load_state_dict(whole.state_dict(), assign=assigns)
    experts = router(x).experts
    assert_bitwise(router.tokens_per_expert, count_choices(experts, EXPERTS), "counts")
    assert update_expert_biases(router) == 1


def test_a_router_that_is_loaded_counts_from_zero() -> None:
    router, x = make(Routing(EXPERTS, 2, bias_update_rate=0.1)), tokens()
    kept = copy.deepcopy(router.state_dict())
    router(x)  # of a step that is given up
    router.load_state_dict(kept)
    assert not router.tokens_per_expert.any()


SAVED = {
    "zeros": lambda _, op, *args, **kw: save_if(op is torch.ops.aten.zeros.default),
    "what is not pointwise": lambda _, op, *args, **kw: save_if(torch.Tag.pointwise not in op.tags),
}


def save_if(wanted: bool) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if wanted else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("policy", SAVED.values(), ids=SAVED)
def test_selective_checkpoints_balance_once(policy: Callable) -> None:
    router, x = make(Routing(EXPERTS, 2, aux_loss_coefficient=1.0)), tokens().requires_grad_()
    context = partial(create_selective_checkpoint_contexts, policy)
    found = []
    for run in (router, lambda x: checkpoint(router, x, use_reentrant=False, context_fn=context)):
        router.weight.grad = x.grad = None
        (run(x).probabilities * torch.linspace(-1, 1, 2)).sum().backward()
        found.append((router.weight.grad, x.grad))
    for got, want in zip(*found, strict=True):
        assert_bitwise(got, want, "gradient")


@pytest.mark.parametrize(
    ("where", "backend"), [("forward", ""), ("backward", ""), ("both", ""), ("forward", "aot_eager")]
)
def test_gradients_do_not_depend_on_autocast_of_torch(where: str, backend: str) -> None:
    torch.compiler.reset()
    router, x = make(Routing(EXPERTS, 2)), tokens().requires_grad_()
    run = torch.compile(router, backend=backend, fullgraph=True) if backend else router
    found = []
    for around in ((), (where,)):
        router.weight.grad = x.grad = None
        forward, backward = (name in around or "both" in around for name in ("forward", "backward"))
        with torch.autocast("cpu", torch.bfloat16, enabled=forward):
            loss = (run(x).probabilities * torch.linspace(-1, 1, 2)).sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=backward):
            loss.backward()
        found.append((router.weight.grad, x.grad))
    for got, want in zip(*found, strict=True):
        assert_bitwise(got, want, "gradient")


@pytest.mark.parametrize("frozen", ["tokens", "weight"])
def test_what_is_frozen_has_no_gradient_and_changes_no_other(frozen: str) -> None:
    router, x = make(Routing(EXPERTS, 2, aux_loss_coefficient=0.1)), tokens().requires_grad_()
    router(x).probabilities[:, 0].sum().backward()
    want = {"tokens": router.weight.grad, "weight": x.grad}[frozen]
    router.weight.grad = x.grad = None
    {"tokens": x, "weight": router.weight}[frozen].requires_grad_(False)
    router(x).probabilities[:, 0].sum().backward()
    got = {"tokens": (router.weight.grad, x.grad), "weight": (x.grad, router.weight.grad)}[frozen]
    assert_bitwise(got[0], want, "gradient")
    assert got[1] is None


def test_gradients_of_gradients_are_refused() -> None:
    router, x = make(Routing(EXPERTS, 2)), tokens().requires_grad_()
    (grad,) = torch.autograd.grad(router(x).probabilities.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_a_scale_that_is_no_number_is_named() -> None:
    router = make(Routing(EXPERTS, 2, aux_loss_coefficient=0.1))
    router.aux_loss_scale = torch.tensor(0.5)
    with pytest.raises(TypeError, match="aux_loss_scale: got tensor"):
        router(tokens())


def checkpointed_by_torch(module: nn.Module, x: Tensor) -> Routed:
    return checkpoint(module, x, use_reentrant=False)


@pytest.mark.parametrize("recompute", [None, te.checkpoint, checkpointed_by_torch])
def test_compiled_choices_are_counted_in_training_once(recompute: Callable | None) -> None:
    torch.compiler.reset()
    router, x = make(Routing(EXPERTS, 2, bias_update_rate=0.1)), tokens().requires_grad_()
    compiled = torch.compile(router, backend="aot_eager", fullgraph=True)
    for passes in (1, 2):
        routed = compiled(x) if recompute is None else recompute(compiled, x)
        routed.probabilities.sum().backward()
        assert_bitwise(router.tokens_per_expert, passes * count_choices(routed.experts, EXPERTS), "counts")


def test_compiled_choices_are_counted_once_where_the_graph_recomputes() -> None:
    torch.compiler.reset()
    router, x = make(Routing(EXPERTS, 2, bias_update_rate=0.1)), tokens().requires_grad_()
    compiled = torch.compile(lambda x: checkpointed_by_torch(router, x), backend="aot_eager", fullgraph=True)
    routed = compiled(x)
    routed.probabilities.sum().backward()
    assert_bitwise(router.tokens_per_expert, count_choices(routed.experts, EXPERTS), "counts")


def test_the_bias_stays_in_fp32_and_in_checkpoints() -> None:
    router = make(Routing(EXPERTS, 2, bias_update_rate=0.1))
    router.expert_bias.copy_(torch.rand(EXPERTS))
    before = router.expert_bias.clone()
    router.bfloat16()
    assert router.weight.dtype == torch.bfloat16
    assert_bitwise(router.expert_bias, before, "bias")
    assert set(router.state_dict()) == {"weight", "expert_bias"}
    assert TopKRouter(HIDDEN, router.routing, device="meta").to_empty(device="cpu").expert_bias.dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_experts": 0}, "num_experts: got 0"),
        ({"top_k": 9}, "top_k: got 9 of 8"),
        ({"num_groups": 3}, "num_groups: got 3"),
        ({"num_groups": 4, "top_groups": 5}, "top_groups: got 5 of 4"),
        ({"num_groups": 8, "top_groups": 1}, "hold 1 experts"),
        ({"score_function": "relu"}, "score_function: got 'relu'"),
        ({"bias_update_rate": -1.0}, "bias_update_rate: got -1.0"),
    ],
)
def test_options_that_cannot_be_are_named(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Routing(**({"num_experts": EXPERTS, "top_k": 2} | options))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_experts": 8.0}, "num_experts: got 8.0, wanted an int"),
        ({"top_k": 2.0}, "top_k: got 2.0, wanted an int"),
        ({"aux_loss_coefficient": float("nan")}, "aux_loss_coefficient: got nan, wanted a finite float"),
        ({"scaling_factor": "1"}, "scaling_factor: got '1', wanted a finite float"),
    ],
)
def test_options_of_another_type_are_named(options: dict, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        Routing(**({"num_experts": EXPERTS, "top_k": 2} | options))


def test_an_input_of_another_width_is_named() -> None:
    with pytest.raises(ValueError, match=r"shape \(2, 3, 16\), wanted \(tokens, 16\)"):
        make(Routing(EXPERTS, 2))(torch.zeros(2, 3, HIDDEN))
