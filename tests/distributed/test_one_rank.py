"""Units over a mesh of one rank: what another parallelism has cut is left alone, all else is torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel import SequenceParallel as TorchSequenceParallel

import te_dist as te
from te_dist import fsdp2, optim, recipe, testing
from te_dist.nn.moe import ExpertParallel, MoE, Routing
from te_dist.tensor_parallel import ColumnParallel, RowParallel
from te_dist.testing import assert_bitwise, memory, pool

HIDDEN, TOKENS = 128, 64
FP8 = recipe.Float8BlockScaling()


def mixture(*, wraps: bool, **options: Any) -> tuple[nn.Module, list[nn.Parameter]]:
    """Experts over all ranks, the rest sharded over all; and the parameters of experts before they were wrapped."""
    with te.quantized_model_init(recipe=FP8), torch.device("meta"):
        model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN, dtype=torch.bfloat16), MoE(HIDDEN, 128, Routing(8, 2)))
    model.to(torch.bfloat16)
    mesh = testing.mesh((1, 2), ("edp", "ep"))
    parallelize_module(model, mesh["ep"], {"1": ExpertParallel()})
    before = list(model[1].experts.parameters())
    if wraps:
        fsdp2.fully_shard(model[1].experts, mesh=mesh["edp"], **options)
    ignored = set() if wraps else set(before)
    fsdp2.fully_shard(model, mesh=init_device_mesh("cpu", (2,)), ignored_params=ignored)
    fsdp2.materialize(model, device="cpu", seed=3)
    return model, before


def train(rank: int, world: int, wraps: bool) -> dict[str, Tensor]:
    """What two steps leave."""
    model, _ = mixture(wraps=wraps)
    optimizer = optim.FusedAdam(model.parameters(), lr=1e-2, master_weights=True)
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(rank)).bfloat16()
    for _ in range(2):
        with te.autocast(recipe=FP8):
            model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: optimizer.state[param]["exp_avg"].full_tensor() for name, param in model.named_parameters()}


def test_experts_over_all_ranks_train_as_if_nobody_had_wrapped_them() -> None:
    wrapped, bare = (pool(2).run(train, wraps) for wraps in (True, False))
    for one, other in zip(wrapped, bare, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert_bitwise(value, other[name], name)


def leave_alone(rank: int, world: int) -> None:
    model, before = mixture(wraps=True)
    experts = model[1].experts
    assert isinstance(experts, FSDPModule)
    with te.autocast(recipe=FP8), fsdp2.count_traffic(model) as traffic:
        model(torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16)).sum().backward()
    assert not any("experts" in name for name, _ in traffic.sent)
    for param, kept in zip(experts.parameters(), before, strict=True):
        assert param.device_mesh == kept.device_mesh
        assert isinstance(param.grad, DTensor)
    unit = fsdp2.footprints(model)
    (inner,) = unit.inner
    assert all(each.sent == {} for each in inner.parameters)
    stored = sum(size for each in inner.parameters for size in each.stored)
    assert stored == sum(memory.allocated_bytes([param.to_local()]) for param in experts.parameters())
    bare, _ = mixture(wraps=False)
    assert fsdp2.peak_bytes(unit) == fsdp2.peak_bytes(fsdp2.footprints(bare))


def test_nothing_of_them_is_gathered_and_footprints_say_so() -> None:
    pool(2).run(leave_alone)


def refuse(rank: int, world: int) -> list[str]:
    experts, messages = mixture(wraps=True)[0][1].experts, []
    mesh = testing.mesh((1, 2), ("dp", "tp"))
    layer = te.Linear(HIDDEN, HIDDEN)
    fsdp2.fully_shard(parallelize_module(layer, mesh["tp"], ColumnParallel()), mesh=mesh["dp"])
    for unit, name, given in (
        (layer, "set_gradient_divide_factor", 2.0),
        (layer, "set_all_reduce_hook", print),
        (experts, "set_all_reduce_hook", print),
    ):
        with pytest.raises(ValueError, match=f"{name}: got .* for a unit over a mesh of one rank") as error:
            getattr(unit, name)(given)
        messages.append(str(error.value))
    layer.set_gradient_divide_factor(1.0)  # asks for nothing
    experts.set_gradient_divide_factor(2.0)
    assert experts.divided_by.num_losses == 2.0  # noqa: PLR2004
    for module in (experts, experts.fc1):
        with pytest.raises(ValueError, match="wrapped by fully_shard already, .*for the blocks first") as error:
            fsdp2.fully_shard(module, mesh=testing.mesh((1, 2), ("edp", "ep"))["edp"])
        messages.append(str(error.value))
    return messages


def test_what_concerns_their_gradients_is_refused() -> None:
    first, second = pool(2).run(refuse)
    assert first == second


def leave_to_torch(rank: int, world: int) -> None:
    for options in (
        {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)},
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    ):
        model, _ = mixture(wraps=True, **options)
        for param in model[1].experts.parameters():
            assert param.device_mesh.mesh_dim_names == ("edp", "ep")
        model[1].experts.set_gradient_divide_factor(2.0)
    plain = nn.Linear(8, 8)
    fsdp2.fully_shard(plain, mesh=testing.mesh((2, 1), ("tp", "dp"))["dp"])
    assert all(isinstance(param, DTensor) for param in plain.parameters())


def test_what_is_cast_or_offloaded_or_whole_is_left_to_torch() -> None:
    pool(2).run(leave_to_torch)


def share_layers(rank: int, world: int, over: bool) -> tuple[Tensor, ...]:
    """Two layers over ranks, with or without data parallelism of one around them: output and gradients."""
    mesh = testing.mesh((1, 2), ("dp", "tp"))
    with te.quantized_model_init(recipe=FP8), torch.device("meta"):
        model = nn.Sequential(te.Linear(HIDDEN, 256), nn.GELU(), te.Linear(256, HIDDEN)).bfloat16()
    parallelize_module(model, mesh["tp"], {"0": ColumnParallel(), "2": RowParallel()})
    if over:
        for layer in (model[0], model[2]):
            fsdp2.fully_shard(layer, mesh=mesh["dp"])
        fsdp2.fully_shard(model, mesh=mesh["dp"])
    fsdp2.materialize(model, device="cpu", seed=1)
    with te.autocast(recipe=FP8):
        out = model(torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16))
    out.sum().backward()
    return out.detach(), *(testing.full_tensor(param.grad) for param in model.parameters())


def test_layers_over_ranks_compute_the_same_with_data_parallelism_of_one() -> None:
    for one, other in zip(pool(2).run(share_layers, True), pool(2).run(share_layers, False), strict=True):
        for value, alone in zip(one, other, strict=True):
            assert_bitwise(value, alone, "")


class Tied(nn.Module):
    """A head with the weight of the embedding, both cut by torch's styles."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        styles = {
            "embedding": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(self, mesh, styles)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


def tie(rank: int, world: int) -> list[str]:
    mesh, messages = testing.mesh((1, world), ("dp", "tp")), []
    casts = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    for first, second in (({}, casts), (casts, {})):
        model = Tied(mesh["tp"])
        fsdp2.fully_shard(model.embedding, mesh=mesh["dp"], **first)
        with pytest.raises(ValueError, match="weight is tied to .*Embedding") as error:
            fsdp2.fully_shard(model.head, mesh=mesh["dp"], **second)
        messages.append(str(error.value))
    model = Tied(mesh["tp"])
    for module in (model.embedding, model):
        fsdp2.fully_shard(module, mesh=mesh["dp"])
    assert model.head.weight is model.embedding.weight
    assert model.head.weight.device_mesh == mesh["tp"]
    model(torch.arange(16)).square().mean().backward()
    assert isinstance(model.embedding.weight.grad, DTensor)
    model = Tied(mesh["tp"])
    fsdp2.fully_shard(model.embedding, mesh=mesh["dp"])
    with pytest.raises(ValueError, match="head.weight is tied to a parameter of Embedding") as error:
        fsdp2.fully_shard(model, mesh=testing.mesh((world,), ("all",)))
    return [*messages, str(error.value)]


def test_tied_weights_stay_tied_or_are_refused() -> None:
    first, second = pool(2).run(tie)
    assert first == second


class Shared(nn.Module):
    """Two layers that ranks share, and a norm that each has whole."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def compile_alike(rank: int, world: int) -> None:
    """Blocks that are alike are of one class, of which graphs are made once."""
    mesh = testing.mesh((1, world), ("dp", "tp"))
    blocks = nn.Sequential(*(Shared() for _ in range(10)))
    torch.compiler.reset()
    for block in blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        block.compile(backend="eager", fullgraph=True)
        fsdp2.fully_shard(block, mesh=mesh["dp"])
    assert len(set(map(type, blocks))) == 1
    blocks(torch.ones(4, 8)).sum().backward()


def test_blocks_compile_once() -> None:
    pool(2).run(compile_alike)


def leave_others(rank: int, world: int) -> None:
    """What ranks have whole is torch's, and modules that are no unit keep their class."""
    mesh = testing.mesh((1, world), ("dp", "tp"))
    block = Shared()
    styles = {"norm": TorchSequenceParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(block, mesh["tp"], styles)
    fsdp2.fully_shard([block, block.up], mesh=mesh["dp"])
    assert block.norm.weight.device_mesh.mesh_dim_names == ("dp", "tp")
    assert block.up.weight.device_mesh.mesh_dim_names == ("tp",)
    assert type(block.up) is nn.Linear
    assert isinstance(block, FSDPModule)


def test_what_ranks_have_whole_is_left_to_torch() -> None:
    pool(2).run(leave_others)
