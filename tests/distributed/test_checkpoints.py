"""Checkpoints: the bytes that were saved, on any number of processes, of every format."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from te_dist import checkpoints, fsdp2, optim
from te_dist.checkpoints.part import Part
from te_dist.formats import Region, geometry
from te_dist.tensor import QuantizedTensor
from te_dist.tensor import storage as storages
from te_dist.tensor.placement import local_tensor
from te_dist.testing import assert_bitwise, device
from tests.distributed.checkpoint_zoo import (
    COLS,
    FORMATS,
    ROWS,
    Layout,
    assert_plain,
    assert_storage,
    assert_weights,
    data_parallel,
    random_matrix,
    whole_of,
    zoo,
)

TP = Layout((2, 2), ("dp", "tp"))
HSDP = Layout((2, 2), ("replicate", "shard"))


def save_zoo(rank: int, world: int, path: Path, layout: Layout) -> None:
    checkpoints.save(path, model=zoo(1, layout))


def load_zoo(rank: int, world: int, path: Path, layout: Layout) -> None:
    model = zoo(2, layout)
    for layer in model.weights.values():
        local_tensor(layer.weight).storage.unsettled = torch.zeros(1)  # what loading has to forget
        local_tensor(layer.weight).storage.initial = torch.zeros(1)
    assert checkpoints.load(path, model=model) == {}
    assert_weights(model, 1)
    assert_plain(model, zoo(1, names=()))


# -- any number of processes ---------------------------------------------------------------------------------------


@pytest.mark.gloo_only("its expected values are made on the CPU")
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (data_parallel(2), data_parallel(3)),
        (data_parallel(3), TP),
        (TP, Layout((4, 1), ("dp", "tp"))),
        (HSDP, data_parallel(2)),
        (TP, HSDP),
        *(
            pytest.param(*each, marks=pytest.mark.exhaustive)
            for each in (
                (data_parallel(2), data_parallel(1)),
                (data_parallel(2), data_parallel(4)),
                (TP, data_parallel(3)),
                (TP, TP),
                (TP, Layout((1, 4), ("dp", "tp"))),
                (data_parallel(2), HSDP),
            )
        ),
    ],
    ids=str,
)
def test_bytes_are_the_same_on_any_mesh(ranks, tmp_path: Path, saved: Layout, loaded: Layout) -> None:
    ranks(saved.world).run(save_zoo, tmp_path / "c", saved)
    ranks(loaded.world).run(load_zoo, tmp_path / "c", loaded)


def save_zoo_by_torch(rank: int, world: int, path: Path, layout: Layout) -> None:
    dcp.save({"model": zoo(1, layout).state_dict()}, checkpoint_id=path)


def load_zoo_by_torch(rank: int, world: int, path: Path, layout: Layout) -> None:
    model = zoo(2, layout)
    state = model.state_dict()
    dcp.load({"model": state}, checkpoint_id=path)
    model.load_state_dict(state)
    assert_weights(model, 1)
    assert_plain(model, zoo(1, names=()))


@pytest.mark.gloo_only("its expected values are made on the CPU")
@pytest.mark.parametrize(("saved", "loaded"), [(data_parallel(3), TP), (TP, HSDP)], ids=str)
def test_torchs_own_checkpoints_load_on_any_mesh(ranks, tmp_path: Path, saved: Layout, loaded: Layout) -> None:
    ranks(saved.world).run(save_zoo_by_torch, tmp_path / "c", saved)
    ranks(loaded.world).run(load_zoo_by_torch, tmp_path / "c", loaded)


def save_zoo_later(rank: int, world: int, path: Path, layout: Layout) -> None:
    """What is written between the call and the end of the save is not in it."""
    model = zoo(1, layout)
    future = checkpoints.async_save(path, model=model)
    for buffer in (b for layer in model.weights.values() for b in local_tensor(layer.weight).storage.buffers.values()):
        buffer.view(torch.uint8).fill_(99)
    future.result()


@pytest.mark.gloo_only("its expected values are made on the CPU")
@pytest.mark.parametrize(("saved", "loaded"), [(data_parallel(2), data_parallel(3)), (TP, HSDP)], ids=str)
def test_a_save_in_a_thread_loads_on_any_mesh(ranks, tmp_path: Path, saved: Layout, loaded: Layout) -> None:
    ranks(saved.world).run(save_zoo_later, tmp_path / "c", saved)
    ranks(loaded.world).run(load_zoo, tmp_path / "c", loaded)


@pytest.mark.gloo_only("its expected values are made on the CPU")
def test_one_process_without_a_process_group(ranks, tmp_path: Path) -> None:
    ranks(2).run(save_zoo, tmp_path / "c", data_parallel(2))
    model = zoo(2)
    checkpoints.load(tmp_path / "c", model=model)
    assert_weights(model, 1)  # among the fields are derived ones
    assert_plain(model, zoo(1, names=()))
    checkpoints.save(tmp_path / "d", model=model)
    ranks(3).run(load_zoo, tmp_path / "d", data_parallel(3))


@pytest.mark.each_value
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("sizes", [(1, 327), (100, 100, 128), (127, 0, 1, 200)], ids=str)
def test_every_value_is_written_once_whatever_the_cuts(name: str, sizes: tuple[int, ...]) -> None:
    """Parts of uneven row cuts, and of one column cut: what they write tiles each field exactly."""
    unit = FORMATS[name].alignment(0)
    rows, whole = sum(sizes) * unit, Region.whole(sum(sizes) * unit, COLS)
    storage = storages.quantize(random_matrix(rows, COLS, 0), FORMATS[name])
    starts = [sum(sizes[:i]) * unit for i in range(len(sizes))]
    shards = [
        storage.narrow(0, start, size * unit).narrow(1, left, width)
        for start, size in zip(starts, sizes, strict=True)
        for left, width in ((0, 70), (70, 90))
    ]
    for buffer in (b for s in shards if not all(s.shape) for b in s.buffers.values()):
        buffer.view(torch.uint8).fill_(99)  # what an empty shard holds must not be asked for
    for field in FORMATS[name].canonical.fields:
        written = torch.zeros(field.compact_shape(whole), dtype=torch.int)
        values = torch.empty(field.compact_shape(whole), dtype=field.dtype)
        offers: dict = {}
        for part in (Part.of_field(field, shard, whole) for shard in shards):
            for item in part.__create_write_items__("key", part):
                wire = part.__get_tensor_shard__(item.index)
                assert_bitwise(wire, offers.setdefault(item.index, wire), f"{field.name} offered by two shards")
        for index, wire in offers.items():  # DCP takes one of several offers at the same place
            place = tuple(slice(o, o + n) for o, n in zip(index.offset, wire.shape, strict=True))
            written[place] += 1
            values[place] = wire
        assert (written == 1).all(), f"{field.name}: values written {written.unique().tolist()} times"
        assert_bitwise(values, geometry.compact(field, storage.buffers[field.name], whole), field.name)


def save_stage(rank: int, world: int, path: Path, stages: tuple[tuple[str, ...], ...]) -> None:
    checkpoints.save(path, model=zoo(1, names=stages[rank]))


def load_stage(rank: int, world: int, path: Path, stages: tuple[tuple[str, ...], ...]) -> None:
    model = zoo(2, names=stages[rank])
    checkpoints.load(path, model=model)
    assert_weights(model, 1)


def test_ranks_may_hold_different_parameters(ranks, tmp_path: Path) -> None:
    """As under pipeline parallelism: the checkpoint is that of all together."""
    names = tuple(FORMATS)
    ranks(2).run(save_stage, tmp_path / "c", (names[:3], names[3:]))
    ranks(3).run(load_stage, tmp_path / "c", (names[:1], names[1:9], names[9:]))
    ranks(1).run(load_stage, tmp_path / "c", (names,))


def save_after_forward(rank: int, world: int, path: Path) -> None:
    model = zoo(1, data_parallel(world), ("mxfp8_1d", "float8_block_2d"))
    with torch.no_grad():
        model(random_matrix(4, COLS, 0).to(device()))
    assert not isinstance(model.norm.weight, DTensor)  # FSDP2 leaves the root unsharded here
    checkpoints.save(path, model=model)
    checkpoints.load(path, model=model)
    assert_weights(model, 1)


def test_a_model_that_is_unsharded_just_now(ranks, tmp_path: Path) -> None:
    ranks(2).run(save_after_forward, tmp_path / "c")


def test_wrappers_leave_no_trace_in_names(tmp_path: Path) -> None:
    inner = [torch.compile(nn.Linear(3, 3)), checkpoint_wrapper(nn.Linear(3, 3))]
    checkpoints.save(tmp_path / "c", model=torch.compile(nn.Sequential(*inner)))
    bare = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    checkpoints.load(tmp_path / "c", model=bare)
    for got, wrapped in zip(bare.parameters(), nn.ModuleList(inner).parameters(), strict=True):
        assert_bitwise(got.detach(), wrapped.detach(), "parameter")


# -- what is on the disk -------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_files_hold_plain_tensors_under_sibling_names(ranks, tmp_path: Path) -> None:
    """Every field can be read by torch alone, as the whole unpadded field."""
    ranks(2).run(save_zoo, tmp_path / "c", data_parallel(2))
    saved = dcp.FileSystemReader(tmp_path / "c").read_metadata().state_dict_metadata
    assert all(isinstance(entry, TensorStorageMetadata) for entry in saved.values())
    for name, format in FORMATS.items():
        whole = whole_of(name, 1)
        state = {
            f"model.weights.{name}.weight_{f.name}": torch.empty(f.compact_shape(whole.region), dtype=f.dtype)
            for f in format.canonical.fields
        }
        assert {key for key in saved if key.startswith(f"model.weights.{name}.")} == state.keys()
        dcp.load(state, checkpoint_id=tmp_path / "c", no_dist=True)
        for field, got in zip(format.canonical.fields, state.values(), strict=True):
            assert_bitwise(got, geometry.compact(field, whole.buffers[field.name], whole.region), field.name)


def test_replicas_write_once(ranks, tmp_path: Path) -> None:
    ranks(2).run(save_zoo, tmp_path / "two", data_parallel(2))
    ranks(4).run(save_zoo, tmp_path / "four", HSDP)
    two, four = (written_places(tmp_path / name) for name in ("two", "four"))
    assert two == four


def written_places(path: Path) -> dict[str, list]:
    """Offsets and sizes of all that was written, by key."""
    saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    return {key: sorted((tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks) for key, entry in saved.items()}


# -- optimizers ----------------------------------------------------------------------------------------------------

TRAINED = tuple(name for name in FORMATS if name != "nvfp4_row_scaled")


def make_optimizer(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    plain = [p for n, p in model.named_parameters() if "weights" not in n]
    if kind == "AdamW":
        return torch.optim.AdamW([{"params": plain[:1], "betas": (0.5, 0.9)}, {"params": plain[1:]}], lr=0.125)
    weights = [p for n, p in model.named_parameters() if "weights" in n]
    if kind == "MasterWeights":
        groups = [{"params": plain, "weight_decay": 0.0}, {"params": weights}]
        return optim.MasterWeights(groups, lambda own: torch.optim.AdamW(own, lr=0.125, weight_decay=0.25))
    options = {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.bfloat16, "store_param_remainders": True}
    groups = [{"params": plain, "weight_decay": 0.0}, {"params": weights}]
    return optim.FusedAdam(groups, lr=0.125, weight_decay=0.25, **(options if kind == "in fewer bits" else {}))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, steps: int) -> None:
    for step in range(first, first + steps):
        model(random_matrix(4, COLS, step).to(device())).backward()
        optimizer.step()
        optimizer.zero_grad()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Local copies of all parameters' fields and all optimizer state of this rank."""
    found = {}
    for name, param in model.named_parameters():
        local = local_tensor(param)
        fields = local.storage.buffers if isinstance(local, QuantizedTensor) else {"": local}
        found |= {f"{name}.{k}": v.detach().cpu().clone() for k, v in fields.items()}
        state = optimizer.state.get(param, {})
        found |= {f"{name}.{k}": local_tensor(v).detach().cpu().clone() for k, v in state.items()}
    return found


def train_save_train(rank: int, world: int, path: Path, kind: str) -> dict[str, torch.Tensor]:
    model = zoo(1, data_parallel(world), TRAINED)
    optimizer = make_optimizer(model, kind)
    train(model, optimizer, 0, 2)
    optimizer.param_groups[1]["lr"] = 0.1  # a schedule was at work
    checkpoints.save(path, model=model, optimizer=optimizer, extra={"step": 2})
    train(model, optimizer, 2, 2)
    return everything(model, optimizer)


def load_train(rank: int, world: int, path: Path, kind: str, used: bool) -> dict[str, torch.Tensor]:
    model = zoo(2, data_parallel(world), TRAINED)
    optimizer = make_optimizer(model, kind)
    if used:
        train(model, optimizer, 0, 1)
    extra = checkpoints.load(path, model=model, optimizer=optimizer)
    train(model, optimizer, extra["step"], 2)
    return everything(model, optimizer)


@pytest.mark.every_run(kind=("FusedAdam", "in fewer bits"))
@pytest.mark.each_value
@pytest.mark.parametrize(
    ("world", "kind"),
    [
        *((2, kind) for kind in ("FusedAdam", "in fewer bits", "MasterWeights", "AdamW")),
        *((3, kind) for kind in ("in fewer bits", "MasterWeights")),  # shards of uneven sizes
    ],
)
def test_training_resumes_exactly(ranks, tmp_path: Path, world: int, kind: str) -> None:
    want = ranks(world).run(train_save_train, tmp_path / "c", kind)
    for used in (False, True):
        for of_rank, expected in zip(ranks(world).run(load_train, tmp_path / "c", kind, used), want, strict=True):
            assert of_rank.keys() == expected.keys()
            for name, tensor in of_rank.items():
                assert_bitwise(tensor, expected[name], name)


def save_trained(rank: int, world: int, path: Path, kind: str) -> dict[str, torch.Tensor]:
    model = zoo(1, data_parallel(world), TRAINED)
    optimizer = make_optimizer(model, kind)
    train(model, optimizer, 0, 1)
    checkpoints.save(path, model=model, optimizer=optimizer)
    return whole_state(model, optimizer)


def load_trained(rank: int, world: int, path: Path, kind: str) -> dict[str, torch.Tensor]:
    model = zoo(2, data_parallel(world), TRAINED)
    optimizer = make_optimizer(model, kind)
    checkpoints.load(path, model=model, optimizer=optimizer)
    return whole_state(model, optimizer)


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{key}": value.full_tensor().cpu() if value.dim() else value.cpu()
        for name, param in model.named_parameters()
        for key, value in optimizer.state[param].items()
    }


@pytest.mark.every_run(kind=("FusedAdam", "in fewer bits"))
@pytest.mark.each_value
@pytest.mark.parametrize(
    ("world", "kind"), [(1, "FusedAdam"), (3, "FusedAdam"), (3, "in fewer bits"), (3, "MasterWeights")]
)
def test_optimizer_state_is_the_same_on_any_number_of_processes(ranks, tmp_path: Path, world: int, kind: str) -> None:
    want = ranks(2).run(save_trained, tmp_path / "c", kind)[0]
    got = ranks(world).run(load_trained, tmp_path / "c", kind)[0]
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        assert_bitwise(tensor, want[name], name)


# -- another format ------------------------------------------------------------------------------------------------


class One(nn.Module):
    """A single weight of any format, or plain."""

    def __init__(self, weight: torch.Tensor, name: str | None) -> None:
        super().__init__()
        if name is not None:
            weight = fsdp2.QuantizedParameter(storages.quantize(weight, FORMATS[name]), weight.shape)
        self.weight = nn.Parameter(weight)


def one(seed: int, world: int, name: str | None) -> One:
    weight = random_matrix(ROWS, COLS, seed).to(device())
    return fsdp2.fully_shard(One(weight, name), mesh=data_parallel(world).mesh())


def save_one(rank: int, world: int, path: Path, name: str | None, masters: bool) -> torch.Tensor | None:
    model = one(1, world, name)
    optimizer = optim.FusedAdam(model.parameters()) if masters else None
    if optimizer is not None:
        optimizer.initialize_state(model.weight)
        master = optimizer.state[model.weight]["master_param"]
        master._local_tensor.add_(0.125)  # so that weights made from masters differ from any other
    checkpoints.save(path, model=model, optimizer=optimizer)
    return master.full_tensor().cpu() if masters else None


def load_one(rank: int, world: int, path: Path, name: str | None, whole: torch.Tensor) -> None:
    model = one(2, world, name)
    checkpoints.load(path, model=model)
    if name is None:
        assert_bitwise(model.weight.full_tensor().detach().cpu(), whole, "plain weight")
    else:
        storage = local_tensor(model.weight).storage
        assert_storage(storage, storages.quantize(whole, FORMATS[name]), name)


@pytest.mark.every_run(wanted=("float8_tensorwise", "float8_block_1d", "mxfp8_2d", "nvfp4_2d"))
@pytest.mark.parametrize("wanted", [n for n, f in FORMATS.items() if f.alignment(0) <= 2 and n != "float8_block_2d"])
def test_another_format_is_made_from_masters(ranks, tmp_path: Path, wanted: str) -> None:
    whole = ranks(2).run(save_one, tmp_path / "c", "float8_block_2d", True)[0]
    ranks(3).run(load_one, tmp_path / "c", wanted, whole)


def test_plain_weights_and_quantized_ones_become_each_other(ranks, tmp_path: Path) -> None:
    ranks(2).run(save_one, tmp_path / "plain", None, False)
    ranks(3).run(load_one, tmp_path / "plain", "mxfp8_2d", random_matrix(ROWS, COLS, 1))
    whole = ranks(2).run(save_one, tmp_path / "quantized", "mxfp8_2d", True)[0]
    ranks(3).run(load_one, tmp_path / "quantized", None, whole)


def save_stepped(rank: int, world: int, path: Path, name: str | None) -> torch.Tensor:
    """The best values of the weight: its master, or itself where it is plain fp32."""
    model = one(1, world, name)
    optimizer = optim.FusedAdam(model.parameters())
    optimizer.initialize_state(model.weight)
    assert ("master_param" in optimizer.state[model.weight]) == (name is not None)
    checkpoints.save(path, model=model, optimizer=optimizer)
    return optimizer.state[model.weight].get("master_param", model.weight).full_tensor().detach().cpu()


def load_other_format(rank: int, world: int, path: Path, name: str | None, whole: torch.Tensor) -> str:
    """What is said with an optimizer; what the message says to do instead works."""
    model = one(2, world, name)
    with pytest.raises(checkpoints.CheckpointError) as error:
        checkpoints.load(path, model=model, optimizer=optim.FusedAdam(model.parameters()))
    load_one(rank, world, path, name, whole)
    return str(error.value)


@pytest.mark.parametrize(("saved", "wanted"), [(None, "mxfp8_2d"), ("mxfp8_2d", None)])
def test_optimizer_state_serves_no_format_that_keeps_other_state(
    ranks, tmp_path: Path, saved: str | None, wanted: str | None
) -> None:
    whole = ranks(2).run(save_stepped, tmp_path / "c", saved)[0]
    first, second = ranks(2).run(load_other_format, tmp_path / "c", wanted, whole)
    assert first == second
    assert first.count("its saved optimizer state") == 1
    assert "load without optimizer= and make a new one" in first
    assert "the options it was saved with" not in first


def load_into_other_size(rank: int, world: int, path: Path) -> str:
    weight = random_matrix(ROWS + 8, COLS, 2).to(device())
    model = fsdp2.fully_shard(One(weight, "mxfp8_2d"), mesh=data_parallel(world).mesh())
    with pytest.raises(checkpoints.CheckpointError) as error:
        checkpoints.load(path, model=model, optimizer=optim.FusedAdam(model.parameters()))
    return str(error.value)


def test_of_a_weight_of_another_size_nothing_else_is_told(ranks, tmp_path: Path) -> None:
    ranks(2).run(save_stepped, tmp_path / "c", "mxfp8_2d")
    first, second = ranks(2).run(load_into_other_size, tmp_path / "c")
    assert first == second
    assert f"weight has shape [{ROWS}, {COLS}] in it, wanted [{ROWS + 8}, {COLS}]; load it into the model" in first
