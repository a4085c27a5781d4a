"""Rules on what may be imported where: tiers, indented imports, the environment, private torch, formats by name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from te_dist import _torch_private
from tests.house.source import Module, Violation, dotted_name

INTEGRATIONS = {"fsdp2", "tensor_parallel", "offload", "recompute", "checkpoints", "optim", "flat_shards"}

# Imports go from a later line to an earlier one, never along a line or down. `te_dist/__init__.py` gathers them all.
TIERS = (
    {"_torch_names"},
    {"env", "_torch_private", "_C", "elsewhere"},
    {"formats"},
    {"kernels"},
    {"ops"},
    {"codecs"},
    {"catalog", "tensor"},
    {"quantizers", "conventions"},
    {"scaling"},
    {"grouped"},
    {"recipe"},
    {"context"},
    INTEGRATIONS,
    {"nn"},
    {"convert", "launch", "pickling"},
    {"__main__"},
)
TESTING = "testing"

# Packages that work for every format and so may name none.
FORMAT_BLIND = {"formats", "tensor", "grouped", *INTEGRATIONS}
FORMAT_NAME = re.compile(r"(?<![a-z])(mxfp8|nvfp4|fp8|fp4|float8|float4|e4m3|e5m2|e8m0|e2m1|hadamard)", re.IGNORECASE)
KNOW_FORMATS = ("te_dist.catalog", "te_dist.quantizers", "te_dist.recipe")
# `path` and why it may name formats all the same.
NAMES_FORMATS: dict[str, str] = {}

PRIVATE_HOME = "te_dist/_torch_private.py"
# Private names of torch objects that may be used in place: listed, with reasons, in _torch_private.ATTRIBUTES.
PRIVATE_IN_PLACE = {re.findall(r"\._\w+", entry.path)[-1][1:] for entry in _torch_private.ATTRIBUTES}
# Names of ops are underscored by torch's convention; the foreach functions are documented; the others are no torch.
NOT_PRIVATE = ("torch.ops.", "aten.", "torch._foreach_", "sys.", "os.")
OF_NAMED_TUPLES = ("_replace", "_asdict", "_fields")  # documented, and underscored to stay clear of fields


def _tier_of(package: str) -> int | None:
    """Tier of a package of te_dist."""
    return next((number for number, packages in enumerate(TIERS) if package in packages), None)


def _is_below(package: str, own: int) -> bool:
    """Whether a package lies below tier `own`; the whole of te_dist (no package) lies below its users alone."""
    tier = _tier_of(package or "nn")
    return tier is not None and tier < own


def imports_go_down(modules: Sequence[Module]) -> Iterator[Violation]:
    """A package imports only from lower tiers: no cycles, and integrations do not know each other."""
    for module in modules:
        if not module.package or module.package == TESTING:
            continue
        own = _tier_of(module.package)
        if own is None:
            yield module.violation(1, f"{module.package} has no tier; give it one in tests/house/imports.py")
            continue
        for imported in module.imports:
            root, _, below = imported.path.partition(".")
            target = below.split(".")[0]
            if root == "te_dist" and target != module.package and not _is_below(target, own):
                why = "is for tests only" if target == TESTING else "is in no lower tier"
                text = f"{module.package} imports {imported.path}, which {why}; pass it as an argument, or move code"
                yield module.violation(imported.line, text)


def imports_stand_at_the_top(modules: Sequence[Module]) -> Iterator[Violation]:
    """No import inside a function or class. `TYPE_CHECKING` and `except ImportError` blocks may hold imports."""
    for module in modules:
        allowed = {id(node) for block in module.tree.body for node in _import_block(block)}
        for node in module.nodes_of(ast.Import, ast.ImportFrom):
            if id(node) not in allowed:
                text = "import inside a block; move it to the top (an optional dependency: importlib.import_module)"
                yield module.violation(node.lineno, text)


def _import_block(block: ast.stmt) -> list[ast.stmt]:
    """Statements that may import: the top level itself, `if TYPE_CHECKING:` and `try: ... except ImportError:`."""
    if isinstance(block, ast.If) and dotted_name(block.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        return block.body
    if isinstance(block, ast.Try) and all(
        handler.type is not None and dotted_name(handler.type) in ("ImportError", "ModuleNotFoundError")
        for handler in block.handlers
    ):
        return block.body
    return [block]


def only_env_reads_the_environment(modules: Sequence[Module]) -> Iterator[Violation]:
    """`os.environ` and `os.getenv` appear in te_dist/env.py alone."""
    for module in modules:
        if module.path == "te_dist/env.py":
            continue
        used = [node for node in module.nodes_of(ast.Attribute) if dotted_name(node) in ("os.environ", "os.getenv")]
        lines = [node.lineno for node in used]
        lines += [i.line for i in module.imports if i.module == "os" and i.name in ("environ", "getenv")]
        for line in sorted(set(lines)):
            yield module.violation(line, "reads the environment; declare the variable in te_dist/env.py and use it")


def only_one_module_knows_private_torch(modules: Sequence[Module]) -> Iterator[Violation]:
    """Private names of torch are imported and used in te_dist/_torch_private.py alone."""
    own_names = _names_defined_in(modules)
    for module in modules:
        if not module.path.startswith("te_dist/") or module.path == PRIVATE_HOME:
            continue
        found = {i.line: i.path for i in module.imports if _is_private_torch(i.path)}
        for node in module.nodes_of(ast.Attribute):
            if _is_foreign_private(node, own_names):
                found.setdefault(node.lineno, dotted_name(node) or f"….{node.attr}")
        for line, name in sorted(found.items()):
            text = f"{name} is private to torch; list it in {PRIVATE_HOME} with a reason and import it from there"
            yield module.violation(line, text)


def _is_private_torch(path: str) -> bool:
    """Whether a dotted path leads through a private name of torch."""
    parts = path.split(".")
    return parts[0] == "torch" and any(_is_private(part) for part in parts[1:])


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _is_foreign_private(node: ast.Attribute, own_names: set[str]) -> bool:
    """Whether an attribute is private and defined nowhere in te_dist."""
    if not _is_private(node.attr) or node.attr in {*PRIVATE_IN_PLACE, *OF_NAMED_TUPLES, *own_names}:
        return False
    return not dotted_name(node).startswith(NOT_PRIVATE)


def _names_defined_in(modules: Sequence[Module]) -> set[str]:
    """Private names that te_dist itself defines: functions, classes, and attributes assigned or annotated anywhere."""
    names: set[str] = set()
    for module in modules:
        names.update(node.name for node in module.nodes_of(ast.FunctionDef, ast.ClassDef))
        names.update(node.id for node in module.nodes_of(ast.Name) if isinstance(node.ctx, ast.Store))
        for node in module.nodes_of(ast.Attribute):
            if isinstance(node.ctx, ast.Store) and dotted_name(node.value) == "self":
                names.add(node.attr)
    return names


def integrations_name_no_format(modules: Sequence[Module]) -> Iterator[Violation]:
    """Packages that serve every format neither spell the name of one nor import the modules that do."""
    for module in modules:
        if module.package not in FORMAT_BLIND or module.path in NAMES_FORMATS:
            continue
        for imported in module.imports:
            if imported.path.startswith(KNOW_FORMATS):
                text = f"imports {imported.path}; take the format from the tensor, or as an argument"
                yield module.violation(imported.line, text)
        for line, word in _spelled_formats(module):
            text = f"{word!r} names a format; derive what is needed from Format, Field or Codec, or move it to codecs/"
            yield module.violation(line, text)


def _spelled_formats(module: Module) -> Iterator[tuple[int, str]]:
    """Identifiers and strings (docstrings apart) that name a format."""
    for node in module.nodes:
        words = [getattr(node, name, None) for name in ("id", "attr", "arg", "name")]
        if isinstance(node, ast.Constant) and id(node) not in module.docstrings:
            words.append(node.value)
        for word in words:
            if isinstance(word, str) and FORMAT_NAME.search(word):
                yield node.lineno, word


def codecs_are_never_told_apart(modules: Sequence[Module]) -> Iterator[Violation]:
    """No isinstance, type comparison or match on a codec, no comparison with a catalog entry, outside codecs/."""
    for module in modules:
        if not module.path.startswith("te_dist/") or module.package in ("codecs", "catalog", TESTING):
            continue
        imported = [i.name for i in module.imports if i.module.startswith(("te_dist.codecs", "te_dist.catalog"))]
        known = {name for name in imported if name is not None and not name.isupper()}
        for node in module.nodes_of(ast.Call, ast.Compare, ast.MatchClass):
            names = _names_in(_compared_parts(node))
            if names & known or any(name.startswith(("catalog.", "codecs.")) for name in names):
                text = "tells codecs or formats apart; ask a property of Format, Field or Codec instead"
                yield module.violation(node.lineno, text)


def _compared_parts(node: ast.AST) -> list[ast.AST]:
    """The sub-trees of a test that say what something is compared with."""
    if isinstance(node, ast.Call) and dotted_name(node.func) in ("isinstance", "issubclass"):
        return list(node.args[1:])
    if isinstance(node, ast.Compare):
        return [node.left, *node.comparators]
    return [node.cls] if isinstance(node, ast.MatchClass) else []


def _names_in(trees: list[ast.AST]) -> set[str]:
    """All names and dotted names in sub-trees."""
    return {name for tree in trees for node in ast.walk(tree) if (name := dotted_name(node))}
