"""Kernels of a model are known before it runs: a rehearsal notes what a step launches, and leaves no trace."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import te_dist as te
from te_dist import kernels, recipe
from te_dist._torch_private import TorchDispatchMode, tree_map_only
from te_dist.codecs import gemm
from te_dist.formats import geometry
from te_dist.fsdp2.ahead import Shards, kernels_of
from te_dist.fsdp2.plan import RESHARDED, Phase, leading_and_region, plan_gather
from te_dist.grouped import GroupCut
from te_dist.kernels import gemm as gemm_kernels
from te_dist.kernels import grouped_gemm, movement, runtime
from te_dist.kernels.cache import Compiled
from te_dist.nn import answers, products, rehearsal
from te_dist.nn.moe import MoE, Routing, StackedExperts
from te_dist.quantizers import base
from te_dist.tensor import Cut, QuantizedTensor
from tests.nn.recipes import DEFAULTS

ROWS = 128


def made(model_recipe: recipe.Recipe, *, quantized: bool) -> nn.Module:
    options = dict(params_dtype=torch.bfloat16)
    with te.quantized_model_init(quantized, recipe=model_recipe):
        model = nn.Sequential(
            te.LayerNormLinear(128, 256, **options),
            te.Linear(256, 128, bias=False, **options),
            te.LayerNormMLP(128, 256, activation="swiglu", normalization="RMSNorm", **options),
        )
    if not quantized:
        te.prepare(model, model_recipe)
    return model


def made_of_experts(model_recipe: recipe.Recipe, *, quantized: bool) -> nn.Module:
    with te.quantized_model_init(quantized, recipe=model_recipe):
        model = MoE(128, 128, Routing(4, 2), shared_ffn_hidden_size=128, params_dtype=torch.bfloat16)
    if not quantized:
        te.prepare(model, model_recipe)
    return model


class Converted(nn.Module):
    """Stacked experts behind a router of somebody else's."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = StackedExperts(4, 128, 128, params_dtype=torch.bfloat16)

    def forward(self, x):
        weights, chosen = x[:, :4].softmax(-1).topk(2)
        return self.experts(x, chosen, weights)


def made_by_conversion(model_recipe: recipe.Recipe, *, quantized: bool) -> nn.Module:
    with te.quantized_model_init(quantized, recipe=model_recipe):
        model = Converted()
    if not quantized:
        te.prepare(model, model_recipe)
    return model


@pytest.fixture
def forgets_multiples():
    """The multiples that products take are looked up anew, and again behind the test."""
    answers.row_multiple.cache_clear()
    yield
    answers.row_multiple.cache_clear()


class Launches(TorchDispatchMode):
    """Notes which kernels the ops that run on the CPU would launch on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.specs: list = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "te_dist":
            with runtime.recording() as specs:
                getattr(kernels, func.name().removeprefix("te_dist::"))(
                    *tree_map_only(torch.Tensor, lambda t: t.to("meta"), args)
                )
            self.specs += specs
        return func(*args, **(kwargs or {}))


def step(model: nn.Module, model_recipe: recipe.Recipe, rows: int = ROWS) -> None:
    x = torch.randn(rows, 128, dtype=torch.bfloat16, requires_grad=True)
    with te.autocast(recipe=model_recipe):
        out = model(x)
    out.float().square().mean().backward()


@pytest.mark.pairwise
@pytest.mark.parametrize("make", [made, made_of_experts, made_by_conversion])
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("rows", [ROWS, ROWS + 1])
@pytest.mark.parametrize("model_recipe", DEFAULTS, ids=lambda r: type(r).__name__)
def test_a_rehearsal_notes_what_a_step_launches(model_recipe, rows, quantized, make, monkeypatch, forgets_multiples):
    monkeypatch.setattr(rehearsal, "ROWS", (rows,))
    for module in (products, base):
        monkeypatch.setattr(module, "READS_ANY_ORDER", ())
    for a, b, device in list(gemm._TABLE):  # on a GPU other functions multiply than those that run here
        entry = gemm._TABLE[a, b, "cpu"]._replace(multiple=gemm._TABLE[a, b, "sm_90a"].multiple)
        monkeypatch.setitem(gemm._TABLE, (a, b, device), entry)
    model = make(model_recipe, quantized=quantized)
    optimizer = te.optim.FusedAdam(model.parameters())
    with Launches() as launches:
        for _ in range(2):
            step(model, model_recipe, rows)
            optimizer.step()
            optimizer.zero_grad()
    launched = {spec.template for spec in launches.specs}
    assert launched
    assert launched <= {spec.template for spec in kernels_of(model)}


class Grouped(nn.Module):
    """Rows in groups of some sizes."""

    def __init__(self, num_groups: int = 4, **options) -> None:
        super().__init__()
        self.experts = te.GroupedLinear(num_groups, 128, 256, params_dtype=torch.bfloat16, **options)
        self.sizes = torch.tensor([5, 0, ROWS - 9, 4] + [0] * (num_groups - 4))

    def forward(self, x):
        return self.experts(x, self.sizes)


@pytest.mark.pairwise
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("model_recipe", DEFAULTS, ids=lambda r: type(r).__name__)
def test_a_rehearsal_notes_what_rows_in_groups_launch(model_recipe, quantized, single, monkeypatch):
    monkeypatch.setattr(rehearsal, "ROWS", (ROWS,))
    monkeypatch.setattr(base, "READS_ANY_ORDER", ())
    with te.quantized_model_init(quantized, recipe=model_recipe):
        model = Grouped(single_grouped_weight=single, single_grouped_bias=single)
    if not quantized:
        te.prepare(model, model_recipe)
    with Launches() as launches:
        step(model, model_recipe)
    launched = {spec.template for spec in launches.specs}
    assert any("Group" in template for template in launched)
    assert launched <= {spec.template for spec in kernels_of(model)}


@pytest.mark.parametrize("most_rows", [0, ROWS])
def test_a_rehearsal_notes_what_few_and_many_rows_of_a_group_launch(most_rows, monkeypatch):
    made_by = recipe.Float8BlockScaling(fp8_format=recipe.Format.HYBRID)
    with te.quantized_model_init(recipe=made_by):
        model = Grouped(8, single_grouped_weight=True)
    with Launches() as launches, monkeypatch.context() as patched:
        patched.setattr(grouped_gemm, "_TURNED_ROWS", most_rows)
        step(model, made_by)
    launched, known = (
        {re.sub(r" \d+", " n", spec.template) for spec in specs}  # other numbers of rows are cut in other ways
        for specs in (launches.specs, kernels_of(model))
    )
    assert any("Transpose" in template for template in launched) == (most_rows == 0)
    assert launched <= known


@pytest.mark.parametrize("num_groups", [8, 32, 128])
def test_a_rehearsal_notes_every_way_to_cut_products_of_weights_that_lie_the_other_way(num_groups):
    made_by = recipe.Float8BlockScaling()
    with te.quantized_model_init(recipe=made_by), torch.device("meta"):
        model = te.GroupedLinear(num_groups, 2048, 1536, single_grouped_weight=True, params_dtype=torch.bfloat16)
    kind = gemm_kernels.Kind(True, 2, turns=True)
    wanted = {
        grouped_gemm.rows_float8_block(("E4M3", "E4M3"), "BFloat16", True, tiling, turns=True).template
        for tiling in grouped_gemm.ROWS_RATES[kind]
    }
    assert len(wanted) > 1
    assert wanted <= {spec.template for spec in kernels_of(model)}


@pytest.mark.parametrize("experts", [False, True])
def test_a_rehearsal_notes_how_what_ranks_gathered_is_put_together(experts):
    made_by, num_shards = recipe.Float8BlockScaling(), 4
    with te.quantized_model_init(recipe=made_by), torch.device("meta"):
        model = Grouped(single_grouped_weight=True) if experts else te.Linear(128, 256)
    weight = next(param for param in model.parameters() if isinstance(param, QuantizedTensor))
    cut = GroupCut(weight.storage.group, 1, weight.shape) if experts else Cut(weight.storage.region, weight.shape)
    plan = plan_gather(weight.format, cut.parts(num_shards), policy=RESHARDED, phase=Phase.BACKWARD)
    outputs = [torch.zeros(wire.nbytes * num_shards, dtype=torch.uint8) for wire in plan.wires]
    leading, region = leading_and_region(plan.whole)
    with Launches() as launches:
        for field in plan.owned(weight.format, len(outputs)):
            plan.assemble(outputs, field, geometry.empty(field, region, device="cpu", leading=leading))
    launched = {spec.template for spec in launches.specs}
    assert launched
    assert launched <= {spec.template for spec in kernels_of(model, shards=Shards(num_shards, 1))}
    assert not launched & {spec.template for spec in kernels_of(model)}


def test_a_rehearsal_leaves_no_trace():
    model = made(recipe.DelayedScaling(), quantized=True)
    step(model, recipe.DelayedScaling())
    for param in model.parameters():
        param.grad = None
    model[1].register_forward_pre_hook(lambda *_: pytest.fail("a hook ran, which may communicate"))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    assert kernels_of(model)
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.cpu().float(), before[name].float()), name
    assert all(param.grad is None and param.device.type == "cpu" for param in model.parameters())


def test_a_rehearsal_sends_nothing():
    agreeing = recipe.CustomRecipe(lambda role: te.NVFP4Quantizer(with_amax_reduction=True))
    model = te.Linear(128, 128, params_dtype=torch.bfloat16)
    te.prepare(model, agreeing)
    with pytest.raises(ValueError, match="process group"), te.autocast(recipe=agreeing):
        model(torch.ones(16, 128, dtype=torch.bfloat16))
    assert any("QuantizeNvFp4" in spec.template for spec in kernels_of(model))


def test_modules_without_a_recipe_have_no_kernels():
    assert kernels_of(nn.Sequential(te.Linear(128, 128), nn.Linear(128, 128))) == ()


def test_activations_may_have_another_dtype():
    model = made(recipe.Float8BlockScaling(), quantized=True)
    assert any("Plain<Float16>" in spec.template for spec in kernels_of(model, dtype=torch.float16))


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs that take any kernel; the list of what was compiled."""
    compiled = []

    def compile_for(spec, arch):
        compiled.append(spec)
        return Compiled(b"", 0, 0, serialized=False)

    monkeypatch.setattr(runtime, "_loaded", {})
    monkeypatch.setattr(runtime, "compiled", compile_for)
    monkeypatch.setattr(runtime, "arch_of", lambda device: "sm_90a")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(
        runtime._C.cuda, "Kernel", lambda *_, **__: SimpleNamespace(load=lambda device: None, launch=None)
    )
    return compiled


SPECS = [movement.copies(width) for width in (1, 2, 4, 8)]


def test_nothing_is_compiled_twice(gpus):
    runtime.prepare(SPECS + SPECS, 0)
    runtime.prepare(SPECS, 0)
    assert sorted(spec.template for spec in gpus) == [spec.template for spec in SPECS]


def test_ranks_of_a_host_begin_at_different_places(gpus, monkeypatch):
    monkeypatch.setattr(runtime.os, "cpu_count", lambda: 1)  # one thread: in order
    runtime.prepare(SPECS, 0)
    runtime.prepare(SPECS, 1)
    assert gpus == [*SPECS, *SPECS[2:], *SPECS[:2]]


def test_capture_of_what_is_not_loaded_is_refused(gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"Assemble<1> would be loaded under CUDA graph capture.*te_dist.prepare"):
        runtime._load(SPECS[0], 0)
