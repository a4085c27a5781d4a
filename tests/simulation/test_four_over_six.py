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
RULES = [("mae", 448), ("mse", 256), ("mae", 256), ("mse", 448)]
RARE = [((side,), (0, 0)) for side in ("row", "col")] + [(("row", "col"), (8, 4))]
PLACES = [(("row", "col"), (0, 0)), *(pytest.param(place, marks=pytest.mark.exhaustive) for place in RARE)]
EVEN = {256: 6.0, 448: 10.5}  # amaxes of a tensor by which tiles up to 6 have scales without rounding: 256, and 384


def _normal() -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(3))


def _between_two_grids() -> Tensor:
    """Every tile errs as much by either of two scales that are not rounded: 1.5 and 3 are codes of both."""
    generator = torch.Generator().manual_seed(4)
    of_both = torch.tensor([0.0, 1.3125, 1.375, 1.4375, 2.75, 3.125, 3.25])
    values = of_both[torch.randint(0, len(of_both), SHAPE, generator=generator)]
    row, col = (torch.arange(extent) for extent in SHAPE)
    return torch.where((row[:, None] - col) % 16 == 0, 6.0, values)


def _unlike() -> Tensor:
    """Tiles of all sizes down to zero, and what is no number."""
    values = _normal() * 2.0 ** -torch.arange(SHAPE[1]).div(6, rounding_mode="floor")
    values[5, ::37], values[77, 40], values[100, 41] = torch.nan, torch.inf, -torch.inf
    values[16:64, 32:96] = 0.0
    return values


VALUES = {
    "normal": _normal,
    "between two grids": _between_two_grids,
    "of one size": lambda: torch.full(SHAPE, -0.7),
    "tiny": lambda: _normal() * 2.0**-70,
    "huge": lambda: _normal() * 2.0**70,
    "small": lambda: _normal() * 2.0**-41,
    "large": lambda: _normal() * 2.0**37,
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


def _amax(x: Tensor, values: str, e4m3_max: int) -> Tensor:
    """Of the tensor, which may be larger than what `x` has of it."""
    if values == "between two grids":
        return torch.tensor([[EVEN[e4m3_max]]])
    found = x.float().nan_to_num(0.0, 0.0, 0.0).abs().amax().reshape(1, 1)
    return found.zero_() if values == "of a tensor of zeros" else found


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: "{}-{}".format(*rule))
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_bytes_are_those_of_the_cpu(values, tiles, rule, place, request) -> None:
    (error, e4m3_max), (sides, phase) = rule, place
    x = VALUES[values]().bfloat16()
    amax, more = _amax(x, values, e4m3_max), 1.125 if values == "unlike" else 1.0  # by columns
    given = dict(phase=phase, e4m3_max=e4m3_max, four_over_six=error, rng_state=None)
    for side in sides:
        tile, of_columns = TILES[tiles][side], side == "col"
        given |= {f"{side}_tile": tile, f"{side}_tensor_amax": amax * more if of_columns else amax}
        if phase != (0, 0):  # tiles are cut: others have their larger values
            larger = (1.5 if of_columns else 1.25) * float(amax)
            given[f"{side}_amax"] = torch.full(grid_shape(SHAPE, phase, tile), larger)
    want, got = _planes(sides, phase), _planes(sides, phase)
    ops.quantize_nvfp4(x, **given, **want)
    request.getfixturevalue("simulated")
    ops.quantize_nvfp4(x, **given, **got)
    for name, plane in got.items():
        assert_same(plane, want[name], name)
