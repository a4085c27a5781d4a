"""A mixture of experts over 1, 2 and 4 ranks: the same bytes, the same outputs, gradients and steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import te_dist as te
from te_dist import checkpoints, fsdp2, optim, recipe, testing
from te_dist._torch_private import TorchDispatchMode
from te_dist.nn.moe import ExpertParallel, MoE, Routing, update_expert_biases
from te_dist.recipe import Recipe
from te_dist.tensor import QuantizedTensor
from te_dist.tensor.placement import local_tensor
from te_dist.testing import assert_bitwise

HIDDEN, FFN, EXPERTS, TOKENS = 128, 128, 8, 64
ROUTING = Routing(EXPERTS, 2, "sigmoid", aux_loss_coefficient=0.0, bias_update_rate=0.01)
RECIPES: dict[str, Recipe | None] = {
    "bf16": None,
    "block": recipe.Float8BlockScaling(),
    "current": recipe.Float8CurrentScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
}
SHARDINGS = {"1": (1, 1), "2 of ep": (1, 2), "2 of dp": (2, 1), "4 of ep": (1, 4), "2 x 2": (2, 2)}  # (edp, ep)


class Model(nn.Module):
    """A mixture between what keeps it from being the root of FSDP2."""

    def __init__(self, routing: Routing = ROUTING) -> None:
        super().__init__()
        self.moe = MoE(HIDDEN, FFN, routing, shared_ffn_hidden_size=FFN, params_dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(x)


def build(made_by: Recipe | None, mesh: DeviceMesh, *, routing: Routing = ROUTING, **how: Any) -> Model:
    """The model cut over (edp, ep), whose product shares the batch; initialized alike for every mesh."""
    with te.quantized_model_init(enabled=made_by is not None, recipe=made_by), torch.device("meta"):
        model = Model(routing)
    everyone = init_device_mesh(testing.device().type, (mesh.size(),), mesh_dim_names=("dp",))
    if mesh["ep"].size() > 1 or any(each is not None for each in how.values()):
        parallelize_module(model, mesh["ep"], {"moe": ExpertParallel(**how)})
    fsdp2.fully_shard(model.moe.experts, mesh=mesh["edp"])
    fsdp2.fully_shard(model, mesh=everyone)
    fsdp2.materialize(model, device=testing.device(), seed=5)
    return model


def whole_bytes(model: nn.Module) -> dict[str, Tensor]:
    """What all parameters store, unsharded: of quantized ones the fields that a forward pass reads."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.unshard()
    found: dict[str, Tensor] = {}
    for name, param in model.named_parameters():
        local = local_tensor(param).detach()
        quantized = isinstance(local, QuantizedTensor)
        stored = (
            {field: local.storage.buffers[field] for field in local.format.rowwise.names} if quantized else {"": local}
        )
        for field, buffer in stored.items():
            cut = isinstance(param, DTensor) and param.placements[0].is_shard()
            found[f"{name}.{field}"] = joined(buffer, param.device_mesh if cut else None)
    for unit in units:
        unit.reshard()
    return found


def joined(part: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """A copy on the CPU of what the ranks of `mesh` hold together, along the first dimension."""
    if mesh is None or mesh.size() == 1:
        return part.cpu().clone()
    parts: list[Any] = [None] * mesh.size()
    dist.all_gather_object(parts, part.cpu(), group=mesh.get_group())
    return torch.cat(parts)


def tokens() -> Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()


def steps(rank: int, world: int, name: str, sizes: tuple[int, int], capacity: int | None) -> dict[str, Any]:
    """Two optimizer steps; bytes before, outputs and gradients of the first, bytes after."""
    made_by, mesh = RECIPES[name], testing.mesh(sizes, ("edp", "ep"))
    model = build(made_by, mesh, capacity=capacity)
    optimizer = optim.FusedAdam(model.parameters(), lr=1e-2, master_weights=True)
    found: dict[str, Any] = {"before": whole_bytes(model)}
    x = tokens().chunk(world)[rank].to(testing.device())
    for step in range(2):
        asking = x.clone().requires_grad_()
        with te.autocast(enabled=made_by is not None, recipe=made_by):
            out = model(asking)
        (out.float().square().mean()).backward()
        if step == 0:
            grads = {key: param.grad for key, param in model.named_parameters()}
            found["grads"] = {key: testing.full_tensor(grad).cpu() for key, grad in grads.items()}
            found["out"], found["dx"] = out.detach().cpu(), asking.grad.cpu() / world
        optimizer.step()
        optimizer.zero_grad()
        assert update_expert_biases(model, mesh=mesh) == 1
    found["after"] = whole_bytes(model)
    found["bias"] = model.moe.router.expert_bias.cpu()
    found["dropped"] = None if model.moe.dropped is None else int(model.moe.dropped)
    model.eval()
    outs = []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), te.autocast(enabled=made_by is not None, recipe=made_by):
            outs.append(model(x))
    assert_bitwise(outs[1], outs[0], "output in inference mode")
    return found


@pytest.mark.every_run(name=("block", "mxfp8"))
@pytest.mark.parametrize("name", ["bf16", "block", "mxfp8"])  # whose rows do not depend on other ranks' in dense maps
def test_experts_over_ranks_are_those_of_one_rank(ranks: Callable, name: str) -> None:
    (whole,) = ranks(1).run(steps, name, (1, 1), None)
    for key, before in whole["before"].items():
        if key.startswith("moe.experts.") and not key.endswith(("scale", "scale_inv")):
            moved = (before != whole["after"][key]).flatten(1).any(1)
            assert moved.all(), f"{key}: experts {(~moved).nonzero().flatten().tolist()} did not move"
    for sizes in SHARDINGS.values():
        world = sizes[0] * sizes[1]
        capacity = None if sizes != (2, 2) else 2 * TOKENS
        results = ranks(world).run(steps, name, sizes, capacity)
        for key, want in whole["before"].items():
            assert_bitwise(results[0]["before"][key], want, f"{key} over {sizes}")
        for key in ("out", "dx"):
            got = torch.cat([result[key] for result in results])
            assert_bitwise(got, whole[key], f"{key} over {sizes}")
        for key, want in whole["grads"].items():
            got = results[0]["grads"][key]
            if sizes[0] == 1 and key.startswith("moe.experts."):  # whose rows came together in the same order
                assert_bitwise(got, want, f"gradient of {key} over {sizes}")
            assert float((got - want).norm() / want.norm()) < 1e-2, f"gradient of {key} over {sizes}"
        for result in results:
            assert_bitwise(result["bias"], whole["bias"], f"bias over {sizes}")
            assert result["dropped"] in (None, 0)


class CountedMessages(TorchDispatchMode):
    """Adds up what this rank sends in all-to-alls."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d.alltoall_base_.default:
            self.num_bytes += args[1].nbytes
        return func(*args, **(kwargs or {}))


def sent(rank: int, world: int, name: str, capacity: int | None) -> list[tuple[tuple[Tensor, ...], int]]:
    """(output, gradients of rows and experts), bytes of messages; with payloads plain and quantized."""
    made_by, mesh = RECIPES[name], testing.mesh((1, world), ("edp", "ep"))
    x, results = tokens()[rank * 40 :][:40].to(testing.device()), []
    for payload in ("plain", "quantized"):
        model = build(made_by, mesh, capacity=capacity, payload=payload)
        asking = x.clone().requires_grad_()
        with te.autocast(recipe=made_by), CountedMessages() as messages:
            out = model(asking)
        out.float().square().mean().backward()
        grads = [p.grad.to_local() for p in model.moe.experts.parameters()]
        results.append((tuple(t.detach().cpu() for t in (out, asking.grad, *grads)), messages.num_bytes))
    return results


@pytest.mark.parametrize("capacity", [None, 48])
@pytest.mark.parametrize("name", ["block", "mxfp8"])
def test_rows_sent_as_codes_are_multiplied_as_they_are(ranks: Callable, name: str, capacity: int | None) -> None:
    for (plain, plain_bytes), (quantized, quantized_bytes) in ranks(2).run(sent, name, capacity):
        assert quantized_bytes < 0.8 * plain_bytes  # there in codes, back in bf16
        for what, a, b in zip(("out", "dx"), quantized, plain, strict=False):
            assert_bitwise(a, b, what)
        first, second = (
            (a.float() - b).norm() / b.float().norm() for a, b in zip(quantized[2:], plain[2:], strict=True)
        )
        assert float(first) < 0.05  # quantized by columns from what the codes stand for
        assert float(second) == 0


def saved(rank: int, world: int, name: str, sizes: tuple[int, int], path: str) -> dict[str, Tensor]:
    """Trains a step and saves; what was saved."""
    model, optimizer = trained(name, sizes)
    checkpoints.save(path, model=model, optimizer=optimizer)
    return whole_bytes(model) | {"bias": model.moe.router.expert_bias.cpu()}


def loaded(rank: int, world: int, name: str, sizes: tuple[int, int], path: str) -> tuple[dict[str, Tensor], Tensor]:
    """Loads into a model of other values; what it holds, and what it makes of tokens."""
    model, optimizer = trained(name, sizes)
    checkpoints.load(path, model=model, optimizer=optimizer)
    with te.autocast(enabled=RECIPES[name] is not None, recipe=RECIPES[name]), torch.no_grad():
        out = model.eval()(tokens().chunk(world)[rank].to(testing.device()))
    return whole_bytes(model) | {"bias": model.moe.router.expert_bias.cpu()}, out.cpu()


def trained(name: str, sizes: tuple[int, int]) -> tuple[Model, torch.optim.Optimizer]:
    made_by, mesh = RECIPES[name], testing.mesh(sizes, ("edp", "ep"))
    model = build(made_by, mesh)
    optimizer = optim.FusedAdam(model.parameters(), lr=1e-2, master_weights=True)
    with te.autocast(enabled=made_by is not None, recipe=made_by):
        out = model(tokens().to(testing.device()) * (1 + sizes[1]))
    out.float().square().mean().backward()
    optimizer.step()
    update_expert_biases(model, mesh=mesh)
    return model, optimizer


@pytest.mark.every_run(name=("block",))
@pytest.mark.parametrize("name", ["bf16", "block"])
def test_checkpoints_do_not_depend_on_how_experts_lie(ranks: Callable, name: str, tmp_path: Path) -> None:
    want = ranks(2).run(saved, name, (1, 2), str(tmp_path / "saved"))[0]
    outputs = []
    for sizes in ((1, 1), (1, 4), (2, 2)):
        results = ranks(sizes[0] * sizes[1]).run(loaded, name, sizes, str(tmp_path / "saved"))
        for key, values in want.items():
            assert_bitwise(results[0][0][key], values, f"{key} over {sizes}")
        outputs.append(torch.cat([result[1] for result in results]))
        assert_bitwise(outputs[-1], outputs[0], f"outputs over {sizes}")


def mixed(rank: int, world: int) -> None:
    """FSDP2 casts inputs to bf16; probabilities stay what they are."""
    everyone = testing.mesh((world,), ("dp",))
    outputs = []
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)):
        model = Model()
        fsdp2.fully_shard(model.moe.experts, mesh=everyone, mp_policy=policy)
        fsdp2.fully_shard(model, mesh=everyone, mp_policy=policy)
        fsdp2.materialize(model, device=testing.device(), seed=5)
        outputs.append(model(tokens().to(testing.device())).detach())
    assert_bitwise(outputs[1], outputs[0], "out")


def test_mixed_precision_leaves_probabilities_alone(ranks: Callable) -> None:
    ranks(1).run(mixed)


def refused(rank: int, world: int) -> str:
    mesh = testing.mesh((1, world), ("edp", "ep"))
    model = build(RECIPES["current"], mesh, payload="quantized")
    with pytest.raises(ValueError) as error, te.autocast(recipe=RECIPES["current"]):
        model(tokens().to(testing.device()))
    return str(error.value)


def test_rows_that_share_a_scale_are_not_sent_as_codes(ranks: Callable) -> None:
    first, second = ranks(2).run(refused)
    assert first == second
    assert "whose rows have 'scale_inv' in common" in first


def test_payloads_that_are_not_known_are_named() -> None:
    with pytest.raises(ValueError, match="payload: got 'fp8', wanted one of"):
        ExpertParallel(payload="fp8")


def starved(rank: int, world: int, name: str, how: dict[str, Any]) -> tuple[list[Tensor], int]:
    """(output and gradient of tokens) where all choose experts of the first rank; how many weights here move."""
    made_by = RECIPES[name]
    torch.manual_seed(0)
    with te.quantized_model_init(enabled=made_by is not None, recipe=made_by):
        moe = MoE(HIDDEN, FFN, Routing(EXPERTS, 2), params_dtype=torch.bfloat16)
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.router.weight[:2] = 1.0
    if world > 1:
        parallelize_module(moe, testing.mesh((world,), ("ep",)), ExpertParallel(**how))
    moe.to(testing.device())
    x = tokens().abs().chunk(world)[rank].to(testing.device()).requires_grad_()
    with te.autocast(enabled=made_by is not None, recipe=made_by):
        out = moe(x)
    out.sum().backward()
    grads = (local_tensor(part.weight.grad) for part in (moe.experts.fc1, moe.experts.fc2))
    return [out.detach().cpu(), x.grad.cpu()], sum(bool(grad.any()) for grad in grads)


@pytest.mark.parametrize("travels", ["copies", "tokens", "batches"])
@pytest.mark.parametrize("payload", ["plain", "quantized"])
@pytest.mark.parametrize("name", ["bf16", "block", "mxfp8"])
def test_ranks_whose_experts_nobody_chooses_take_part(ranks: Callable, name: str, payload: str, travels: str) -> None:
    how = {"payload": payload, "travels": travels}
    (want, _), *_ = ranks(1).run(starved, name, how)
    found = ranks(2).run(starved, name, how)
    assert [moved for _, moved in found] == [2, 0]
    for index, value in enumerate(want):
        got = torch.cat([of_rank[index] for of_rank, _ in found])
        assert got.isfinite().all() and (payload == "quantized" or torch.equal(got, value))


def waited(rank: int, world: int, how: dict[str, Any]) -> list[int]:
    """How often the host had waited when shared experts began, and in the end, of a second pass."""
    moe = MoE(HIDDEN, FFN, Routing(EXPERTS, 2), shared_ffn_hidden_size=FFN).to(testing.device())
    parallelize_module(moe, testing.mesh((world,), ("ep",)), ExpertParallel(**how))
    x, before = torch.ones(TOKENS, HIDDEN, device=testing.device()), []
    moe.shared_experts.register_forward_pre_hook(lambda *_: before.append(moe.dispatcher.num_host_syncs))
    moe(x)
    known = moe.dispatcher.num_host_syncs
    moe(x)
    return [before[1] - known, moe.dispatcher.num_host_syncs - known]


@pytest.mark.parametrize("travels", ["copies", "tokens", "batches"])
def test_shared_experts_compute_before_the_host_waits(ranks: Callable, travels: str) -> None:
    assert ranks(2).run(waited, {"travels": travels}) == [[0, 1]] * 2
