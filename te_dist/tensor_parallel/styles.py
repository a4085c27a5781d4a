"""Parallel styles for `parallelize_module` over the linear modules of te_dist.

    parallelize_module(block, mesh["tp"], {
        "attention": GatherInput("query"),                            # once, quantized, for all three projections
        "attention.query": ColumnParallel(), "attention.key": ColumnParallel(), "attention.value": ColumnParallel(),
        "attention.out": RowParallel(output_layouts=Shard(1)),
    })

[Note: What a style touches]
A style cuts parameters into DTensors and tells the *site*, the submodule in which a linear module multiplies, what
ranks send each other around the product: that is where a norm in front has run and where the recipe is known. Operands
of which ranks hold parts are quantized by the scales of the whole, so that a sharded model multiplies the same bytes as
an unsharded one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from te_dist.context import autocast_of_torch
from te_dist.formats import Direction, Format
from te_dist.kernels.runtime import is_recording
from te_dist.tensor import QuantizedTensor
from te_dist.tensor.placement import local_tensor
from te_dist.tensor_parallel import traced
from te_dist.tensor_parallel.cuts import spans
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
from te_dist.tensor_parallel.sites import (
    BIAS,
    SITE,
    WEIGHT,
    Around,
    change_input,
    change_parameters,
    check_parameters,
    check_returned,
    column_parallel,
    cut_of,
    layout_of,
    local_of,
    name_of,
    others_of,
    site_of,
    spread_of,
)
from te_dist.tensor_parallel.spread import FormatWriter
from te_dist.tensor_parallel.traced import is_fixed, is_one_graph


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
        self.input_layouts = layout_of("input_layouts", input_layouts, Replicate())
        self.output_layouts = layout_of("output_layouts", output_layouts, Shard(-1))
        self.use_local_output = use_local_output
        self.gather_format = gather_format

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        site = site_of(module, type(self).__name__)
        check_parameters(module, (WEIGHT, BIAS), type(self).__name__)
        name, out_features = name_of(module), module.weight.shape[0]
        cut = {
            key: cut_parameter(param, device_mesh, dim=0, name=f"{name}.{key}")
            for key, param in ((WEIGHT, module.weight), (BIAS, module.bias))
            if param is not None
        }
        for key, param in cut.items():
            module.register_parameter(key, param)
        placed = ColumnPlacement(spans(out_features, device_mesh.size()), device_mesh.get_group())
        around = Around(
            before=lambda site, x, weight, bias: (self._input(site, x, weight, device_mesh), weight, bias),
            behind=lambda site, given, out: self._output(out, out_features, device_mesh),
            in_graph=lambda site, x, weight, bias: self._in_graph(site, (x, weight, bias), device_mesh),
        )
        site.cut(placed, around)
        others = others_of(module)
        if others:
            change_input(
                module,
                lambda module, x: self._part(x, device_mesh),
                in_graph=lambda module, x: self._part_in_graph(x, device_mesh),
            )
        if others and isinstance(self.input_layouts, Shard):
            sum_gradients(module, others, device_mesh)
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
        local, size = local_of(x, mesh, self.input_layouts)
        if size is not None and size % mesh.size():
            raise ValueError(
                f"a sequence of {size} over {mesh.size()} ranks: a module with a norm takes equal parts; pad the "
                "sequence, or use a separate norm and Linear"
            )
        return local

    def _part_in_graph(self, x: Tensor, mesh: DeviceMesh) -> Tensor | None:
        """As `_part`, of plain inputs; None of others."""
        if isinstance(x, (DTensor, QuantizedTensor)):
            return None
        if not isinstance(self.input_layouts, Shard):
            traced.refuse_summed(x, mesh.get_group().group_name)
        return x

    def _in_graph(self, site: Any, args: tuple[Tensor, Tensor, Tensor | None], mesh: DeviceMesh) -> Tensor | None:
        """All of it, of plain inputs and those that were gathered; None where it is not for a graph."""
        (x, weight, _), layout = args, self.input_layouts
        is_gathered = isinstance(x, QuantizedTensor)
        if isinstance(x, DTensor) or self.gather_format or not self._gives_local(x.dim()):
            return None
        if site.takes_gathered and not is_gathered and torch.is_grad_enabled() and x.requires_grad:
            return None  # what is refused
        plan = site.graph_plan(x, weight)
        group = mesh.get_group().group_name
        if not plan:
            return None
        if is_gathered:
            return site.among_ranks(*args, plan=plan, exchange=(group,))
        if isinstance(layout, Shard):
            return site.among_ranks(*args, plan=plan, exchange=(group, layout.dim)) if is_fixed(x) else None
        traced.refuse_summed(x, group)
        return site.among_ranks(traced.replicate(x, group), *args[1:], plan=plan, exchange=(group,))

    def _gives_local(self, dims: int) -> bool:
        """Whether this rank's columns of an output of so many dimensions are what is wanted."""
        return self.use_local_output and self.output_layouts in (Shard(dims - 1), Shard(-1))

    def _input(self, site: Any, x: Tensor, weight: Tensor, mesh: DeviceMesh) -> Tensor:
        if sums_gradient(x, mesh.get_group()):
            return x
        local, size = local_of(x, mesh, self.input_layouts)
        if not isinstance(self.input_layouts, Shard):
            if site.takes_gathered and torch.is_grad_enabled() and local.requires_grad:
                raise ValueError(
                    f"{site.name or 'Linear'}: got another input than GatherInput gathered like that of this layer, "
                    "whose gradient would be summed twice; wanted that one as it is: gather behind what is computed "
                    "of it, or name another layer"
                )
            return replicate(local, mesh.get_group())
        local = autocast_of_torch(local)
        directions = _read_directions(trains=weight.requires_grad)
        if self.gather_format:
            how = Quantization.now(FormatWriter(self.gather_format), directions)
        elif plan := site.plan(local, weight, notes=False):
            how = Quantization.of(plan, "input", directions, is_cut=True)
        else:
            return gather_values(local, mesh.get_group(), dim=self.input_layouts.dim, size=size)
        cut = cut_of(local, mesh, self.input_layouts.dim, size=size)
        return gather_by(how, local, group=mesh.get_group(), cut=cut)

    def _output(self, out: Tensor, out_features: int, mesh: DeviceMesh) -> Tensor:
        if self._gives_local(out.dim()):
            return out
        held = Shard(out.dim() - 1)
        spread = spread_of(out, mesh, held, shape=(*out.shape[:-1], out_features))
        spread = spread.redistribute(placements=[self.output_layouts])
        return spread.to_local() if self.use_local_output else spread

    def _with_bias(self, module: Any, args: Any, out: tuple[Any, ...]) -> tuple[Any, ...]:
        """What is returned, with as much of the bias as the output has columns."""
        if torch.compiler.is_compiling() and self._gives_local(out[0].dim()):
            return tuple([x.to_local() if x is module.bias else x for x in out])
        return self._with_bias_outside(module, out)

    @outside_of_graphs
    def _with_bias_outside(self, module: Any, out: tuple[Any, ...]) -> tuple[Any, ...]:
        return out if is_recording() else tuple(self._bias(x, out) if x is module.bias else x for x in out)

    def _bias(self, bias: DTensor, out: tuple[Any, ...]) -> Tensor:
        if self._gives_local(out[0].dim()):
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
        self.input_layouts = layout_of("input_layouts", input_layouts, Shard(-1))
        self.output_layouts = layout_of("output_layouts", output_layouts, Replicate())
        self.use_local_output = use_local_output

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        site = site_of(module, type(self).__name__)
        if others_of(module):
            raise ValueError(
                f"{name_of(module)} normalizes its input, of which RowParallel leaves each rank some columns; use a "
                "separate norm and Linear"
            )
        check_parameters(module, (WEIGHT,), type(self).__name__)
        parts = spans(module.weight.shape[1], device_mesh.size())
        weight = cut_parameter(module.weight, device_mesh, dim=1, name=f"{name_of(module)}.{WEIGHT}")
        module.register_parameter(WEIGHT, weight)
        around = Around(
            before=lambda site, x, weight, bias: (self._input(x, device_mesh), weight, None),
            behind=lambda site, given, out: self._output(site.biased, given, out, device_mesh),
            in_graph=lambda site, x, weight, _: self._in_graph(site, x, weight, device_mesh),
        )
        site.cut(RowPlacement(parts, device_mesh.get_group()), around)
        if module.bias is not None and isinstance(self.output_layouts, Shard):
            sum_gradients(module, [BIAS], device_mesh)  # each rank adds it to its part, or returns it for that
        vars(site)["biased"] = module  # and no submodule of it; copies of the module have copies of both
        return module

    def _input(self, x: Tensor, mesh: DeviceMesh) -> Tensor:
        return local_of(x, mesh, self.input_layouts)[0]

    def _in_graph(self, site: Any, x: Tensor, weight: Tensor, mesh: DeviceMesh) -> Tensor | None:
        """All of it, of plain inputs; None where it is not for a graph."""
        plan = "" if isinstance(x, (DTensor, QuantizedTensor)) else site.graph_plan(x, weight)
        if not plan or not self.use_local_output:
            return None
        scatters = None
        if isinstance(self.output_layouts, Shard):
            scatters, rows = self.output_layouts.dim % x.dim(), math.prod(x.shape[:-1])
            if not is_fixed(x) or x.shape[scatters] % mesh.size() or not site.fits_in_graph(plan, rows):
                return None  # or it is refused
        exchange = mesh.get_group().group_name, None, scatters, scatters is None
        out = site.among_ranks(x, weight, None, plan=plan, exchange=exchange)
        bias = None if site.biased.return_bias else site.biased.bias
        return out if bias is None else out + bias.to(out.dtype)

    def _output(self, module: Any, args: tuple[Any, ...], out: Tensor, mesh: DeviceMesh) -> Tensor:
        group, shape = mesh.get_group(), out.shape
        bias = None if module.return_bias else module.bias
        if isinstance(self.output_layouts, Shard):
            size = shape[self.output_layouts.dim]
            if self.use_local_output and size % mesh.size():
                raise ValueError(
                    f"{name_of(module)}: got an output of {size} along dimension {self.output_layouts.dim} to cut "
                    f"into plain tensors over {mesh.size()} ranks, wanted a multiple, since layers behind take parts "
                    "for equal ones; give RowParallel use_local_output=False, as DTensors tell the whole size, or pad "
                    "the sequence"
                )
            gradients = _gradient_gather(getattr(module, SITE), args, out)
            out = reduce_scatter(out, group, dim=self.output_layouts.dim, gradients=gradients)
        else:
            out = all_reduce(out, group)
        out = out if bias is None else out + bias.to(out.dtype)
        return out if self.use_local_output else spread_of(out, mesh, self.output_layouts, shape=shape)


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
        site_of(layer, type(self).__name__).takes_gathered = True
        vars(module)["gathers_like"] = layer  # which may be wrapped later; copies of the module have copies of it
        change_input(
            module,
            lambda module, x: self._input(module, x, device_mesh),
            in_graph=lambda module, x: self._in_graph(module, x, device_mesh),
        )
        return module

    def _in_graph(self, module: Any, x: Tensor, mesh: DeviceMesh) -> Tensor | None:
        """As `_input`, of plain parts; None where it is not for a graph."""
        if isinstance(x, DTensor) or not is_one_graph():
            return None
        x, layer = autocast_of_torch(x), module.gathers_like
        layers = [layer, *column_parallel(module)]
        plans = [getattr(each, SITE).graph_plan(x, each.weight) for each in layers]
        if not all(plans):
            return None
        trains = torch.is_grad_enabled() and any([each.weight.requires_grad for each in layers])  # noqa: C419
        is_cut, group = getattr(layer, SITE).placed is not None, mesh.get_group().group_name
        return traced.gather(x, (plans[0], "input", (True, trains), is_cut, group, self.input_layouts.dim))

    def _input(self, module: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        local, size = local_of(x, mesh, self.input_layouts)
        local = autocast_of_torch(local)
        layer = module.gathers_like
        site = getattr(layer, SITE)
        plan = site.plan(local, layer.weight, notes=False)
        if plan is None:
            return gather_values(local, mesh.get_group(), dim=self.input_layouts.dim, size=size)
        cut = cut_of(local, mesh, self.input_layouts.dim, size=size)
        layers = (layer, *column_parallel(module))
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
        check_returned(module, "SequenceParallel")
        sum_gradients(module, names, device_mesh)
        return module


def sum_gradients(module: nn.Module, names: list[str], mesh: DeviceMesh) -> None:
    """Makes the gradients of parameters of `module`, which every rank uses on other rows, sums over the mesh.

    In forward they are replaced by tensors whose gradient is summed: what FSDP2 put in their place stays as it is.
    Meanwhile `module.replaced` holds them.
    """
    vars(module).setdefault("replaced", [])

    def replace(module: Any, args: Any) -> None:
        group = mesh.get_group()
        if torch.compiler.is_compiling() and _are_in_graph(module, names):
            _replace(module, names, lambda local: traced.replicate(local, group.group_name))
        else:
            _replace_outside(module, names, group)

    def put_back(module: Any, args: Any, out: Any) -> None:
        if module.replaced:  # else another hook raised before
            module._parameters.update(module.replaced.pop())

    change_parameters(module, replace, put_back)


def _replace(module: Any, names: list[str], replaced: Callable[[Tensor], Tensor]) -> None:
    held: dict[str, Any] = {name: module._parameters[name] for name in names}
    for name, param in held.items():
        module._parameters[name] = replaced(param.to_local() if isinstance(param, DTensor) else param)
    module.replaced.append(held)


@outside_of_graphs
def _replace_outside(module: Any, names: list[str], group: dist.ProcessGroup) -> None:
    _replace(module, names, lambda local: replicate(local, group))


def _are_in_graph(module: Any, names: list[str]) -> bool:
    """Whether a graph may hold what replaces these parameters, see [Note: Parallel layers in graphs]."""
    locals_ = [local_tensor(module._parameters[name]) for name in names]
    return not any([isinstance(local, QuantizedTensor) for local in locals_]) or is_one_graph()  # noqa: C419


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
