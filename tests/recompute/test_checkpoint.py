"""Recomputed forward passes compute what the first ones did, bit for bit, whoever runs them again and with what."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint

import te_dist as te
from te_dist import offload
from te_dist.context import current_autocast
from te_dist.offload import Kept
from te_dist.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizerRole,
    Recipe,
)
from te_dist.recompute import context_fn
from te_dist.testing import assert_bitwise

ROWS, WIDTH = 16, 64


def hybrid(role: QuantizerRole) -> te.quantizers.Quantizer:
    if role.tensor_type == "grad_output":
        return te.MXFP8Quantizer()
    return te.HybridQuantizer(
        rowwise_quantizer=te.Float8CurrentScalingQuantizer(), columnwise_quantizer=te.MXFP8Quantizer()
    )


RECIPES: dict[str, Recipe | None] = {
    "none": None,
    "current": Float8CurrentScaling(),
    "delayed": DelayedScaling(amax_history_len=3),
    "block": Float8BlockScaling(),
    "mx": MXFP8BlockScaling(),
    "nv": NVFP4BlockScaling(),  # rounds gradients by chance
    "hybrid": CustomRecipe(hybrid),
}
every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


class Block(nn.Module):
    """Draws random numbers, and normalizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = te.LayerNormLinear(WIDTH, 2 * WIDTH), te.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(nn.functional.dropout(torch.relu(self.first(x)), 0.25))


Run = Callable[[nn.Module, Tensor], Tensor]
PLAIN: Run = lambda block, x: block(x)  # noqa: E731
WAYS: dict[str, Run] = {
    "te_dist": te.checkpoint,
    "te_dist_reentrant": lambda block, x: te.checkpoint(block, x, use_reentrant=True),
    "torch": lambda block, x: torch_checkpoint.checkpoint(block, x, use_reentrant=False),
    "torch_with_context": lambda block, x: torch_checkpoint.checkpoint(
        block, x, use_reentrant=False, context_fn=context_fn
    ),
}
# Those of torch alone, which do not know of recipes.
OF_TORCH: dict[str, Run] = {
    "torch": WAYS["torch"],
    "torch_reentrant": lambda block, x: torch_checkpoint.checkpoint(block, x, use_reentrant=True),
}
NON_REENTRANT = [way for way in WAYS if "reentrant" not in way]


def make_blocks(recipe: Recipe | None) -> nn.ModuleList:
    torch.manual_seed(0)
    with te.quantized_model_init(enabled=recipe is not None, recipe=recipe):
        return nn.ModuleList(Block() for _ in range(2))


def train(blocks: nn.ModuleList, run: Run, recipe: Recipe | None, *, steps: int = 1) -> list[Tensor]:
    """Losses, gradients, and what delayed scaling keeps."""
    results = []
    torch.manual_seed(1)
    for _ in range(steps):
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        y = x
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            for block in blocks:
                y = run(block, y)
        loss = y.square().mean()
        loss.backward()
        results += [
            loss.detach(),
            x.grad,
            *(p.grad for p in blocks.parameters()),
            *(b.clone() for b in blocks.buffers()),
        ]
        blocks.zero_grad()
    return results


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want)
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_bitwise(a, b, f"result {index}")


@every_recipe
@pytest.mark.parametrize("way", WAYS)
def test_recomputation_changes_no_bit(way, recipe):
    assert_same(train(make_blocks(recipe), WAYS[way], recipe), train(make_blocks(recipe), PLAIN, recipe))


@pytest.mark.parametrize("recomputed", [{0}, {1}, {0, 1}])
@pytest.mark.parametrize("way", WAYS)
def test_histories_move_once_a_step(way, recomputed):
    recipe = RECIPES["delayed"]
    blocks = make_blocks(recipe)
    some = [list(blocks)[index] for index in recomputed]
    got = train(blocks, lambda block, x: (WAYS[way] if block in some else PLAIN)(block, x), recipe, steps=4)
    want = train(make_blocks(recipe), PLAIN, recipe, steps=4)
    assert_same(got, want)
    assert any(tensor.shape[:1] == (3,) and (tensor[1:] != 0).all() for tensor in want), "no history was ever full"


@every_recipe
@pytest.mark.parametrize("way", NON_REENTRANT)
def test_recomputation_and_offloading_together_change_no_bit(way, recipe):
    want = train(make_blocks(recipe), PLAIN, recipe)
    blocks = make_blocks(recipe)
    with offload.activations(min_bytes=0) as statistics:
        got = train(blocks, WAYS[way], recipe)
    assert_same(got, want)
    inputs = len(blocks) * ROWS * WIDTH * 4
    assert 0 < statistics.parked <= inputs + ROWS * WIDTH * 4, "more than the inputs of the blocks was parked"
    assert statistics.live == 0


@every_recipe
@pytest.mark.parametrize("budget", [None, 4000])
def test_offloading_alone_changes_no_bit_and_copies_no_weight(recipe, budget):
    want = train(make_blocks(recipe), PLAIN, recipe)
    with offload.activations(budget, min_bytes=0) as statistics:
        got = train(make_blocks(recipe), PLAIN, recipe)
    assert_same(got, want)
    assert statistics.kept[Kept.PARAMETER] >= 2 * 3  # two weights and a norm's in each block
    assert 0 < statistics.peak <= (budget or statistics.peak)
    assert statistics.live == 0


def test_the_first_and_the_second_pass_see_the_same_autocast():
    seen = []

    def look(x: Tensor) -> Tensor:
        seen.append(current_autocast())
        return x.sin().cos()

    x = torch.ones(2, requires_grad=True)
    with te.autocast(recipe=RECIPES["mx"]):
        y = te.checkpoint(look, x)
    with te.autocast(recipe=RECIPES["block"]):
        y = te.checkpoint(look, y)
    y.sum().backward()
    assert [state.recipe for state in seen] == [RECIPES[name] for name in ("mx", "block", "block", "mx")]
    assert current_autocast().recipe is None


def test_keyword_arguments_go_to_the_function_and_to_torch():
    x = torch.ones(3, requires_grad=True)
    y = te.checkpoint(lambda x, *, power: x**power, x, power=3, preserve_rng_state=False, determinism_check="none")
    y.sum().backward()
    assert x.grad.tolist() == [3.0] * 3


@pytest.mark.parametrize("name", ["distribute_saved_activations", "get_rng_state_tracker", "tp_group"])
def test_arguments_that_have_no_meaning_say_where_to_go(name):
    with pytest.raises(ValueError, match=rf"checkpoint takes no {name}: "):
        te.checkpoint(torch.sin, torch.ones(1), **{name: object()})
    te.checkpoint(torch.sin, torch.ones(1), **{name: None})


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("other", [None, "current"])
@pytest.mark.parametrize("way", [*OF_TORCH, "torch_with_context"])
def test_a_pass_of_another_kind_between_forward_and_a_second_forward_is_told(way, other, quantized):
    recipe, x = RECIPES["block"], torch.randn(2 * WIDTH, 2 * WIDTH, requires_grad=True)
    with te.quantized_model_init(enabled=quantized, recipe=recipe):
        # Square, and of whole tiles: torch does not tell what it saves from what a plain map saves.
        block = te.Linear(2 * WIDTH, 2 * WIDTH)
    with te.autocast(recipe=recipe):
        y = {**WAYS, **OF_TORCH}[way](block, x)
    with torch.no_grad(), te.autocast(enabled=other is not None, recipe=other and RECIPES[other]):
        block(x)
    if way == "torch_with_context":
        y.sum().backward()
    else:
        with pytest.raises(
            RuntimeError,
            match=r"a linear map is run again in backward.* ran otherwise.* context_fn=te_dist.recompute.context_fn",
        ):
            y.sum().backward()


@pytest.mark.parametrize("way", OF_TORCH)
def test_an_evaluation_between_forward_and_a_second_forward_changes_nothing(way):
    gradients = []
    for evaluates in (False, True):
        torch.manual_seed(0)
        block, x = te.Linear(2 * WIDTH, 2 * WIDTH), torch.randn(2 * WIDTH, 2 * WIDTH, requires_grad=True)
        with te.autocast(recipe=RECIPES["block"]):
            y = OF_TORCH[way](block, x)
        if evaluates:
            with torch.no_grad():
                block.eval()(x)
            block.train()
        y.sum().backward()
        gradients.append(x.grad)
    assert_bitwise(*gradients, "gradient")


def maps(kind: str) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """A module, and what is computed with it."""
    torch.manual_seed(0)
    if kind == "grouped":
        module = te.GroupedLinear(2, WIDTH, WIDTH, bias=False)
        return module, lambda x: torch.tanh(module(x, [WIDTH // 2, WIDTH // 2]))
    module = nn.Sequential(te.Linear(WIDTH, WIDTH), nn.Tanh()) if kind == "linear" else te.LayerNormMLP(WIDTH, WIDTH)
    return module, module


@pytest.mark.parametrize("between", ["micro batch", "other model"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", ["linear", "mlp", "grouped"])
def test_an_evaluation_changes_nothing_whatever_has_been_run_backward_meanwhile(kind, frozen, between):
    gradients = []
    for run, evaluates in ((PLAIN, False), (OF_TORCH["torch"], True)):
        module, function = maps(kind)
        module.requires_grad_(not frozen)
        inputs = [torch.randn(WIDTH, WIDTH, requires_grad=True) for _ in range(2)]
        other = te.Linear(WIDTH, WIDTH)
        with te.autocast(recipe=RECIPES["current"]):
            first = other(inputs[0]) if between == "other model" else run(function, inputs[0])
            second = run(function, inputs[1])
        first.square().mean().backward()
        if evaluates:
            module.eval()
            with torch.no_grad(), te.autocast(recipe=RECIPES["delayed"]):
                function(inputs[0])
            module.train()
        second.square().mean().backward()
        gradients.append([inputs[1].grad, *(p.grad for p in module.parameters() if not frozen)])
    assert_same(*gradients)


@pytest.mark.parametrize("way", OF_TORCH)
def test_a_training_pass_of_another_kind_is_told_whatever_has_been_run_backward_meanwhile(way):
    torch.manual_seed(0)
    module, other = te.Linear(WIDTH, WIDTH), te.Linear(WIDTH, WIDTH)
    x = torch.randn(WIDTH, WIDTH, requires_grad=True)
    with te.autocast(recipe=RECIPES["current"]):
        y, loss = OF_TORCH[way](module, x), other(x).sum()
    loss.backward()
    with te.autocast(recipe=RECIPES["block"]):
        z = module(x)
    with pytest.raises(RuntimeError, match=r"a linear map is run again in backward.* ran otherwise"):
        y.sum().backward()
    z.sum().backward()


@pytest.mark.parametrize("way", OF_TORCH)
def test_recipes_may_take_turns_from_step_to_step(way):
    module = te.Linear(WIDTH, WIDTH)
    x = torch.randn(WIDTH, WIDTH, requires_grad=True)
    for name in ("current", "block", "mx", "current"):
        with te.autocast(recipe=RECIPES[name]):
            y = OF_TORCH[way](module, x)
        y.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_records_nothing_is_refused_after_an_evaluation_that_ran_otherwise(reentrant):
    """Of frozen weights and an input without gradients, or as the reentrant kind begins: nobody knows if it waits."""
    torch.manual_seed(0)
    module, trained = te.Linear(WIDTH, WIDTH).requires_grad_(False), te.Linear(WIDTH, WIDTH)
    losses, beside = [], torch.ones((), requires_grad=True)  # torch's reentrant kind asks for an input with gradients
    for x in torch.randn(2, WIDTH, WIDTH):
        with te.autocast(recipe=RECIPES["current"]):
            y = torch_checkpoint.checkpoint(lambda x, _: trained(module(x)), x, beside, use_reentrant=reentrant)
        losses.append(y.square().mean())
    losses[0].backward()
    module.eval()
    with torch.no_grad():
        module(torch.randn(WIDTH, WIDTH))
    module.train()
    with pytest.raises(RuntimeError, match=r"a linear map is run again in backward.* ran otherwise"):
        losses[1].backward()


@pytest.mark.parametrize("way", OF_TORCH)
def test_what_is_evaluated_for_gradients_of_its_input_runs_again_as_it_did(way):
    gradients = []
    for run in (PLAIN, OF_TORCH[way]):
        torch.manual_seed(0)
        block, x = te.Linear(2 * WIDTH, 2 * WIDTH).eval().requires_grad_(False), torch.randn(2 * WIDTH, 2 * WIDTH)
        with torch.no_grad():
            block(x)
        with te.autocast(recipe=RECIPES["block"]):
            y = run(block, x.requires_grad_())
        y.square().sum().backward()
        gradients.append(x.grad)
    assert_bitwise(*gradients, "gradient")


@pytest.mark.parametrize("way", OF_TORCH)
def test_passes_of_another_kind_before_a_step_or_behind_it_are_none_between(way):
    block, x = te.Linear(2 * WIDTH, 2 * WIDTH), torch.randn(2 * WIDTH, 2 * WIDTH, requires_grad=True)
    for _ in range(2):
        with torch.no_grad():
            block(x)
        with te.autocast(recipe=RECIPES["block"]):
            y = OF_TORCH[way](block, x)
        y.sum().backward()


@pytest.mark.pairwise
@pytest.mark.parametrize("first", [None, "disabled", "current"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("way", [way for way in WAYS if way != "torch"])
def test_a_pass_runs_again_as_it_did_whatever_ran_since(way, quantized, frozen, first):
    gradients = []
    for run in (PLAIN, WAYS[way]):
        block = make_blocks(RECIPES["block"] if quantized else None)[0].requires_grad_(not frozen)
        torch.manual_seed(1)
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        recipe = None if first is None else RECIPES.get(first)
        with te.autocast(enabled=recipe is not None, recipe=recipe) if first else contextlib.nullcontext():
            y = run(block, x)
        with te.autocast(recipe=RECIPES["block"]):
            z = run(block, x)
        with te.autocast(recipe=RECIPES["mx"]):  # what surrounds backward says nothing of the pass
            y.square().mean().backward()
        gradients.append([x.grad, *(p.grad for p in block.parameters() if p.requires_grad)])
        del z
    assert_same(*gradients)


@pytest.mark.pairwise
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("name", ["current", "delayed", "block", "mx"])
@pytest.mark.parametrize("inner", ["te_dist", "torch_with_context"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_region_inside_of_one_that_torch_runs_again_has_its_recipe(reentrant, inner, name, quantized):
    gradients = []
    for inside, outside in ((PLAIN, PLAIN), (WAYS[inner], torch_checkpoint.checkpoint)):
        block = make_blocks(RECIPES[name] if quantized else None)[0]

        def region(x: Tensor, block: nn.Module = block, inside: Run = inside) -> Tensor:
            return block.second(torch.relu(inside(block.first, x)))

        how = {} if outside is PLAIN else {"use_reentrant": reentrant}
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1), requires_grad=True)
        with te.autocast(recipe=RECIPES[name]):
            y = outside(region, x, **how)
        y.square().mean().backward()
        gradients.append([x.grad, *(p.grad for p in block.parameters()), *block.buffers()])
    assert_same(*gradients)


def test_threads_leave_a_block_that_they_share_each_on_its_own():
    shared, mine = te.autocast(recipe=RECIPES["block"]), te.autocast(recipe=RECIPES["mx"])
    entered, left = threading.Event(), threading.Event()
    seen = []

    def other() -> None:
        with shared:
            entered.set()
            left.wait(10)
        seen.append(current_autocast().recipe)

    thread = threading.Thread(target=other)
    with mine:
        thread.start()
        entered.wait(10)
        with shared:
            left.set()
            thread.join()
        assert current_autocast().recipe == RECIPES["mx"]
    assert seen == [None]
