"""Rules on the shape of code: length of files and functions, parameters, docstrings, comments."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator, Sequence

from tests.house.source import ROOT, Function, Module, Violation, last_name, native_files

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60  # without the docstring
MAX_PARAMETERS = 6
MAX_OPERANDS = 3  # by position: what a function works on
MAX_POSITIONAL_OPTIONS = 2  # parameters with a default are named in calls, unless they come as first or second
MAX_BOOLS = 1

# Methods whose signature somebody else calls: torch, FSDP2, the interpreter, unittest-like protocols.
FOREIGN_SIGNATURES = {
    "__torch_dispatch__",
    "__torch_function__",
    "__tensor_flatten__",
    "__tensor_unflatten__",
    "__exit__",
    "fsdp_pre_all_gather",
    "fsdp_post_all_gather",
    "forward",
    "backward",
    "setup_context",
    "extra_repr",
    "state_dict",
    "load_state_dict",
    "_load_from_state_dict",
    "_save_to_state_dict",
    "get_extra_state",
    "set_extra_state",
    "reset_parameters",
}

# Functions that may have many parameters, several bools or positional operands: `path` or `path::qualname` and why.
WIDE_SIGNATURES = {
    "te_dist/kernels/": "a kernel's launch has the signature of its op",
    "te_dist/ops/": "an op's signature is its schema: operands in order, outputs are arguments",
    "te_dist/codecs/reference/": "oracles take the operands of the op they witness",
    "te_dist/formats/geometry.py": "(field, stored, region, part, out) come in this order in every function",
    "te_dist/fsdp2/api.py::fully_shard": "torch's fully_shard, and what te_dist adds to it",
    "te_dist/context.py": "TransformerEngine's, so that moving over is an edit of imports",
    "te_dist/optim/clipping.py::clip_grad_norm_": "torch's clip_grad_norm_, and the ranks of a pipeline",
    "te_dist/flat_shards/masters.py::quantize_master_weights": "TransformerEngine's",
    "te_dist/offload/layers.py::get_cpu_offload_context": "TransformerEngine's",
    "te_dist/tensor/quantized_tensor.py::QuantizedTensor.update_usage": "TransformerEngine's",
    "te_dist/tensor/storage.py::QuantizedStorage.update_usage": "TransformerEngine's",
    "te_dist/grouped/members.py::MemberView.update_usage": "TransformerEngine's",
}


def _is_wide(module: Module, function: Function) -> bool:
    """Whether the allow-list names the function, its module or its folder."""
    place = f"{module.path}::{function.qualname}"
    return any(place == entry or (not entry.count("::") and place.startswith(entry)) for entry in WIDE_SIGNATURES)


def _mirrors_a_constructor(function: Function) -> bool:
    """`__init__` of a module, a recipe or an optimizer, which keeps the signature its users know."""
    bases = {last_name(base) for base in function.owner.bases}
    return bool(bases & {"Module", "Optimizer", "ParallelStyle", "Function"})


def _signatures(modules: Sequence[Module]) -> Iterator[tuple[Module, Function]]:
    """Functions of the package whose parameters are ours to choose."""
    for module in modules:
        if not module.path.startswith("te_dist/"):
            continue
        for function in module.functions:
            if function.node.name in FOREIGN_SIGNATURES or _is_wide(module, function):
                continue
            if function.node.name == "__init__" and function.owner is not None and _mirrors_a_constructor(function):
                continue
            yield module, function


def _classes_of(modules: Sequence[Module]) -> dict[str, ast.ClassDef]:
    """All classes of the tree by name."""
    return {node.name: node for module in modules for node in module.nodes_of(ast.ClassDef)}


def _overridden(function: Function, classes: dict[str, ast.ClassDef]) -> list[ast.FunctionDef]:
    """Definitions of the method in base classes that stand in the tree."""
    found = []
    pending = [last_name(base) for base in function.owner.bases] if function.owner is not None else []
    while pending:
        base = classes.get(pending.pop())
        if base is not None:
            members = [member for member in base.body if isinstance(member, ast.FunctionDef)]
            found += [member for member in members if member.name == function.node.name]
            pending += [last_name(further) for further in base.bases]
    return found


def files_are_short(modules: Sequence[Module]) -> Iterator[Violation]:
    """No file over 500 lines."""
    sizes = [(module.path, module.text.count("\n")) for module in modules]
    sizes += [(file.relative_to(ROOT).as_posix(), file.read_text().count("\n")) for file in native_files()]
    for path, lines in sizes:
        if lines > MAX_FILE_LINES:
            yield Violation(path, lines, f"{lines} lines, at most {MAX_FILE_LINES}; split it by concern")


def functions_are_short(modules: Sequence[Module]) -> Iterator[Violation]:
    """No function over 60 lines, docstring not counted."""
    for module in modules:
        for function in module.functions:
            node = function.node
            first = node.body[0]
            documented = isinstance(first, ast.Expr) and id(first.value) in module.docstrings
            lines = node.end_lineno - node.lineno + 1 - (first.end_lineno - first.lineno + 1 if documented else 0)
            if lines > MAX_FUNCTION_LINES:
                text = (
                    f"{function.qualname} has {lines} lines, at most {MAX_FUNCTION_LINES}; take steps out of it by name"
                )
                yield module.violation(node.lineno, text)


def parameters_are_few(modules: Sequence[Module]) -> Iterator[Violation]:
    """At most six parameters."""
    for module, function in _signatures(modules):
        if len(function.parameters) > MAX_PARAMETERS:
            text = (
                f"{function.qualname} takes {len(function.parameters)} parameters, at most {MAX_PARAMETERS}; "
                "group what travels together in a frozen dataclass"
            )
            yield module.violation(function.node.lineno, text)


def options_are_keywords(modules: Sequence[Module]) -> Iterator[Violation]:
    """Public functions take up to three operands by position; options, that is defaults, after the second by name."""
    classes = _classes_of(modules)
    for module, function in _signatures(modules):
        if function.node.name != "__init__" and _overridden(function, classes):
            continue
        is_operator = function.node.name.startswith("__") and function.node.name != "__init__"
        num_operands = len(function.positional) - len(function.node.args.defaults)
        first_named = min(MAX_OPERANDS, max(MAX_POSITIONAL_OPTIONS, num_operands))
        if not function.is_public or is_operator or len(function.positional) <= first_named:
            continue
        names = [argument.arg for argument in function.positional[first_named:]]
        text = f"{function.qualname}: write `*,` before {names[0]!r}, so that calls name {', '.join(names)}"
        yield module.violation(function.node.lineno, text)


def bools_come_alone(modules: Sequence[Module]) -> Iterator[Violation]:
    """At most one bool parameter."""
    for module, function in _signatures(modules):
        bools = [argument.arg for argument in function.parameters if _is_bool(argument)]
        if len(bools) > MAX_BOOLS:
            text = f"{function.qualname} takes {len(bools)} bools ({', '.join(bools)}); make them an enum or a policy"
            yield module.violation(function.node.lineno, text)


def _is_bool(argument: ast.arg) -> bool:
    """Whether the annotation is `bool` or `bool | None`."""
    names = [node.id for node in ast.walk(argument.annotation or ast.Pass()) if isinstance(node, ast.Name)]
    return names == ["bool"]


def everything_public_is_documented(modules: Sequence[Module]) -> Iterator[Violation]:
    """Every module, public class and public function has a docstring.

    One-statement methods may go without, and overrides of what a base class of te_dist documents.
    """
    classes = _classes_of(modules)
    for module in modules:
        if ast.get_docstring(module.tree) is None and module.text.strip():
            yield module.violation(1, "the module has no docstring; say in one line what it is for")
        if not module.path.startswith("te_dist/") or "/_" in module.path:
            continue
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and ast.get_docstring(node) is None:
                yield module.violation(node.lineno, f"class {node.name} has no docstring; define what it is")
        for function in module.functions:
            node = function.node
            is_simple = function.owner is not None and len(node.body) == 1
            is_known = node.name in FOREIGN_SIGNATURES or node.name == "__init__" or "overload" in function.decorators
            documented = any(ast.get_docstring(each) for each in (node, *_overridden(function, classes)))
            if function.is_public and not (is_simple or is_known or documented):
                yield module.violation(
                    node.lineno, f"{function.qualname} has no docstring; say in one line what it does"
                )


def no_code_is_commented_out(modules: Sequence[Module]) -> Iterator[Violation]:
    """A comment on a line of its own is prose, not a statement."""
    for module in modules:
        comments = (line.lstrip() for line in module.text.splitlines())
        if not any(line.startswith("#") and _is_code(line[1:]) for line in comments):
            continue
        for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
            if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#") and _is_code(token.string[1:]):
                text = (
                    f"`{token.string.strip()}` is commented-out code; delete it, or put formulas in words or backquotes"
                )
                yield module.violation(token.start[0], text)


def _is_code(comment: str) -> bool:
    """Whether text parses as a statement that nobody writes as prose."""
    try:
        body = ast.parse(comment.strip()).body
    except (SyntaxError, ValueError):
        return False
    keywords = (
        ast.Import,
        ast.ImportFrom,
        ast.Return,
        ast.Raise,
        ast.Assert,
        ast.Delete,
        ast.FunctionDef,
        ast.ClassDef,
    )
    calls = [node for node in body if isinstance(node, ast.Expr | ast.Assign) and isinstance(node.value, ast.Call)]
    return bool(calls) or any(isinstance(node, keywords) for node in body)
