"""Weights of GroupedLinear that a flag on the device keeps quantized: the bytes of then, or those of now."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor

import te_dist as te
from te_dist import fsdp2, recipe
from te_dist.recipe import Recipe
from te_dist.testing import assert_bitwise, mesh, pool
from tests.nn.recipes import CASES

GROUPS, IN, OUT, SIZES = 3, 128, 256, [5, 0, 11]
# Not those without products in groups, with histories (every call moves them), or that read what they have rounded.
NAMES = ("current", "block", "mxfp8", "mxfp8_2d", "nvfp4", "nvfp4_4over6", "hybrid")
BLOCK = recipe.Float8BlockScaling()
Gradients = dict[str, Tensor]


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make(scale: float = 1.0, **options: Any) -> te.GroupedLinear:
    """Of the same values every time, up to a factor."""
    torch.manual_seed(0)
    module = te.GroupedLinear(GROUPS, IN, OUT, bias=False, **options)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(scale)
    return module


def call(module: te.GroupedLinear, made_by: Recipe = BLOCK, flag: Tensor | None = None, **options: Any) -> Tensor:
    with te.autocast(recipe=made_by):
        return module(normal(sum(SIZES), IN).requires_grad_(), SIZES, skip_weight_quantization=flag, **options)


def step(module: te.GroupedLinear, made_by: Recipe = BLOCK, flag: Tensor | None = None) -> Gradients:
    """Output and gradients of one pass, by name."""
    module.zero_grad()
    x = normal(sum(SIZES), IN).requires_grad_()
    with te.autocast(recipe=made_by):
        out = module(x, SIZES, skip_weight_quantization=flag)
    out.backward(normal(*out.shape, seed=2))
    return {"y": out.detach(), "dx": x.grad} | {name: p.grad for name, p in module.named_parameters()}


def check(got: Gradients, want: Gradients) -> None:
    for key, value in want.items():
        assert_bitwise(got[key], value, key)


def scale_weights(module: te.GroupedLinear, by: float) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(by)


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize(
    ("name", "dtype"), [(name, torch.int32) for name in NAMES] + [("block", torch.bool), ("block", torch.float32)]
)
def test_weights_are_quantized_where_the_flag_is_not_set(name: str, single: bool, dtype: torch.dtype) -> None:
    made_by, options = CASES[name].recipe, dict(single_grouped_weight=single)
    module, flag = make(**options), torch.zeros(1, dtype=dtype)
    before, after = step(make(**options), made_by), step(make(1.7, **options), made_by)
    check(step(module, made_by, flag), before)
    scale_weights(module, 1.7)
    flag.fill_(1)
    check(step(module, made_by, flag), before)
    flag.fill_(0)
    check(step(module, made_by, flag), after)


def test_the_first_call_quantizes_whatever_the_flag_says() -> None:
    check(step(make(), BLOCK, torch.ones(())), step(make()))


def test_training_goes_on_with_what_an_evaluation_has_quantized() -> None:
    module, flag = make(), torch.zeros(1)
    with torch.inference_mode():
        call(module, flag=flag)
    scale_weights(module, 1.7)
    check(step(module, BLOCK, torch.ones(1)), step(make()))
    check(step(module, BLOCK, flag), step(make(1.7)))


@pytest.mark.parametrize("how", ["data", "assign", "dtype", "recipe"])
def test_weights_that_lie_elsewhere_are_quantized_again(how: str) -> None:
    module, flag, made_by = make(), torch.zeros(1, dtype=torch.bool), BLOCK
    step(module, BLOCK, flag)
    flag.fill_(True)
    other = make(0.3)
    if how == "data":
        for name in module.weight_names:
            getattr(module, name).data = getattr(other, name).data
    elif how == "assign":
        module.load_state_dict(other.state_dict(), assign=True)
    elif how == "dtype":
        module, other = module.bfloat16(), make().bfloat16()
    else:
        made_by, other = CASES["mxfp8"].recipe, make()
    check(step(module, made_by, flag), step(other, made_by))


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))], ids=["copy", "file"]
)
def test_copies_keep_nothing(how: Any) -> None:
    module, flag = make(), torch.zeros(1)
    step(module, BLOCK, flag)
    other = how(module)
    scale_weights(other, 2.0)
    check(step(other, BLOCK, torch.ones(1)), step(make(2.0)))
    flag.fill_(1)
    check(step(module, BLOCK, flag), step(make()))


def test_backward_never_reads_weights_of_a_later_forward() -> None:
    module, flag = make(), torch.zeros(1)
    first, second = call(module, flag=flag), call(module, flag=flag)  # two passes in flight, as in a pipeline
    first.sum().backward()
    scale_weights(module, 2.0)
    second.sum().backward()  # of bytes that nobody has written since
    left = call(module, flag=flag)
    scale_weights(module, 2.0)
    call(module, flag=flag)
    with pytest.raises(RuntimeError, match="may have been quantized anew, since the forward pass of this backward"):
        left.sum().backward()


def test_recomputed_passes_take_the_bytes_that_were_kept() -> None:
    module, flag = make(), torch.zeros(1)
    want = step(module, BLOCK, flag)
    scale_weights(module, 1.7)
    flag.fill_(1)
    module.zero_grad()
    x = normal(sum(SIZES), IN).requires_grad_()
    with te.autocast(recipe=BLOCK):
        out = te.checkpoint(module, x, SIZES, skip_weight_quantization=flag)
    out.backward(normal(*out.shape, seed=2))
    check({"y": out.detach(), "dx": x.grad}, {key: want[key] for key in ("y", "dx")})


def test_main_gradients_are_added_to_whatever_the_flag_says() -> None:
    module, flag = make(single_grouped_weight=True, fuse_wgrad_accumulation=True), torch.zeros(1)
    want = step(make(single_grouped_weight=True))["weight"]
    module.weight.main_grad = torch.zeros(GROUPS, OUT, IN)
    for number in range(2):
        flag.fill_(number)
        step(module, BLOCK, flag)
    torch.testing.assert_close(module.weight.main_grad, want + want)


def test_outside_of_autocast_weights_are_not_quantized() -> None:
    module, x = make(), normal(sum(SIZES), IN)
    assert_bitwise(module(x, SIZES, skip_weight_quantization=torch.ones(1)), module(x, SIZES), "y")


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        (True, "got True, wanted a tensor of one element in the memory of the device"),
        (torch.zeros(2), r"got torch.float32 of \(2,\) on cpu, wanted one element"),
        (torch.zeros(1, dtype=torch.int64), r"got torch.int64 of \(1,\) on cpu, wanted one element of torch.bool, "),
        (torch.zeros(1, device="meta"), r"on meta, wanted one element of .* on cpu"),
    ],
)
def test_other_flags_are_refused(flag: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(make(), flag=flag)


def test_a_flag_that_has_no_meaning_is_refused() -> None:
    flag = torch.zeros(1)
    with te.quantized_model_init(recipe=BLOCK):
        quantized = make()
    with pytest.raises(ValueError, match="the weights are quantized already; leave skip_weight_quantization out"):
        call(quantized, flag=flag)
    with pytest.raises(ValueError, match="is_first_microbatch says it too; leave skip_weight_quantization out"):
        call(make(), flag=flag, is_first_microbatch=True)


def drawn(role: recipe.QuantizerRole) -> te.quantizers.Quantizer:
    """Weights in 4 bits that are rounded by chance."""
    return te.NVFP4Quantizer(stochastic_rounding=role.tensor_type == "weight")


@pytest.mark.parametrize(
    "made_by", [recipe.CustomRecipe(drawn), CASES["high_precision_backward"].recipe], ids=["drawn", "rounded"]
)
def test_quantizers_that_no_flag_turns_off_are_refused(made_by: Recipe) -> None:
    with pytest.raises(NotImplementedError, match="no flag turns off how .* quantizes weights"):
        call(make(), made_by, torch.zeros(1))


def test_graphs_are_not_captured_before_there_is_something_to_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    module = make()
    known = module.gemm.kept
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with pytest.raises(RuntimeError, match="there are no quantized weights that a graph could keep; run a pass"):
        known.by_flag([module.weight0], te.Float8BlockQuantizer(), torch.zeros(1))


def keep_parts(rank: int, world: int) -> None:
    """Local parts of DTensors are kept; what FSDP2 gathers is not."""
    module, flag = te.GroupedLinear(GROUPS, IN, OUT, bias=False, single_grouped_weight=True), torch.zeros(1)
    whole = normal(world * GROUPS, OUT, IN)
    module.weight = torch.nn.Parameter(distribute_tensor(whole, mesh((world,), ("ep",)), [Shard(0)]))
    want = call(module, flag=flag).detach()
    scale_weights(module, 2.0)
    flag.fill_(1)
    assert_bitwise(call(module, flag=flag).detach(), want, "y")
    sharded = make(single_grouped_weight=True)
    fsdp2.fully_shard(sharded, mesh=mesh((world,), ("dp",)))
    with pytest.raises(ValueError, match="gathered by FSDP2, under which skip_weight_quantization would lose"):
        call(sharded, flag=flag)


def test_local_parts_of_dtensors_are_kept_and_gathered_weights_are_not() -> None:
    pool(2).run(keep_parts)
