"""What `set_gradient_divide_factor` does to a unit whose gradients are not divided by FSDP2 alone.

[Note: Divided gradients]
FSDP2 divides sums of gradients by the number of ranks, or by a factor that it was told: 1, for instance, where losses
were divided by the tokens of all ranks. Of experts that lie over ranks, FSDP2 adds up what ranks with the same experts
have, and the experts what comes to them from other ranks; each divides by its own number. Told a factor, one of the two
divides by it and the other by 1: the experts where FSDP2 leaves them alone (see [Note: Units of one rank]), FSDP2
elsewhere. A module that divides has an attribute `divided_by`, whose `divide_by` takes the factor, None for the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from numbers import Real
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from te_dist import _torch_private
from te_dist.fsdp2.footprint import outside_of_units
from te_dist.fsdp2.one_rank import left_by


def note_divided(modules: Sequence[nn.Module]) -> None:
    """Has a unit of `modules` heed what divides, or reduces, gradients beside FSDP2."""
    if left_by(modules) or _dividing(modules):
        for each in modules:
            if isinstance(each, FSDPModule):
                each.__class__ = _heeding(type(each))


class _Heeding:
    """See [Note: Divided gradients]."""

    def set_gradient_divide_factor(self: Any, factor: float | None) -> None:
        """As in torch: gradients, added up over all ranks of the model, are divided by `factor`; None for the mean.

        Raises:
            ValueError: the factor is no positive number; or it is not 1, and FSDP2 sees no gradient of some parameters,
                and nor do experts.
        """
        modules = _torch_private.modules_of_unit(self)
        left, dividing = left_by(modules), _dividing(modules)
        if factor is not None and not (isinstance(factor, Real) and factor > 0):
            raise ValueError(
                f"set_gradient_divide_factor: got {factor!r}, wanted a positive number, or None for the mean"
            )
        others = left - {id(param) for each in dividing for param in each.parameters()}
        if others and factor not in (None, 1):
            raise _not_reduced("set_gradient_divide_factor", f"{factor}")
        super().set_gradient_divide_factor(factor)  # type: ignore[misc]
        reduced = {managed.module for managed in _torch_private.managed_parameters(self)}
        for each in dividing:
            is_reduced = any(inner in reduced for inner in each.modules())
            each.divided_by.divide_by(None if factor is None else 1 if is_reduced else factor)

    def set_all_reduce_hook(self: Any, hook: Any, **options: Any) -> None:
        """As in torch.

        Raises:
            ValueError: FSDP2 sees no gradient of some parameters.
        """
        if left_by(_torch_private.modules_of_unit(self)):
            raise _not_reduced("set_all_reduce_hook", f"{hook}")
        super().set_all_reduce_hook(hook, **options)  # type: ignore[misc]


def _dividing(modules: Sequence[nn.Module]) -> list[Any]:
    """Modules of a unit that divide gradients themselves."""
    found = (each for module in modules for _, each in outside_of_units(module))
    return [each for each in found if getattr(each, "divided_by", None) is not None]


def _not_reduced(name: str, got: str) -> ValueError:
    return ValueError(
        f"{name}: got {got} for a unit over a mesh of one rank, of parameters that another parallelism has cut; wanted "
        "one that reduces gradients: FSDP2 sees none of these. Change gradients in a hook (Tensor.register_hook), or "
        "wrap the module by torch's own fully_shard, which copies them"
    )


@cache  # compiled code asks for the class: blocks that are alike have one
def _heeding(cls: type) -> type:
    return type(cls.__name__, (_Heeding, cls), {})
