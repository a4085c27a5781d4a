"""Every environment variable te_dist reads: name, type, default, meaning. No other module reads the environment.

A variable is read when it is asked for, not at import, so that a launcher or a test may still set it:

    from te_dist import env

    rank = env.RANK.get()
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One environment variable.

    Attributes:
        name: name in the environment.
        parse: text to value; raises `ValueError` for text that is none.
        default: text that is taken where the variable is unset or empty.
        meaning: one sentence for the user.
    """

    name: str
    parse: Callable[[str], T]
    default: str
    meaning: str

    def get(self) -> T:
        """The value in the environment of this moment, or the default."""
        text = os.environ.get(self.name, "")
        try:
            return self.parse(text or self.default)
        except ValueError as error:
            found = f"{self.name}={text!r}" if text else f"{self.name}, unset, means {self.default!r}"
            remedy = "unset it or correct it" if text else "set it"
            raise ValueError(f"environment variable {found}: {error}; {remedy}") from None


def _integer(text: str) -> int:
    """A number of 0 or more."""
    if not text.isdecimal():
        raise ValueError("wants a whole number of 0 or more")
    return int(text)


def _flag(text: str) -> bool:
    """Yes or no, as 1 or 0."""
    if text not in ("0", "1"):
        raise ValueError("wants 1 (yes) or 0 (no)")
    return text == "1"


def _folder(text: str) -> Path:
    """A path, which may begin with ~."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ValueError(f"no home directory is known for {Path(text).parts[0]}, wants the path of a folder") from None


RANK = Variable("RANK", _integer, "0", "Rank of this process among all processes; torchrun sets it.")
WORLD_SIZE = Variable("WORLD_SIZE", _integer, "1", "Number of processes; torchrun sets it.")
LOCAL_RANK = Variable("LOCAL_RANK", _integer, "0", "Rank of this process on its host, and its GPU; torchrun sets it.")
NODES = Variable("GROUP_WORLD_SIZE", _integer, "1", "Number of nodes; torchrun sets it.")
RESTARTS = Variable(
    "TORCHELASTIC_RESTART_COUNT", _integer, "0", "How often a node has started its processes again; torchrun sets it."
)
MAX_RESTARTS = Variable("TORCHELASTIC_MAX_RESTARTS", _integer, "0", "How often it may; torchrun sets it.")
LAUNCH = Variable("TORCHELASTIC_RUN_ID", str, "none", "Name of a launch (--rdzv-id); torchrun sets it.")
OWN_STORES = Variable(
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
    _flag,
    "0",
    "1: processes that are started again meet in a store of their own; the files for nodes in `launch/` set it.",
)
SHARED_GPUS = Variable(
    "NCCL_MULTI_RANK_GPU_ENABLE",
    _flag,
    "0",
    "1: NCCL from 2.30 lets several ranks use one GPU, and the pools of `te_dist.testing` then need only one.",
)
KERNEL_CACHE = Variable(
    "TE_DIST_KERNEL_CACHE",
    _folder,
    "~/.cache/te_dist/kernels",
    "Folder of compiled CUDA kernels; many processes and hosts may share it.",
)
UNMEASURED_KERNELS = Variable(
    "TE_DIST_UNMEASURED_KERNELS",
    _flag,
    "0",
    "1 allows kernels for architectures on which te_dist has never been run (sm_100); they are refused otherwise.",
)


def variables() -> tuple[Variable, ...]:
    """All variables, in the order of this file."""
    return tuple(value for value in globals().values() if isinstance(value, Variable))
