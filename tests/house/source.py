"""The source tree as the rules see it: parsed modules, their functions and imports, and violations."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TypeVar

ROOT = Path(__file__).parents[2]
PYTHON_FOLDERS = ("te_dist", "tests", "benchmarks", "examples", "launch", "docs")
NATIVE_SUFFIXES = (".h", ".cpp", ".cu", ".cuh")

Node = TypeVar("Node", bound=ast.AST)
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Violation:
    """A place that breaks a rule, and how to mend it."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


@dataclass(frozen=True)
class Function:
    """A function or method with its place in the module.

    Attributes:
        node: its definition.
        qualname: dotted name inside the module.
        owner: the class it is a method of.
        is_nested: whether it stands inside another function.
    """

    node: FunctionNode
    qualname: str
    owner: ast.ClassDef | None
    is_nested: bool

    @property
    def is_public(self) -> bool:
        """Whether others may call it: no part of its name is private, and it is no dunder but `__init__`."""
        parts = self.qualname.split(".")
        return not self.is_nested and all(part == "__init__" or not part.startswith("_") for part in parts)

    @cached_property
    def decorators(self) -> set[str]:
        """Last parts of the names of its decorators."""
        return {last_name(node.func if isinstance(node, ast.Call) else node) for node in self.node.decorator_list}

    @cached_property
    def positional(self) -> list[ast.arg]:
        """Parameters that may be given by position, without self, cls and ctx."""
        arguments = [*self.node.args.posonlyargs, *self.node.args.args]
        takes_instance = self.owner is not None and "staticmethod" not in self.decorators
        if arguments and (takes_instance or arguments[0].arg == "ctx"):
            arguments = arguments[1:]
        return arguments

    @cached_property
    def parameters(self) -> list[ast.arg]:
        """All named parameters, without self, cls and ctx."""
        return [*self.positional, *self.node.args.kwonlyargs]


@dataclass(frozen=True)
class Import:
    """One imported module or name: `module` alone, or `name` from `module`."""

    module: str
    name: str | None
    line: int

    @property
    def path(self) -> str:
        """Dotted path of what is imported."""
        return self.module if self.name is None else f"{self.module}.{self.name}"


@dataclass(frozen=True)
class Module:
    """One Python file; `path` is relative to the root of the repository."""

    path: str
    text: str

    @staticmethod
    def read(file: Path) -> Module:
        """The module of a file of this repository."""
        return Module(file.relative_to(ROOT).as_posix(), file.read_text())

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax tree."""
        return ast.parse(self.text, self.path)

    @cached_property
    def package(self) -> str:
        """First name below `te_dist` ("fsdp2", "catalog"), empty for other folders and the package itself."""
        parts = PurePosixPath(self.path).with_suffix("").parts
        return parts[1] if parts[0] == "te_dist" and parts[1] != "__init__" else ""

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree."""
        return list(ast.walk(self.tree))

    @cached_property
    def _by_type(self) -> dict[type, list[ast.AST]]:
        found: dict[type, list[ast.AST]] = {}
        for node in self.nodes:
            found.setdefault(type(node), []).append(node)
        return found

    def nodes_of(self, *types: type[Node]) -> list[Node]:
        """Nodes of exactly these types, type by type."""
        return [node for each in types for node in self._by_type.get(each, ())]  # type: ignore[misc]

    @cached_property
    def functions(self) -> list[Function]:
        """All functions, methods and nested functions."""
        return list(_functions(self.tree.body, "", None, False))

    @cached_property
    def imports(self) -> list[Import]:
        """All imports, wherever they stand."""
        found = []
        for node in self.nodes_of(ast.Import, ast.ImportFrom):
            if isinstance(node, ast.Import):
                found += [Import(alias.name, None, node.lineno) for alias in node.names]
            else:
                found += [Import(node.module or "", alias.name, node.lineno) for alias in node.names]
        return found

    @cached_property
    def docstrings(self) -> set[int]:
        """Ids of the constants that are docstrings."""
        holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        firsts = [node.body[0] for node in self.nodes_of(*holders) if node.body]
        return {id(first.value) for first in firsts if isinstance(first, ast.Expr)}

    def violation(self, line: int, text: str) -> Violation:
        """A violation in this module."""
        return Violation(self.path, line, text)


def read_tree() -> list[Module]:
    """All Python modules of the repository."""
    files = (file for folder in PYTHON_FOLDERS for file in sorted((ROOT / folder).rglob("*.py")))
    return [Module.read(file) for file in files]


def native_files() -> list[Path]:
    """All C++ and CUDA sources."""
    return sorted(file for file in (ROOT / "csrc").rglob("*") if file.suffix in NATIVE_SUFFIXES)


def last_name(node: ast.AST) -> str:
    """The last part of a dotted name, empty for anything else."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def dotted_name(node: ast.AST) -> str:
    """`a.b.c` of an attribute chain on a name, empty for anything else."""
    if isinstance(node, ast.Attribute):
        owner = dotted_name(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return node.id if isinstance(node, ast.Name) else ""


def _functions(body: list[ast.stmt], prefix: str, owner: ast.ClassDef | None, nested: bool) -> Iterator[Function]:
    for node in body:
        if isinstance(node, FunctionNode):
            yield Function(node, prefix + node.name, owner, nested)
            yield from _functions(node.body, f"{prefix}{node.name}.", None, True)
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{prefix}{node.name}.", node, nested)
        elif isinstance(node, ast.If | ast.With | ast.Try | ast.For | ast.While):
            inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
            yield from _functions(inner, prefix, owner, nested)
