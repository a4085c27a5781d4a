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
from functools import cache
from typing import Any, NamedTuple, NoReturn

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy
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


_left: weakref.WeakKeyDictionary[nn.Module, _Left] = weakref.WeakKeyDictionary()  # by the first module of a unit


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
    """Says that a unit of `modules` has left these alone; it refuses what concerns gradients that FSDP2 reduces."""
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
    _left[modules[0]] = _Left(
        tuple(map(weakref.ref, modules)), type(modules[0]).__name__.removeprefix("FSDP"), tuple(places)
    )
    for each in modules:
        if isinstance(each, FSDPModule):
            each.__class__ = _refusing(type(each))


class _Settings:
    """Refuses what nobody would do: FSDP2 does not see the gradients of this unit."""

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Raises ValueError, unless the factor is 1, of one rank."""
        if factor != 1:
            self._refuse("set_gradient_divide_factor")

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Raises ValueError, unless the factor is 1."""
        if factor != 1:
            self._refuse("set_reduce_scatter_divide_factor")

    def set_all_reduce_hook(self, hook: Any, **options: Any) -> NoReturn:
        """Raises ValueError."""
        self._refuse("set_all_reduce_hook")

    def _refuse(self, name: str) -> NoReturn:
        raise ValueError(
            f"{name}: got a unit over a mesh of one rank, of parameters that another parallelism has cut; wanted one "
            "that reduces gradients: FSDP2 sees none of these. te_dist's ExpertParallel gives means over the experts' "
            "ranks by itself; otherwise multiply gradients in a hook (Tensor.register_hook), or wrap the module by "
            "torch's own fully_shard, which copies them"
        )


@cache  # compiled code asks for the class: blocks that are alike have one
def _refusing(cls: type) -> type:
    return type(cls.__name__, (_Settings, cls), {})
