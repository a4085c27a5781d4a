"""Registration of the ops: schema, kernels, fake implementation.

[Note: Ops under selective checkpointing]
torch's selective checkpointing keeps what an op returned and leaves the op out when forward runs again. An op that
writes into its arguments returns nothing: its outputs would stay memory that nobody wrote. So all of them are among the
ops that no policy is asked about, which run in both passes; and with them the collectives that maps call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import SAC_IGNORED_OPS

from te_dist.kernels.runtime import is_recording

LIBRARY = torch.library.Library("te_dist", "DEF")


def register(schema: str, cpu: Callable[..., None] | None, cuda: Callable[..., None]) -> None:
    """Defines an op that writes into its arguments and returns nothing. Without `cpu` it raises on CPU tensors."""
    name = define_writing(schema)
    LIBRARY.impl(name, cpu or _refuse_on_cpu(name), "CPU")
    LIBRARY.impl(name, _on_one_device(schema, cuda), "CUDA")
    torch.library.register_fake(f"te_dist::{name}", _rehearsed(name, cuda), lib=LIBRARY)


def define_writing(schema: str) -> str:
    """Defines an op that returns nothing, still without kernels; its name.

    See [Note: Ops under selective checkpointing].
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    SAC_IGNORED_OPS.add(getattr(torch.ops.te_dist, name).default)
    return name


def _on_one_device(schema: str, cuda: Callable[..., None]) -> Callable[..., None]:
    """`cuda`, which reads addresses and so trusts that all of them are on the GPU of the first tensor."""
    name, _, rest = schema.partition("(")
    declared = rest[: rest.rindex(") ->")].split(", ")
    single = [i for i, argument in enumerate(declared) if argument.startswith("Tensor") and "[]" not in argument]
    lists = [i for i, argument in enumerate(declared) if argument.startswith("Tensor") and "[]" in argument]

    def checked(*args: Any) -> None:
        devices = {args[i].get_device() for i in single if args[i] is not None}
        for i in lists:
            devices.update(tensor.get_device() for tensor in args[i])
        if len(devices) > 1:
            raise _apart(name, ("cpu" if device < 0 else f"cuda:{device}" for device in sorted(devices)))
        cuda(*args)

    return checked


def _apart(name: str, devices: Iterable[str]) -> ValueError:
    """The error of an op whose tensors are on several devices."""
    return ValueError(f"{name}: got tensors on {', '.join(devices)}, wanted all of them on one device; move them")


def _refuse_on_cpu(name: str) -> Callable[..., None]:
    def refuse(*_: object) -> None:
        raise NotImplementedError(f"te_dist.ops.{name} runs on CUDA, got CPU tensors; move them to a GPU")

    return refuse


def _rehearsed(name: str, cuda: Callable[..., None]) -> Callable[..., None]:
    def fake(*args: Any) -> None:
        """Outputs are arguments: there is nothing to make up. See [Note: Kernels ahead of time]."""
        if is_recording():
            return cuda(*args)
        given = [each for arg in args for each in (arg if isinstance(arg, (list, tuple)) else (arg,))]
        devices = {str(each.device) for each in given if isinstance(each, Tensor)}
        if "meta" in devices and len(devices) > 1:  # one tensor there leads here, whatever the others are
            raise _apart(name, sorted(devices))
        return None

    return fake
