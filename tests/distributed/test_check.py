"""`fsdp2.check`: a weight that was made quantized and is not any more is named, whatever made it plain."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import te_dist as te
from te_dist import fsdp2, testing
from te_dist.nn.moe import ExpertParallel, MoE, Routing, TopKRouter
from te_dist.recipe import Float8BlockScaling, MXFP8BlockScaling
from te_dist.tensor import quantize


def model() -> nn.Sequential:
    """Quantized weights, of two layers and a group, and plain ones."""
    with te.quantized_model_init(recipe=Float8BlockScaling()):
        layers = [te.Linear(128, 128), te.LayerNormLinear(128, 128)]
    return nn.Sequential(*layers, te.Linear(128, 128), nn.Linear(128, 128))


def make_plain(net: nn.Sequential) -> None:
    net[0].weight = nn.Parameter(net[0].weight.dequantize())


def change_format(net: nn.Sequential) -> None:
    with te.quantized_model_init(recipe=MXFP8BlockScaling()):
        net[0]._parameters["weight"] = te.Linear(128, 128).weight


def take_hooks(net: nn.Sequential) -> None:
    net[0].weight = nn.Parameter(quantize(torch.randn(128, 128), net[0].weight.format))


@pytest.mark.parametrize(
    ("breaks", "said"), [(make_plain, "plain torch.float32"), (change_format, "another format"), (take_hooks, "hooks")]
)
def test_a_weight_that_is_not_what_it_was_made_is_named(breaks, said: str) -> None:
    net = model()
    fsdp2.check(net)
    fsdp2.check(copy.deepcopy(net))
    breaks(net)
    with pytest.raises(RuntimeError, match=f"not any more: 0.weight: .*{said}"):
        fsdp2.check(net)
    del net[0].quantized_weights["weight"]
    fsdp2.check(net)


def test_models_on_meta_and_converted_ones_are_checked() -> None:
    with torch.device("meta"):
        net = model()
    fsdp2.check(net)
    plain = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    te.convert(plain, {"0": Float8BlockScaling(), "1": None})
    fsdp2.check(plain)
    assert list(plain[0].quantized_weights) == ["weight"]
    assert not hasattr(plain[1], "quantized_weights")


def refuse_each(rank: int, world: int) -> list[str]:
    """When wrapped; before the first pass; after the first step; and nothing is called later on."""
    over, messages = testing.mesh((world,), ("dp",)), []
    net, x = model(), torch.randn(4, 128)
    make_plain(net)
    with pytest.raises(RuntimeError, match="0.weight: plain") as error:
        fsdp2.fully_shard(net, mesh=over)
    messages.append(str(error.value))
    for passes in (0, 1):
        net = model()
        fsdp2.fully_shard(net, mesh=over)
        for _ in range(passes):
            net(x).sum().backward()
        swap_for_values(net[0])
        with pytest.raises(RuntimeError, match="0.weight: plain") as error:
            net(x)
        messages.append(str(error.value))
    net = model()
    hooks = len(net._forward_pre_hooks)
    fsdp2.fully_shard(net, mesh=over)
    with_check = len(net._forward_pre_hooks)
    for _ in range(2):
        net(x).sum().backward()
    assert len(net._forward_pre_hooks) == with_check - 1 > hooks
    return messages


def wrap_some(rank: int, world: int, whole: bool) -> list[tuple[str, str]]:
    """What is warned of, and from where, with a model that has its values: while it is wrapped, used and checked."""
    over, net = testing.mesh((world,), ("dp",)), model()
    net[2].requires_grad_(False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for unit in (net[0], net) if whole else (net[0],):
            fsdp2.fully_shard(unit, mesh=over)
        with te.autocast(enabled=False):  # or a process that never trained without is told of that, once
            net(torch.randn(4, 128)).sum().backward()
        fsdp2.check(net)
        fsdp2.check(net[0])
    return [(str(each.message), each.filename) for each in caught]


def test_trained_parameters_that_no_unit_has_are_told_of() -> None:
    for ((message, where),) in testing.pool(2).run(wrap_some, False):
        assert message.startswith("6 parameters belong to no unit of FSDP2 (1.")
        assert message.endswith("call fully_shard(model) for the model around its units too")
        assert where == __file__
    assert testing.pool(2).run(wrap_some, True) == [[], []]


def shard_over_all(rank: int, world: int) -> None:
    net = model()
    fsdp2.fully_shard(net)
    assert net[0].weight.device_mesh.size() == world
    net(torch.randn(4, 128, device=net[0].weight.device)).sum().backward()
    with pytest.raises(TypeError, match="mesh=2: wanted a DeviceMesh"):
        fsdp2.fully_shard(model(), mesh=2)


def test_without_a_mesh_all_ranks_are_sharded_over(ranks) -> None:
    ranks(2).run(shard_over_all)


def test_without_a_process_group_there_is_no_mesh() -> None:
    assert not torch.distributed.is_initialized()
    with pytest.raises(RuntimeError, match=r"init_process_group\(\) first, or pass a mesh"):
        fsdp2.fully_shard(model())


def swap_for_values(layer: nn.Module) -> None:
    """As code does that knows of no quantized weights."""
    shard = layer.weight
    assert isinstance(shard, DTensor)
    values = distribute_tensor(torch.zeros(shard.shape), shard.device_mesh, shard.placements)
    layer._parameters["weight"] = nn.Parameter(values)


def shard_columns(rank: int, world: int) -> list[str]:
    """By torch's own `fully_shard`, which takes what it cuts along columns for plain."""
    over, messages = testing.mesh((world,), ("dp",)), []
    x = torch.randn(4, 128, device=over.device_type)
    with te.quantized_model_init(recipe=Float8BlockScaling()):
        grouped = te.GroupedLinear(2, 128, 128, single_grouped_weight=True)
    for net, dim, args in ((te.Linear(128, 128), 1, ()), (model()[0], 1, ()), (grouped, 2, ([2, 2],))):
        fully_shard(net, mesh=over, shard_placement_fn=lambda param, dim=dim: Shard(dim if param.dim() > dim else 0))
        if hasattr(net, "quantized_weights"):
            with pytest.raises(RuntimeError, match="made quantized, it is gathered as plain torch.float32") as error:
                net(x, *args)
            messages.append(str(error.value))
            net.quantized_weights.clear()
        net(x, *args)
    return messages


def test_weights_that_torch_shards_as_plain_ones_are_refused(ranks) -> None:
    first, second = ranks(2).run(shard_columns)
    assert first == second
    assert len(first) == 2


def test_a_sharded_model_is_checked_until_the_first_step(ranks) -> None:
    first, second = ranks(2).run(refuse_each)
    assert first == second


class Head(nn.Module):
    """Gives what its last layer is applied to; that is for somebody else."""

    def __init__(self, quantized: bool) -> None:
        super().__init__()
        with te.quantized_model_init(quantized, recipe=Float8BlockScaling()):
            self.head = te.Linear(128, 2, bias=False, name="head")  # of three ranks, the last one has no rows
            self.normed = te.LayerNormLinear(128, 128, name="normed")
        self.norm = te.RMSNorm(128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


def use_shards(rank: int, world: int, quantized: bool) -> list[str]:
    x, messages = torch.randn(4, 128), []
    for shard in (fsdp2.fully_shard, fully_shard):
        net = Head(quantized)
        want = net.logits(x)
        shard(net, mesh=testing.mesh((world,), ("dp",)), reshard_after_forward=True)
        for call in (net.head, net.logits):
            with pytest.raises(RuntimeError, match=r"head: the weight of \(2, 128\) is a shard") as error:
                call(net(x))
            messages.append(str(error.value))
        for norm, name in ((net.norm, "RMSNorm"), (net.normed, "normed")):
            with pytest.raises(RuntimeError, match=rf"{name}: the weight of \(128,\) is a shard") as error:
                norm(net(x))
            messages.append(str(error.value))
        register_fsdp_forward_method(net, "logits")
        assert torch.equal(net.logits(net(x)), want)
    return messages


def use_shards_of_experts(rank: int, world: int) -> list[str]:
    messages, x = [], torch.randn(8, 128)
    for cut, single, count in ((0, True, 2), (1, True, 2), (0, False, 2), (0, True, 1)):  # the last rank may have none
        with te.quantized_model_init(recipe=Float8BlockScaling()):
            experts = te.GroupedLinear(count, 128, 128, bias=False, single_grouped_weight=single)
        net = nn.Sequential(experts, TopKRouter(128, Routing(num_experts=count, top_k=1)))
        options = {"shard_placement_fn": lambda param: Shard(int(param.dim() > 2))} if cut else {}  # noqa: PLR2004
        fsdp2.fully_shard(net, mesh=testing.mesh((world,), ("dp",)), **options)
        for call in (
            lambda experts=experts: experts(x, [8 // experts.num_gemms] * experts.num_gemms),
            lambda router=net[1]: router(x),
        ):
            with pytest.raises(RuntimeError, match="is a shard") as error:
                call()
            messages.append(str(error.value))
    return messages


def test_shards_of_experts_are_not_multiplied_on_any_rank() -> None:
    first, second = testing.pool(2).run(use_shards_of_experts)
    assert first == second


@pytest.mark.parametrize("quantized", [True, False])
def test_shards_are_not_multiplied_on_any_rank(quantized: bool) -> None:
    first, *others = testing.pool(3).run(use_shards, quantized)
    assert all(messages == first for messages in others)


def run_without_values(rank: int, world: int) -> str:
    with torch.device("meta"):
        net = model()
    fsdp2.fully_shard(net, mesh=testing.mesh((world,), ("dp",)))
    with pytest.raises(RuntimeError) as error:
        net(torch.randn(4, 128))
    fsdp2.materialize(net, device="cpu", seed=0)
    with te.autocast(recipe=Float8BlockScaling()):
        net(torch.randn(4, 128)).sum().backward()
    return str(error.value)


def test_a_model_without_values_says_what_gives_it_some() -> None:
    for message in testing.pool(2).run(run_without_values):
        assert message.startswith("10 parameters are on the meta device and have no values (0.weight, 0.bias, 1.")
        assert "te_dist.fsdp2.materialize" in message


def wrap_over_fewer(rank: int, world: int, spreads: bool) -> list[tuple[str, str]]:
    """Experts over one rank each, inside of a unit over all; spread over these before, or forgotten."""
    mesh = testing.mesh((1, world), ("edp", "ep"))
    with te.quantized_model_init(recipe=Float8BlockScaling()), torch.device("meta"):
        block = MoE(128, 128, Routing(8, 2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if spreads:
            parallelize_module(block, mesh["ep"], ExpertParallel())
        fsdp2.fully_shard(block.experts, mesh=mesh["edp"])
        fsdp2.fully_shard(block, mesh=testing.mesh((world,), ("dp",)))
        fsdp2.check(block)
    return [(str(each.message), each.filename) for each in caught]


def test_units_over_fewer_ranks_than_what_is_around_them_are_told_of() -> None:
    for found in testing.pool(2).run(wrap_over_fewer, False):
        assert len(found) == 2  # noqa: PLR2004  (wrapped, and checked)
        for message, where in found:
            assert message.startswith("2 parameters lie over 1 of 2 ranks of a unit around them (experts.fc1.weight")
            assert "apply ExpertParallel before fully_shard" in message
            assert where == __file__
    assert testing.pool(2).run(wrap_over_fewer, True) == [[], []]
