"""What modules keep under a recipe, made before their first pass."""

from __future__ import annotations

from torch import nn

from te_dist.fsdp2.ahead import prepare_kernels
from te_dist.nn import rehearsal
from te_dist.nn.site import LinearSite
from te_dist.recipe import Recipe
from te_dist.scaling.delayed import Siblings


def prepare(model: nn.Module, recipe: Recipe) -> None:
    """Makes what the modules of `model` keep under `recipe` (histories of delayed scaling) before their first pass.

    Modules made in `quantized_model_init` with that recipe have it. Others need this before a checkpoint is loaded, and
    all do where ranks may take other maps than others in a step: what was prepared is reduced as a whole.
    For a model on a GPU, compiles the kernels of its passes; `fsdp2.fully_shard` does that for the modules it wraps,
    by the recipe of `quantized_model_init` or that of an earlier `prepare`.

    Raises:
        ValueError: `recipe` is none, or the device cannot compute a module by it.
    """
    if not isinstance(recipe, Recipe):
        raise ValueError(
            f"prepare needs a recipe, got {recipe!r}; pass one of te_dist.recipe, such as recipe.Float8BlockScaling(), "
            "or leave the call out: a model that is trained without a recipe keeps nothing"
        )
    states = []
    for module in model.modules():
        sites = {name: site for name, site in module.named_children() if isinstance(site, LinearSite)}
        for site in sites.values():
            site.prepare(recipe, next(module.parameters(recurse=False)).device)
            rehearsal.expect(site, recipe)
            if site.scaling is not None:
                states.append(site.scaling)
    Siblings.join(states)
    if any(param.is_cuda for param in model.parameters()):
        prepare_kernels(model)
