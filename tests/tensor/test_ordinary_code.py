"""Code that knows nothing of quantized tensors runs on quantized parameters: logs, averages, initializers, steps."""

from __future__ import annotations

import copy
import io
import re
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import swa_utils

import te_dist as te
from te_dist import grouped, recipe
from te_dist.catalog import FORMATS
from te_dist.fsdp2 import GroupedParameter, QuantizedParameter
from te_dist.tensor import QuantizedTensor, quantize
from te_dist.testing import assert_bitwise
from tests.tensor.samples import NAMES, SHAPE, assert_same_bytes, of_each_family, signed

every_format = pytest.mark.parametrize("name", NAMES)


class Holder(nn.Module):
    """A module with one quantized and one plain parameter."""

    def __init__(self, name: str) -> None:
        super().__init__()
        storage = quantize(signed(dtype=torch.float32), FORMATS[name]).storage
        self.weight = nn.Parameter(QuantizedParameter(storage))
        self.bias = nn.Parameter(torch.ones(SHAPE[0]))

    def forward(self) -> torch.Tensor:
        return (self.weight * 2.0).sum() + self.bias.sum()


@every_format
def test_a_parameter_is_one(name: str) -> None:
    module = Holder(name)
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    assert weight.is_leaf
    assert weight.requires_grad
    assert [n for n, _ in module.named_parameters()] == ["weight", "bias"]
    assert sum(p.numel() for p in module.parameters()) == SHAPE[0] * SHAPE[1] + SHAPE[0]
    assert len(f"{weight.abs().max():.2f} {weight.norm():.2f} {weight.mean().item():.3f}") > 0
    assert torch.isfinite(weight).all()
    assert not torch.isnan(weight).any()


@every_format
def test_autograd_reaches_it(name: str) -> None:
    module = Holder(name)
    module().backward()
    assert type(module.weight.grad) is torch.Tensor
    assert_bitwise(module.weight.grad, torch.full(SHAPE, 2.0), "gradient")


@every_format
def test_gradients_of_its_values_are_its_own(name: str) -> None:
    weight, grad = Holder(name).weight, signed(dtype=torch.float32)
    for values in (weight.dequantize(), weight.dequantize(dtype=torch.bfloat16)):
        weight.grad = None
        values.backward(grad.to(values.dtype))
        assert_bitwise(weight.grad, grad.to(values.dtype).float(), "gradient")
    values.mul_(2)
    with torch.no_grad():
        assert not weight.dequantize().requires_grad
    assert not weight.detach().dequantize().requires_grad


@every_format
def test_models_are_copied_moved_and_converted(name: str) -> None:
    module = Holder(name)
    twin = copy.deepcopy(module)
    assert isinstance(twin.weight, nn.Parameter)
    assert_same_bytes(twin.weight, module.weight, "deepcopy")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        twin = copy.deepcopy(module).to(dtype)
        assert isinstance(twin.weight, QuantizedParameter)
        assert twin.weight.dtype == twin.bias.dtype == dtype
        assert_same_bytes(twin.weight, module.weight, "conversion")
    empty = copy.deepcopy(module).to("meta").to_empty(device="cpu")
    assert isinstance(empty.weight, QuantizedParameter)
    assert list(empty.weight.storage.buffers) == list(module.weight.storage.buffers)


@every_format
def test_state_dicts_load_from_quantized_and_from_plain(name: str) -> None:
    module, other = Holder(name), Holder(name)
    with torch.no_grad():
        other.weight.zero_()
    other.load_state_dict(module.state_dict())
    assert_same_bytes(other.weight, module.weight, "quantized state")
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file), assign=True)
    assert_same_bytes(other.weight, module.weight, "saved state")
    x = signed(seed=3, dtype=torch.float32)
    other.load_state_dict({"weight": x, "bias": module.bias.detach()})
    assert_same_bytes(other.weight, quantize(x, FORMATS[name]), "plain state")


@every_format
def test_parameters_are_told_apart_by_address(name: str) -> None:
    first, second = Holder(name), Holder(name)
    assert first.weight.data_ptr() == first.weight.detach().data_ptr() != second.weight.data_ptr() != 0
    with pytest.raises(RuntimeError, match="high_precision_state_dict"):
        first.weight.storage()


@every_format
def test_ops_of_ops_are_the_same_in_inference_mode(name: str) -> None:
    weight = Holder(name).weight
    calls = (
        weight.float,
        lambda: weight.to(torch.bfloat16),
        lambda: weight.view_as(weight),
        lambda: weight.reshape(SHAPE),
        lambda: weight.expand_as(weight),
        lambda: weight.type_as(torch.ones(1)),
        lambda: weight.chunk(1)[0],
        lambda: weight.narrow(0, 0, SHAPE[0]),
        lambda: Holder(name).to("cpu").weight,
    )
    for call in calls:
        with torch.no_grad():
            want = call()
        with torch.inference_mode():
            got = call()
        assert type(got) is type(want) and got.dtype == want.dtype and got.shape == want.shape
        assert_same_bytes(got, want, "in inference mode")
    with torch.inference_mode(), pytest.raises(NotImplementedError, match="aten.* is not defined on a quantized"):
        torch.nn.functional.linear(torch.ones(1, SHAPE[1]), weight)


@pytest.mark.parametrize("is_param", [False, True])
@every_format
def test_the_class_of_a_weight_takes_another_one_over(name: str, is_param: bool) -> None:
    """As `accelerate` makes parameters: `type(weight)(tensor, requires_grad=...)`."""
    module = Holder(name)
    weight = module.weight if is_param else module.weight.data
    weight.keep_initial = True
    for requires_grad in (True, False):
        made = type(module.weight)(weight, requires_grad=requires_grad)
        assert isinstance(made, nn.Parameter) and type(made) is QuantizedParameter
        assert made.requires_grad is requires_grad and made.keep_initial and made.is_leaf
        assert made is not weight and made.storage is weight.storage and made.shape == weight.shape
    module.weight = made
    assert module.get_parameter("weight") is made
    of_class = QuantizedTensor(weight)
    assert type(of_class) is QuantizedTensor and of_class.storage is weight.storage and not of_class.requires_grad
    stacked = QuantizedTensor(weight.storage, (2, SHAPE[0] // 2, SHAPE[1]))
    assert QuantizedParameter(stacked).shape == stacked.shape


def test_the_class_of_a_weight_takes_nothing_else() -> None:
    matrix = QuantizedParameter(quantize(torch.ones(64, 64), FORMATS["float8_block_2d"]).storage)
    group = GroupedParameter(grouped.quantize(torch.ones(2, 64, 64), FORMATS["float8_block_2d"]).storage)
    for requires_grad in (True, False):
        made = GroupedParameter(nn.Parameter(group), requires_grad=requires_grad)
        assert isinstance(made, nn.Parameter) and made.storage is group.storage and made.requires_grad is requires_grad
    for cls in (QuantizedTensor, QuantizedParameter, grouped.GroupedTensor, GroupedParameter):
        other = matrix if issubclass(cls, grouped.GroupedTensor) else group
        named = ((torch.ones(64, 64), r"Tensor of \(64, 64\)"), (None, "NoneType"), (other, type(other).__name__))
        for given, what in named:
            with pytest.raises(TypeError, match=rf"^{cls.__name__}: got {what}.*, wanted .*weight\.copy_\(values\)"):
                cls(given, requires_grad=True)


def test_an_op_that_is_not_defined_says_what_of_and_what_to_do() -> None:
    weight = quantize(signed(dtype=torch.float32), FORMATS["float8_block_2d"])
    wanted = rf"aten\..* got \[{re.escape(str(SHAPE))}\].*outside of its module.*\.dequantize\(\).*te_dist\.convert"
    for product in (
        lambda: weight @ torch.ones(SHAPE[1], 1),
        weight.t,
        lambda: torch.ones(1, SHAPE[0]) @ weight,
    ):
        with torch.no_grad(), pytest.raises(NotImplementedError, match=wanted):
            product()


@every_format
def test_a_weight_that_was_given_a_slice_says_how_it_is_loaded(name: str) -> None:
    big, small = Holder(name), Holder(name)
    state = {name: value.clone() for name, value in small.state_dict().items()} | {"weight": torch.ones(32, SHAPE[1])}
    small.weight.data = big.weight.data[:32]
    with pytest.raises(RuntimeError, match=r"weight\.data = whole\[:n\]\.clone\(\)"):
        small.load_state_dict(state)
    small.weight.data = big.weight.data[:32].clone()
    small.load_state_dict(state)
    assert_bitwise(small.weight.dequantize(), torch.ones(32, SHAPE[1]), "loaded")


@every_format
def test_what_is_no_quantized_tensor_says_how_to_get_values(name: str) -> None:
    weight = quantize(signed(dtype=torch.float32), FORMATS[name])
    exchanged = ((lambda: torch.from_dlpack(weight), "__dlpack__"), (lambda: np.from_dlpack(weight), "__dlpack__"))
    arrays = (weight.numpy, "numpy"), (lambda: np.asarray(weight), "numpy"), (weight.tolist, "tolist")
    for call, op in (*arrays, *exchanged):
        with pytest.raises(RuntimeError, match=rf"{op} of a quantized tensor.*call \.dequantize\(\)\.{op}\(\)"):
            call()
    for part in (lambda: weight[0], lambda: weight[0, 0], lambda: weight[:, 0], lambda: list(weight)):
        with pytest.raises(NotImplementedError, match=r"of \(\d+, \d+\): got a row, .*; call \.dequantize\(\) first"):
            part()
    assert weight.dequantize().numpy().shape == SHAPE


@every_format
def test_what_is_written_into_a_slice_is_not_lost_in_silence(name: str) -> None:
    weight = quantize(signed(dtype=torch.float32), FORMATS[name])
    part, before = weight[:16], weight.clone()
    other = quantize(signed(seed=1, dtype=torch.float32), FORMATS[name])[:16]
    for write in (lambda: part.copy_(other), lambda: part.fill_(1.0), lambda: torch._foreach_mul_([part], 2.0)):
        with pytest.raises(NotImplementedError, match="part of shape"):
            write()
    assert_same_bytes(weight, before, "the whole")
    part.clone().fill_(1.0)
    weight[:].copy_(before)


class Values(nn.Module):
    """The values of a model's parameters, which averages are kept in."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.values = nn.ParameterList([param.detach() * 1.0 for param in model.parameters()])


@of_each_family
@every_format
def test_averages_of_weights_in_high_precision_move(name: str) -> None:
    module, goal = Holder(name), Holder(name)
    with torch.no_grad():
        goal.weight.copy_(signed(seed=5, dtype=torch.float32))
    for multi_avg_fn in (None, swa_utils.get_swa_multi_avg_fn(), swa_utils.get_ema_multi_avg_fn(0.999)):
        average = swa_utils.AveragedModel(Values(module), multi_avg_fn=multi_avg_fn)
        assert type(average.module.values[0].data) is torch.Tensor
        average.update_parameters(module)
        first, last = module.weight.dequantize(), goal.weight.dequantize()
        assert_bitwise(average.module.values[0].detach(), first, "the first")
        for _ in range(50):
            average.update_parameters(goal)
        kept = 0.999**50 if multi_avg_fn and "ema" in multi_avg_fn.__qualname__ else 1 / 51
        torch.testing.assert_close(average.module.values[0].detach(), last + kept * (first - last), atol=1e-4, rtol=0)


@of_each_family
@every_format
def test_averages_that_are_quantized_are_refused(name: str) -> None:
    module, goal = Holder(name), Holder(name)
    with torch.no_grad():
        goal.weight.copy_(signed(seed=5, dtype=torch.float32))
        before = module.weight.dequantize()
        for average in (
            lambda: module.weight.lerp_(goal.weight, 0.1),
            lambda: module.weight.lerp_(goal.weight, torch.tensor(0.1)),
            lambda: torch._foreach_lerp_([module.bias, module.weight], [goal.bias, goal.weight], 0.1),
            lambda: torch._foreach_lerp_([module.weight], [goal.weight], [torch.full(SHAPE, 0.1)]),
        ):
            with pytest.raises(RuntimeError, match=r"lerp_.*stand still.*detach\(\) \* 1\.0"):
                average()
    assert_bitwise(module.weight.dequantize(), before, "refused")
    for multi_avg_fn in (swa_utils.get_swa_multi_avg_fn(), swa_utils.get_ema_multi_avg_fn(0.9)):
        average = swa_utils.AveragedModel(module, multi_avg_fn=multi_avg_fn)
        average.update_parameters(module)
        with pytest.raises(RuntimeError, match=r"_foreach_lerp_.*AveragedModel"):
            average.update_parameters(module)


@of_each_family
@every_format
def test_sums_into_quantized_tensors_are_warned_of(name: str) -> None:
    average, weight = (Holder(name).weight.detach() for _ in range(2))
    for add in (
        lambda: average.mul_(0.9).add_(weight, alpha=0.1),
        lambda: average.addcmul_(torch.ones(SHAPE), torch.ones(SHAPE)),
        lambda: torch._foreach_sub_([average], [torch.ones(SHAPE)]),
    ):
        with pytest.warns(UserWarning, match=r"add.*_|sub_.*stands still.*te_dist\.optim") as caught:
            add()
        assert caught[0].filename == __file__, "it names the line that sums"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        average.mul_(0.9).add_(1.0).copy_(weight)
        (average * 1.0).add_(weight, alpha=0.1)
        nn.init.kaiming_uniform_(Holder(name).weight)


def test_sums_into_weights_that_keep_their_values_lose_nothing_and_warn_of_nothing() -> None:
    with te.quantized_model_init(recipe=recipe.NVFP4BlockScaling(), preserve_high_precision_init_val=True):
        weight = te.Linear(64, 64).weight
    want = weight.get_high_precision_init_val().clone()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        for _ in range(20):
            weight.add_(torch.ones(64, 64), alpha=1e-4)
            want.add_(torch.ones(64, 64), alpha=1e-4)
    assert_bitwise(weight.get_high_precision_init_val(), want, "sum")


@every_format
def test_quantized_weights_are_averaged_into_plain_tensors(name: str) -> None:
    weight = Holder(name).weight.detach()
    for write in (
        lambda average: average.lerp_(weight, 0.1),
        lambda average: average.lerp_(end=weight, weight=torch.tensor(0.1)),
        lambda average: torch._foreach_lerp_([average], [weight], 0.1),
        lambda average: torch._foreach_lerp_([average], [weight], [torch.full(SHAPE, 0.1)]),
    ):
        average = torch.ones(SHAPE)
        write(average)
        torch.testing.assert_close(average, torch.ones(SHAPE).lerp_(weight.dequantize(), 0.1))


@pytest.mark.parametrize(
    "initialize",
    [
        lambda w: w.data.normal_(mean=0.0, std=0.02),
        lambda w: w.data.uniform_(-1, 1),
        nn.init.kaiming_uniform_,
        nn.init.xavier_normal_,
        nn.init.orthogonal_,
        lambda w: nn.init.constant_(w, 0.5),
        nn.init.ones_,
    ],
    ids=["normal", "uniform", "kaiming", "xavier", "orthogonal", "constant", "ones"],
)
@of_each_family
@every_format
def test_initializers_quantize_what_they_fill_in(name: str, initialize) -> None:
    module, plain = Holder(name), nn.Parameter(torch.empty(SHAPE))
    torch.manual_seed(0)
    initialize(module.weight)
    torch.manual_seed(0)
    initialize(plain)
    got, want = module.weight.dequantize(), plain.detach()
    assert (got - want).norm() <= 0.15 * want.norm()


@every_format
def test_a_truncated_normal_is_one_or_is_refused(name: str) -> None:
    module = Holder(name)
    try:
        nn.init.trunc_normal_(module.weight, std=0.02)
    except NotImplementedError as error:
        assert "erfinv_" in str(error)  # torch 2.11 makes it in steps that rounding between them would spoil
        return
    with pytest.raises(NotImplementedError, match="preserve_high_precision_init_val=True"), torch.no_grad():
        module.weight.erfinv_()
    assert 0.018 < module.weight.std() < 0.022
    assert module.weight.abs().max() < 0.2


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=True),
        lambda p: torch.optim.AdamW(p, lr=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
        lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    ],
    ids=["sgd", "sgd-foreach", "adamw", "adamw-foreach", "adamw-loop"],
)
@of_each_family
@every_format
def test_optimizers_without_masters_step_where_asked_to(name: str, make) -> None:
    module = Holder(name)
    before = module.weight.dequantize()
    optimizer = make(list(module.parameters()))
    optimizer.writes_quantized_parameters = True  # they round every update to a code, and are asked to
    for _ in range(2):
        module().backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert isinstance(module.weight, QuantizedParameter)
    assert (module.weight.dequantize() < before).any()


@every_format
def test_hooks_and_flags_work(name: str) -> None:
    module, seen = Holder(name), []
    module.weight.register_post_accumulate_grad_hook(lambda p: seen.append(type(p)))
    module.weight.register_hook(lambda grad: grad * 2)
    module().backward()
    assert seen == [QuantizedParameter]
    assert_bitwise(module.weight.grad, torch.full(SHAPE, 4.0), "gradient after a hook")
    module.weight.requires_grad_(False)
    assert not module.weight.requires_grad
    assert nn.utils.parameters_to_vector(module.parameters()).shape == (SHAPE[0] * SHAPE[1] + SHAPE[0],)
