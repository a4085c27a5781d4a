"""Optimizers whose state comes from a checkpoint: what it is saved of, and in which types it goes on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import te_dist as te
from te_dist import checkpoints, fsdp2, optim, recipe
from te_dist.tensor.placement import local_tensor
from te_dist.testing import WorkerPool, assert_bitwise, device, mesh

Ranks = Callable[[int], WorkerPool]
WIDTH, ROWS, ONE_SCALE = 64, 16, recipe.Float8CurrentScaling()
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "fused": lambda model: optim.FusedAdam(model.parameters(), lr=1e-3),
    "wrapped": lambda model: optim.MasterWeights(
        model.parameters(), lambda masters: torch.optim.AdamW(masters, lr=1e-3)
    ),
}


def sharded(world: int, *, seed: int, keeps: bool = False) -> nn.Sequential:
    with te.quantized_model_init(recipe=ONE_SCALE, preserve_high_precision_init_val=keeps), torch.device("meta"):
        model = nn.Sequential(*(te.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)))
    for module in (*model, model):
        fsdp2.fully_shard(module, mesh=mesh((world,), ("dp",)))
    fsdp2.materialize(model, device=device(), seed=seed)
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, *, made_by: recipe.Recipe = ONE_SCALE) -> None:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).to(device())
    with te.autocast(recipe=made_by):
        model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def assert_local_bitwise(got: Tensor, want: Tensor, name: str) -> None:
    assert_bitwise(local_tensor(got).detach(), local_tensor(want).detach(), name)


def clamps_between_step_and_save(rank: int, world: int, path: Path, kind: str) -> None:
    """A job that goes on from its checkpoint goes on as the job that wrote it."""
    model = sharded(world, seed=0)
    optimizer = OPTIMIZERS[kind](model)
    step(model, optimizer, 1)
    with torch.no_grad():
        for param in model.parameters():
            param.clamp_(-0.02, 0.02)
    fsdp2.settle(model)
    checkpoints.save(path, model=model, optimizer=optimizer)
    resumed = sharded(world, seed=1)
    another = OPTIMIZERS[kind](resumed)
    checkpoints.load(path, model=resumed, optimizer=another)
    for each, its in ((model, optimizer), (resumed, another)):
        step(each, its, 2)
    for (name, got), want in zip(resumed.named_parameters(), model.parameters(), strict=True):
        assert_local_bitwise(got, want, name)
        for key, value in optimizer.state[want].items():
            assert_local_bitwise(another.state[got][key], value, f"{name}: {key}")


def changes_behind_a_load(rank: int, world: int, kind: str) -> None:
    """Shards that are changed in place behind a load change their masters, as without one."""
    trained = []
    for loads in (True, False):
        model = sharded(world, seed=0)
        optimizer = OPTIMIZERS[kind](model)
        step(model, optimizer, 1)
        if loads:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.9)
        fsdp2.settle(model)
        step(model, optimizer, 2)
        trained.append((model, optimizer))
    (model, optimizer), (other, its) = trained
    for (name, got), want in zip(model.named_parameters(), other.parameters(), strict=True):
        assert_local_bitwise(got, want, name)
        assert_local_bitwise(optimizer.state[got]["master_param"], its.state[want]["master_param"], f"{name}: master")


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_shards_that_are_changed_behind_a_load_change_their_masters(ranks: Ranks, kind: str) -> None:
    ranks(2).run(changes_behind_a_load, kind)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_checkpoints_hold_what_was_written_since_the_step(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    ranks(2).run(clamps_between_step_and_save, tmp_path / "c", kind)


def half_loaded(rank: int, world: int, path: Path, kind: str) -> None:
    """Weights go back to a checkpoint, without the optimizer that goes on: those in 16 bits too."""
    model = nn.Sequential(te.LayerNormLinear(WIDTH, WIDTH, params_dtype=torch.bfloat16, device=device()))
    fsdp2.fully_shard(model, mesh=mesh((world,), ("dp",)))
    before = [local_tensor(param).detach().clone() for param in model.parameters()]
    checkpoints.save(path, model=model)
    optimizer = OPTIMIZERS[kind](model)
    for seed in range(2):
        step(model, optimizer, seed)
    checkpoints.load(path, model=model)
    exported = checkpoints.high_precision_state_dict(model, optimizer=optimizer)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    step(model, optimizer, 2)
    for (name, param), want in zip(model.named_parameters(), before, strict=True):
        assert torch.equal(local_tensor(param), want), name
        whole = param.full_tensor().dequantize().cpu()
        assert rank or torch.equal(exported[name], whole), f"{name} as exported"


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_weights_in_16_bits_that_are_loaded_alone_stay(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    ranks(2).run(half_loaded, tmp_path / "c", kind)


def of_another_mesh(rank: int, world: int) -> str:
    """State that was saved by fewer ranks, each its own part."""
    models = [nn.Linear(WIDTH, WIDTH, device=device()) for _ in range(2)]
    fsdp2.fully_shard(models[0], mesh=mesh((world,), ("dp",)))
    fsdp2.fully_shard(models[1], mesh=mesh((world // 2, 2), ("replicas", "dp"))["dp"])
    states = []
    for model in models:
        optimizer = OPTIMIZERS["fused"](model)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        states.append(optimizer.state_dict())
    with pytest.raises(ValueError, match="exp_avg of a parameter of shape") as caught:
        OPTIMIZERS["fused"](models[0]).load_state_dict(states[1])
    return str(caught.value)


def test_state_of_another_mesh_is_refused(ranks: Ranks) -> None:
    for rank, message in enumerate(ranks(4).run(of_another_mesh)):
        own = [0, 1] if rank < 2 else [2, 3]
        got, wanted = message.split("wanted", 1)
        assert f"of shape (32, {WIDTH}) on" in got, message
        assert f"a part of ({WIDTH}, {WIDTH}) by S(0) over ranks {own}" in got, message
        assert f"of shape (16, {WIDTH}) on" in wanted, message
        assert f"a part of ({WIDTH}, {WIDTH}) by S(0) over ranks [0, 1, 2, 3];" in wanted, message


def one_step(param: nn.Parameter) -> torch.optim.Optimizer:
    optimizer = optim.FusedAdam([param], lr=1e-2)
    param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


def of_other_wraps(rank: int, world: int) -> None:
    """State of the same part, said to be of another whole: alone, a copy by a mesh or none, part of a larger mesh."""
    grid = mesh((world // 2, 2), ("replicas", "dp"))
    whole, part = torch.randn(8, 4, device=device()), [Shard(0)]
    copies = [Replicate(), Shard(0)]
    made = {
        "plain": nn.Parameter(whole.clone()),
        "copied": nn.Parameter(DTensor.from_local(whole.clone(), grid["dp"], [Replicate()])),
        "cut": nn.Parameter(distribute_tensor(whole, grid["dp"], part)),
        "copied and cut": nn.Parameter(distribute_tensor(whole, grid, copies)),
    }
    ways = [("plain", "copied"), ("copied", "plain"), ("cut", "copied and cut"), ("copied and cut", "cut")]
    for saved, here in ways:
        state = one_step(made[saved]).state_dict()
        state["state"][0] = {key: value.clone() for key, value in state["state"][0].items()}
        optimizer = optim.FusedAdam([made[here]], lr=1e-2)
        optimizer.load_state_dict(state)
        found, want = optimizer.state[made[here]]["exp_avg"], state["state"][0]["exp_avg"]
        assert_local_bitwise(found, want, f"{saved} for {here}")
        assert isinstance(found, DTensor) == (here != "plain")
        one_step(made[here])
    state = one_step(made["cut"]).state_dict()
    state["state"][0] = {key: local_tensor(value).clone() for key, value in state["state"][0].items()}
    state["state"][0]["step"] = state["state"][0]["step"].view(1)
    optim.FusedAdam([made["cut"]]).load_state_dict(state)
    for saved, here in (("plain", "cut"), ("cut", "plain"), ("cut", "copied")):
        with pytest.raises(ValueError, match="exp_avg of a parameter of shape"):
            optim.FusedAdam([made[here]]).load_state_dict(one_step(made[saved]).state_dict())


def test_state_of_the_same_part_is_loaded_whatever_it_is_said_to_be_of(ranks: Ranks) -> None:
    ranks(4).run(of_other_wraps)


def of_another_length(rank: int, world: int) -> None:
    """Rows of which the first rank has as many: all ranks refuse."""
    over = mesh((world,), ("dp",))
    long, short = (
        nn.Parameter(distribute_tensor(torch.randn(n, 4, device=device()), over, [Shard(0)])) for n in (6, 5)
    )
    with pytest.raises(ValueError, match=r"a part of \(6, 4\) by .*wanted .* a part of \(5, 4\) by"):
        optim.FusedAdam([short]).load_state_dict(one_step(long).state_dict())


def test_state_of_another_length_is_refused_by_all(ranks: Ranks) -> None:
    ranks(2).run(of_another_length)


def master_of_another_cut(rank: int, world: int) -> None:
    over, whole = mesh((world,), ("dp",)), torch.randn(world, 8, device=device()).bfloat16()
    cut, copied = nn.Parameter(distribute_tensor(whole, over, [Shard(0)])), nn.Parameter(whole.clone())
    states = []
    for param in (cut, copied):
        optimizer = optim.MasterWeights([param], torch.optim.SGD)
        param.grad = torch.ones_like(param)
        optimizer.step()
        states.append(optimizer.state_dict())
    with pytest.raises(ValueError, match="master_param of a parameter of shape .*: got shape .* on this rank"):
        optimizer.load_state_dict(states[0])


def test_masters_of_another_cut_are_refused(ranks: Ranks) -> None:
    ranks(2).run(master_of_another_cut)


RECIPES = {"one scale": ONE_SCALE, "blocks": recipe.Float8BlockScaling(), "mxfp8": recipe.MXFP8BlockScaling()}


def decays_by_hand(rank: int, world: int, kind: str, name: str) -> None:
    """By less than the distance of two codes, between steps; sharded as whole."""
    jobs = []
    for over in (world, None):
        with te.quantized_model_init(recipe=RECIPES[name]), torch.device("meta"):
            model = nn.Sequential(te.Linear(WIDTH, 3 * WIDTH, bias=False), te.Linear(3 * WIDTH, WIDTH, bias=False))
        for module in (*model, model) if over else ():
            fsdp2.fully_shard(module, mesh=mesh((over,), ("dp",)))
        fsdp2.materialize(model, device=device(), seed=0)
        jobs.append((model, OPTIMIZERS[kind](model)))
    for seed in range(3):
        for model, optimizer in jobs:
            step(model, optimizer, seed, made_by=RECIPES[name])
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(1 - 2**-12).clamp_(-0.125, 0.125)
    (model, optimizer), (whole, its) = jobs
    fsdp2.settle(model)
    states = optimizer.state_dict()["state"]
    for number, (got, want) in enumerate(zip(model.parameters(), whole.parameters(), strict=True)):
        assert_bitwise(got.full_tensor().dequantize(), want.dequantize(), f"weight {number}")
        master = states[number]["master_param"].full_tensor()
        assert_bitwise(master, its.state[want]["master_param"], f"master {number}")


@pytest.mark.each_value
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_ops_in_place_change_masters_of_shards(ranks: Ranks, kind: str, name: str) -> None:
    ranks(2).run(decays_by_hand, kind, name)


def saved_before_the_first_step(rank: int, world: int, path: Path, kind: str) -> None:
    """Masters begin with the values before quantization, which the model alone does not tell."""
    model, resumed = (sharded(world, seed=seed, keeps=True) for seed in range(2))
    optimizer, another = OPTIMIZERS[kind](model), OPTIMIZERS[kind](resumed)
    checkpoints.save(path, model=model, optimizer=optimizer)
    assert not optimizer.state  # of which torch's helpers would take a part for all
    assert all(local_tensor(param).storage.initial is not None for param in model.parameters())
    checkpoints.load(path, model=resumed, optimizer=another)
    untouched = sharded(world, seed=0, keeps=True)
    jobs = [(model, optimizer), (resumed, another), (untouched, OPTIMIZERS[kind](untouched))]
    for each, its in jobs:
        step(each, its, 1)
    for of_model, its in jobs[:2]:
        for (name, got), want in zip(of_model.named_parameters(), untouched.parameters(), strict=True):
            assert_local_bitwise(got, want, name)
            assert_local_bitwise(its.state[got]["master_param"], jobs[2][1].state[want]["master_param"], name)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_checkpoints_before_the_first_step_hold_what_was_quantized(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    ranks(3).run(saved_before_the_first_step, tmp_path / "c", kind)


def saved_before_a_first_gradient(rank: int, world: int, path: Path, kind: str) -> None:
    """A weight that others were trained without goes on from the values it had before quantization."""
    model, resumed = (sharded(world, seed=seed, keeps=True) for seed in range(2))
    optimizer, another = OPTIMIZERS[kind](model), OPTIMIZERS[kind](resumed)
    late = optimizer.register_step_pre_hook(lambda *_: setattr(model[1].weight, "grad", None))
    for seed in range(2):
        step(model, optimizer, seed)
    late.remove()
    checkpoints.save(path, model=model, optimizer=optimizer)
    checkpoints.load(path, model=resumed, optimizer=another)
    for seed in range(2, 4):
        for each, its in ((model, optimizer), (resumed, another)):
            step(each, its, seed)
        for (name, got), want in zip(resumed.named_parameters(), model.parameters(), strict=True):
            assert_local_bitwise(got, want, name)
            assert_local_bitwise(another.state[got]["master_param"], optimizer.state[want]["master_param"], name)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_weights_without_a_gradient_so_far_go_on_from_what_was_quantized(ranks, tmp_path: Path, kind: str) -> None:
    ranks(2).run(saved_before_a_first_gradient, tmp_path / "c", kind)


def of_other_types(rank: int, world: int, path: Path, saved: torch.dtype, here: torch.dtype, used: bool) -> None:
    """Masters and moments are those that were saved, in the types that the optimizer was made with."""

    def made(model: nn.Module, dtype: torch.dtype) -> optim.FusedAdam:
        kept = {name: dtype for name in ("master_weight_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")}
        return optim.FusedAdam(model.parameters(), lr=1e-3, **kept)

    model, resumed = (sharded(world, seed=seed) for seed in range(2))
    optimizer, another = made(model, saved), made(resumed, here)
    step(model, optimizer, 1)
    checkpoints.save(path, model=model, optimizer=optimizer)
    if used:
        step(resumed, another, 2)
    before = {param: dict(state) for param, state in another.state.items()}
    checkpoints.load(path, model=resumed, optimizer=another)
    if saved == here:  # where a captured graph reads it
        assert all(another.state[param][key] is value for param, own in before.items() for key, value in own.items())
    for (name, got), want in zip(resumed.named_parameters(), model.parameters(), strict=True):
        for key, value in optimizer.state[want].items():
            wanted: Tensor = value if key == "step" else value.to(here)
            assert_local_bitwise(another.state[got][key], wanted, f"{name}: {key}")


@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
@pytest.mark.parametrize(
    ("saved", "here"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float32, torch.float32)],
    ids=["wider", "narrower", "equal"],
)
def test_state_keeps_the_types_of_the_optimizer(ranks: Ranks, tmp_path: Path, saved, here, used: bool) -> None:
    ranks(2).run(of_other_types, tmp_path / "c", saved, here, used)


def of_codes(rank: int, world: int, path: Path) -> str:
    """Moments that were saved as codes, loaded where they are values."""
    model = sharded(world, seed=0)
    optimizer = optim.FusedAdam(model.parameters(), lr=1e-3, exp_avg_dtype=torch.uint8)
    step(model, optimizer, 1)
    checkpoints.save(path, model=model, optimizer=optimizer)
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(checkpoints.CheckpointError) as caught:
        checkpoints.load(path, model=model, optimizer=optim.FusedAdam(model.parameters(), lr=1e-3))
    for param, want in zip(model.parameters(), before, strict=True):
        assert_local_bitwise(param, want, "weight")
    return str(caught.value)


def test_state_of_another_kind_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    for message in ranks(2).run(of_codes, tmp_path / "c"):
        assert "exp_avg_scale" in message
        assert "use the same options" in message


def delayed(world: int, *, seed: int) -> nn.Sequential:
    with te.quantized_model_init(recipe=recipe.DelayedScaling()), torch.device("meta"):
        model = nn.Sequential(te.Linear(WIDTH, WIDTH, bias=False))
    for module in (*model, model):
        fsdp2.fully_shard(module, mesh=mesh((world,), ("dp",)))
    fsdp2.materialize(model, device=device(), seed=seed)
    return model


def weights_alone(rank: int, world: int, path: Path) -> list[str]:
    """Histories of delayed scaling are neither exported nor asked for."""
    model, other = (delayed(world, seed=seed) for seed in range(2))
    checkpoints.export_safetensors(model, path)
    checkpoints.import_safetensors(other, path)
    for got, want in zip(other.parameters(), model.parameters(), strict=True):
        assert_bitwise(local_tensor(got).dequantize(), local_tensor(want).dequantize(), "weight")
    return sorted(checkpoints.high_precision_state_dict(model))


def test_exports_hold_weights_without_histories(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2).run(weights_alone, tmp_path)[0] == ["0.weight"]


def rates(rank: int, world: int, path: Path) -> list[float]:
    """Of groups that were made with one tensor, and saved with two."""
    model, other = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device()) for _ in range(2))
    made = []
    for each in (model, other):
        rate = torch.tensor(0.5, device=device())
        groups = [{"params": layer.parameters()} for layer in each]
        made.append(optim.FusedAdam(groups, lr=rate, capturable=True))
    made[0].param_groups[1]["lr"] = torch.tensor(0.25, device=device())
    checkpoints.save(path, model=model, optimizer=made[0])
    checkpoints.load(path, model=other, optimizer=made[1])
    return [group["lr"].item() for group in made[1].param_groups]


def test_groups_that_shared_a_rate_are_loaded_apart(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(1).run(rates, tmp_path / "c") == [[0.5, 0.25]]


def stages_apart(rank: int, world: int, path: Path, rate: float) -> str:
    """Other parameters on each rank, and another rate."""
    stage = nn.ModuleDict({str(rank): nn.Linear(4, 4)}).to(device())
    optimizer = optim.FusedAdam(stage.parameters(), lr=rate * (rank + 1))
    with pytest.raises(checkpoints.CheckpointError) as caught:
        checkpoints.save(path, model=stage, optimizer=optimizer)
    return str(caught.value)


def test_rates_that_ranks_do_not_share_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    for message in ranks(2).run(stages_apart, tmp_path / "c", 0.125):
        assert "make the same groups in the same order on every rank" in message


def goes_on_from_plain_torch(rank: int, world: int, path: Path, kind: str) -> None:
    """As docs/checkpoints.md has it: weights of a run in plain torch, its moments, and masters that are its weights."""
    over = mesh((world,), ("dp",))
    torch.manual_seed(0)
    plain, model = (nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))).to(device()) for _ in "12")
    for module in (*plain, plain):
        torch_fully_shard(module, mesh=over)
    adam = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for seed in (1, 2):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).to(device())
        plain(x).square().mean().backward()
        adam.step()
        adam.zero_grad()
    weights, moments = get_state_dict(plain, adam)
    dcp.save({"model": weights, "optim": moments}, checkpoint_id=path)

    te.convert(model, {"*": ONE_SCALE}, preserve_high_precision_init_val=True)
    for module in (*model, model):
        fsdp2.fully_shard(module, mesh=over)
    values = {name: value.detach() * 1.0 for name, value in get_model_state_dict(model).items()}
    dcp.load({"model": values}, checkpoint_id=path)
    set_model_state_dict(model, values)
    fsdp2.settle(model)
    optimizer = OPTIMIZERS[kind](model)
    state = get_optimizer_state_dict(model, optimizer)
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load({"optim": state}, checkpoint_id=path, planner=planner)
    set_optimizer_state_dict(model, optimizer, state)

    found = get_optimizer_state_dict(model, optimizer)["state"]
    for name, value in get_model_state_dict(plain).items():
        assert_local_bitwise(found[name]["master_param"], value, f"master of {name}")
        for moment in ("exp_avg", "exp_avg_sq"):
            assert_local_bitwise(found[name][moment], moments["state"][name][moment], f"{moment} of {name}")
    before = {name: local_tensor(entry["master_param"]).clone() for name, entry in found.items()}
    step(model, optimizer, 3)
    after = get_optimizer_state_dict(model, optimizer)["state"]
    moved = [(local_tensor(after[name]["master_param"]) - before[name]).abs().max() for name in before]
    assert all(0 < float(distance) < 3e-2 for distance in moved), moved  # by the lr of the checkpoint


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_run_in_plain_torch_goes_on_quantized(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    ranks(2).run(goes_on_from_plain_torch, tmp_path / "c", kind)
