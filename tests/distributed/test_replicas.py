"""What ranks hold under one name without a common mesh: copies are saved once, other weights are refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import te_dist as te
from te_dist import checkpoints, fsdp2
from te_dist.recipe import Float8BlockScaling
from te_dist.testing import device, mesh

WIDTH = 96
REFUSED = "ranks hold other values under one name"


def stage(seed: int, *, quantized: bool, over: object | None = None) -> nn.Module:
    """A stage of a pipeline; every one of them has a `0.weight` and a `1.weight`."""
    torch.manual_seed(seed)
    with te.quantized_model_init(enabled=quantized, recipe=Float8BlockScaling()), torch.device(device()):
        layers = [te.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)]
    nn.init.normal_(layers[1].weight)
    model = nn.Sequential(*layers)
    return model if over is None else fsdp2.fully_shard(model, mesh=over)


def outcome(write: Callable[[], object]) -> str:
    """What was raised or, if nothing was, warned of."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            write()
        except checkpoints.CheckpointError as error:
            return str(error)
    return "; ".join(str(each.message) for each in seen if "should have copies" in str(each.message))


def save_stages(rank: int, world: int, path: Path, quantized: bool, sharded: bool, alike: bool) -> list[str]:
    """Two stages, each of one rank or sharded over two. What comes of a save, a background one, and exports."""
    grid = mesh((2, world // 2), ("pp", "dp"))
    index = grid.get_local_rank("pp")
    model = stage(0 if alike else index, quantized=quantized, over=grid["dp"] if sharded else None)
    return [
        outcome(lambda: checkpoints.save(path / "c", model=model)),
        outcome(lambda: checkpoints.async_save(path / "a", model=model).result()),
        outcome(lambda: checkpoints.export_safetensors(model, path / "e")),
        outcome(lambda: checkpoints.high_precision_state_dict(model)),
    ]


@pytest.mark.parametrize(("world", "sharded"), [(2, False), (4, True)], ids=["plain", "sharded"])
@pytest.mark.parametrize("quantized", [False, True], ids=["fp32", "quantized"])
def test_stages_with_the_same_names_are_refused(
    ranks, tmp_path: Path, quantized: bool, world: int, sharded: bool
) -> None:
    first, *others = ranks(world).run(save_stages, tmp_path, quantized, sharded, False)
    assert others == [first] * (world - 1)
    for message in first:
        assert message.startswith(REFUSED), message
        assert f"0.weight (ranks 0 and {world // 2})" in message
        assert f"1.weight (ranks 0 and {world // 2})" in message
        assert "1.bias" not in message  # zeros in both
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("world", "sharded"), [(2, False), (4, True)], ids=["plain", "sharded"])
def test_copies_are_saved_without_a_word(ranks, tmp_path: Path, world: int, sharded: bool) -> None:
    assert ranks(world).run(save_stages, tmp_path, True, sharded, True) == [[""] * 4] * world


def drifted(rank: int, world: int, path: Path) -> tuple[str, list[Tensor], Tensor]:
    """A copy goes its own way for a while, where no gradient is reduced. Also what ranks have, and what was saved."""
    model = stage(0, quantized=True)
    copies = [model[1].weight.detach() * (1 + 1e-3 * each) for each in range(world)]
    with torch.no_grad():
        model[1].weight.copy_(copies[rank])
    said = outcome(lambda: checkpoints.save(path, model=model))
    checkpoints.load(path, model=model)
    return said, [copy.cpu() for copy in copies], model[1].weight.detach().cpu()


def test_copies_that_drifted_apart_are_told_of_once(ranks, tmp_path: Path) -> None:
    (first, copies, saved), (second, _, other) = ranks(2).run(drifted, tmp_path / "c")
    assert "ranks 0 and 1 should have copies of 1.weight, which are apart by 1.0e-03 of their norm (1 param" in first
    assert second == ""
    assert torch.equal(saved, other)
    assert any(torch.equal(saved, copy) for copy in copies)


def save_cut_elsewhere(rank: int, world: int, path: Path) -> str:
    """Stages of two ranks and of one, which is alone with its whole weights."""
    grid = mesh((world,), ("all",))
    model = stage(rank // 2, quantized=True)
    first = torch.distributed.device_mesh.DeviceMesh(grid.device_type, [0, 1])
    if rank < 2:
        fsdp2.fully_shard(model, mesh=first)
    return outcome(lambda: checkpoints.save(path, model=model))


def test_stages_of_other_sizes_are_refused(ranks, tmp_path: Path) -> None:
    messages = ranks(3).run(save_cut_elsewhere, tmp_path / "c")
    assert len(set(messages)) == 1
    assert messages[0].startswith(REFUSED), messages[0]
    assert "0.weight (ranks 0 and 2)" in messages[0]


def save_changed(rank: int, world: int, path: Path, how: str) -> str:
    """Copies of a model with parameters of other kinds; ranks change one of them each in its own way."""
    model = stage(0, quantized=False)
    model.scale = nn.Parameter(torch.zeros(WIDTH, device=device()))
    model.place = nn.Parameter(torch.zeros(1, dtype=torch.int64, device=device()), requires_grad=False)
    own = torch.randn(WIDTH, generator=torch.Generator().manual_seed(rank)).to(device())
    with torch.no_grad():
        match how:
            case "drift from zero":
                model.scale.copy_(own * 1e-6)
            case "trained apart from zero":
                model.scale.copy_(own)
            case "another sign of zero":
                model.scale.copy_(torch.zeros_like(own) * (-1) ** rank)
            case "what a rank knows of itself":
                model.place.fill_(rank)
            case "other weights, one of them infinite":
                model.scale.copy_(own)
                model.scale[0] = float("nan") if rank else float("inf")
            case "odd rows":
                model[0].weight[1::2] = own
    return outcome(lambda: checkpoints.save(path, model=model))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("drift from zero", "should have copies of scale"),
        ("trained apart from zero", REFUSED),
        ("another sign of zero", ""),
        ("what a rank knows of itself", ""),
        ("other weights, one of them infinite", REFUSED),
        ("odd rows", REFUSED),
    ],
)
def test_what_copies_are_is_told_by_their_values(ranks, tmp_path: Path, how: str, said: str) -> None:
    message, other = ranks(2).run(save_changed, tmp_path / "c", how)
    assert said in message if said else message == "", message
    assert other == (message if said == REFUSED else "")
