"""Rows that are no multiple of what products take: quantized as one group, with the bytes of a matrix padded before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import te_dist as te
from te_dist import quantizers as q
from te_dist import recipe
from te_dist.formats import Direction, Region, geometry
from te_dist.nn import products
from te_dist.nn.plan import Plan
from te_dist.nn.site import LinearSite
from te_dist.ops.group_table import one_group
from te_dist.testing import assert_bitwise
from tests.nn.recipes import CASES, relative_error

ROWWISE, COLUMNWISE = Direction
TILE, IN, OUT = 128, 96, 160
TAKERS: dict[str, q.Quantizer] = {
    "block": q.Float8BlockQuantizer(block_scaling_dim=1),
    "current": q.Float8CurrentScalingQuantizer(),
    "delayed": q.Float8Quantizer(torch.tensor([3.0]), None),
    "mxfp8": q.MXFP8Quantizer(),
    "mxfp8_2d": q.MXFP8Quantizer(with_2d_quantization=True),
    "nvfp4": q.NVFP4Quantizer(),
    "nvfp4_2d": q.NVFP4Quantizer(with_2d_quantization=True),
    "nvfp4_transformed": q.NVFP4Quantizer(with_rht=True),
    "hybrid": q.HybridQuantizer(rowwise_quantizer=q.MXFP8Quantizer(), columnwise_quantizer=q.NVFP4Quantizer()),
}


class Mine(q.MXFP8Quantizer):
    """May do what it likes."""


class MineDelayed(q.Float8Quantizer):
    """The same."""


class MineHybrid(q.HybridQuantizer):
    """The same."""


OTHERS: dict[str, q.Quantizer] = {
    "squares": q.Float8BlockQuantizer(block_scaling_dim=2),
    "row_scaled": q.NVFP4Quantizer(row_scaled_nvfp4=True),
    "agreeing": q.Float8CurrentScalingQuantizer(with_amax_reduction=True),
    "plain": q.IdentityQuantizer(),
    "of others": Mine(),
    "of others, delayed": MineDelayed(torch.ones(1), None),
    "of others, hybrid": MineHybrid(rowwise_quantizer=q.MXFP8Quantizer(), columnwise_quantizer=q.NVFP4Quantizer()),
    "hybrid with others": q.HybridQuantizer(rowwise_quantizer=Mine(), columnwise_quantizer=q.NVFP4Quantizer()),
    "hybrid": q.HybridQuantizer(rowwise_quantizer=q.MXFP8Quantizer(), columnwise_quantizer=q.IdentityQuantizer()),
    "of rowwise values": q.HybridQuantizer(
        rowwise_quantizer=q.MXFP8Quantizer(),
        columnwise_quantizer=q.NVFP4Quantizer(),
        columnwise_source="rowwise_dequantized",
    ),
}


def normal(*shape: int, seed: int = 1) -> Tensor:
    """Rows of different magnitudes."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values * torch.logspace(-2, 2, shape[0])[:, None]


@pytest.mark.parametrize("rows", [1, 37, 128, 201])
@pytest.mark.parametrize("quantizer", TAKERS.values(), ids=TAKERS)
def test_one_group_has_the_bytes_of_a_padded_matrix(quantizer: q.Quantizer, rows: int) -> None:
    assert quantizer.takes_groups
    x = normal(rows, IN)
    padded = F.pad(x, (0, 0, 0, -rows % TILE))
    grouped = quantizer.encode_groups(x, one_group(rows, x.device), *Direction)
    for direction in Direction:
        # As on a device whose products read each direction as it is stored.
        whole = quantizer.make_empty(padded.shape, dtype=x.dtype).storage
        quantizer.write(padded, whole)
        region = Region.whole(rows if direction is ROWWISE else len(padded), IN)
        for field in whole.format[direction].fields:
            got = geometry.compact(field, grouped.buffers[field.name].view(field.shape(region)), region)
            want = geometry.compact(field, whole.buffers[field.name], whole.region)
            assert_bitwise(got, want[tuple(map(slice, got.shape))].contiguous(), f"{direction.value} {field.name}")


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_scale_and_amax_of_one_group_have_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    x, amax = normal(37, IN), torch.zeros(shape)
    quantizer = q.Float8Quantizer(torch.full(shape, 3.0), amax)
    rows = quantizer.encode_groups(x, one_group(37, x.device), ROWWISE)
    want = TAKERS["delayed"].encode_groups(x, one_group(37, x.device), ROWWISE)
    assert_bitwise(rows.buffers["qdata"], want.buffers["qdata"], "codes")
    assert float(amax) == float(x.abs().max())


@pytest.mark.parametrize("quantizer", OTHERS.values(), ids=OTHERS)
def test_what_knows_no_groups_says_so(quantizer: q.Quantizer) -> None:
    assert not quantizer.takes_groups


def test_squares_along_columns_are_no_groups() -> None:
    quantizer, x = OTHERS["squares"], normal(200, IN)
    quantizer.encode_groups(x, one_group(200, x.device), ROWWISE)
    with pytest.raises(NotImplementedError, match="columnwise direction of Block.* squares; take runs"):
        quantizer.encode_groups(x, one_group(200, x.device), *Direction)


def test_operands_of_one_product_are_groups_or_none() -> None:
    mx, row_scaled = q.MXFP8Quantizer(), OTHERS["row_scaled"]
    assert Plan(mx, mx, mx).takes_groups
    assert not Plan(row_scaled, mx, mx).takes_groups
    assert not Plan(mx, mx, row_scaled).takes_groups


@pytest.mark.parametrize("rows", [1, 37, 201])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_pass_gives_what_padded_rows_give(case: Any, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tables: list[int] = []
    monkeypatch.setattr(products, "one_group", lambda n, device: (tables.append(n), one_group(n, device))[1])
    monkeypatch.setattr(LinearSite, "row_multiple", lambda *_: 16)  # as products of a GPU take them

    def step(x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        module, x = te.Linear(IN, OUT), x.clone().requires_grad_()
        with te.autocast(recipe=case.recipe):
            out = module(x)
            plans.append(module.gemm.plan(x, module.weight))
        out.backward(grad)
        return out.detach()[:rows], x.grad[:rows], module.weight.grad, module.bias.grad

    plans: list[Any] = []
    x, grad = normal(rows, IN), normal(rows, OUT, seed=2)
    wanted = step(*(F.pad(each, (0, 0, 0, -rows % TILE)) for each in (x, grad)))
    for name, got, want in zip(("y", "dx", "dw", "db"), step(x, grad), wanted, strict=True):
        assert relative_error(got, want.double()) < 1e-6, name  # fp32 sums in another order
    assert tables == [rows, rows] * plans[0].takes_groups


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_rows_that_nobody_sums_over_are_taken_as_they_are(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LinearSite, "row_multiple", lambda *_: 16)
    for name in ("one_group", "F"):
        monkeypatch.setattr(products, name, None)
    torch.manual_seed(0)
    module, x = te.Linear(IN, OUT), normal(37, IN).requires_grad_()
    module.weight.requires_grad_(False)
    with te.autocast(recipe=case.recipe):
        out = module(x)
        with torch.no_grad():
            assert_bitwise(module(x), out, "an evaluation")
    out.backward(normal(37, OUT, seed=2))
    assert x.grad is not None and module.bias.grad is not None
    with monkeypatch.context() as patched:
        patched.setattr(products, "F", F)
        twin, y = te.Linear(IN, OUT), F.pad(x.detach(), (0, 0, 0, 11)).requires_grad_()
        twin.load_state_dict(dict(module.named_parameters()))
        with te.autocast(recipe=case.recipe):
            padded = twin(y)
        padded.backward(F.pad(normal(37, OUT, seed=2), (0, 0, 0, 11)))
    for name, got, want in (
        ("y", out, padded[:37]),
        ("dx", x.grad, y.grad[:37]),
        ("db", module.bias.grad, twin.bias.grad),
    ):
        assert relative_error(got.detach(), want.detach().double()) < 1e-6, name


@pytest.mark.parametrize("rows", [5, 37])
def test_columns_that_groups_do_not_take_are_padded(rows: int) -> None:
    module = te.Linear(100, 30)
    x = torch.randn(rows, 100, generator=torch.Generator().manual_seed(1), requires_grad=True)
    with te.autocast(recipe=recipe.NVFP4BlockScaling()):
        out = module(x)
    out.sum().backward()
    assert out.shape == (rows, 30)
    assert all(grad.isfinite().all() and grad.any() for grad in (x.grad, module.weight.grad, module.bias.grad))


@pytest.mark.parametrize("features", [(136, 80), (80, 136), (72, 40)], ids=str)
@pytest.mark.parametrize("name", ["block", "nvfp4", "nvfp4_plain", "hybrid"])
def test_both_operands_are_padded_alike_whatever_the_features(name: str, features: tuple[int, int]) -> None:
    module, rows = te.Linear(*features), 33
    x, grad = normal(rows, features[0]), normal(rows, features[1], seed=2)
    passes = []
    for more in (0, TILE - rows):
        given = F.pad(x, (0, 0, 0, more)).requires_grad_()
        module.zero_grad()
        with te.autocast(recipe=CASES[name].recipe):
            out = module(given)
        out.backward(F.pad(grad, (0, 0, 0, more)))
        passes.append((out.detach()[:rows], given.grad[:rows], module.weight.grad, module.bias.grad))
    for label, got, want in zip(("y", "dx", "dw", "db"), *passes, strict=True):
        assert relative_error(got, want) < 1e-6, label


def test_a_weight_that_is_exchanged_may_have_other_features() -> None:
    module, made_by = te.Linear(128, 128, bias=False), recipe.NVFP4BlockScaling(disable_rht=True)
    for features in (128, 136, 96):
        module.weight = torch.nn.Parameter(normal(features, features))
        for rows in (33, 64):
            with te.autocast(recipe=made_by):
                out = module(normal(rows, features))
            out.sum().backward()
            assert module.weight.grad.isfinite().all()
