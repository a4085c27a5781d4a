"""NVFP4 whose tiles choose between two scales, simulated: the bytes of the CPU, also where both lose about the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_dist import ops
from te_dist.ops._checks import grid_shape
from tests.gpu.twins import assert_same

SHAPE = (144, 288)
TILES = {"runs": {"row": (1, 16), "col": (16, 1)}, "squares": {"row": (16, 16), "col": (16, 16)}}
E4M3_MAX = {"mae": 448, "mse": 256}
RARE = [((side,), (0, 0)) for side in ("row", "col")] + [(("row", "col"), (8, 4))]
PLACES = [(("row", "col"), (0, 0)), *(pytest.param(*place, marks=pytest.mark.exhaustive) for place in RARE)]


def _normal() -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(3))


def _of_both_grids() -> Tensor:
    """Multiples of two thirds of a code too: many tiles lose the same by both scales, or nothing."""
    generator = torch.Generator().manual_seed(4)
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])[torch.randint(0, 8, SHAPE, generator=generator)]
    rare = torch.rand(SHAPE, generator=generator) < 0.05
    sizes = 2.0 ** torch.randint(-3, 3, (SHAPE[0], 1), generator=generator)
    return torch.where(rare, values / 1.5, values) * sizes


def _unlike() -> Tensor:
    """Tiles of all sizes down to zero, and what is no number."""
    values = _normal() * 2.0 ** -torch.arange(SHAPE[1]).div(6, rounding_mode="floor")
    values[5, ::37], values[77, 40], values[100, 41] = torch.nan, torch.inf, -torch.inf
    values[16:64, 32:96] = 0.0
    return values


VALUES = {
    "normal": _normal,
    "of both grids": _of_both_grids,
    "of one size": lambda: torch.full(SHAPE, -0.7),
    "tiny": lambda: _normal() * 2.0**-70,
    "huge": lambda: _normal() * 2.0**70,
    "unlike": _unlike,
    "zeros": lambda: torch.zeros(SHAPE),
    "of a tensor of zeros": _normal,
}


def _planes(sides: tuple[str, ...], phase: tuple[int, int]) -> dict[str, Tensor]:
    planes = {}
    for side in sides:
        rows, cols = SHAPE if side == "row" else SHAPE[::-1]
        planes[f"{side}_data"] = torch.zeros(rows, cols // 2, dtype=torch.uint8)
        planes[f"{side}_scale"] = torch.zeros(grid_shape(SHAPE, phase, TILES["runs"][side]), dtype=torch.uint8)
    return planes


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("error", E4M3_MAX)
@pytest.mark.parametrize(("sides", "phase"), PLACES)
def test_bytes_are_those_of_the_cpu(values, tiles, error, sides, phase, request) -> None:
    x = VALUES[values]().bfloat16()
    more = 1.0 if values == "normal" else 1.125  # by columns
    amax = x.float().nan_to_num(0.0, 0.0, 0.0).abs().amax().reshape(1, 1)
    if values == "of a tensor of zeros":  # its amax was found before
        amax.zero_()
    rule = dict(phase=phase, e4m3_max=E4M3_MAX[error], four_over_six=error, rng_state=None)
    for side in sides:
        tile = TILES[tiles][side]
        rule |= {f"{side}_tile": tile, f"{side}_tensor_amax": amax * (1.0 if side == "row" else more)}
        if phase != (0, 0):  # tiles are cut: others have their larger values
            rule[f"{side}_amax"] = torch.full(
                grid_shape(SHAPE, phase, tile), (1.25 if side == "row" else 1.5) * float(amax)
            )
    want, got = _planes(sides, phase), _planes(sides, phase)
    ops.quantize_nvfp4(x, **rule, **want)
    request.getfixturevalue("simulated")
    ops.quantize_nvfp4(x, **rule, **got)
    for name, plane in got.items():
        assert_same(plane, want[name], name)
