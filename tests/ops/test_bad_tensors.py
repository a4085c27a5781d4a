"""Tensors that an op cannot take are named before anything is computed, without a GPU as well."""

from __future__ import annotations

import re

import pytest

from tests.gpu.each_op import of_each_op, tensors, with_tensor

pytestmark = pytest.mark.parametrize("call", of_each_op(), ids=lambda call: call.op.__name__)


def test_a_matrix_that_is_flat_is_named(call):
    for name in dict.fromkeys(name for name, tensor in tensors(call) if tensor.dim() == 2 and tensor.numel() > 1):
        with pytest.raises(ValueError, match=rf"^{re.escape(name).replace('_', '[._]')}.*: got "):
            with_tensor(call, name, lambda tensor: tensor.reshape(-1)).run()


def test_a_tensor_on_the_meta_device_beside_others_is_refused(call):
    for name in dict.fromkeys(name for name, _ in tensors(call)):
        with pytest.raises(ValueError, match="meta.* wanted all of them on one device|wanted one element on"):
            with_tensor(call, name, lambda tensor: tensor.to("meta")).run()
