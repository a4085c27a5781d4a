"""Initialization of sharded models: bit for bit the same for every number of ranks, and the quantized whole."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import te_dist as te
from te_dist import fsdp2
from te_dist.catalog import FORMATS
from te_dist.formats import Format, Region
from te_dist.fsdp2 import QuantizedParameter
from te_dist.fsdp2.parameter import ShardedParameter
from te_dist.tensor import empty
from te_dist.tensor import storage as storages
from te_dist.tensor.placement import local_tensor
from te_dist.testing import assert_bitwise, mesh, pool
from tests.distributed.probe import wires
from tests.nn.test_convert_experts import HIDDEN, Experts

ROWS, COLS = 336, 160


class Projection(nn.Module):
    """A quantized weight on meta, which knows how to fill a whole one."""

    def __init__(self, format: Format, keep_initial: bool = False) -> None:
        super().__init__()
        storage = empty(format, Region.whole(ROWS, COLS), dtype=torch.bfloat16, device="meta")
        weight = QuantizedParameter(storage)
        weight.keep_initial = keep_initial
        self.weight = nn.Parameter(weight)

    def init_parameter(self, name: str, tensor: Tensor) -> None:
        nn.init.normal_(tensor, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.dequantize().t()


class Model(nn.Module):
    """Quantized and plain parameters, and a buffer that reset_parameters makes."""

    def __init__(self, format: Format) -> None:
        super().__init__()
        self.first = Projection(format)
        self.norm = nn.LayerNorm(ROWS, device="meta", dtype=torch.bfloat16)
        self.second = Projection(format, keep_initial=True)


def make(name: str) -> Model:
    return Model(FORMATS[name])


def materialize_and_gather(rank: int, world: int, name: str) -> dict[str, Tensor]:
    model = make(name)
    for module in (model.first, model.norm, model.second):
        fsdp2.fully_shard(module, mesh=mesh((world,), ("dp",)), reshard_after_forward=False)
    fsdp2.materialize(model, device="cpu", seed=7)
    assert all(local_tensor(p).storage.unsettled is None for p in (model.first.weight, model.second.weight))
    initial = local_tensor(model.second.weight).get_high_precision_init_val()
    rows = local_tensor(model.second.weight).storage.region.rows
    result = {f"initial.{rows.start}": initial}
    assert local_tensor(model.first.weight).get_high_precision_init_val() is None
    for prefix in ("first", "second"):
        unit = getattr(model, prefix)
        unit.unshard()
        result |= {f"{prefix}.{field}": wire for field, wire in wires(unit.weight).items()}
    return result


@pytest.mark.every_run(name=("float8_tensorwise", "float8_block_2d", "mxfp8_1d", "nvfp4_2d", "hybrid_mxfp8_nvfp4"))
@pytest.mark.parametrize("name", FORMATS)
def test_every_number_of_ranks_gives_the_same_model(name: str) -> None:
    alone = make(name)
    fsdp2.materialize(alone, device="cpu", seed=7)
    whole = {f"{p}.{f}": w for p in ("first", "second") for f, w in wires(getattr(alone, p).weight).items()}
    initial = alone.second.weight.get_high_precision_init_val()
    for world in (2, 3, 4):
        if ROWS // world % FORMATS[name].alignment(0):
            continue
        for result in pool(world).run(materialize_and_gather, name):
            for key, got in result.items():
                prefix, field = key.split(".")
                want = initial[int(field) : int(field) + len(got)] if prefix == "initial" else whole[key]
                assert_bitwise(got, want, f"{key} on {world} ranks")


def test_seed_and_name_decide() -> None:
    models = {seed: make("float8_block_2d") for seed in (0, 1)}
    for seed, model in models.items():
        fsdp2.materialize(model, device="cpu", seed=seed)
    assert not torch.equal(models[0].first.weight, models[1].first.weight)
    assert not torch.equal(models[0].first.weight, models[0].second.weight)


@pytest.mark.parametrize("wrap", [checkpoint_wrapper, torch.compile])
def test_what_recomputes_or_compiles_changes_no_value(wrap: Callable[[nn.Module], nn.Module]) -> None:
    plain, wrapped = make("float8_block_2d"), make("float8_block_2d")
    wrapped.first, wrapped.norm = wrap(wrapped.first), wrap(wrapped.norm)
    for model in (plain, wrapped):
        fsdp2.materialize(model, device="cpu", seed=7)
    for got, want in zip(wrapped.parameters(), plain.parameters(), strict=True):
        assert torch.equal(got, want)


def test_the_generators_of_the_caller_are_left_alone() -> None:
    torch.manual_seed(3)
    want = torch.randn(4)
    torch.manual_seed(3)
    fsdp2.materialize(make("mxfp8_1d"), device="cpu", seed=0)
    assert_bitwise(torch.randn(4), want, "draws after materialize")


def tied() -> nn.Sequential:
    """On meta; the head has the embedding's weight."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(ROWS, COLS), nn.Sequential(nn.Linear(COLS, COLS), nn.Linear(COLS, ROWS)))
    model[1][1].weight = model[0].weight
    return model


def test_what_modules_share_they_share_afterwards() -> None:
    model = tied()
    fsdp2.materialize(model, device="cpu", seed=0)
    assert model[1][1].weight is model[0].weight
    assert abs(float(model[0].weight.detach().std()) - 1.0) < 0.05, "an embedding's values, not a linear map's"
    assert len(list(model.parameters())) == 4


def materialize_tied_shards(rank: int, world: int) -> None:
    model, whole = tied(), tied()
    fsdp2.fully_shard(model, mesh=mesh((world,), ("dp",)))
    for each in (model, whole):
        fsdp2.materialize(each, device="cpu", seed=0)
    assert model[1][1].weight is model[0].weight
    x = torch.arange(8)
    model(x).sum().backward()
    whole(x).sum().backward()
    torch.testing.assert_close(model[0].weight.grad.full_tensor(), whole[0].weight.grad)


def test_shards_that_modules_share_they_share_afterwards() -> None:
    pool(2).run(materialize_tied_shards)


def materialize_what_is_gathered(rank: int, world: int) -> None:
    """As a pass without backward leaves it."""
    over, layers = mesh((world,), ("dp",)), [Projection(FORMATS["float8_block_2d"]) for _ in range(2)]
    for layer in layers:
        fsdp2.fully_shard(layer, mesh=over, reshard_after_forward=False)
    fsdp2.materialize(layers[0], device="cpu", seed=0)
    layers[0](torch.zeros(1, COLS, dtype=torch.bfloat16))
    for layer in layers:
        fsdp2.materialize(layer, device="cpu", seed=1)
        layer.reshard()
    got, want = (local_tensor(layer.weight) for layer in layers)
    for field in want.storage.buffers:
        assert_bitwise(got.storage.buffers[field], want.storage.buffers[field], field)


def test_shards_are_materialized_also_while_they_are_gathered() -> None:
    pool(2).run(materialize_what_is_gathered)


def test_a_module_without_initialization_is_named() -> None:
    model = nn.Sequential(nn.Identity())
    model[0].weight = nn.Parameter(torch.empty(3, device="meta"))
    with pytest.raises(ValueError, match=r"0 \(Identity\).*reset_parameters"):
        fsdp2.materialize(model, device="cpu", seed=0)


def initialize_as_torch_does(rank: int, world: int, name: str) -> None:
    """to_empty and an in-place init of the shards: rank-local values, one set of scales."""
    layer = Projection(FORMATS[name])
    fsdp2.fully_shard(layer, mesh=mesh((world,), ("dp",)), reshard_after_forward=False)
    layer.to_empty(device="cpu")
    nn.init.normal_(layer.weight)
    written = local_tensor(layer.weight).storage.unsettled
    assert (written is not None) == any(
        t[0] != 1 for d in FORMATS[name].directions for t in FORMATS[name][d].codec.amax_tiles
    )
    fsdp2.settle(layer)
    layer(torch.zeros(1, COLS, dtype=torch.bfloat16))
    if written is None:
        return
    everyone = [torch.empty_like(written) for _ in range(world)]
    torch.distributed.all_gather(everyone, written)
    want = wires(storages.quantize(torch.cat(everyone), FORMATS[name]))
    for field, wire in wires(layer.weight).items():
        assert_bitwise(wire, want[field], field)


@pytest.mark.parametrize("name", ["float8_tensorwise", "float8_block_2d", "mxfp8_1d", "nvfp4_2d", "high_precision"])
def test_initialization_as_torch_does_it(name: str) -> None:
    pool(2).run(initialize_as_torch_does, name)


def materialized_beside(rank: int, world: int, whole: bool) -> list[tuple[str, str]]:
    """What is warned of where units do not hold all that is trained, and from where."""
    model = make("float8_block_2d")
    model.second.requires_grad_(False)
    for module in (model.first, model) if whole else (model.first,):
        fsdp2.fully_shard(module, mesh=mesh((world,), ("dp",)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fsdp2.materialize(model, device="cpu", seed=7)
    return [(str(each.message), each.filename) for each in caught]


def test_parameters_that_no_unit_has_are_told_of() -> None:
    for ((message, where),) in pool(2).run(materialized_beside, False):
        assert message.startswith("2 parameters belong to no unit of FSDP2 (norm.weight, norm.bias)")
        assert where == __file__
    assert pool(2).run(materialized_beside, True) == [[], []]


class Rotary(nn.Module):
    """Somebody else's: a buffer that only its constructor computes, and no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", self.compute(), persistent=False)

    @staticmethod
    def compute() -> Tensor:
        return 10000.0 ** -(torch.arange(0, 32, 2, dtype=torch.float32) / 32)


def test_buffers_of_others_are_computed_by_what_is_assigned() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), Rotary())
    with pytest.raises(ValueError, match=r"1 \(Rotary\) has buffers .*assigned to the module.*on a device"):
        fsdp2.materialize(model, device="cpu", seed=0)
    model[1].reset_parameters = lambda: model[1].inv_freq.copy_(Rotary.compute())
    fsdp2.materialize(model, device="cpu", seed=0)
    assert_bitwise(model[1].inv_freq, Rotary.compute(), "inv_freq")


class Foreign(nn.Module):
    """A linear map, experts and a scale, of a library whose rule initializes modules by their class."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(HIDDEN, HIDDEN)
        self.experts = Experts()
        self.scale = nn.Parameter(torch.empty(HIDDEN))

    @staticmethod
    def rule(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.5)
            nn.init.constant_(module.bias, 2.0)
        elif isinstance(module, Experts):
            nn.init.normal_(module.gate_up_proj, std=0.25)
            nn.init.normal_(module.down_proj, std=0.125)
        elif isinstance(module, Foreign):
            nn.init.constant_(module.scale, 3.0)


def initialized_by_a_rule(rank: int, world: int, converted: bool) -> dict[str, Tensor]:
    """Whole values, of converted maps those that were quantized."""
    with torch.device("meta"):
        model = Foreign()
    if converted:
        plan = {"*": te.recipe.Float8BlockScaling()}
        assert len(te.convert(model, plan, preserve_high_precision_init_val=True)) == 2  # noqa: PLR2004
    if world > 1:
        fsdp2.fully_shard(model.experts, mesh=mesh((world,), ("dp",)))
        fsdp2.fully_shard(model, mesh=mesh((world,), ("dp",)))
    fsdp2.materialize(model, device="cpu", seed=0, initialize=Foreign.rule)
    found = {}
    for name, param in model.named_parameters():
        local = local_tensor(param)
        kept = local.get_high_precision_init_val() if isinstance(local, ShardedParameter) else local
        parts = [torch.empty_like(kept) for _ in range(world)]
        if world > 1:
            dist.all_gather(parts, kept.detach().contiguous())
        found[name] = torch.cat(parts) if world > 1 else kept.detach()
    return found


def test_a_library_initializes_by_its_own_rule_what_is_converted_too() -> None:
    (plain,), (whole,) = pool(1).run(initialized_by_a_rule, False), pool(1).run(initialized_by_a_rule, True)
    sharded, _ = pool(2).run(initialized_by_a_rule, True)
    assert plain.keys() == whole.keys() and len(plain) == 5  # noqa: PLR2004
    for name, want in plain.items():
        assert_bitwise(whole[name], want, name)
        assert_bitwise(sharded[name], want, f"{name}, sharded")
    assert float(plain["experts.down_proj"].std()) == pytest.approx(0.125, rel=0.05)


def test_what_a_rule_leaves_without_values_is_named() -> None:
    with torch.device("meta"):
        model = Foreign()
    with pytest.raises(ValueError, match=r"experts \(Experts\): its rule .* left \['gate_up_proj', 'down_proj'\]"):
        fsdp2.materialize(model, device="cpu", seed=0, initialize=lambda m: isinstance(m, Experts) or Foreign.rule(m))


class Half(nn.Module):
    """One of whose parameters its constructor fills alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(16, 16))
        self.gain = nn.Parameter(torch.ones(16))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)


class Counting(te.Linear):
    """With buffers, of which `reset_parameters` fills some."""

    filled = ("total", "calls")

    def __init__(self) -> None:
        super().__init__(32, 32)
        self.register_buffer("total", torch.zeros(8))
        self.register_buffer("calls", torch.zeros(8, dtype=torch.int64))

    def reset_parameters(self) -> None:
        for name in self.filled:
            getattr(self, name).zero_()


@pytest.mark.parametrize("missing", ["total", "calls"])
def test_a_buffer_without_values_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counting, "filled", tuple({"total", "calls"} - {missing}))
    with torch.device("meta"):
        model = nn.Sequential(Counting())
    with pytest.raises(ValueError, match=rf"0 \(Counting\).* left \['{missing}'\] without values"):
        fsdp2.materialize(model, device="cpu", seed=0)
    with pytest.raises(ValueError, match=r"1 \(Rotary\).* left \['inv_freq'\] without values"):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(8, 8), Rotary())
        fsdp2.materialize(model, device="cpu", seed=0, initialize=Foreign.rule)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_parameter_that_only_its_constructor_fills_is_named(device: str) -> None:
    with torch.device(device):
        model = nn.Sequential(Half())
    with pytest.raises(ValueError, match=r"0 \(Half\).* left \['gain'\] without values"):
        fsdp2.materialize(model, device="cpu", seed=0)


def test_what_resets_buffers_leaves_weights_as_they_were_filled() -> None:
    with torch.device("meta"):
        ours, plain = nn.Sequential(Counting()), nn.Sequential(te.Linear(32, 32))
    for model in (ours, plain):
        fsdp2.materialize(model, device="cpu", seed=0)
    assert_bitwise(ours[0].weight, plain[0].weight, "weight")
    assert not ours[0].total.any() and not ours[0].calls.any()


def test_buffers_that_have_values_keep_them() -> None:
    rotary = Rotary()
    with torch.device("meta"):
        linear = nn.Linear(8, 8)
    model = nn.Sequential(linear, rotary)
    fsdp2.materialize(model, device="cpu", seed=0)
    assert_bitwise(rotary.inv_freq, Rotary.compute(), "inv_freq")


def test_buffers_that_modules_share_they_share_afterwards() -> None:
    with torch.device("meta"):
        one, other = Rotary(), Rotary()
    other.inv_freq = one.inv_freq
    one.reset_parameters = lambda: one.inv_freq.copy_(Rotary.compute())
    model = nn.Sequential(one, other)
    fsdp2.materialize(model, device="cpu", seed=0)
    assert model[0].inv_freq is model[1].inv_freq
    assert_bitwise(model[1].inv_freq, Rotary.compute(), "inv_freq")
