"""Checkpoints of groups of quantized matrices: any number of ranks, cut by members or rows, the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

import te_dist as te
from te_dist import checkpoints, fsdp2, grouped, optim
from te_dist.conventions import FP8_BLOCK, Convention
from te_dist.formats import geometry
from te_dist.fsdp2 import GroupedParameter, QuantizedParameter
from te_dist.tensor import quantize
from te_dist.tensor.placement import local_part, local_tensor
from te_dist.testing import assert_bitwise, device, mesh, pool
from tests.distributed.probe import FORMATS
from tests.distributed.test_grouped_fsdp2 import MEMBERS, placed, random_group

FEW = ["float8_tensorwise", "float8_block_2d", "nvfp4_2d"]


class Packed(nn.Module):
    """For every format the weights of all experts in one parameter, and their biases."""

    def __init__(self, seed: int, names: list[str]) -> None:
        super().__init__()
        self.names, values = names, random_group(seed)
        for name in names:
            self.register_parameter(
                f"{name}_weight", nn.Parameter(GroupedParameter(grouped.quantize(values, FORMATS[name]).storage))
            )
        self.bias = nn.Parameter(values[:, :, 0].clone())


class Separate(nn.Module):
    """The same with parameters of their own for each expert."""

    def __init__(self, seed: int, names: list[str]) -> None:
        super().__init__()
        self.names, values = names, random_group(seed)
        for index, matrix in enumerate(values):
            for name in names:
                param = QuantizedParameter(quantize(matrix, FORMATS[name]).storage)
                self.register_parameter(f"{name}_weight{index}", nn.Parameter(param))
            self.register_parameter(f"bias{index}", nn.Parameter(matrix[:, 0].clone()))


def made(kind: type[nn.Module], seed: int, names: list[str], world: int, cut: str) -> nn.Module:
    model = kind(seed, names)
    if cut == "experts":  # over a mesh dimension of their own, then each rank's between data parallel ranks
        over = mesh((2, world // 2), ("dp", "ep"))
        for name, param in list(model.named_parameters()):
            part = distribute_tensor(param.data, over["ep"], [Shard(0)], src_data_rank=None)
            model.register_parameter(name, nn.Parameter(part))
        fsdp2.fully_shard(model, mesh=over["dp"])
        return model
    by_group = placed(cut)
    is_matrix = lambda p: isinstance(local_tensor(p), GroupedParameter)  # noqa: E731
    choose = (lambda p: by_group(p) if is_matrix(p) else None) if by_group else None
    fsdp2.fully_shard(model, mesh=mesh((world,), ("dp",)), shard_placement_fn=choose)
    return model


def members_of(model: nn.Module, name: str) -> list[tuple[int, object]]:
    """(which member, its storage) of the weights of a format that this rank has a part of."""
    if isinstance(model, Packed):
        param = getattr(model, f"{name}_weight")
        return list(enumerate(local_tensor(param).storage.members, start=grouped.first_member(param)))
    return [(i, local_tensor(getattr(model, f"{name}_weight{i}")).storage) for i in range(MEMBERS)]


def assert_model(model: nn.Module, seed: int) -> None:
    """Every part of every matrix has the bytes of the matrix that `seed` makes, quantized whole."""
    values = random_group(seed)
    for name in model.names:
        for index, got in members_of(model, name):
            whole = quantize(values[index], FORMATS[name]).storage
            for field in got.fields:
                part = geometry.narrow(field, whole.buffers[field.name], whole.region, got.region)
                assert_bitwise(got.buffers[field.name], part, f"{name}.{field.name} of member {index}")
    if isinstance(model, Packed):
        biases = [(slice(None), model.bias)]
    else:
        biases = [(index, getattr(model, f"bias{index}")) for index in range(MEMBERS)]
    for index, bias in biases:
        assert_bitwise(local_tensor(bias).detach(), local_part(values[index][..., 0], bias), f"bias {index}")


def save(rank: int, world: int, path: Path, kind: type[nn.Module], names: list[str], cut: str) -> None:
    checkpoints.save(path, model=made(kind, 1, names, world, cut))


def load(rank: int, world: int, path: Path, kind: type[nn.Module], names: list[str], cut: str) -> None:
    model = made(kind, 2, names, world, cut)
    checkpoints.load(path, model=model)
    assert_model(model, 1)


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("ranks", "cuts"),
    [
        ((1, 4), ("members", "rows")),
        ((4, 2), ("members", "members")),
        ((2, 4), ("rows", "experts")),
        ((4, 2), ("experts", "members")),
    ],
    ids=str,
)
def test_resharding_keeps_every_byte(ranks: tuple[int, int], cuts: tuple[str, str], tmp_path: Path) -> None:
    names = list(FORMATS)
    pool(ranks[0]).run(save, tmp_path / "c", Packed, names, cuts[0])
    pool(ranks[1]).run(load, tmp_path / "c", Packed, names, cuts[1])


def load_the_other_kind(rank: int, world: int, packed: bool) -> str:
    """What `load_state_dict` of a sharded module says."""
    models = []
    for single in (packed, not packed):
        with te.quantized_model_init(recipe=te.recipe.Float8BlockScaling()):
            model = te.GroupedLinear(MEMBERS, 128, 128, bias=False, single_grouped_weight=single, device=device())
        fsdp2.fully_shard(model, mesh=mesh((world,), ("dp",)))
        models.append(model)
    with pytest.raises(RuntimeError, match=r"te_dist\.checkpoints\.load") as caught:
        models[1].load_state_dict(models[0].state_dict())
    return str(caught.value)


@pytest.mark.parametrize("packed", [False, True])
def test_shards_of_the_other_kind_are_refused_by_name(packed: bool) -> None:
    for message in pool(2).run(load_the_other_kind, packed):
        assert "te_dist.checkpoints.load" in message
        assert f"single_grouped_weight={packed}" in message


def save_by_torch(rank: int, world: int, path: Path, names: list[str], cut: str) -> None:
    dcp.save(made(Packed, 1, names, world, cut).state_dict(), checkpoint_id=path)


def load_by_torch(rank: int, world: int, path: Path, names: list[str], cut: str) -> None:
    model = made(Packed, 2, names, world, cut)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state)
    assert_model(model, 1)


@pytest.mark.parametrize(("ranks", "cuts"), [((2, 4), ("rows", "experts")), ((4, 2), ("members", "rows"))], ids=str)
def test_torchs_own_checkpoints_load_on_any_mesh(ranks: tuple[int, int], cuts: tuple[str, str], tmp_path: Path) -> None:
    names = list(FORMATS)
    pool(ranks[0]).run(save_by_torch, tmp_path / "c", names, cuts[0])
    pool(ranks[1]).run(load_by_torch, tmp_path / "c", names, cuts[1])


def trained(world: int, kind: type[nn.Module], seed: int, cut: str) -> tuple[nn.Module, optim.FusedAdam]:
    model = made(kind, seed, FEW, world, cut)
    return model, optim.FusedAdam(model.parameters(), lr=0.05)


def step(model: nn.Module, optimizer: optim.FusedAdam, number: int) -> None:
    """A step by gradients that depend on the values of the whole model only."""
    for name, param in model.named_parameters():
        gradients = random_group(100 + number) if name.startswith(tuple(FEW)) else random_group(200 + number)[..., 0]
        digits = name[len(name.rstrip("0123456789")) :]
        whole = gradients if isinstance(model, Packed) else gradients[int(digits)]
        local = local_tensor(param)
        grad = local_part(whole, param).contiguous()
        param.grad = torch.distributed.tensor.DTensor.from_local(
            grad, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
        )
        assert grad.shape == local.shape
    optimizer.step()


def bytes_of(model: nn.Module) -> dict[tuple[str, int, str, int], Tensor]:
    """By format, member, field and first row, what this rank holds."""
    return {
        (name, index, field.name, got.region.rows.start): got.buffers[field.name].clone()
        for name in FEW
        for index, got in members_of(model, name)
        for field in got.fields
    }


def train_and_save(rank: int, world: int, path: Path, kind: type[nn.Module], cut: str) -> None:
    model, optimizer = trained(world, kind, 1, cut)
    step(model, optimizer, 0)
    checkpoints.save(path, model=model, optimizer=optimizer)


def continue_from(rank: int, world: int, path: Path, kind: type[nn.Module], cut: str) -> None:
    """A step after loading is the second step of training that was never interrupted."""
    model, optimizer = trained(world, kind, 1, cut)
    step(model, optimizer, 0)
    step(model, optimizer, 1)
    want = bytes_of(model)
    model, optimizer = trained(world, kind, 2, cut)
    checkpoints.load(path, model=model, optimizer=optimizer)
    step(model, optimizer, 1)
    for key, got in bytes_of(model).items():
        assert_bitwise(got, want[key], str(key))


@pytest.mark.parametrize(("ranks", "cuts"), [((2, 4), ("members", "experts")), ((4, 1), ("rows", "members"))], ids=str)
def test_training_goes_on_where_it_was(ranks: tuple[int, int], cuts: tuple[str, str], tmp_path: Path) -> None:
    pool(ranks[0]).run(train_and_save, tmp_path / "c", Packed, cuts[0])
    pool(ranks[1]).run(continue_from, tmp_path / "c", Packed, cuts[1])


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("saved", "wanted", "ranks"), [(Packed, Separate, (2, 4)), (Separate, Packed, (4, 2)), (Packed, Separate, (1, 1))]
)
def test_packed_weights_become_separate_ones_and_back(
    saved: type[nn.Module], wanted: type[nn.Module], ranks: tuple[int, int], tmp_path: Path
) -> None:
    names = [name for name in FORMATS if FORMATS[name].alignment(0) == 1]
    pool(ranks[0]).run(save, tmp_path / "c", saved, names, "members")
    pool(ranks[1]).run(load, tmp_path / "c", wanted, names, "members")


@pytest.mark.parametrize(("saved", "wanted"), [(Packed, Separate), (Separate, Packed)])
def test_training_goes_on_with_weights_packed_the_other_way(
    saved: type[nn.Module], wanted: type[nn.Module], tmp_path: Path
) -> None:
    pool(2).run(train_and_save, tmp_path / "c", saved, "members")
    pool(4).run(continue_from, tmp_path / "c", wanted, "members")


class Mixed(nn.Module):
    """Packed plain weights, or separate quantized ones of the same names."""

    def __init__(self, seed: int, plain: bool) -> None:
        super().__init__()
        values = random_group(seed)
        if plain:
            self.weight = nn.Parameter(values.clone())
        for index, matrix in enumerate([] if plain else values):
            param = QuantizedParameter(quantize(matrix, FORMATS["float8_block_2d"]).storage)
            self.register_parameter(f"weight{index}", nn.Parameter(param))


def test_plain_packed_weights_become_separate_quantized_ones(tmp_path: Path) -> None:
    checkpoints.save(tmp_path / "c", model=Mixed(1, plain=True))
    model = Mixed(2, plain=False)
    checkpoints.load(tmp_path / "c", model=model)
    for index, matrix in enumerate(random_group(1)):
        want = quantize(matrix, FORMATS["float8_block_2d"])
        for field, got in getattr(model, f"weight{index}").storage.buffers.items():
            assert_bitwise(got, want.storage.buffers[field], f"{field} of weight{index}")


class One(nn.Module):
    """A quantized weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


def test_one_matrix_of_all_rows_is_not_taken_for_a_group(tmp_path: Path) -> None:
    values, format = random_group(1), FORMATS["float8_tensorwise"]
    checkpoints.save(tmp_path / "c", model=One(QuantizedParameter(quantize(values, format).storage, values.shape)))
    with pytest.raises(checkpoints.CheckpointError, match="no high-precision values"):
        checkpoints.load(tmp_path / "c", model=One(GroupedParameter(grouped.quantize(values, format).storage)))


def export(rank: int, world: int, path: Path, cut: str, convention: Convention | None) -> None:
    checkpoints.export_safetensors(made(Packed, 1, ["float8_block_2d"], world, cut), path, convention=convention)


@pytest.mark.parametrize(("world", "cut"), [(4, "members"), (2, "rows"), (4, "experts")])
def test_members_are_exported_one_by_one(world: int, cut: str, tmp_path: Path) -> None:
    name, values = "float8_block_2d", random_group(1)
    pool(world).run(export, tmp_path, cut, FP8_BLOCK)
    found = load_file(tmp_path / "model.safetensors")
    fields = {f"{name}_weight{i}{suffix}" for i in range(MEMBERS) for suffix in ("", "_scale_inv")}
    assert found.keys() == {*fields, "bias"}
    for index, matrix in enumerate(values):
        want = quantize(matrix, FORMATS[name])
        codes = found[f"{name}_weight{index}"]
        assert codes.dtype == torch.float8_e4m3fn
        assert_bitwise(codes.view(torch.uint8), want.row_data, f"codes of member {index}")
        scales = found[f"{name}_weight{index}_scale_inv"]
        assert_bitwise(scales, want.row_scale[:, : scales.shape[1]], f"scales of member {index}")


def export_values(rank: int, world: int, path: Path, kind: type[nn.Module], cut: str) -> None:
    model = made(kind, 1, FEW, world, cut)
    checkpoints.export_safetensors(model, path, dtype=torch.float32)


def fill_values(rank: int, world: int, path: Path, kind: type[nn.Module], cut: str) -> None:
    model = made(kind, 2, FEW, world, cut)
    checkpoints.import_safetensors(model, path)
    for name in FEW:
        whole = grouped.quantize(random_group(1), FORMATS[name]).dequantize()
        for index, got in members_of(model, name):
            want = quantize(whole[index], FORMATS[name]).storage
            for field in got.fields:
                part = geometry.narrow(field, want.buffers[field.name], want.region, got.region)
                assert_bitwise(got.buffers[field.name], part, f"{name}.{field.name} of member {index}")


@pytest.mark.parametrize(
    ("kinds", "cuts"),
    [
        ((Packed, Packed), ("members", "rows")),
        ((Packed, Separate), ("members", "rows")),
        ((Separate, Packed), ("rows", "experts")),
    ],
    ids=("packed", "packed to separate", "separate to packed"),
)
def test_values_of_groups_leave_and_come_back(
    kinds: tuple[type[nn.Module], type[nn.Module]], cuts: tuple[str, str], tmp_path: Path
) -> None:
    pool(2).run(export_values, tmp_path, kinds[0], cuts[0])
    pool(4).run(fill_values, tmp_path, kinds[1], cuts[1])


def test_values_of_fewer_experts_are_refused_by_name(tmp_path: Path) -> None:
    values = {f"weight{index}": matrix.clone() for index, matrix in enumerate(random_group(1)[:2])}
    save_file(values, tmp_path / "model.safetensors")
    model = One(GroupedParameter(grouped.quantize(random_group(2), FORMATS["float8_block_2d"]).storage))
    before = model.weight.detach().dequantize()
    counted = f"weight0 to weight1 are 2, wanted {MEMBERS} for weight; weight is in no file"
    with pytest.raises(checkpoints.CheckpointError, match=f"{counted}.*weight0 is in model.safetensors only"):
        checkpoints.import_safetensors(model, tmp_path)
    assert_bitwise(model.weight.detach().dequantize(), before, "values")
    (tmp_path / "packed").mkdir()
    save_file({"block_weight": random_group(1)[:2].clone()}, tmp_path / "packed" / "model.safetensors")
    separate = nn.ParameterDict({f"block_weight{index}": matrix for index, matrix in enumerate(random_group(2))})
    with pytest.raises(
        checkpoints.CheckpointError, match=f"block_weight has 2 members, wanted {MEMBERS}: block_weight0"
    ):
        checkpoints.import_safetensors(separate, tmp_path / "packed")


def test_values_of_one_expert_of_another_shape_are_refused_by_name(tmp_path: Path) -> None:
    values = {f"weight{index}": matrix.clone() for index, matrix in enumerate(random_group(1))}
    values["weight1"] = values["weight1"][:-1].clone()
    save_file(values, tmp_path / "model.safetensors")
    model = One(GroupedParameter(grouped.quantize(random_group(2), FORMATS["float8_block_2d"]).storage))
    with pytest.raises(checkpoints.CheckpointError, match="weight1 has shape"):
        checkpoints.import_safetensors(model, tmp_path)
