"""How other programs name and lay out quantized weights that one of our formats holds already."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from te_dist import catalog
from te_dist.formats import Encoding, Format


@dataclass(frozen=True)
class Convention:
    """Rowwise fields of a weight, as tensors of another program.

    Attributes:
        formats: whose rowwise direction it is.
        suffixes: by field name, what is appended to the name of the weight.
        dtypes: by field name, as what its bytes are read; those not named keep their dtype.
    """

    formats: tuple[Format, ...]
    suffixes: dict[str, str]
    dtypes: dict[str, torch.dtype]

    def accepts(self, encoding: Encoding | None) -> bool:
        """Whether bytes of this encoding are stored as they are."""
        return any(format.rowwise == encoding for format in self.formats)


# What inference engines load as block-quantized FP8: `weight`, and `weight_scale_inv` of one value for 128 x 128 codes.
FP8_BLOCK = Convention(
    formats=(catalog.float8_block(2), catalog.float8_block(2, pow2=False)),
    suffixes={"row_data": "", "row_scale": "_scale_inv"},
    dtypes={"row_data": torch.float8_e4m3fn},
)


def names_a_scale(key: str) -> bool:
    """Whether a tensor of this name is what a convention stores beside the codes of a weight."""
    return any(key.endswith(suffix) for suffix in FP8_BLOCK.suffixes.values() if suffix)
