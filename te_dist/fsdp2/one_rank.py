"""Units whose mesh is one rank, of parameters that another parallelism has cut.

[Note: Units of one rank]
Experts that lie over all ranks are wrapped over a mesh of one, as are parts of layers without data parallelism. FSDP2
would copy such parameters before each pass, and their gradients twice, though there is nobody to gather from. They are
left as they are: DTensors of the other mesh, whose gradients are added by autograd. Parameters that nobody has cut
become DTensors by this, and are left to torch; so are those that ranks have whole, as norms of parts of a sequence,
whose gradients FSDP2 adds up, and what is cast, offloaded, or has a placement of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor


class _Left(NamedTuple):
    """What a unit has left alone.

    Attributes:
        units: the modules that were wrapped.
        name: of the unit, for messages.
        places: modules in it and names of their parameters. (No references to these, which `swap_tensors` refuses.)
    """

    units: tuple[weakref.ref[nn.Module], ...]
    name: str
    places: tuple[tuple[weakref.ref[nn.Module], str], ...]

    def parameters(self) -> Iterator[int]:
        """Their ids as they are now."""
        return (id(getattr(module, name, None)) for ref, name in self.places if (module := ref()) is not None)


_left: weakref.WeakKeyDictionary[nn.Module, _Left] = weakref.WeakKeyDictionary()  # by modules of a unit


def left_alone(params: Iterable[nn.Parameter], mesh: DeviceMesh, options: Mapping[str, Any]) -> list[nn.Parameter]:
    """Those of `params` that FSDP2 has nothing to do with, given the keywords of torch's `fully_shard`."""
    policy = options.get("mp_policy") or MixedPrecisionPolicy()
    if mesh.size() > 1 or type(options.get("offload_policy", OffloadPolicy())) is not OffloadPolicy:
        return []
    return [
        param
        for param in params
        if isinstance(param, DTensor)
        and all(placement.is_shard() for placement in param.placements)
        and {policy.param_dtype, policy.reduce_dtype} <= {None, param.dtype}
    ]


def check_left(
    params: Iterable[tuple[str, nn.Parameter]], modules: Sequence[nn.Module], left: Iterable[nn.Parameter]
) -> None:
    """Checks parameters, by name, of a unit of `modules` that leaves some alone, `left`, for what other units left.

    Raises:
        ValueError: a unit around this one, or this one before, has left a parameter alone; or another has, and this one
            does not: it would shard and update a copy.
    """
    now, others = {id(param) for param in left}, {param: each for each in _left.values() for param in each.parameters()}
    for name, param in params:
        before = others.get(id(param))
        if before is None:
            continue
        units = [unit for reference in before.units if (unit := reference()) is not None]
        if any(each in modules for unit in units for each in unit.modules()):
            raise ValueError(
                f"{name} was wrapped by fully_shard already, with the same module or one around it ({before.name}), "
                "got it to wrap once more, wanted what no unit has; call fully_shard once for each module: for the "
                "blocks first, then for the module around them"
            )
        if id(param) not in now:
            raise ValueError(
                f"{name} is tied to a parameter of {before.name}, a unit over one rank that left it as it was: FSDP2 "
                "would shard and update each on its own; wrap both alike, or as one unit"
            )


def note_left(params: Iterable[nn.Parameter], modules: Sequence[nn.Module]) -> None:
    """Says that a unit of `modules` has left these alone."""
    wanted = {id(param) for param in params}
    if not wanted:
        return
    places = {
        (weakref.ref(inner), name)
        for each in modules
        for inner in each.modules()
        for name, param in inner.named_parameters(recurse=False)
        if id(param) in wanted
    }
    name = type(modules[0]).__name__.removeprefix("FSDP")
    _left.update(dict.fromkeys(modules, _Left(tuple(map(weakref.ref, modules)), name, tuple(places))))


def left_by(modules: Sequence[nn.Module]) -> set[int]:
    """Ids of the parameters that a unit of `modules` has left alone."""
    return set(_left[modules[0]].parameters()) if modules[0] in _left else set()
