"""Annotations are true, as far as a checker can tell; strictly so in te_dist/formats and te_dist/tensor."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
KNOWN = "2.13"  # version of torch whose annotations are known; those of others find other things


@pytest.mark.skipif(shutil.which("node") is None, reason="pyright runs on node, which is not installed")
@pytest.mark.skipif(not torch.__version__.startswith(KNOWN), reason=f"wants the annotations of torch {KNOWN}")
def test_annotations_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYRIGHT_PYTHON_IGNORE_WARNINGS", "1")  # of newer versions
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--project", str(ROOT)]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
