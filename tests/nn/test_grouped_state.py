"""What a GroupedLinear keeps, saves and takes: buffers of callers, checkpoints, recomputation, offloading, scales."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import te_dist as te
from te_dist import fsdp2, offload, recipe, tensor_parallel
from te_dist.formats import Direction
from te_dist.fsdp2 import GroupedParameter
from te_dist.grouped import GroupedStorage
from te_dist.kernels import grouped_gemm
from te_dist.nn.group_fronts import SWIGLU, WEIGHTED_SWIGLU
from te_dist.nn.group_tables import group_table
from te_dist.nn.grouped_products import Given
from te_dist.nn.grouped_weights import as_one, in_one_piece
from te_dist.recipe import Recipe
from te_dist.tensor import QuantizedTensor
from te_dist.testing import assert_bitwise
from tests.nn.recipes import CASES, relative_error
from tests.nn.test_grouped_options import GROUPS, IN, OUT, SIZES, make, normal, step

QUANTIZED: dict[str, Recipe] = {
    "block": recipe.Float8BlockScaling(),
    "current": recipe.Float8CurrentScaling(),
    "delayed": recipe.DelayedScaling(amax_history_len=3),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(disable_stochastic_rounding=True),
    "hybrid": CASES["hybrid"].recipe,
}
every_recipe = pytest.mark.parametrize("made_by", QUANTIZED.values(), ids=QUANTIZED.keys())
ROWS = sum(SIZES)


def training(module: te.GroupedLinear, made_by: Recipe, *, evaluates: bool) -> list[Tensor]:
    """Outputs of steps of an optimizer, evaluations between them; the weights at the end."""
    optimizer = te.optim.FusedAdam(module.parameters(), lr=0.05, master_weights=True)
    found = []
    for seed in range(4):
        if evaluates:
            module.eval()
            with torch.no_grad() if seed % 2 else torch.inference_mode(), te.autocast(recipe=made_by):
                module(normal(ROWS, IN, seed=50 + seed), SIZES)
            module.train()
        optimizer.zero_grad()
        x = normal(ROWS, IN, seed=seed).requires_grad_()
        with te.autocast(recipe=made_by):
            out = module(x, SIZES)
        out.square().mean().backward()
        optimizer.step()
        found += [out.detach(), x.grad]
    return [*found, *(p.dequantize() if isinstance(p, QuantizedTensor) else p.detach() for p in module.parameters())]


@pytest.mark.parametrize("single", [False, True])
@every_recipe
def test_training_and_evaluation_in_turn_equal_training_alone(made_by: Recipe, single: bool) -> None:
    alone, in_turn = (
        training(make(made_by, single_grouped_weight=single), made_by, evaluates=evaluates)
        for evaluates in (False, True)
    )
    for number, (got, want) in enumerate(zip(in_turn, alone, strict=True)):
        assert_bitwise(got, want, f"result {number}")
    start = make(made_by, single_grouped_weight=single)
    first = getattr(start, start.weight_names[0]).dequantize()
    assert not torch.equal(first.flatten()[: OUT * IN], alone[8].flatten()[: OUT * IN])


@pytest.mark.parametrize("derived", [False, True])
def test_a_columnwise_direction_that_is_kept_follows_the_weight(derived: bool) -> None:
    made_by = QUANTIZED["block"]
    module = make(made_by, single_grouped_weight=True)
    if derived:
        module.weight.update_usage(columnwise_usage=True)
    for number, (got, want) in enumerate(
        zip(
            training(module, made_by, evaluates=True),
            training(make(made_by, single_grouped_weight=True), made_by, evaluates=False),
            strict=True,
        )
    ):
        assert_bitwise(got, want, f"result {number}")


@pytest.mark.parametrize(
    ("num_in", "num_out", "dtype", "turns"),
    [
        (256, 384, torch.bfloat16, True),
        (384, 256, torch.float16, True),
        (256, 144, torch.bfloat16, False),  # a square that is summed over in part
        (256, 384, torch.float32, False),
    ],
)
@pytest.mark.parametrize("kept", list(Direction))
def test_weights_are_transposed_only_where_many_rows_of_a_group_read_them(
    kept: Direction, num_in: int, num_out: int, dtype: torch.dtype, turns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    derived, made_by = [], QUANTIZED["block"]
    with te.quantized_model_init(recipe=made_by):
        module = te.GroupedLinear(GROUPS, num_in, num_out, bias=False, single_grouped_weight=True, params_dtype=dtype)
    is_rowwise = kept is Direction.ROWWISE
    module.weight.update_usage(rowwise_usage=is_rowwise, columnwise_usage=not is_rowwise)
    lies_well = turns if is_rowwise else dtype != torch.float32  # forward sums over whole squares in all cases
    derive, found = GroupedStorage.with_derived, []
    monkeypatch.setattr(GroupedStorage, "with_derived", lambda *args: derived.append(args) or derive(*args))
    for most_rows in (ROWS, 0):
        monkeypatch.setattr(grouped_gemm, "_TURNED_ROWS", most_rows)
        x = normal(ROWS, num_in).to(dtype).requires_grad_()
        with te.autocast(recipe=made_by):
            out = module(x, SIZES)
        out.square().sum().backward()
        if most_rows:
            assert bool(derived) != lies_well
        found.append((out, x.grad))
    assert derived
    for got, want, name in zip(*found, ("the output", "the gradient of the input"), strict=True):
        assert_bitwise(got, want, name)


@pytest.mark.parametrize("single", [False, True])
def test_copies_and_pickles_compute_the_same(single: bool) -> None:
    made_by = QUANTIZED["block"]
    module = make(made_by, single_grouped_weight=single)
    want = step(module, made_by)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert single or twin.gemm.one_buffer.holds(list(twin._local(twin.weight_names)))
        twin.zero_grad()
        for key, value in step(twin, made_by).items():
            assert_bitwise(value, want[key], key)


@pytest.mark.parametrize("made_by", [None, *QUANTIZED.values()], ids=["plain", *QUANTIZED])
def test_buffers_of_the_caller_keep_what_lies_behind_the_last_group(made_by: Recipe | None) -> None:
    rows, want = ROWS + 4, step(make(made_by), made_by)
    x = torch.cat([normal(ROWS, IN), torch.full((4, IN), torch.nan)]).requires_grad_()
    out, dgrad_out = torch.full((rows, OUT), 7.0), torch.full((rows, IN), 7.0)
    module = make(made_by)
    with te.autocast(enabled=made_by is not None, recipe=made_by):
        y = module(x, SIZES, None, out, dgrad_out)
    assert y.data_ptr() == out.data_ptr() and out.grad_fn is None
    y.backward(torch.cat([normal(ROWS, OUT, seed=2), torch.full((4, OUT), torch.nan)]))
    assert_bitwise(out[:ROWS], want["y"], "y")
    assert_bitwise(dgrad_out[:ROWS], want["dx"], "dx")
    assert_bitwise(x.grad, dgrad_out, "gradient")
    assert (out[ROWS:] == 7).all() and (dgrad_out[ROWS:] == 7).all()
    assert_bitwise(torch.stack([getattr(module, name).grad for name in module.weight_names]), want["dw"], "dw")
    assert_bitwise(torch.stack([getattr(module, name).grad for name in module.bias_names]), want["db"], "db")


@pytest.mark.parametrize(
    "wrong",
    [
        torch.empty(ROWS, OUT + 1),
        torch.empty(ROWS, OUT, dtype=torch.bfloat16),
        torch.empty(OUT, ROWS).t(),
        torch.empty(ROWS, OUT, requires_grad=True),
        torch.empty(ROWS, OUT, device="meta"),
    ],
)
def test_buffers_that_cannot_be_written_are_refused(wrong: Tensor) -> None:
    with pytest.raises(ValueError, match="out: got"):
        make(None)(normal(ROWS, IN), SIZES, out=wrong)


@every_recipe
def test_recomputation_gives_the_same_bits(made_by: Recipe) -> None:
    want = step(make(made_by), made_by)
    module, x = make(made_by), normal(ROWS, IN).requires_grad_()
    with te.autocast(recipe=made_by):
        out = te.checkpoint(module, x, SIZES)
    out.backward(normal(ROWS, OUT, seed=2))
    assert_bitwise(out, want["y"], "y")
    assert_bitwise(x.grad, want["dx"], "dx")
    assert_bitwise(torch.stack([getattr(module, name).grad for name in module.weight_names]), want["dw"], "dw")


@pytest.mark.parametrize("made_by", [None, *QUANTIZED.values()], ids=["plain", *QUANTIZED])
def test_what_is_saved_is_offloaded_whole(made_by: Recipe | None) -> None:
    want, module, x = step(make(made_by), made_by), make(made_by), normal(ROWS, IN).requires_grad_()
    with te.autocast(enabled=made_by is not None, recipe=made_by), offload.activations(min_bytes=1):
        out = module(x * 1.0, SIZES)
    out.backward(normal(ROWS, OUT, seed=2))
    assert_bitwise(x.grad, want["dx"], "dx")
    assert_bitwise(torch.stack([getattr(module, name).grad for name in module.weight_names]), want["dw"], "dw")


def saved_by(module: te.GroupedLinear, made_by: Recipe | None, x: Tensor) -> list[Any]:
    saved: list[Any] = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
        te.autocast(enabled=made_by is not None, recipe=made_by),
    ):
        module(x, SIZES)
    return saved


def test_forward_saves_the_columnwise_input_as_one_tensor_and_the_weight_itself() -> None:
    made_by = QUANTIZED["block"]
    module = make(made_by, single_grouped_weight=True)
    table, inputs, weight = saved_by(module, made_by, normal(ROWS, IN).requires_grad_())
    assert isinstance(inputs, QuantizedTensor) and set(inputs.storage.buffers) == {"col_data", "col_scale"}
    assert inputs.shape == (GROUPS * 128, IN)  # as many tiles as so many rows can need
    assert isinstance(weight, GroupedParameter) and weight.storage is module.weight.storage
    assert table.shape == (4, GROUPS + 1)


def test_saving_the_original_input_saves_nothing_else() -> None:
    made_by, x = QUANTIZED["block"], normal(ROWS, IN).requires_grad_()
    module = make(made_by, single_grouped_weight=True, save_original_input=True)
    _, original, _ = saved_by(module, made_by, x)
    assert original.data_ptr() == x.data_ptr()


def test_what_is_frozen_costs_nothing() -> None:
    made_by = QUANTIZED["block"]
    module = make(made_by, single_grouped_weight=True).requires_grad_(False)
    _, weight = saved_by(module, made_by, normal(ROWS, IN).requires_grad_())
    assert isinstance(weight, GroupedParameter)
    module.requires_grad_(True)
    _, inputs = saved_by(module, made_by, normal(ROWS, IN))
    assert isinstance(inputs, QuantizedTensor) and not isinstance(inputs, GroupedParameter)


@pytest.mark.parametrize("name", ["block", "mxfp8", "current", "nvfp4"])
def test_a_quantized_input_is_multiplied_as_it_is(name: str) -> None:
    made_by, module = QUANTIZED[name], make(QUANTIZED[name])
    quantizer = made_by.quantizer(recipe.QuantizerRole("grouped_linear", "input"))
    quantizer.set_usage(columnwise=False)
    x = normal(ROWS, IN)
    inputs = quantizer(x).detach().requires_grad_()
    with te.autocast(recipe=made_by):
        out = module(inputs, SIZES)
    out.backward(normal(ROWS, OUT, seed=2))
    values = step_of(make(made_by), made_by, inputs.detach().dequantize())
    for got, want in ((inputs.grad, values[1]), (module.weight0.grad, values[2])):
        assert_bitwise(got, want, "gradient")
    weight = module.weight0.dequantize()
    want = inputs.detach().dequantize()[: SIZES[0]] @ weight.t() + module.bias0
    assert relative_error(out[: SIZES[0]], want) < 1e-5


def step_of(module: te.GroupedLinear, made_by: Recipe, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(output, gradient of the input, of the first weight)."""
    x = x.requires_grad_()
    with te.autocast(recipe=made_by):
        out = module(x, SIZES)
    out.backward(normal(ROWS, OUT, seed=2))
    return out.detach(), x.grad, module.weight0.grad


def test_formats_of_weights_do_not_mix() -> None:
    module, made_by = make(QUANTIZED["mxfp8"]), QUANTIZED["mxfp8"]
    module.weight1 = make(QUANTIZED["hybrid"]).weight1
    with te.autocast(recipe=made_by), pytest.raises(ValueError, match="hybrid and plain quantizers do not mix"):
        module(normal(ROWS, IN), SIZES)
    module.weight1 = make(None).weight1
    with te.autocast(recipe=made_by), pytest.raises(ValueError, match="have one format, or are all plain"):
        module(normal(ROWS, IN), SIZES)


def test_delayed_scaling_keeps_a_scale_of_every_group() -> None:
    made_by = recipe.DelayedScaling(amax_history_len=2)
    module = make(made_by)
    step(module, made_by)
    scaling = module.gemm.scaling
    assert scaling.scale.shape == (2 * GROUPS,)
    x, begin = normal(ROWS, IN), 0
    for group, size in enumerate(SIZES):
        want = 448 / x[begin : begin + size].abs().max() if size else 1.0  # nothing was seen of an empty group
        assert scaling.scale[group] == want
        begin += size


@pytest.mark.parametrize(("mode", "sizes"), [("column", (IN, OUT // 2)), ("row", (IN // 2, OUT))])
@pytest.mark.parametrize("single", [False, True])
def test_parallel_modes_cut_the_right_dimension(mode: Any, sizes: tuple[int, int], single: bool) -> None:
    kind = dict(parallel_mode=mode, tp_size=2, bias=False, single_grouped_weight=single)
    module = te.GroupedLinear(GROUPS, IN, OUT, **kind)
    dim = int(single) + (mode == "row")
    for name in module.weight_names:
        weight = getattr(module, name)
        assert weight.shape[-2:] == sizes[::-1]
        assert (weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride) == (True, dim, 1)
    assert module.weight_placement == Shard(dim)
    whole = list(getattr(module, module.weight_names[0]).shape)
    whole[module.weight_placement.dim] *= 2
    assert whole[-2:] == [OUT, IN]


def test_main_gradients_in_one_piece_are_added_to_without_a_copy() -> None:
    made_by, want = QUANTIZED["block"], step(make(QUANTIZED["block"]), QUANTIZED["block"])["dw"]
    module = make(made_by, fuse_wgrad_accumulation=True)
    whole = normal(GROUPS, OUT, IN, seed=8)
    expected = whole + want
    for name, part in zip(module.weight_names, whole, strict=True):
        getattr(module, name).main_grad = part
    x = normal(ROWS, IN)
    with te.autocast(recipe=made_by):
        out = module(x, SIZES)
    pieces = [getattr(module, name).main_grad for name in module.weight_names]
    assert in_one_piece(pieces).data_ptr() == whole.data_ptr() and in_one_piece(pieces[::-1]) is None
    out.backward(normal(ROWS, OUT, seed=2))
    torch.testing.assert_close(whole, expected, rtol=1e-6, atol=1e-5)


def test_the_first_microbatch_overwrites_main_gradients() -> None:
    made_by, want = QUANTIZED["block"], step(make(None), QUANTIZED["block"])["dw"]
    module = make(None, fuse_wgrad_accumulation=True, single_grouped_weight=True)
    module.weight.main_grad = torch.full((GROUPS, OUT, IN), 9.0)
    for is_first, count in ((True, 1), (False, 2), (True, 1)):
        with te.autocast(recipe=made_by):
            out = module(normal(ROWS, IN), SIZES, is_first)
        out.backward(normal(ROWS, OUT, seed=2))
        torch.testing.assert_close(module.weight.main_grad, count * want, rtol=1e-6, atol=1e-5)


def test_a_missing_main_gradient_is_named() -> None:
    module = make(None, fuse_wgrad_accumulation=True)
    with pytest.raises(RuntimeError, match=r"set weight.main_grad to zeros"):
        module(normal(ROWS, IN), SIZES).sum().backward()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("made_by", [None, *QUANTIZED.values()], ids=["plain", *QUANTIZED])
def test_swiglu_in_front_is_that_of_values_written(made_by: Recipe | None, weighted: bool) -> None:
    if made_by == QUANTIZED["delayed"]:
        pytest.skip("two passes have two scales")
    x, p = normal(ROWS, 2 * IN), torch.rand(ROWS, generator=torch.Generator().manual_seed(3))
    table = group_table(torch.tensor(SIZES), ROWS).tensor
    given = Given(table, None, front=WEIGHTED_SWIGLU if weighted else SWIGLU)  # type: ignore[arg-type]
    results = []
    for fused in (True, False):
        module, x_in, p_in = make(made_by), x.clone().requires_grad_(), p.clone().requires_grad_()
        weights = [getattr(module, name) for name in module.weight_names]
        with te.autocast(enabled=made_by is not None, recipe=made_by):
            if fused:
                out = module.gemm(x_in, weights, given=given, beside=(p_in,) if weighted else ())
            else:
                gate, up = x_in.chunk(2, dim=-1)
                hidden = nn.functional.silu(gate) * up * (p_in[:, None] if weighted else 1.0)
                out = module.gemm(hidden, weights, given=Given(table, None))  # type: ignore[arg-type]
        out.backward(normal(ROWS, OUT, seed=2))
        results.append((out.detach(), x_in.grad, p_in.grad, weights[0].grad))
    for got, want in zip(*results, strict=True):
        assert (got is None) == (want is None)
        assert got is None or relative_error(got, want) < 2e-2


@pytest.mark.parametrize("made_by", [None, QUANTIZED["block"], QUANTIZED["nvfp4"]], ids=["plain", "block", "nvfp4"])
def test_one_weight_for_each_group_is_multiplied_without_a_copy(made_by: Recipe | None) -> None:
    module = make(made_by)
    weights = [getattr(module, name) for name in module.weight_names]
    want = step(module, made_by)

    def is_one() -> bool:
        return as_one(weights) is not weights if made_by is None else module.gemm.one_buffer.holds(weights)

    assert is_one()
    moved = copy.deepcopy(module)
    weights = [getattr(moved, name) for name in moved.weight_names]
    weights[1].data = weights[1].detach().clone()
    assert not is_one()
    moved.zero_grad()
    for key, value in step(moved, made_by).items():
        assert_bitwise(value, want[key], key)


@pytest.mark.parametrize("made_by", [None, *QUANTIZED.values()], ids=["plain", *QUANTIZED])
def test_weights_that_are_moved_lie_in_one_buffer_again(made_by: Recipe | None) -> None:
    module, want = make(made_by), make(made_by).to(torch.bfloat16).to(torch.float32)
    twin = copy.deepcopy(module)
    twin.to(torch.bfloat16).to(torch.float32)
    weights, biases = ([getattr(twin, name) for name in names] for names in (twin.weight_names, twin.bias_names))
    assert as_one(biases) is not biases
    assert as_one(weights) is not weights if made_by is None else twin.gemm.one_buffer.holds(weights)
    got = step(twin, made_by)
    for key, value in step(want, made_by).items():
        assert_bitwise(got[key], value, key)
    twin.gemm.one_buffer = twin.gemm.scaling = None
    for key, value in step(twin, made_by).items():  # joined in every pass
        if key in ("y", "dx"):
            assert_bitwise(value, got[key], key)


@pytest.mark.parametrize("made_by", [None, *QUANTIZED.values()], ids=["plain", *QUANTIZED])
def test_weights_that_are_assigned_lie_in_one_buffer_again(made_by: Recipe | None) -> None:
    module, twin = make(made_by), make(made_by)
    state = {key: value.clone() if isinstance(value, Tensor) else value for key, value in module.state_dict().items()}
    twin.load_state_dict(state, assign=True)
    weights = [getattr(twin, name) for name in twin.weight_names]
    assert as_one(weights) is not weights if made_by is None else twin.gemm.one_buffer.holds(weights)
    want = step(module, made_by)
    for key, value in step(twin, made_by).items():
        assert_bitwise(value, want[key], key)


def test_weights_of_other_groups_are_not_seen_as_changed() -> None:
    module = make(None)
    out = module(normal(ROWS, IN).requires_grad_(), SIZES)
    versions = [getattr(module, name)._version for name in module.weight_names]
    with torch.no_grad():
        module.weight0.add_(1)
    assert [getattr(module, name)._version - v for name, v in zip(module.weight_names, versions, strict=True)][1:] == [
        0,
        0,
    ]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("style", [tensor_parallel.ColumnParallel, tensor_parallel.RowParallel])
@pytest.mark.parametrize("single", [False, True])
def test_styles_of_tensor_parallelism_refuse_groups(style: Any, single: bool) -> None:
    module = te.GroupedLinear(GROUPS, IN, OUT, bias=False, single_grouped_weight=single)
    with pytest.raises(ValueError, match=r"got te_dist's GroupedLinear; .*for GroupedLinear use parallel_mode"):
        style()._apply(module, None)


def test_delayed_gradients_are_added_to_those_that_are_there() -> None:
    made_by, want = QUANTIZED["block"], step(make(QUANTIZED["block"]), QUANTIZED["block"])["dw"]
    module = make(made_by, delay_wgrad_compute=True, single_grouped_weight=True)
    for count in (1, 2):
        with te.autocast(recipe=made_by):
            out = module(normal(ROWS, IN), SIZES)
        out.backward(normal(ROWS, OUT, seed=2))
        module.backward_dw()
        module.backward_dw()  # which has nothing left to do
        torch.testing.assert_close(module.weight.grad, count * want, rtol=1e-6, atol=1e-6)


def test_inside_of_torch_autocast_plain_groups_are_multiplied_in_its_type() -> None:
    x = normal(ROWS, IN)
    with torch.autocast("cpu", torch.bfloat16):
        got = make(None)(x, SIZES)
    assert_bitwise(got, make(None)(x.bfloat16(), SIZES), "y")


def test_inside_of_torch_autocast_biases_may_be_of_another_type() -> None:
    module, x, made_by = make(None, params_dtype=torch.float16), normal(ROWS, IN), QUANTIZED["block"]
    module.bias1 = nn.Parameter(module.bias1.detach().clone())  # beside the others no longer
    with torch.autocast("cpu", torch.bfloat16), te.autocast(recipe=made_by):
        got = module(x, SIZES)
    with te.autocast(recipe=made_by):
        assert_bitwise(got, module(x.bfloat16(), SIZES), "y")


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("made_by", [None, QUANTIZED["block"], QUANTIZED["nvfp4"]], ids=["plain", "block", "nvfp4"])
def test_groups_made_on_meta_compute_once_they_have_values(made_by: Recipe | None, single: bool) -> None:
    with te.quantized_model_init(enabled=made_by is not None, recipe=made_by), torch.device("meta"):
        modules = [te.GroupedLinear(GROUPS, IN, OUT, single_grouped_weight=single) for _ in range(2)]
    with pytest.raises(ValueError, match=r"on the meta device .* call te_dist.fsdp2.materialize"):
        modules[0](normal(ROWS, IN), SIZES)
    fsdp2.materialize(nn.Sequential(modules[0]), device="cpu", seed=0)
    modules[1].to_empty(device="cpu")
    modules[1].load_state_dict(modules[0].state_dict())
    found = [step(module, made_by) for module in modules]
    assert 0.5 < found[0]["y"].std() < 2
    for key, value in found[1].items():
        assert_bitwise(value, found[0][key], key)
