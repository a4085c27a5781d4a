"""Situations of initialization and loading: every way to the first step gives the bytes of the whole, quantized."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from te_dist import fsdp2, testing
from te_dist.tensor import QuantizedTensor
from te_dist.tensor.placement import local_tensor
from te_dist.tensor_parallel import ColumnParallel, RowParallel
from te_dist.testing import assert_bitwise
from tests.distributed.matrix.catalog import Formats, situation
from tests.distributed.matrix.model import Beside, Net, net, pairs, part_of
from tests.distributed.matrix.sharding import over, wrap

STARTS = "Initialization and loading"
SEED = 11


def on_meta(formats: Formats) -> Net:
    """Without values."""
    return net(formats).to("meta")


def materialized(formats: Formats) -> Net:
    """Whole, on every rank."""
    model = on_meta(formats)
    fsdp2.materialize(model, device=testing.device(), seed=SEED)
    return model


def follow(sharded: Net, alone: Net, *, steps: int = 1) -> None:
    """Trains both, once the sharded one is known to be quantized."""
    fsdp2.check(sharded)
    Beside(sharded, alone, dist.get_world_size(), dist.get_rank()).follow(steps)


def materialize_after(formats: Formats, mesh: DeviceMesh | None = None) -> None:
    model = wrap(on_meta(formats), mesh)
    fsdp2.materialize(model, device=testing.device(), seed=SEED)
    follow(model, materialized(formats))


@situation("`materialize`, then wrapped", STARTS)
def materialize_before(formats: Formats) -> None:
    follow(wrap(materialized(formats)), materialized(formats))


@situation("wrapped on meta, then `materialize`", STARTS)
def materialize_on_two(formats: Formats) -> None:
    materialize_after(formats)


@situation("wrapped on meta, then `materialize`: one rank", STARTS, world=1)
def materialize_on_one(formats: Formats) -> None:
    materialize_after(formats)


@situation("wrapped on meta, then `materialize`: four ranks", STARTS, world=4)
def materialize_on_four(formats: Formats) -> None:
    materialize_after(formats)


@situation("wrapped on meta, then `materialize`: HSDP", STARTS, world=4)
def materialize_hybrid(formats: Formats) -> None:
    materialize_after(formats, over(2, 2, names=("rep", "shard")))


def in_parallel(model: Net, mesh: DeviceMesh) -> Net:
    """Maps over the ranks of `tp`, units over those of `dp`."""
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColumnParallel(), "down": RowParallel()})
    return wrap(model, mesh["dp"])


def follow_in_parallel(sharded: Net, alone: Net, mesh: DeviceMesh) -> None:
    fsdp2.check(sharded)
    Beside(sharded, alone, mesh["dp"].size(), mesh.get_local_rank("dp"), is_exact=False).follow(1)


@situation("wrapped on meta, then `materialize`: with tensor parallelism", STARTS, world=4)
def materialize_parallel(formats: Formats) -> None:
    mesh = over(2, 2, names=("dp", "tp"))
    model = in_parallel(on_meta(formats), mesh)
    fsdp2.materialize(model, device=testing.device(), seed=SEED)
    follow_in_parallel(model, materialized(formats), mesh)


@situation("made on the CPU, then wrapped", STARTS)
def made_on_cpu(formats: Formats) -> None:
    model = wrap(net(formats).cpu())
    assert all(param.device.type == testing.device().type for param in model.parameters())
    follow(model, net(formats))


@situation("`to_empty` and `reset_parameters`, as torch does", STARTS)
def reset(formats: Formats) -> None:
    model = wrap(on_meta(formats))
    model.to_empty(device=testing.device())
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    fsdp2.settle(model)
    alone = net(formats)
    alone.load_state_dict({name: param.full_tensor() for name, param in model.named_parameters()})
    follow(model, alone)


# -- loading -------------------------------------------------------------------------------------------------------


def values_of(formats: Formats) -> dict[str, Tensor]:
    """High-precision values for every parameter."""
    generator = torch.Generator().manual_seed(SEED)
    shapes = {name: param.shape for name, param in net(formats).named_parameters()}
    values = {name: torch.randn(shape, generator=generator) / 8 for name, shape in shapes.items()}
    return {name: value.to(testing.device()) for name, value in values.items()}


def loaded(formats: Formats) -> Net:
    """Whole, on every rank."""
    model = net(formats)
    model.load_state_dict(values_of(formats))
    return model


def spread(values: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Cut as the parameters of `model` are."""
    params: dict[str, Any] = dict(model.named_parameters())
    return {
        name: distribute_tensor(value, params[name].device_mesh, params[name].placements)
        for name, value in values.items()
    }


@situation("`load_state_dict` of high-precision values", STARTS)
def load_values(formats: Formats) -> None:
    model = wrap(net(formats))
    model.load_state_dict(spread(values_of(formats), model))
    fsdp2.settle(model)
    follow(model, loaded(formats))


@situation("`load_state_dict(assign=True)` onto meta", STARTS)
def assign_values(formats: Formats) -> None:
    model = wrap(on_meta(formats))
    model.load_state_dict(spread(values_of(formats), model), assign=True)
    fsdp2.settle(model)
    follow(model, loaded(formats))


@situation("`set_model_state_dict` of whole high-precision values", STARTS)
def set_whole_values(formats: Formats) -> None:
    model = wrap(net(formats))
    set_model_state_dict(model, values_of(formats), options=StateDictOptions(full_state_dict=True))
    fsdp2.settle(model)
    follow(model, loaded(formats))


@situation("`set_model_state_dict(broadcast_from_rank0=True)` onto meta", STARTS)
def broadcast_values(formats: Formats) -> None:
    model = wrap(on_meta(formats))
    values = values_of(formats) if dist.get_rank() == 0 else {}
    # Where all is on meta, torch does not know the device to broadcast on.
    model.blocks[0].norm.to_empty(device=testing.device())
    set_model_state_dict(model, values, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    fsdp2.settle(model)
    follow(model, loaded(formats))


@situation("whole state dicts of quantized tensors", STARTS)
def set_whole_bytes(formats: Formats) -> None:
    source, model = wrap(net(formats)), wrap(materialized(formats))
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, get_model_state_dict(source, options=options), options=options)
    follow(model, net(formats))


@situation("whole state dicts of quantized tensors: with tensor parallelism", STARTS, world=4)
def set_whole_bytes_parallel(formats: Formats) -> None:
    mesh, options = over(2, 2, names=("dp", "tp")), StateDictOptions(full_state_dict=True)
    source, model = in_parallel(net(formats), mesh), in_parallel(materialized(formats), mesh)
    set_model_state_dict(model, get_model_state_dict(source, options=options), options=options)
    follow_in_parallel(model, net(formats), mesh)


@situation("`preserve_high_precision_init_val`", STARTS)
def preserved(formats: Formats) -> None:
    values, models = values_of(formats), [net(formats) for _ in range(2)]
    for model in models:
        for name, param in model.named_parameters():
            if isinstance(param, QuantizedTensor):
                param.quantize_(values[name])
                param.keep_initial, param.storage.initial = True, values[name].cpu()
    wrap(models[0])
    for name, param, _ in pairs(*models):
        local = local_tensor(param)
        if isinstance(local, QuantizedTensor):
            want = part_of(values[name], param).cpu()
            assert_bitwise(local.get_high_precision_init_val(), want, f"{name} as it was initialized")
    follow(models[0], models[1], steps=2)
    assert not any(keeps(param) for param in models[0].parameters()), "the optimizer has masters of its own"


def keeps(param: Any) -> bool:
    """Whether the values of initialization are still there."""
    local = local_tensor(param)
    return isinstance(local, QuantizedTensor) and local.storage.initial is not None
