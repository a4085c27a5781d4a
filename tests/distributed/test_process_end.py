"""How processes end whose mesh is still referenced."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import pathlib
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import te_dist

store = dist.FileStore(str(pathlib.Path(__file__).with_name("store")), 2)
dist.init_process_group("gloo", store=store, rank=int(sys.argv[1]), world_size=2)
mesh = init_device_mesh("cpu", (2,))
for _ in range(50):
    dist.all_reduce(torch.ones(64), group=mesh.get_group())
dist.destroy_process_group()
"""


@pytest.mark.exhaustive  # two processes that take seconds to start
def test_gloo_does_not_abort_a_process_that_ends(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ranks = [subprocess.Popen([sys.executable, str(program), str(rank)], stderr=subprocess.PIPE) for rank in range(2)]
    for rank in ranks:
        _, errors = rank.communicate(timeout=60)
        assert rank.returncode == 0, errors.decode()
