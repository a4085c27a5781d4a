"""Weights as safetensors: in high precision both ways, and as inference engines load FP8."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import te_dist as te
from te_dist import checkpoints, fsdp2, optim
from te_dist.checkpoints import exchange
from te_dist.conventions import FP8_BLOCK
from te_dist.formats import geometry
from te_dist.recipe import MXFP8BlockScaling
from te_dist.tensor import storage as storages
from te_dist.tensor.placement import local_part, local_tensor
from te_dist.testing import assert_bitwise, device
from tests.distributed.checkpoint_zoo import (
    COLS,
    FORMATS,
    Layout,
    assert_plain,
    assert_storage,
    assert_weights,
    data_parallel,
    random_matrix,
    rows_of,
    whole_of,
    zoo,
)

TP = Layout((2, 2), ("dp", "tp"))


def files_of(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors, by way of the index."""
    places = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    files = {name: load_file(directory / name) for name in set(places.values())}
    assert {key for file in files.values() for key in file} == places.keys()
    return {key: files[name][key] for key, name in places.items()}


def export(rank: int, world: int, path: Path, layout: Layout, dtype: torch.dtype | None, masters: bool) -> None:
    model = zoo(1, layout)
    optimizer = optim.FusedAdam(model.parameters()) if masters else None
    for param in model.parameters() if masters else ():
        optimizer.initialize_state(param)
        if "master_param" in optimizer.state[param]:
            local_tensor(optimizer.state[param]["master_param"]).fill_(0.75)
    exchange.FILE_BYTES = 300_000
    checkpoints.export_safetensors(model, path, optimizer=optimizer, dtype=dtype)


def export_written(rank: int, world: int, path: Path, kind: str) -> None:
    """A model that was trained, and then given other values by way of its weights."""
    names = ("float8_block_2d", "mxfp8_1d")
    model = zoo(1, data_parallel(world), names)
    if kind == "FusedAdam":
        optimizer = optim.FusedAdam(model.parameters())
    else:
        optimizer = optim.MasterWeights(model.parameters(), torch.optim.AdamW)
    model(torch.ones(2, COLS, device=device())).backward()
    optimizer.step()
    model.load_state_dict(zoo(2, data_parallel(world), names).state_dict())
    exchange.FILE_BYTES = 1 << 30
    checkpoints.export_safetensors(model, path, optimizer=optimizer)
    given = checkpoints.high_precision_state_dict(model, optimizer=optimizer)
    for name in names if rank == 0 else ():
        assert_bitwise(given[f"weights.{name}.weight"], whole_of(name, 2).dequantize(), name)


@pytest.mark.parametrize("kind", ["FusedAdam", "MasterWeights"])
def test_weights_that_were_written_otherwise_are_exported_as_they_are(ranks, tmp_path: Path, kind: str) -> None:
    ranks(2).run(export_written, tmp_path, kind)
    got = files_of(tmp_path)
    for name in ("float8_block_2d", "mxfp8_1d"):
        assert_bitwise(got[f"weights.{name}.weight"], whole_of(name, 2).dequantize(), name)


def give_whole(rank: int, world: int, layout: Layout) -> None:
    model = zoo(1, layout)
    got, want = checkpoints.high_precision_state_dict(model, dtype=torch.float32), zoo(1).state_dict()
    assert got.keys() == (want.keys() if rank == 0 else set())
    for name, tensor in got.items():
        expected = want[name].dequantize() if name.startswith("weights") else want[name]
        assert_bitwise(tensor, expected.float() if expected.is_floating_point() else expected, name)


@pytest.mark.parametrize("layout", [data_parallel(3), TP], ids=str)
def test_values_are_given_whole_to_one_rank(ranks, layout: Layout) -> None:
    ranks(layout.world).run(give_whole, layout)


def test_tied_values_are_given_under_every_name() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    model.b.weight = model.a.weight
    given = checkpoints.high_precision_state_dict(model)
    assert given["a.weight"] is given["b.weight"]


@pytest.mark.parametrize("layout", [data_parallel(3), TP], ids=str)
def test_values_are_exported_whole(ranks, tmp_path: Path, layout: Layout) -> None:
    ranks(layout.world).run(export, tmp_path, layout, None, False)
    assert len(list(tmp_path.glob("model-0*-of-0*.safetensors"))) > 1
    got, want = files_of(tmp_path), zoo(1).state_dict()
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        expected = want[name].dequantize() if name.startswith("weights") else want[name]
        assert_bitwise(tensor, expected, name)


def test_masters_are_exported_where_there_are_any(ranks, tmp_path: Path) -> None:
    ranks(2).run(export, tmp_path, data_parallel(2), torch.bfloat16, True)
    for name, tensor in files_of(tmp_path).items():
        if name.startswith(("weights", "head")):
            assert tensor.dtype == torch.bfloat16
            assert (tensor == 0.75).all(), name


def keeping(world: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Weights that keep what they were quantized from, a group of them and one of few rows too; and those values."""
    with (
        torch.random.fork_rng(),
        te.quantized_model_init(recipe=MXFP8BlockScaling(), preserve_high_precision_init_val=True),
    ):
        torch.manual_seed(3)
        model = nn.Sequential(
            te.Linear(COLS, 96), te.Linear(96, 2), te.GroupedLinear(2, 128, 64, single_grouped_weight=True)
        )
    values = {f"{i}.weight": m.weight.get_high_precision_init_val().clone() for i, m in enumerate(model)}
    if world > 1:
        fsdp2.fully_shard(model.to(device()), mesh=data_parallel(world).mesh())
    return model, values


def export_kept(rank: int, world: int, path: Path) -> None:
    """Values as they were quantized, whether an optimizer is yet to begin or there is none."""
    model, values = keeping(world)
    stored = {name: local_tensor(param).dequantize() for name, param in model.named_parameters() if name in values}
    checkpoints.export_safetensors(model, path)
    given = checkpoints.high_precision_state_dict(model, optimizer=optim.FusedAdam(model.parameters()))
    for name, value in values.items() if rank == 0 else ():
        assert not torch.equal(stored[name].cpu(), value[: len(stored[name])])
        assert_bitwise(files_of(path)[name], value, name)
        assert_bitwise(given[name], value, name)
    if rank == world - 1:  # one rank knows no more than codes
        local_tensor(model[0].weight).clear_high_precision_init_val()
    given = checkpoints.high_precision_state_dict(model)
    if rank == 0:
        assert_bitwise(given["0.weight"][: len(stored["0.weight"])], stored["0.weight"].cpu(), "0.weight")
        assert_bitwise(given["2.weight"], values["2.weight"], "2.weight")


@pytest.mark.parametrize("world", [1, 2, 3])
def test_values_that_weights_keep_are_exported(ranks, tmp_path: Path, world: int) -> None:
    ranks(world).run(export_kept, tmp_path)


def load_values(rank: int, world: int, path: Path, layout: Layout) -> None:
    model = zoo(2, layout)
    for layer in list(model.weights.values())[::2]:
        local_tensor(layer.weight).keep_initial = True
    checkpoints.import_safetensors(model, path)
    for i, (name, layer) in enumerate(model.weights.items()):
        local = local_tensor(layer.weight)
        kept = local.get_high_precision_init_val()
        assert (kept is None) == bool(i % 2), name
        if kept is not None:
            assert_bitwise(kept, local_part(random_matrix(*layer.weight.shape, 1), layer.weight), name)
        local.clear_high_precision_init_val()
        assert_storage(local.storage, whole_of(name, 1), name)


@pytest.mark.parametrize(
    ("layout", "dtype"), [(data_parallel(3), torch.float32), (TP, torch.float32), (TP, torch.float64)], ids=str
)
def test_imported_values_are_quantized_as_the_whole(ranks, tmp_path: Path, layout: Layout, dtype: torch.dtype) -> None:
    values = {f"weights.{n}.weight": random_matrix(rows_of(f), COLS, 1).to(dtype) for n, f in FORMATS.items()}
    plain = {n: t for n, t in zoo(1).state_dict().items() if not n.startswith("weights")}
    save_file(values | plain, tmp_path / "a.safetensors")
    ranks(layout.world).run(load_values, tmp_path, layout)


def load_refused(rank: int, world: int, path: Path) -> str:
    """The message of an import that fails and changes nothing."""
    model = zoo(2, data_parallel(world), ("mxfp8_1d",))
    with pytest.raises(checkpoints.CheckpointError) as error:
        checkpoints.import_safetensors(model, path)
    assert_weights(model, 2)
    assert_plain(model, zoo(2, names=()))
    return str(error.value)


def message_of(ranks: Callable, path: Path) -> str:
    first, second = ranks(2).run(load_refused, path)
    assert first == second
    return first


def test_what_cannot_be_imported_is_named(ranks, tmp_path: Path) -> None:
    tensors = {n: t for n, t in zoo(1).state_dict().items() if not n.startswith("weights")}
    save_file(tensors | {"seen": torch.zeros(3), "more": torch.zeros(1)}, tmp_path / "a.safetensors")
    first = message_of(ranks, tmp_path)
    assert "weights.mxfp8_1d.weight is in no file" in first
    assert "more is in a.safetensors only" in first
    assert "seen has shape [3], wanted [1]" in first
    (tmp_path / "a.safetensors").write_bytes(b"nothing")
    assert "no safetensors file" in message_of(ranks, tmp_path)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64], ids=str)
def test_what_is_not_high_precision_is_no_value_of_a_weight(ranks, tmp_path: Path, dtype: torch.dtype) -> None:
    """Neither of a quantized one nor of a plain one; a tensor that fits comes first in the file."""
    tensors = values_for_mxfp8()
    tensors |= {name: tensors[name].to(dtype) for name in ("weights.mxfp8_1d.weight", "norm.weight")}
    save_file(tensors, tmp_path / "a.safetensors")
    message = message_of(ranks, tmp_path)
    for name in ("weights.mxfp8_1d.weight", "norm.weight"):
        said = f"{name} has dtype {str(dtype)[6:]}, wanted one of float64, float32, bfloat16, float16"
        assert said in message, message
    assert "convert what is in the files" in message


def test_a_plain_tensor_takes_the_dtype_it_has(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_buffer("codes", torch.randn(4, 4).to(torch.float8_e5m2))
    model.register_buffer("count", torch.tensor(3))
    checkpoints.export_safetensors(model, tmp_path)
    want = {name: tensor.clone() for name, tensor in model.named_buffers()}
    for tensor in model.buffers():
        tensor.zero_()
    checkpoints.import_safetensors(model, tmp_path)
    for name, tensor in model.named_buffers():
        assert_bitwise(tensor, want[name], name)


# -- several exports to one directory ------------------------------------------------------------------------------


def values_for_mxfp8() -> dict[str, torch.Tensor]:
    """What a zoo of one format can import."""
    model = zoo(1, names=("mxfp8_1d",))
    return {n: t.dequantize() if n.startswith("weights") else t for n, t in model.state_dict().items()}


def export_and_import(rank: int, world: int, path: Path, seed: int, file_bytes: int) -> None:
    exchange.FILE_BYTES = file_bytes
    checkpoints.export_safetensors(zoo(seed, data_parallel(world), ("mxfp8_1d",)), path)
    model = zoo(9, data_parallel(world), ("mxfp8_1d",))
    checkpoints.import_safetensors(model, path)
    quantized_again = storages.quantize(whole_of("mxfp8_1d", seed).dequantize(), FORMATS["mxfp8_1d"])
    assert_storage(local_tensor(model.weights["mxfp8_1d"].weight).storage, quantized_again, "mxfp8_1d")
    assert_plain(model, zoo(seed, names=()))


def test_nothing_is_left_of_an_earlier_export(ranks, tmp_path: Path) -> None:
    for other in ("adapter_model.safetensors", "model-of-mine.safetensors", "notes.txt"):
        (tmp_path / other).touch()
    own = {path.name for path in tmp_path.iterdir()} | {"model.safetensors.index.json"}
    for seed, (file_bytes, count) in enumerate([(1 << 30, 1), (1, 5), (1000, 3), (1 << 30, 1)]):
        ranks(2).run(export_and_import, tmp_path, seed, file_bytes)
        files = {path.name for path in tmp_path.iterdir()} - own
        assert len(files) == count, files
        places = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
        assert files == set(places.values())


def test_readers_find_one_whole_export_at_every_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = tmp_path / "model.safetensors.index.json"
    found = []

    def watched(change: Callable) -> Callable:
        def run(path: Path, *args: object) -> object:
            result = change(path, *args)
            if index.is_file():
                places = json.loads(index.read_text())["weight_map"]
                assert all((tmp_path / name).is_file() for name in places.values()), places
                model = constant(-1)
                checkpoints.import_safetensors(model, tmp_path)
                (value,) = {value for param in model.parameters() for value in param.flatten().tolist()}
                found.append(value)
            return result

        return run

    for name in ("rename", "unlink", "write_text"):
        monkeypatch.setattr(Path, name, watched(getattr(Path, name)))
    for value, file_bytes in enumerate([1 << 30, 1, 40, 1 << 30]):
        monkeypatch.setattr(exchange, "FILE_BYTES", file_bytes)
        checkpoints.export_safetensors(constant(value), tmp_path)
        assert found[-1] == value
    assert found == sorted(found)


def constant(value: float) -> nn.Module:
    model = nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(3)])
    for param in model.parameters():
        nn.init.constant_(param, value)
    return model


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("no file", ["model-00002-of-00002.safetensors is not there", "copy or export all of it again"]),
        ("no key", ["norm.weight is not in model-00002-of-00002.safetensors"]),
        ("another key", ["more is in model-00002-of-00002.safetensors, where the index has it not"]),
        ("another file", ["norm.bias is in model-00002-of-00002.safetensors, where the index has it not"]),
        (
            "no index",
            ["norm.weight is in model-00002-of-00002.safetensors and in model.safetensors", "remove the files"],
        ),
        ("broken index", ["index.json: it is no index of safetensors files (JSONDecodeError"]),
        ("another kind of index", ["index.json: it is no index of safetensors files (KeyError"]),
    ],
)
def test_files_that_are_not_of_one_export_are_told_apart(ranks, tmp_path: Path, how: str, said: list[str]) -> None:
    tensors, second = values_for_mxfp8(), tmp_path / "model-00002-of-00002.safetensors"
    norms = {name: tensors[name] for name in ("norm.weight", "norm.bias")}
    rest = {name: tensor for name, tensor in tensors.items() if name not in norms}
    places = dict.fromkeys(rest, "model-00001-of-00002.safetensors") | dict.fromkeys(norms, second.name)
    if how == "no key":
        norms.pop("norm.weight")
    if how == "another key":
        norms["more"] = torch.zeros(1)
    if how == "another file":
        places["norm.bias"] = "model-00001-of-00002.safetensors"
    save_file(rest, tmp_path / "model-00001-of-00002.safetensors")
    save_file(norms, second)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    if how == "no file":
        second.unlink()
    if how == "no index":
        save_file(norms, tmp_path / "model.safetensors")
        index.unlink()
    if how == "broken index":
        index.write_text("{")
    if how == "another kind of index":
        index.write_text("{}")
    message = message_of(ranks, tmp_path)
    assert all(part in message for part in said), message


def test_what_is_no_directory_of_high_precision_weights_is_told_apart(tmp_path: Path) -> None:
    model = zoo(1, names=("float8_block_2d",))
    checkpoints.export_safetensors(model, tmp_path, convention=FP8_BLOCK)
    with pytest.raises(
        checkpoints.CheckpointError, match="weight_scale_inv.*export for inference.*without convention="
    ):
        checkpoints.import_safetensors(model, tmp_path)
    with pytest.raises(checkpoints.CheckpointError, match=f"got a file, wanted its directory; pass {tmp_path}$"):
        checkpoints.import_safetensors(model, tmp_path / "model.safetensors")


def test_a_convention_is_not_told_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(
        checkpoints.CheckpointError, match="convention: got 'fp8_block', wanted a Convention of te_dist.conventions"
    ):
        checkpoints.export_safetensors(zoo(1), tmp_path, convention="fp8_block")


def export_as(rank: int, world: int, path: Path, dtype: torch.dtype) -> list[str]:
    model, messages = zoo(1, data_parallel(world), ("float8_block_2d",)), []
    for call in (
        lambda: checkpoints.export_safetensors(model, path, dtype=dtype),
        lambda: checkpoints.high_precision_state_dict(model, dtype=dtype),
    ):
        with pytest.raises(checkpoints.CheckpointError, match="wanted one of float64, float32.*convention=") as error:
            call()
        messages.append(str(error.value))
    return messages


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.bool], ids=str)
def test_values_are_exported_in_high_precision(ranks, tmp_path: Path, dtype: torch.dtype) -> None:
    first, second = ranks(2).run(export_as, tmp_path / "e", dtype)
    assert first == second
    assert not (tmp_path / "e").exists()


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    checkpoints.export_safetensors(model, tmp_path)
    assert files_of(tmp_path).keys() == {"0.weight"}
    want = model[0].weight.detach().clone()
    nn.init.zeros_(model[0].weight)
    checkpoints.import_safetensors(model, tmp_path)
    assert_bitwise(model[1].weight.detach(), want, "tied weight")
    (other := tmp_path / "other").mkdir()
    save_file({"1.weight": want * 2}, other / "model.safetensors")  # the other name does as well
    checkpoints.import_safetensors(model, other)
    assert_bitwise(model[0].weight.detach(), want * 2, "tied weight")
    save_file({"bias": want}, other / "model.safetensors")
    with pytest.raises(checkpoints.CheckpointError, match=": 0.weight is in no file; bias is in model.*only;"):
        checkpoints.import_safetensors(model, other)


def export_fp8(rank: int, world: int, path: Path, names: tuple[str, ...]) -> str | None:
    try:
        checkpoints.export_safetensors(zoo(1, data_parallel(world), names), path, convention=FP8_BLOCK)
    except checkpoints.CheckpointError as error:
        return str(error)


def test_fp8_blocks_are_stored_as_inference_engines_load_them(ranks, tmp_path: Path) -> None:
    names = ("float8_block_2d", "float8_block_2d_fp32_scales")
    assert ranks(3).run(export_fp8, tmp_path, names) == [None] * 3
    got = files_of(tmp_path)
    for name in names:
        whole = whole_of(name, 1)
        codes, scales = got[f"weights.{name}.weight"], got[f"weights.{name}.weight_scale_inv"]
        assert codes.dtype == torch.float8_e4m3fn
        assert scales.shape == (3, 2)
        spread = scales.repeat_interleave(128, 0)[:328].repeat_interleave(128, 1)[:, :COLS]
        assert_bitwise(codes.float() * spread, whole.dequantize(), name)
        scale = whole.format.rowwise.fields[1]
        assert_bitwise(scales, geometry.compact(scale, whole.buffers[scale.name], whole.region), name)


def test_a_weight_of_another_format_is_not_made_to_fit(ranks, tmp_path: Path) -> None:
    first, second = ranks(2).run(export_fp8, tmp_path, ("mxfp8_1d",))
    assert first == second
    assert "MxFp8(" in first


def export_plain(rank: int, world: int, path: Path) -> str:
    with pytest.raises(checkpoints.CheckpointError, match="without quantized weights, wanted some") as error:
        checkpoints.export_safetensors(zoo(1, data_parallel(world), ()), path, convention=FP8_BLOCK)
    return str(error.value)


def test_a_model_without_quantized_weights_is_no_export_of_them(ranks, tmp_path: Path) -> None:
    first, second = ranks(2).run(export_plain, tmp_path / "e")
    assert first == second
    assert not (tmp_path / "e").exists()
