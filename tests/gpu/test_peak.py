"""Bytes of parameters that are allocated at once: predicted, and by the statistics of CUDA's allocator.

One process stands for a rank, and collectives move nothing: what is allocated does not depend on what arrives.
"""

from __future__ import annotations

import gc

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from te_dist import fsdp2
from te_dist._torch_private import pretended_ranks
from tests.distributed.probe import FORMATS
from tests.distributed.test_peak import TOKENS, build

pytestmark = pytest.mark.gpu

FACTOR = 20  # a plane of codes has 14 MiB and more, its scales 0.4 MiB where they are finest
# What torch's own kernels allocate for the time of a launch (sizes and addresses of many tensors), and activations.
SLACK = 128 * 1024


@pytest.mark.parametrize("how", ["ours", "kept", "recompute", "experts"])
@pytest.mark.parametrize("name", FORMATS)
def test_peak_is_the_predicted_one(name: str, how: str) -> None:
    with pretended_ranks(4, 0):
        mesh = init_device_mesh("cuda", (4,), mesh_dim_names=("shard",))
        model = build(name, how, mesh, factor=FACTOR)
        predicted = fsdp2.peak_bytes(fsdp2.footprints(model))
        x = torch.ones(TOKENS, 1, device="cuda", requires_grad=True)
        dy = torch.ones(TOKENS, 1, device="cuda")
        model(x).backward(dy)  # the first step compiles kernels and makes streams
        gc.collect()  # what earlier tests left would be freed in the midst of this one
        torch.cuda.synchronize()
        idle = requested("current")
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            y = model(x)
            assert_close(requested("peak") - idle, predicted.forward - predicted.idle)
            assert_close(requested("current") - idle, predicted.between - predicted.idle)
            torch.cuda.reset_peak_memory_stats()
            y.backward(dy)
            assert_close(requested("peak") - idle, predicted.backward - predicted.idle)
            del y
            assert_close(requested("current") - idle, 0)


def requested(when: str) -> int:
    """Bytes that were asked for: blocks may be larger, by up to a MiB where one was not worth splitting."""
    return torch.cuda.memory_stats()[f"requested_bytes.all.{when}"]


def assert_close(seen: int, predicted: int) -> None:
    """Nothing less than predicted, and no more than torch takes for itself."""
    assert predicted <= seen <= predicted + SLACK, f"{seen} bytes, predicted {predicted} and at most {SLACK} more"
