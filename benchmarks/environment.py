"""What a figure needs beside it: machine, versions, commit."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import torch


def describe() -> dict[str, str]:
    """Machine, versions and commit of this process."""
    facts = {
        "cpu": _cpu(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": _commit(),
    }
    if torch.cuda.is_available():
        facts |= {"gpu": torch.cuda.get_device_name(), "driver": _driver(), "cuda": str(torch.version.cuda)}
    return facts


def _cpu() -> str:
    """Model and number of cores."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.processor()}, {len(models) or 1} cores"


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    run = subprocess.run(command, check=False, capture_output=True, text=True, cwd=Path(__file__).parent)
    return run.stdout.strip() or "unknown"
