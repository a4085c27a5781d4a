"""Parallel styles for `parallelize_module` over the linear modules of te_dist.

    parallelize_module(block, mesh["tp"], {
        "attention": GatherInput("query"),                            # once, quantized, for all three projections
        "attention.query": ColumnParallel(), "attention.key": ColumnParallel(), "attention.value": ColumnParallel(),
        "attention.out": RowParallel(output_layouts=Shard(1)),
    })

[Note: What a style touches]
A style cuts parameters into DTensors and hooks the *site*, the submodule in which a linear module multiplies: that is
where a norm in front has run and where the recipe is known. Operands of which ranks hold parts are quantized by the
scales of the whole, so that a sharded model multiplies the same bytes as an unsharded one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from te_dist.context import autocast_of_torch
from te_dist.formats import Direction, Format
from te_dist.kernels.runtime import is_recording
from te_dist.tensor_parallel.cuts import SequenceCut, spans
from te_dist.tensor_parallel.cutting import ColumnPlacement, RowPlacement, cut_parameter
from te_dist.tensor_parallel.gather import (
    Quantization,
    all_reduce,
    gather_by,
    gather_values,
    outside_of_graphs,
    reduce_scatter,
    replicate,
    sums_gradient,
)
from te_dist.tensor_parallel.spread import FormatWriter

SITE, WEIGHT, BIAS = "gemm", "weight", "bias"
_PLACED_TYPE = "linear"  # of the roles that a recipe is asked for: others have weights of other dimensions


class ColumnParallel(ParallelStyle):
    """Each rank computes some of the outputs of a `Linear` or `LayerNormLinear`.

    Args:
        input_layouts: `Replicate()` (default), or `Shard(dim)` for sequence parallelism: the input is cut along that
            dimension, normalized in parts by a norm of the module, and gathered quantized. A plain tensor is taken to
            be this rank's part, as long as that of any other; a DTensor is brought to this layout first, and may be cut
            unevenly. What `gather`, `gather_values` and `GatherInput` make is taken as it is: they sum its gradient.
        output_layouts: `Shard(-1)` by default.
        use_local_output: whether the output is a plain tensor instead of a DTensor.
        gather_format: format in which the input is gathered; by default that of the recipe for inputs, and high
            precision outside of `autocast`.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        gather_format: Format | None = None,
    ) -> None:
        super().__init__()
        self.input_layouts = _layout("input_layouts", input_layouts, Replicate())
        self.output_layouts = _layout("output_layouts", output_layouts, Shard(-1))
        self.use_local_output = use_local_output
        self.gather_format = gather_format

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        site = _site_of(module, type(self).__name__)
        _check_parameters(module, (WEIGHT, BIAS), type(self).__name__)
        name, out_features = _name_of(module), module.weight.shape[0]
        cut = {
            key: cut_parameter(param, device_mesh, dim=0, name=f"{name}.{key}")
            for key, param in ((WEIGHT, module.weight), (BIAS, module.bias))
            if param is not None
        }
        for key, param in cut.items():
            module.register_parameter(key, param)
        site.placed = ColumnPlacement(spans(out_features, device_mesh.size()), device_mesh.get_group())
        others = _others(module)
        if others:
            _on_input(module, lambda _, x: self._part(x, device_mesh))
        if others and isinstance(self.input_layouts, Shard):
            sum_gradients(module, others, device_mesh)
        _hook(
            site,
            before=lambda site, args: (self._input(site, args, device_mesh), *args[1:]),
            behind=lambda site, args, out: self._output(out, out_features, device_mesh),
        )
        if module.return_bias and module.bias is not None and self.use_local_output:
            module.register_forward_hook(self._with_bias)
        return module

    def _part(self, x: Tensor, mesh: DeviceMesh) -> Tensor:
        """This rank's part of a module's input, for what runs before the multiplication."""
        if not isinstance(self.input_layouts, Shard) and sums_gradient(x, mesh.get_group()):
            raise ValueError(
                "a module with a norm: got an input that was gathered, whose gradient is summed over ranks, wanted one "
                "whose norm every rank may compute alike; gather behind a separate norm, or give it its part of the "
                "sequence, as Shard(1)"
            )
        local, size = _local(x, mesh, self.input_layouts)
        if size is not None and size % mesh.size():
            raise ValueError(
                f"a sequence of {size} over {mesh.size()} ranks: a module with a norm takes equal parts; pad the "
                "sequence, or use a separate norm and Linear"
            )
        return local

    def _input(self, site: Any, args: tuple[Any, ...], mesh: DeviceMesh) -> Tensor:
        if sums_gradient(args[0], mesh.get_group()):
            return args[0]
        local, size = _local(args[0], mesh, self.input_layouts)
        if not isinstance(self.input_layouts, Shard):
            if site.takes_gathered and torch.is_grad_enabled() and local.requires_grad:
                raise ValueError(
                    f"{site.name or 'Linear'}: got another input than GatherInput gathered like that of this layer, "
                    "whose gradient would be summed twice; wanted that one as it is: gather behind what is computed "
                    "of it, or name another layer"
                )
            return replicate(local, mesh.get_group())
        local = autocast_of_torch(local)
        directions = _read_directions(trains=args[1].requires_grad)
        if self.gather_format:
            how = Quantization.now(FormatWriter(self.gather_format), directions)
        elif plan := site.plan(local, args[1], notes=False):
            how = Quantization.of(plan, "input", directions, is_cut=True)
        else:
            return gather_values(local, mesh.get_group(), dim=self.input_layouts.dim, size=size)
        cut = _cut(local, mesh, self.input_layouts.dim, size)
        return gather_by(how, local, group=mesh.get_group(), cut=cut)

    def _output(self, out: Tensor, out_features: int, mesh: DeviceMesh) -> Tensor:
        held = Shard(out.dim() - 1)
        if self.use_local_output and self.output_layouts in (held, Shard(-1)):
            return out
        spread = _spread(out, mesh, held, (*out.shape[:-1], out_features))
        spread = spread.redistribute(placements=[self.output_layouts])
        return spread.to_local() if self.use_local_output else spread

    @outside_of_graphs
    def _with_bias(self, module: Any, args: Any, out: tuple[Any, ...]) -> tuple[Any, ...]:
        """What is returned, with as much of the bias as the output has columns."""
        return out if is_recording() else tuple(self._bias(x, out) if x is module.bias else x for x in out)

    def _bias(self, bias: DTensor, out: tuple[Any, ...]) -> Tensor:
        if self.output_layouts in (Shard(out[0].dim() - 1), Shard(-1)):
            return bias.to_local()
        whole = bias.redistribute(placements=[Replicate()])
        is_cut = isinstance(self.output_layouts, Shard)  # then each rank adds it to other rows
        return whole.to_local(grad_placements=[Partial() if is_cut else Replicate()])


class RowParallel(ParallelStyle):
    """Each rank multiplies some of the inputs of a `Linear`; the outputs are summed in high precision.

    Args:
        input_layouts: `Shard(-1)` by default: a plain tensor is taken to be this rank's columns; a DTensor is brought
            to that layout.
        output_layouts: `Replicate()` (default): every rank gets the sum; or `Shard(dim)` for sequence parallelism:
            each gets its part along that dimension, and the gradient is gathered quantized.
        use_local_output: whether the output is a plain tensor instead of a DTensor; parts of unequal size are DTensors,
            which tell how long the whole is.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__()
        self.input_layouts = _layout("input_layouts", input_layouts, Shard(-1))
        self.output_layouts = _layout("output_layouts", output_layouts, Replicate())
        self.use_local_output = use_local_output

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        site = _site_of(module, type(self).__name__)
        if _others(module):
            raise ValueError(
                f"{_name_of(module)} normalizes its input, of which RowParallel leaves each rank some columns; use a "
                "separate norm and Linear"
            )
        _check_parameters(module, (WEIGHT,), type(self).__name__)
        parts = spans(module.weight.shape[1], device_mesh.size())
        weight = cut_parameter(module.weight, device_mesh, dim=1, name=f"{_name_of(module)}.{WEIGHT}")
        module.register_parameter(WEIGHT, weight)
        site.placed = RowPlacement(parts, device_mesh.get_group())
        if module.bias is not None and isinstance(self.output_layouts, Shard):
            sum_gradients(module, [BIAS], device_mesh)  # each rank adds it to its part, or returns it for that
        vars(site)["biased"] = module  # and no submodule of it; copies of the module have copies of both
        _hook(
            site,
            before=lambda site, args: (self._input(args[0], device_mesh), args[1]),
            behind=lambda site, args, out: self._output(site.biased, args, out, device_mesh),
        )
        return module

    def _input(self, x: Tensor, mesh: DeviceMesh) -> Tensor:
        return _local(x, mesh, self.input_layouts)[0]

    def _output(self, module: Any, args: tuple[Any, ...], out: Tensor, mesh: DeviceMesh) -> Tensor:
        group, shape = mesh.get_group(), out.shape
        bias = None if module.return_bias else module.bias
        if isinstance(self.output_layouts, Shard):
            size = shape[self.output_layouts.dim]
            if self.use_local_output and size % mesh.size():
                raise ValueError(
                    f"{_name_of(module)}: got an output of {size} along dimension {self.output_layouts.dim} to cut "
                    f"into plain tensors over {mesh.size()} ranks, wanted a multiple, since layers behind take parts "
                    "for equal ones; give RowParallel use_local_output=False, as DTensors tell the whole size, or pad "
                    "the sequence"
                )
            gradients = _gradient_gather(getattr(module, SITE), args, out)
            out = reduce_scatter(out, group, dim=self.output_layouts.dim, gradients=gradients)
        else:
            out = all_reduce(out, group)
        out = out if bias is None else out + bias.to(out.dtype)
        return out if self.use_local_output else _spread(out, mesh, self.output_layouts, shape)


class GatherInput(ParallelStyle):
    """Gathers the first input of a module once, quantized, for all the `ColumnParallel` layers in it that take it.

    These take it whole, as it is: their `input_layouts` is `Replicate()`, the default. Its gradient is summed over
    ranks, inside and outside of `autocast`. So others may take it too whose output each rank uses in another way, as a
    key and value for all heads, with `SequenceParallel()` for the sum of their own gradients. None may that every rank
    computes alike, a norm for instance, whose gradient would be counted once for each rank, nor one that sums its
    gradient itself, as torch's `ColwiseParallel`: take `ColumnParallel`, with `output_layouts=Replicate()` where ranks
    use the whole output alike.

    Layers that keep histories (`DelayedScaling`) have the amax of what they take in theirs.

    Args:
        like: name of the layer, below the module, by whose input quantizer it is gathered: one that is trained, where
            any is.
        input_layouts: `Shard(dim)` along which the input is cut; `Shard(1)` by default, of (batch, sequence, K).
    """

    def __init__(self, like: str, *, input_layouts: Shard | None = None) -> None:
        super().__init__()
        self.like = like
        self.input_layouts = input_layouts or Shard(1)

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        layer = dict(module.named_modules()).get(self.like)
        if layer is None:
            raise ValueError(
                f"GatherInput({self.like!r}): there is none such below the {type(module).__name__}, wanted the name of "
                "a layer, as query, by whose input quantizer the input is gathered"
            )
        _site_of(layer, type(self).__name__).takes_gathered = True
        vars(module)["gathers_like"] = layer  # which may be wrapped later; copies of the module have copies of it
        _on_input(module, lambda module, x: self._input(module, x, device_mesh))
        return module

    def _input(self, module: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        local, size = _local(x, mesh, self.input_layouts)
        local = autocast_of_torch(local)
        layer = module.gathers_like
        site = getattr(layer, SITE)
        plan = site.plan(local, layer.weight, notes=False)
        if plan is None:
            return gather_values(local, mesh.get_group(), dim=self.input_layouts.dim, size=size)
        cut = _cut(local, mesh, self.input_layouts.dim, size)
        layers = (layer, *_column_parallel(module))
        trains = torch.is_grad_enabled() and any(each.weight.requires_grad for each in layers)
        how = Quantization.of(plan, "input", _read_directions(trains=trains), is_cut=site.placed is not None)
        if how.tensors and trains and not (local.requires_grad or layer.weight.requires_grad):
            raise ValueError(
                f"GatherInput({self.like!r}): got a layer whose weight and input are frozen, wanted one of those that "
                "train, since a recipe with histories (DelayedScaling) moves none of what is frozen"
            )
        gathered = gather_by(how, local, group=mesh.get_group(), cut=cut)
        if how.tensors:
            site.quantized_ahead(gathered)
        return gathered


class SequenceParallel(ParallelStyle):
    """For a module that each rank applies to its part of a sequence, as a norm: gradients of its parameters are summed.

    Those of modules inside are not, which may be cut over the ranks: name these.
    """

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        names = [name for name, _ in module.named_parameters(recurse=False)]
        inside = [name for name, _ in module.named_parameters()]
        if not names and inside:
            raise ValueError(
                f"SequenceParallel: got {type(module).__name__}, whose parameters are those of modules inside "
                f"({', '.join(inside[:3])}), wanted the modules that hold them: sums are of a module's own alone. Name "
                "each; of a MoE take ExpertParallel(sequence_mesh=mesh), over that mesh or one around it"
            )
        _check_returned(module, "SequenceParallel")
        sum_gradients(module, names, device_mesh)
        return module


def sum_gradients(module: nn.Module, names: list[str], mesh: DeviceMesh) -> None:
    """Makes the gradients of parameters of `module`, which every rank uses on other rows, sums over the mesh.

    In forward they are replaced by tensors whose gradient is summed: what FSDP2 put in their place stays as it is.
    Meanwhile `module.replaced` holds them.
    """

    @outside_of_graphs
    def replace(module: Any, args: Any) -> None:
        held: dict[str, Any] = {name: module._parameters[name] for name in names}
        for name, param in held.items():
            local = param.to_local() if isinstance(param, DTensor) else param
            module._parameters[name] = replicate(local, mesh.get_group())
        vars(module).setdefault("replaced", []).append(held)

    @outside_of_graphs
    def put_back(module: Any, args: Any, out: Any) -> None:
        if held := vars(module).get("replaced"):  # else another hook raised before
            module._parameters.update(held.pop())

    module.register_forward_pre_hook(replace)
    module.register_forward_hook(put_back, always_call=True)


def _layout(name: str, given: Any, default: Placement) -> Placement:
    """`given`, or the default where that is None; raises TypeError where it is no placement."""
    if given is not None and not isinstance(given, Placement):
        raise TypeError(f"{name}: got {given!r}, wanted a placement of torch.distributed.tensor, as Shard(1)")
    return default if given is None else given


def _on_input(module: nn.Module, change: Callable[[Any, Tensor], Tensor]) -> None:
    """Gives a module what `change` makes of it and its first input, which may be passed by its name."""

    @outside_of_graphs
    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if args:
            return (change(module, args[0]), *args[1:]), kwargs
        name = next(iter(inspect.signature(module.forward).parameters), "")
        if name not in kwargs:
            raise TypeError(
                f"{type(module).__name__}: got {sorted(kwargs)} by name, wanted its first input, {name!r}, which a "
                "parallel style gathers or takes a part of; pass it by position"
            )
        return args, kwargs | {name: change(module, kwargs[name])}

    module.register_forward_pre_hook(before, with_kwargs=True)


def _hook(
    site: nn.Module,
    *,
    before: Callable[[Any, tuple[Any, ...]], tuple[Any, ...]],
    behind: Callable[[Any, tuple[Any, ...], Tensor], Tensor],
) -> None:
    """Surrounds what a site computes. A rehearsal sends nothing, see [Note: Kernels ahead of time].

    Both take the site, which in a copy of the module is another one.
    """

    @outside_of_graphs
    def ahead(site: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        return None if is_recording() else before(site, args)

    @outside_of_graphs
    def after(site: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor | None:
        return None if is_recording() else behind(site, args, out)

    site.register_forward_pre_hook(ahead)
    site.register_forward_hook(after)


def _site_of(module: nn.Module, style: str) -> Any:
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


def _check_parameters(module: nn.Module, names: tuple[str, ...], style: str) -> None:
    """Raises where something would be lost if a style cut these parameters."""
    _check_returned(module, style)
    for name in names:
        param = getattr(module, name)
        if param is not None and (param._backward_hooks or param._post_accumulate_grad_hooks):
            raise ValueError(
                f"{_name_of(module)}.{name}: got a parameter with hooks, wanted one without, since these would be "
                f"lost; add them after {style} has cut it"
            )


def _check_returned(module: nn.Module, style: str) -> None:
    """Raises where gradients of a module's weights are not returned to autograd."""
    if option := getattr(module, "bypasses_autograd", None):
        raise ValueError(
            f"{style}: got {type(module).__name__} with {option}, by which autograd sees no gradient of the weight "
            "that is cut, or summed over ranks; leave it out"
        )


def _name_of(module: Any) -> str:
    return module.name or type(module).__name__


def _others(module: nn.Module) -> list[str]:
    """Parameters of a linear module beside its weight and bias: those of a norm in front."""
    return [name for name, _ in module.named_parameters(recurse=False) if name not in (WEIGHT, BIAS)]


def _local(x: Tensor, mesh: DeviceMesh, layout: Placement) -> tuple[Tensor, int | None]:
    """This rank's part of `x` in this layout; and, where a DTensor tells, the whole extent of the dimension cut."""
    if not isinstance(x, DTensor):
        return x, None
    size = x.shape[layout.dim] if isinstance(layout, Shard) else None
    return x.redistribute(mesh, [layout]).to_local(), size


def _spread(local: Tensor, mesh: DeviceMesh, layout: Placement, shape: tuple[int, ...]) -> DTensor:
    """The DTensor of this shape whose part here is `local`."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [layout], run_check=False, shape=torch.Size(shape), stride=stride)


def _cut(local: Tensor, mesh: DeviceMesh, dim: int, size: int | None) -> SequenceCut:
    return SequenceCut.of_local(tuple(local.shape), dim, num_parts=mesh.size(), size=size)


def _column_parallel(module: nn.Module) -> list[Any]:
    """The layers of `module` of which each rank computes some outputs."""
    sites = ((layer, getattr(layer, SITE, None)) for layer in module.modules())
    return [layer for layer, site in sites if isinstance(getattr(site, "placed", None), ColumnPlacement)]


def _read_directions(*, trains: bool) -> tuple[Direction, ...]:
    """Those of a gathered input that forward reads, and wgrad where it `trains` a weight."""
    return (Direction.ROWWISE, Direction.COLUMNWISE) if torch.is_grad_enabled() and trains else (Direction.ROWWISE,)


def _gradient_gather(site: Any, args: tuple[Any, ...], out: Tensor) -> Quantization | None:
    """How a site's grad_output is gathered for it; None outside of `autocast`, in high precision, or without one."""
    x, weight = args[:2]
    plan = site.plan(x, weight, notes=False)
    if plan is None or not out.requires_grad:
        return None
    rows = out.shape[:-1].numel()
    if rows % plan.row_multiple:
        raise ValueError(
            f"{site.name or 'Linear'}: {rows} rows of a sequence-parallel output are no multiple of "
            f"{plan.row_multiple}, as the formats of its products want; pad the sequence or the batch"
        )
    wanted = ((Direction.ROWWISE, x.requires_grad), (Direction.COLUMNWISE, weight.requires_grad))
    directions = [direction for direction, is_wanted in wanted if is_wanted]
    return Quantization.of(plan, "grad_output", directions, is_cut=True)
