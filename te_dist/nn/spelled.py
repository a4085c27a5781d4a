"""Objects made again from their text: graphs know plans and formats by it, and may run in another process."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from te_dist import codecs, recipe
from te_dist.formats import Encoding, Field, Format, Region, Span

# What may be called, by its name. `Format` is called for one of a tensor, and read for a type of 8 bits.
_CLASSES: Mapping[str, Any] = {
    **{each.__name__: each for each in (Encoding, Field, Format, Region, Span, *codecs.FAMILIES, *recipe.UNIFORM)},
    "torch.Size": torch.Size,
}


@lru_cache(maxsize=4096)
def made_of(text: str, *more: type) -> Any:
    """The object of which `text` is the `repr`: of recipes and formats, what they consist of, and of classes `more`.

    Nothing else is called, whatever the text says.

    Raises:
        ValueError: the text says something else.
    """
    classes = {**_CLASSES, **{each.__name__: each for each in more}}
    try:
        return _value(ast.parse(text, mode="eval").body, classes)
    except (SyntaxError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not the text of a recipe or a format of te_dist: {text}") from error


def _value(node: ast.expr, classes: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value):
            return value
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as value)):
            return -value
        case ast.Tuple(each) | ast.List(each):
            return tuple(_value(part, classes) for part in each)
        case ast.Attribute(ast.Name("torch"), name) if isinstance(found := getattr(torch, name), torch.dtype):
            return found
        case ast.Attribute(ast.Name("Format"), name):
            return recipe.Format[name]
        case ast.Call(function, args, keywords):
            made_by = classes[ast.unparse(function)]
            options = {str(each.arg): _value(each.value, classes) for each in keywords}
            return made_by(*(_value(each, classes) for each in args), **options)
    raise ValueError(f"not the text of a recipe or a format of te_dist: {ast.unparse(node)}")
