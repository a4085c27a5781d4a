"""What is easily forgotten, each said once: `autocast` around quantized weights, or its recipe; that one was tied to a
plain weight; biases of routers."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from te_dist import catalog
from te_dist.context import is_in_autocast
from te_dist.formats import Format
from te_dist.tensor import QuantizedTensor

_has_warned = False
_has_warned_of_another = False
_has_warned_of_biases = False
_has_warned_of_plain = False
_MANY_PASSES = 1024  # more micro batches than a step has


def warn(weight: Tensor, site: Any) -> None:
    """Once, where `weight` is quantized and trained, and no block says how, not even `autocast(enabled=False)`.

    `site`: the `LinearSite` that it is multiplied by, for the message.
    """
    global _has_warned  # noqa: PLW0603
    if _has_warned or is_in_autocast() or not isinstance(weight, QuantizedTensor):
        return
    if weight.requires_grad and torch.is_grad_enabled():
        _has_warned = True
        warnings.warn(
            f"{_label_of(site)}: a quantized weight is trained outside of te_dist.autocast, where its values are "
            "multiplied in high precision; put the forward pass into te_dist.autocast(recipe=...), or into "
            "te_dist.autocast(enabled=False) where this is meant",
            stacklevel=2,
        )


def warn_of_another(weight: QuantizedTensor, made: Format, *, recipe: object, site: Any) -> None:
    """Once, where `recipe`, that of `autocast`, would have stored `weight` otherwise: in the format `made`."""
    global _has_warned_of_another  # noqa: PLW0603
    its = weight.format
    if _has_warned_of_another or all(d in made and made[d].fields == its[d].fields for d in its.directions):
        return
    _has_warned_of_another = True
    found, wanted = catalog.name_of(its), catalog.name_of(made)
    warnings.warn(
        f"{_label_of(site)}: its weight is {found}, and {type(recipe).__name__} of te_dist.autocast makes weights of "
        f"{wanted}. What is multiplied is the weight as it is: where there are kernels for both formats at all, most "
        "decode it, which is slower. Give autocast the recipe of quantized_model_init, unless this is meant",
        stacklevel=2,
    )


def warn_of_plain(site: Any) -> None:
    """Once, where the weight of a map that was made quantized is a plain one now. Not while a compiler traces it."""
    global _has_warned_of_plain  # noqa: PLW0603
    if _has_warned_of_plain or torch.compiler.is_compiling():
        return
    _has_warned_of_plain = True
    warnings.warn(
        f"{_label_of(site)}: its weight was made quantized, and another one that is plain has taken its place, as "
        "tying weights does: it takes the memory of a plain one, and products quantize it each time. Tie weights "
        "before te_dist.convert, which refuses to quantize them, unless this is meant; "
        "te_dist.fsdp2.check(model) names all",
        stacklevel=2,
    )


def warn_of_biases(passes: int) -> None:
    """Once, where a router has counted choices in so many passes since `update_expert_biases` was called."""
    global _has_warned_of_biases  # noqa: PLW0603
    if _has_warned_of_biases or passes < _MANY_PASSES:
        return
    _has_warned_of_biases = True
    warnings.warn(
        f"TopKRouter: {passes} training passes have counted choices, and nobody has called what moves its biases by "
        "them, once a step after backward: te_dist.nn.moe.update_expert_biases(model)",
        stacklevel=2,
    )


def warn_of_mesh(num_known: int) -> None:
    """Where biases move by the choices of some ranks alone, and the router is no shard that tells of others.

    `num_known`: ranks whose choices count.
    """
    if dist.is_initialized() and (num_ranks := dist.get_world_size()) > num_known:
        warnings.warn(
            f"update_expert_biases: got no mesh, and a router whose weight is no shard, on {num_known} of {num_ranks} "
            "ranks: its biases move by the choices of these alone, and apart from those of others; pass mesh=... of "
            "the ranks that share the batch",
            stacklevel=4,
        )


def _label_of(site: Any) -> str:
    return site.name or f"{site.module_type} ({site.in_features} to {site.out_features})"
