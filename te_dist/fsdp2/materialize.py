"""Initialization that does not depend on how a model is sharded.

Each parameter is initialized whole, one at a time, from a generator seeded by (seed, name); its scales are those of
the whole; then it is cut. Names are those the author gave: wrapping for torch.compile or recomputation changes no
value. On one kind of device the result is bit for bit the same for every mesh and world size.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from te_dist._torch_private import given_name
from te_dist.fsdp2.check import warn_of_others
from te_dist.grouped import place_whole


@torch.no_grad()
def materialize(
    model: nn.Module,
    *,
    device: torch.device | str,
    seed: int,
    initialize: Callable[[nn.Module], object] | None = None,
) -> None:
    """Allocates all parameters and buffers of `model` on `device` and initializes them.

    A module that has `init_parameter(name, tensor)` fills each whole tensor in turn; any other one is asked for
    `reset_parameters()`, or handed to `initialize`, with its own parameters whole in place. Not collective.

    Args:
        model: on meta or anywhere, sharded or not; every parameter is initialized anew, one that modules share by the
            first of them.
        device: where parameters go.
        seed: any integer; equal seeds give equal models.
        initialize: rule of the library that the model is from, such as `_init_weights` of a Hugging Face model; fills
            the parameters and buffers of one module, not those of its children. What `te_dist.convert` has exchanged is
            handed to it as the module that was there before.

    Raises:
        ValueError: a module has parameters or buffers and no way to initialize them, or `initialize` left parameters
            without values.
    """
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()  # what a pass left gathered is no parameter
    warn_of_others(model, stacklevel=4)  # where this is called, past torch's decorator
    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        _allocate(model, device)
    done: set[int] = set()
    for prefix, module in model.named_modules():
        own = {n: p for n, p in module.named_parameters(recurse=False) if id(p) not in done}
        done |= {id(p) for p in own.values()}
        if own or any(True for _ in module.buffers(recurse=False)):
            if initialize is None or _has_rule_of_its_own(module):
                _initialize(module, given_name(prefix), own, seed)
            else:
                _initialize_by(initialize, module, given_name(prefix), own, seed)


def _has_rule_of_its_own(module: nn.Module) -> bool:
    """Whether it is none of the library's that the model is from."""
    return hasattr(module, "init_parameter") and not getattr(module, "exchanged", ())


def _allocate(model: nn.Module, device: torch.device | str) -> None:
    """`to_empty`, which makes a tensor for each place; what modules share they share afterwards."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(param), []).append((module, name))
    model.to_empty(device=device)
    for (module, name), *others in places.values():
        for other, its_name in others:
            if getattr(other, its_name) is not getattr(module, name):
                other.register_parameter(its_name, getattr(module, name))


def _initialize(module: nn.Module, prefix: str, own: dict[str, nn.Parameter], seed: int) -> None:
    if hasattr(module, "init_parameter"):
        for name, param in own.items():
            whole = _whole(param)
            with _seeded(seed, f"{prefix}.{name}", whole.device):
                module.init_parameter(name, whole)
            place_whole(param, whole)
    if hasattr(module, "init_parameter") and not any(True for _ in module.buffers(recurse=False)):
        return
    if not hasattr(module, "reset_parameters"):
        raise ValueError(
            f"{prefix or 'the root module'} ({type(module).__name__}) has {sorted(own) or 'buffers'} and neither "
            "init_parameter nor reset_parameters; pass initialize=, the rule of the library that it is from "
            "(model._init_weights of transformers), give it a reset_parameters() that initializes them (assigned "
            "to the module, where the class is somebody else's), or build the model on a device and leave this call out"
        )
    every = dict(module.named_parameters(recurse=False))  # with what an earlier module has initialized
    with _whole_in_place(module, every) as wholes, _seeded(seed, prefix, _device(module)):
        module.reset_parameters()
    _place(wholes, own)


def _initialize_by(
    initialize: Callable[[nn.Module], object], module: nn.Module, prefix: str, own: dict[str, nn.Parameter], seed: int
) -> None:
    (known,) = getattr(module, "exchanged", ()) or (module,)
    every = dict(module.named_parameters(recurse=False))
    with _whole_in_place(known, every) as wholes, _seeded(seed, prefix, _device(module)):
        for whole in wholes.values():
            whole.fill_(math.nan if whole.is_floating_point() else 0)
        initialize(known)
    left = [name for name in own if wholes[name].isnan().any()]
    if left:
        raise ValueError(
            f"{prefix or 'the root module'} ({type(known).__name__}): initialize left {left} without values; have it "
            "fill these, or give the module a reset_parameters() and call materialize without initialize"
        )
    _place(wholes, own)


def _place(wholes: dict[str, Tensor], own: dict[str, nn.Parameter]) -> None:
    for name, param in own.items():
        place_whole(param, wholes[name])


def _device(module: nn.Module) -> torch.device:
    return next(t.device for t in (*module.parameters(recurse=False), *module.buffers(recurse=False)))


def _whole(param: nn.Parameter) -> Tensor:
    return torch.empty(param.shape, dtype=param.dtype, device=param.device)


@contextmanager
def _whole_in_place(module: nn.Module, every: dict[str, nn.Parameter]) -> Iterator[dict[str, Tensor]]:
    """Plain parameters of whole size in the place of the module's own."""
    wholes = {name: _whole(param) for name, param in every.items()}
    before = {name: module._parameters[name] for name in every}
    try:
        for name, whole in wholes.items():
            module.register_parameter(name, nn.Parameter(whole, requires_grad=False))
        yield wholes
    finally:
        for name, param in before.items():
            module.register_parameter(name, param)


@contextmanager
def _seeded(seed: int, name: str, device: torch.device) -> Iterator[None]:
    """torch's generators, seeded by (seed, name) and put back afterwards."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    devices = [device] if device.type != "cpu" else []
    with torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        yield
