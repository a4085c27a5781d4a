"""Units whose mesh is one rank, of parameters that another parallelism has cut.

[Note: Units of one rank]
Experts that lie over all ranks are wrapped over a mesh of one, as are parts of layers without data parallelism. FSDP2
would copy such parameters before each pass, and their gradients twice, though there is nobody to gather from. They are
left as they are: DTensors of the other mesh, whose gradients are added by autograd. Parameters that nobody has cut
become DTensors by this, and are left to torch; so is what is cast, offloaded, or has a placement of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor


def left_alone(params: Iterable[nn.Parameter], mesh: DeviceMesh, options: Mapping[str, Any]) -> list[nn.Parameter]:
    """Those of `params` that FSDP2 has nothing to do with, given the keywords of torch's `fully_shard`."""
    policy = options.get("mp_policy") or MixedPrecisionPolicy()
    if mesh.size() > 1 or type(options.get("offload_policy", OffloadPolicy())) is not OffloadPolicy:
        return []
    return [
        param
        for param in params
        if isinstance(param, DTensor) and {policy.param_dtype, policy.reduce_dtype} <= {None, param.dtype}
    ]


class _Settings:
    """Refuses what nobody would do: FSDP2 does not see the gradients of this unit."""

    def set_gradient_divide_factor(self, factor: float) -> NoReturn:
        """Raises ValueError."""
        self._refuse("set_gradient_divide_factor")

    def set_reduce_scatter_divide_factor(self, factor: float) -> NoReturn:
        """Raises ValueError."""
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


def refuse_settings(modules: Iterable[nn.Module]) -> None:
    """Has modules of a unit, of which parameters were left alone, refuse what concerns gradients that FSDP2 reduces."""
    for each in modules:
        cls = type(each)
        each.__class__ = type(cls.__name__, (_Settings, cls), {})
