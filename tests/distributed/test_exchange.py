"""Weights as safetensors: in high precision both ways, and as inference engines load FP8."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from te_dist import checkpoints, optim
from te_dist.checkpoints import exchange
from te_dist.conventions import FP8_BLOCK
from te_dist.formats import geometry
from te_dist.tensor.placement import local_part, local_tensor
from te_dist.testing import assert_bitwise
from tests.distributed.checkpoint_zoo import (
    COLS,
    FORMATS,
    Layout,
    assert_storage,
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


@pytest.mark.parametrize("layout", [data_parallel(3), TP], ids=str)
def test_imported_values_are_quantized_as_the_whole(ranks, tmp_path: Path, layout: Layout) -> None:
    values = {f"weights.{n}.weight": random_matrix(rows_of(f), COLS, 1) for n, f in FORMATS.items()}
    plain = {n: t for n, t in zoo(1).state_dict().items() if not n.startswith("weights")}
    save_file(values | plain, tmp_path / "a.safetensors")
    ranks(layout.world).run(load_values, tmp_path, layout)


def load_refused(rank: int, world: int, path: Path) -> str:
    with pytest.raises(checkpoints.CheckpointError) as error:
        checkpoints.import_safetensors(zoo(2, data_parallel(world), ("mxfp8_1d",)), path)
    return str(error.value)


def test_what_cannot_be_imported_is_named(ranks, tmp_path: Path) -> None:
    tensors = {n: t for n, t in zoo(1).state_dict().items() if not n.startswith("weights")}
    save_file(tensors | {"seen": torch.zeros(3), "more": torch.zeros(1)}, tmp_path / "a.safetensors")
    first, second = ranks(2).run(load_refused, tmp_path)
    assert first == second
    assert "weights.mxfp8_1d.weight is in no file" in first
    assert "more is in a.safetensors only" in first
    assert "seen has shape [3], wanted [1]" in first
    (tmp_path / "a.safetensors").write_bytes(b"nothing")
    assert "no safetensors file" in ranks(2).run(load_refused, tmp_path)[0]


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


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    checkpoints.export_safetensors(model, tmp_path)
    assert files_of(tmp_path).keys() == {"0.weight"}
    want = model[0].weight.detach().clone()
    nn.init.zeros_(model[0].weight)
    checkpoints.import_safetensors(model, tmp_path)
    assert_bitwise(model[1].weight.detach(), want, "tied weight")


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
