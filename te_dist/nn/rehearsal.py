"""One pass of a module on meta tensors, for the kernels it would launch. See [Note: Kernels ahead of time]."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from te_dist._torch_private import tree_leaves
from te_dist.context import autocast
from te_dist.recipe import Recipe
from te_dist.scaling.delayed import step_set_aside
from te_dist.tensor import QuantizedTensor
from te_dist.tensor.placement import local_tensor

# Of the input: products cut few rows and many in different ways, and odd ones are quantized as those of one group.
ROWS = (512, 8192, 513)
ROWS_OF_A_GROUP = (512, 4096)  # besides: matrices that few rows read are multiplied as they lie

# The recipe that a linear map was made for; beside the modules, since it may hold a function that cannot be pickled.
_recipes: WeakKeyDictionary[nn.Module, Recipe] = WeakKeyDictionary()


def expect(site: nn.Module, recipe: Recipe) -> None:
    """Notes that a linear map is going to be computed by `recipe`."""
    _recipes[site] = recipe


def rehearse(module: nn.Module, dtype: torch.dtype | None, *rest: Tensor, groups: int = 0) -> None:
    """Runs forward and backward of `module` by the recipe its maps expect; nothing where they expect none.

    Args:
        module: of linear maps, its first weight taking the input.
        dtype: of activations and of plain parameters; None leaves those of the parameters.
        rest: what its forward pass takes besides the input, on the meta device.
        groups: of rows, which have a matrix each; 0 where all have the same ones.
    """
    recipe = next((_recipes[site] for site in module.modules() if site in _recipes), None)
    if recipe is None:
        return
    held = (*module.named_parameters(), *module.named_buffers())
    tensors = {f"module.{name}": _on_meta(tensor, dtype) for name, tensor in held}
    weight = next(tensor for tensor in tensors.values() if tensor.dim() > 1)
    with autocast(recipe=recipe), torch.enable_grad(), step_set_aside():
        for rows in (*ROWS, *(rows * groups for rows in ROWS_OF_A_GROUP if groups)):
            x = torch.empty(rows, weight.shape[-1], dtype=dtype or weight.dtype, device="meta", requires_grad=True)
            torch.func.functional_call(_Pass(module), tensors, (x, *rest))


class _Pass(nn.Module):
    """Forward and backward of a module, without its hooks, which may communicate."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Tensor) -> None:
        leaves = tree_leaves(self.module.forward(*args))
        outputs = [out for out in leaves if isinstance(out, Tensor) and out.requires_grad]
        torch.autograd.backward(outputs, [torch.empty_like(out) for out in outputs])


def _on_meta(tensor: Tensor, dtype: torch.dtype | None) -> Any:
    local = local_tensor(tensor)
    if isinstance(local, QuantizedTensor):
        fields = local.format.canonical.fields
        storage = local.storage.blank(local.format, device="meta", fields=fields)
        storage.dtype = dtype or local.dtype
        return local.like(storage, local.shape).detach().requires_grad_(tensor.requires_grad)
    wanted = dtype if isinstance(tensor, nn.Parameter) else None
    return torch.empty_like(local, dtype=wanted, device="meta").requires_grad_(tensor.requires_grad)
