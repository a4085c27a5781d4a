"""Tensors as the compiled CPU kernels see them."""

from __future__ import annotations

import pytest
import torch

from te_dist import _C


def test_a_tensor_on_another_device_is_refused_before_its_address_is_read():
    elsewhere = torch.empty(4, 4, device="meta")
    with pytest.raises(ValueError, match="got a tensor on meta, wanted all of them on the CPU"):
        _C.transpose(torch.zeros(4, 4), 32, elsewhere, 1)
