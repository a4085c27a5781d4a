"""Checkpoints of models built as users build them: recipe, meta device, FSDP2, materialize, FusedAdam."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

import te_dist as te
from te_dist import checkpoints, fsdp2, optim, recipe
from te_dist.formats import geometry
from te_dist.tensor.placement import local_tensor
from te_dist.tensor_parallel import ColumnParallel, RowParallel
from te_dist.testing import assert_bitwise, device, mesh

RECIPES = {
    "delayed": recipe.DelayedScaling(),
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(),
}


def build(name: str, over: DeviceMesh, seed: int) -> tuple[nn.Module, optim.FusedAdam]:
    with te.quantized_model_init(recipe=RECIPES[name]), torch.device("meta"):
        model = nn.Sequential(*(te.LayerNormLinear(128, 128) for _ in range(2)), te.Linear(128, 256))
    for block in model:
        fsdp2.fully_shard(block, mesh=over)
    fsdp2.fully_shard(model, mesh=over)
    fsdp2.materialize(model, device=device(), seed=seed)
    return model, optim.FusedAdam(model.parameters(), lr=0.01)


def steps(name: str, model: nn.Module, optimizer: optim.FusedAdam, first: int, count: int) -> list[float]:
    """Losses of `count` optimizer steps; every rank sees the same data, so that they do not depend on the world."""
    losses = []
    for step in range(first, first + count):
        x = torch.randn(32, 128, generator=torch.Generator().manual_seed(step)).to(device())
        with te.autocast(recipe=RECIPES[name]):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def save_halfway(rank: int, world: int, path: Path, name: str) -> list[float]:
    model, optimizer = build(name, mesh((world,), ("dp",)), seed=1)
    steps(name, model, optimizer, 0, 2)
    rng = torch.get_rng_state()
    checkpoints.save(path, model=model, optimizer=optimizer, extra={"step": 2, "rng": rng})
    return steps(name, model, optimizer, 2, 3)


def resume(rank: int, world: int, path: Path, name: str) -> list[float]:
    model, optimizer = build(name, mesh((world,), ("dp",)), seed=2)
    extra = checkpoints.load(path, model=model, optimizer=optimizer)
    torch.set_rng_state(extra["rng"])
    return steps(name, model, optimizer, extra["step"], 3)


@pytest.mark.every_run(name=("delayed", "nvfp4"))
@pytest.mark.gloo_only("its expected values are made on the CPU")
@pytest.mark.parametrize("name", RECIPES)
def test_losses_go_on_as_if_nothing_had_happened(ranks, tmp_path: Path, name: str) -> None:
    want = ranks(2).run(save_halfway, tmp_path / "c", name)
    assert ranks(2).run(resume, tmp_path / "c", name) == want
    (loss, *_) = ranks(4).run(resume, tmp_path / "c", name)
    # The first loss is that of the very bytes; later ones sum gradients in another order.
    assert loss[0] == want[0][0]


def go_on_in(rank: int, world: int, path: Path, name: str) -> None:
    """As the page on checkpoints says; what is saved then has the state that `name` keeps, no more and no less."""
    model, optimizer = build("current" if name == "delayed" else name, mesh((world,), ("dp",)), seed=2)
    if name != "delayed":
        te.prepare(model, RECIPES["delayed"])
    checkpoints.load(path, model=model, optimizer=optimizer)
    if name == "delayed":
        te.prepare(model, RECIPES["delayed"])
    else:
        for module in model.modules():
            if getattr(module, "scaling", None) is not None:
                module.scaling = None
    losses = steps(name, model, optimizer, 2, 3)
    assert losses[-1] < losses[0]
    checkpoints.save(path / name, model=model, optimizer=optimizer)
    again, its = build(name, mesh((world,), ("dp",)), seed=3)
    checkpoints.load(path / name, model=again, optimizer=its)
    assert steps(name, again, its, 5, 1) == steps(name, model, optimizer, 5, 1)


@pytest.mark.every_run(name=("block",))
@pytest.mark.parametrize("name", [name for name in RECIPES if name != "delayed"])
def test_histories_can_be_begun_and_left_behind(ranks, tmp_path: Path, name: str) -> None:
    for saved, wanted in ((name, "delayed"), ("delayed", name)):
        ranks(2).run(save_halfway, tmp_path / saved, saved)
        ranks(2).run(go_on_in, tmp_path / saved, wanted)


def half_frozen(name: str) -> tuple[nn.Sequential, optim.FusedAdam]:
    with te.quantized_model_init(recipe=RECIPES[name], preserve_high_precision_init_val=True):
        model = nn.Sequential(te.Linear(128, 128, bias=False), te.Linear(128, 128, bias=False))
    model[0].requires_grad_(False)
    return model, optim.FusedAdam(model.parameters(), lr=0.01)


def check_unfrozen(rank: int, world: int, path: Path, name: str) -> None:
    """What is trained only after loading begins where it would have begun."""
    models = [half_frozen(name)[0].to(device()) for _ in range(2)]
    for model in models:
        fsdp2.fully_shard(model, mesh=mesh((world,), ("dp",)))
    first, second = ((model, optim.FusedAdam(model.parameters(), lr=0.01)) for model in models)
    x = torch.randn(16, 128, generator=torch.Generator().manual_seed(rank)).to(device())

    def step(model: nn.Module, optimizer: optim.FusedAdam) -> torch.Tensor:
        with te.autocast(recipe=RECIPES[name]):
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step(*first)
    checkpoints.save(path, model=first[0], optimizer=first[1])
    checkpoints.load(path, model=second[0], optimizer=second[1])
    kept = [local_tensor(model[0].weight).storage.initial for model, _ in (first, second)]
    assert_bitwise(kept[1], kept[0].float(), "kept")
    for model, _ in (first, second):
        assert local_tensor(model[1].weight).storage.initial is None
        model[0].requires_grad_(True)
    for _ in range(2):
        assert_bitwise(step(*second), step(*first), "loss")


@pytest.mark.parametrize("name", ["block", "mxfp8"])
def test_what_a_frozen_weight_keeps_is_saved_with_it(ranks, tmp_path: Path, name: str) -> None:
    ranks(2).run(check_unfrozen, tmp_path / "c", name)


def test_what_weights_keep_comes_over_into_another_format_and_into_others_names(tmp_path: Path) -> None:
    model, _ = half_frozen("block")
    checkpoints.save(tmp_path / "c", model=model)
    other, _ = half_frozen("mxfp8")
    checkpoints.load(tmp_path / "c", model=other)
    plain = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(2)))
    checkpoints.load(tmp_path / "c", model=plain)
    for index in range(2):
        want = model[index].weight.get_high_precision_init_val()
        assert_bitwise(other[index].weight.get_high_precision_init_val(), want, "another format")
        assert_bitwise(plain[index].weight.detach(), want, "plain")
    for saved_as_one in (True, False):
        with te.quantized_model_init(recipe=RECIPES["block"], preserve_high_precision_init_val=True):
            one, each = (te.GroupedLinear(2, 128, 128, bias=False, single_grouped_weight=s) for s in (True, False))
        saved, wanted = (one, each) if saved_as_one else (each, one)
        checkpoints.save(tmp_path / str(saved_as_one), model=saved)
        checkpoints.load(tmp_path / str(saved_as_one), model=wanted)
        together = one.weight.get_high_precision_init_val()
        for number, weight in enumerate((each.weight0, each.weight1)):
            assert_bitwise(weight.get_high_precision_init_val(), together[number], f"expert {number}")


def check_stages(rank: int, world: int, path: Path) -> None:
    """Of ranks that hold different parts of a model, one has nothing to train."""
    with te.quantized_model_init(recipe=RECIPES["block"], preserve_high_precision_init_val=True):
        stages = [nn.ModuleDict({str(rank): te.Linear(128, 128, bias=False)}).to(device()) for _ in range(2)]
    optimizers = [optim.FusedAdam(stage.parameters()) if rank == 0 else None for stage in stages]
    checkpoints.save(path, model=stages[0], optimizer=optimizers[0])
    checkpoints.load(path, model=stages[1], optimizer=optimizers[1])
    kept = [stage[str(rank)].weight.get_high_precision_init_val() for stage in stages]
    assert_bitwise(kept[1], kept[0], f"stage {rank}")


def test_a_stage_without_an_optimizer_is_saved_beside_one_that_has_one(ranks, tmp_path: Path) -> None:
    ranks(2).run(check_stages, tmp_path / "c")


def test_weights_keep_what_was_saved_beside_an_optimizer_that_nobody_asks_for(tmp_path: Path) -> None:
    model, optimizer = half_frozen("block")
    checkpoints.save(tmp_path / "c", model=model, optimizer=optimizer)
    other, _ = half_frozen("block")
    checkpoints.load(tmp_path / "c", model=other)
    for got, want in zip(other.parameters(), model.parameters(), strict=True):
        assert_bitwise(got.get_high_precision_init_val(), want.get_high_precision_init_val(), "kept")


def test_a_frozen_weight_of_another_format_is_named_and_comes_over_by_its_values(tmp_path: Path) -> None:
    model, optimizer = half_frozen("block")
    optimizer.initialize_state(model[1].weight)  # as its first step does, to weights that have gradients
    master = optimizer.state[model[1].weight]["master_param"].add_(0.125)
    checkpoints.save(tmp_path / "c", model=model, optimizer=optimizer)
    other, _ = half_frozen("mxfp8")
    checkpoints.load(tmp_path / "c", model=other)  # by what the frozen one keeps
    frozen = model[0].weight.get_high_precision_init_val().clone()
    assert_bitwise(other[0].weight.get_high_precision_init_val(), frozen, "frozen, by what was saved with it")
    model[0].weight.clear_high_precision_init_val()
    checkpoints.save(tmp_path / "c", model=model, optimizer=optimizer)
    model[0].weight.storage.note_initial(frozen)
    with pytest.raises(checkpoints.CheckpointError, match=r"0\.weight is .* no master of it, as of every frozen") as e:
        checkpoints.load(tmp_path / "c", model=other)
    assert "1.weight" not in str(e.value)
    checkpoints.export_safetensors(model, tmp_path / "values", optimizer=optimizer)
    checkpoints.import_safetensors(other, tmp_path / "values")
    frozen = model[0].weight.get_high_precision_init_val()
    assert_bitwise(other[0].weight.get_high_precision_init_val(), frozen, "frozen, by what it keeps")
    model[0].weight.clear_high_precision_init_val()
    checkpoints.export_safetensors(model, tmp_path / "values", optimizer=optimizer)
    checkpoints.import_safetensors(other, tmp_path / "values")
    assert_bitwise(other[0].weight.get_high_precision_init_val(), model[0].weight.dequantize(), "frozen, by its codes")
    assert_bitwise(other[1].weight.get_high_precision_init_val(), master, "trained")


class Mlp(nn.Module):
    """Two linear maps, the first one cut by columns, the second by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = te.Linear(128, 320, bias=False), te.Linear(320, 128, bias=False)


def build_mlp(name: str, shape: tuple[int, ...], seed: int) -> tuple[nn.Module, optim.FusedAdam]:
    """Over a mesh of (data, tensor) parallelism, or (data,) alone; weights depend on the seed alone."""
    with te.quantized_model_init(recipe=RECIPES[name]), torch.device("meta"):
        model = Mlp()
    over = mesh(shape, ("dp", "tp")[: len(shape)])
    if len(shape) == 2:
        parallelize_module(model, over["tp"], {"up": ColumnParallel(), "down": RowParallel()})
    fsdp2.fully_shard(model, mesh=over["dp"])
    fsdp2.materialize(model, device=device(), seed=seed)
    optimizer = optim.FusedAdam(model.parameters())
    for param in model.parameters():
        optimizer.initialize_state(param)
    return model, optimizer


def assert_mlp(model: nn.Module, optimizer: optim.FusedAdam, path: Path) -> None:
    """Fields and masters, cut as this rank cuts them, are those of a model that was never cut."""
    whole = torch.load(path)
    for parameter, param in model.named_parameters():
        storage, expected = param._local_tensor.storage, whole[parameter]
        for field in storage.format.canonical.fields:
            part = geometry.narrow(field, expected["fields"][field.name], expected["region"], storage.region)
            assert_bitwise(
                geometry.compact(field, storage.buffers[field.name], storage.region).cpu(),
                geometry.compact(field, part, storage.region),
                f"{parameter}.{field.name}",
            )
        assert_bitwise(optimizer.state[param]["master_param"].full_tensor().cpu(), expected["master"], parameter)


def save_mlp(rank: int, world: int, path: Path, name: str, shape: tuple[int, ...]) -> None:
    model, optimizer = build_mlp(name, shape, 1)
    checkpoints.save(path, model=model, optimizer=optimizer)


def write_whole(rank: int, world: int, path: Path, name: str) -> None:
    model, optimizer = build_mlp(name, (1,), 1)
    whole = {
        parameter: {
            "fields": param._local_tensor.storage.buffers,
            "region": param._local_tensor.storage.region,
            "master": optimizer.state[param]["master_param"].full_tensor(),
        }
        for parameter, param in model.named_parameters()
    }
    torch.save(whole, path)


def load_mlp(rank: int, world: int, path: Path, name: str, shape: tuple[int, ...]) -> None:
    model, optimizer = build_mlp(name, shape, 2)
    checkpoints.load(path, model=model, optimizer=optimizer)
    assert_mlp(model, optimizer, path.with_name("whole"))


@pytest.mark.every_run(name=("delayed", "block"))
@pytest.mark.parametrize("name", RECIPES)
def test_tensor_parallel_models_load_on_any_mesh(ranks, tmp_path: Path, name: str) -> None:
    ranks(1).run(write_whole, tmp_path / "whole", name)
    ranks(4).run(save_mlp, tmp_path / "c", name, (2, 2))
    ranks(3).run(load_mlp, tmp_path / "c", name, (3,))
    ranks(4).run(load_mlp, tmp_path / "c", name, (1, 4))
