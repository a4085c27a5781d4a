"""Where parallel styles meet the modules that they are for: sites, parameters, inputs, layouts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from te_dist.tensor_parallel.cuts import SequenceCut
from te_dist.tensor_parallel.cutting import ColumnPlacement
from te_dist.tensor_parallel.gather import outside_of_graphs

SITE, WEIGHT, BIAS = "gemm", "weight", "bias"
_PLACED_TYPE = "linear"  # of the roles that a recipe is asked for: others have weights of other dimensions


class Around(NamedTuple):
    """What ranks send each other around the product of a map, of which each has a part.

    All take the site first, which in a copy of a module is another one.

    Attributes:
        before: (site, x, weight, bias) -> those that are multiplied.
        behind: (site, these, their product) -> the output.
        in_graph: (site, x, weight, bias) -> the output where compilers trace; None where it is none of a graph.
    """

    before: Callable[..., tuple[Tensor, Tensor, Tensor | None]]
    behind: Callable[..., Tensor]
    in_graph: Callable[..., Tensor | None]


def layout_of(name: str, given: Any, default: Placement) -> Placement:
    """`given`, or the default where that is None; raises TypeError where it is no placement."""
    if given is not None and not isinstance(given, Placement):
        raise TypeError(f"{name}: got {given!r}, wanted a placement of torch.distributed.tensor, as Shard(1)")
    return default if given is None else given


def change_input(
    module: nn.Module,
    change: Callable[[Any, Tensor], Tensor],
    *,
    in_graph: Callable[[Any, Tensor], Tensor | None],
) -> None:
    """Gives a module what `change` makes of it and its first input, which may be passed by its name.

    `in_graph` is the same where compilers trace; None where what it makes is none of a graph.
    """
    name = next(iter(inspect.signature(module.forward).parameters), "")

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if torch.compiler.is_compiling() and (args or name in kwargs):
            changed = in_graph(module, args[0] if args else kwargs[name])
            if changed is not None:
                return ((changed, *args[1:]), kwargs) if args else (args, kwargs | {name: changed})
        return outside(module, args, kwargs)

    @outside_of_graphs
    def outside(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if args:
            return (change(module, args[0]), *args[1:]), kwargs
        if name not in kwargs:
            raise TypeError(
                f"{type(module).__name__}: got {sorted(kwargs)} by name, wanted its first input, {name!r}, which a "
                "parallel style gathers or takes a part of; pass it by position"
            )
        return args, kwargs | {name: change(module, kwargs[name])}

    key = _key(module._forward_pre_hooks)
    module._forward_pre_hooks[key], module._forward_pre_hooks_with_kwargs[key] = before, True


def change_parameters(module: nn.Module, replace: Callable[..., None], put_back: Callable[..., None]) -> None:
    """Calls `replace` before forward passes of a module, and `put_back` behind them, also where one raises."""
    module.register_forward_pre_hook(replace)
    key = _key(module._forward_hooks)
    module._forward_hooks[key], module._forward_hooks_always_called[key] = put_back, True


def _key(hooks: Mapping[Any, Any]) -> Any:
    """By which a hook is known in a module.

    Graphs are guarded by keys of hooks that take keywords or are called always. Torch numbers all hooks of a process,
    and so modules that are alike would share no graph.
    """
    return f"te_dist.{sum(isinstance(key, str) for key in hooks)}"


def site_of(module: nn.Module, style: str) -> Any:
    """The submodule in which a linear module of te_dist multiplies."""
    site = getattr(module, SITE, None)
    if site is None or not hasattr(site, "placed") or site.module_type != _PLACED_TYPE:
        kind = type(module)
        raise ValueError(
            f"{style} is for te_dist's Linear and LayerNormLinear, got {kind.__module__.split('.')[0]}'s "
            f"{kind.__name__}; exchange torch's by te_dist.convert first, or use the styles of "
            "torch.distributed.tensor.parallel for it; for GroupedLinear use parallel_mode; build others from these two"
        )
    return site


def check_parameters(module: nn.Module, names: tuple[str, ...], style: str) -> None:
    """Raises where something would be lost if a style cut these parameters."""
    check_returned(module, style)
    for name in names:
        param = getattr(module, name)
        if param is not None and (param._backward_hooks or param._post_accumulate_grad_hooks):
            raise ValueError(
                f"{name_of(module)}.{name}: got a parameter with hooks, wanted one without, since these would be "
                f"lost; add them after {style} has cut it"
            )


def check_returned(module: nn.Module, style: str) -> None:
    """Raises where gradients of a module's weights are not returned to autograd."""
    if option := getattr(module, "bypasses_autograd", None):
        raise ValueError(
            f"{style}: got {type(module).__name__} with {option}, by which autograd sees no gradient of the weight "
            "that is cut, or summed over ranks; leave it out"
        )


def name_of(module: Any) -> str:
    """For messages."""
    return module.name or type(module).__name__


def others_of(module: nn.Module) -> list[str]:
    """Parameters of a linear module beside its weight and bias: those of a norm in front."""
    return [name for name, _ in module.named_parameters(recurse=False) if name not in (WEIGHT, BIAS)]


def local_of(x: Tensor, mesh: DeviceMesh, layout: Placement) -> tuple[Tensor, int | None]:
    """This rank's part of `x` in this layout; and, where a DTensor tells, the whole extent of the dimension cut."""
    if not isinstance(x, DTensor):
        return x, None
    size = x.shape[layout.dim] if isinstance(layout, Shard) else None
    return x.redistribute(mesh, [layout]).to_local(), size


def spread_of(local: Tensor, mesh: DeviceMesh, layout: Placement, *, shape: tuple[int, ...]) -> DTensor:
    """The DTensor of this shape whose part here is `local`."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [layout], run_check=False, shape=torch.Size(shape), stride=stride)


def cut_of(local: Tensor, mesh: DeviceMesh, dim: int, *, size: int | None) -> SequenceCut:
    """How a sequence of this `size`, or of equal parts, is cut, of which `local` is this rank's part."""
    return SequenceCut.of_local(tuple(local.shape), dim, num_parts=mesh.size(), size=size)


def column_parallel(module: nn.Module) -> list[Any]:
    """The layers of `module` of which each rank computes some outputs."""
    sites = ((layer, getattr(layer, SITE, None)) for layer in module.modules())
    return [layer for layer, site in sites if isinstance(getattr(site, "placed", None), ColumnPlacement)]
