"""How processes end whose mesh is still referenced."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import te_dist

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
for _ in range(50):
    dist.all_reduce(torch.ones(64), group=mesh.get_group())
dist.destroy_process_group()
"""


def test_gloo_does_not_abort_a_process_that_ends(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run([*launcher, str(program)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
