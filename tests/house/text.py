"""Rules on literals, native sources, tests and texts."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.house.source import ROOT, Function, Module, Violation, dotted_name, native_files

# Extents of blocks. They have one home each; everything else computes with Field.
BLOCK_EXTENTS = {16, 32, 128}
KNOWS_EXTENTS = ("codecs", "catalog", "kernels", "ops", "launch", "testing")

TEXT_SUFFIXES = {".py", ".md", ".toml", ".sh", ".yaml", ".yml", ".cfg", ".txt", ".h", ".cpp", ".cu", ".cuh", ".slurm"}
TEXT_FOLDERS = ("te_dist", "csrc", "tests", "benchmarks", "examples", "launch", "docs", ".ci")
MACHINE_PATH = re.compile(r"(?<![\w.])/(work|root|tmp/te)(?=/|\b)")

FORMAT_FILE = re.compile(r"mxfp8|nvfp4|float8|fp8|fp4|block_scal")
CLOCKS = {"time.time", "time.time_ns", "time.perf_counter", "time.perf_counter_ns", "time.process_time"}


def block_extents_have_one_home(modules: Sequence[Module]) -> Iterator[Violation]:
    """The numbers 16, 32 and 128 stand in the catalog, the codecs and the kernels only."""
    for module in modules:
        if not module.path.startswith("te_dist/") or module.package in KNOWS_EXTENTS:
            continue
        in_bytes = {id(inner) for node in module.tree.body if _is_byte_count(node) for inner in ast.walk(node)}
        for node in module.nodes:
            is_extent = isinstance(node, ast.Constant) and type(node.value) is int and node.value in BLOCK_EXTENTS
            if is_extent and id(node) not in in_bytes:
                text = f"literal {node.value}; take it from Field (grain, tile, pad), or name it ..._BYTES"
                yield module.violation(node.lineno, text)


def _is_byte_count(node: ast.stmt) -> bool:
    """Whether a statement defines a constant in bytes: no extent of a block, though it looks like one."""
    return isinstance(node, ast.Assign) and bool(re.search("BYTES|ALIGNMENT", ast.unparse(node.targets[0])))


def native_sources_need_no_torch(modules: Sequence[Module]) -> Iterator[Violation]:
    """csrc builds without torch: it is given pointers and sizes."""
    for file in native_files():
        for number, line in enumerate(file.read_text().splitlines(), 1):
            if re.match(r"\s*#\s*include\s*[<\"](torch|ATen|c10|caffe2)/", line):
                yield Violation(file.relative_to(ROOT).as_posix(), number, "includes torch; pass pointers and sizes")


def texts_name_no_machine(modules: Sequence[Module]) -> Iterator[Violation]:
    """No absolute path of somebody's machine."""
    files = [file for folder in TEXT_FOLDERS for file in sorted((ROOT / folder).rglob("*")) if _is_text(file)]
    files += [file for file in sorted(ROOT.iterdir()) if _is_text(file) or file.name == "Makefile"]
    for file in files:
        for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1):
            if MACHINE_PATH.search(line):
                text = "names a path of one machine; make it relative, or an argument"
                yield Violation(file.relative_to(ROOT).as_posix(), number, text)


def _is_text(file: Path) -> bool:
    """Whether a file is text that we write."""
    return file.suffix in TEXT_SUFFIXES and file.is_file()


def no_test_file_is_about_one_format(modules: Sequence[Module]) -> Iterator[Violation]:
    """Integration tests run over the catalog; only numerics (tests/codecs, tests/ops, tests/csrc) go by format."""
    for module in modules:
        if not module.path.startswith("tests/") or module.path.startswith(
            ("tests/codecs/", "tests/ops/", "tests/csrc/")
        ):
            continue
        if FORMAT_FILE.search(module.path):
            text = "a test file about one format; parametrise over the catalog, so that every format has the test"
            yield module.violation(1, text)


def tests_never_time(modules: Sequence[Module]) -> Iterator[Violation]:
    """Clocks belong into benchmarks/; `time.monotonic` may end a wait."""
    for module in _tests(modules):
        for node in module.nodes_of(ast.Call):
            if dotted_name(node.func) in CLOCKS:
                yield module.violation(
                    node.lineno, "reads a clock; count bytes, launches or calls, or move it to benchmarks/"
                )


def gpu_tests_are_marked(modules: Sequence[Module]) -> Iterator[Violation]:
    """A test that uses "cuda" carries the mark `gpu`, and that mark is the only way to ask for a GPU."""
    for module in _tests(modules):
        whole = any("gpu" in _words(node) for node in module.tree.body if _assigns(node, "pytestmark"))
        for function in module.functions:
            is_marked = whole or any("gpu" in _words(node) for node in _decorators(function))
            if function.node.name.startswith("test_") and not is_marked and _uses_cuda(function):
                text = f"{function.node.name} uses a GPU; mark it @pytest.mark.gpu, or take the fixture `device_type`"
                yield module.violation(function.node.lineno, text)
        for node in module.nodes_of(ast.Attribute) if "is_available" in module.text else ():
            if node.attr == "skipif":
                yield module.violation(node.lineno, "skips by hand; @pytest.mark.gpu skips where there is no GPU")


def _tests(modules: Sequence[Module]) -> list[Module]:
    """Test modules, without the house rules themselves."""
    return [m for m in modules if m.path.startswith("tests/") and not m.path.startswith("tests/house/")]


def _decorators(function: Function) -> list[ast.expr]:
    """Decorators of a test and of the class around it."""
    return [*function.node.decorator_list, *(function.owner.decorator_list if function.owner else [])]


def _assigns(node: ast.stmt, name: str) -> bool:
    return isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets)


def _words(node: ast.AST) -> set[str]:
    """Attribute names in a sub-tree: the marks of a decorator."""
    return {inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute)}


def _uses_cuda(function: Function) -> bool:
    """Whether the body of a function names a CUDA device."""
    for node in (inner for statement in function.node.body for inner in ast.walk(statement)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"cuda(:\d+)?", node.value):
            return True
        if isinstance(node, ast.Attribute) and dotted_name(node).startswith("torch.cuda."):
            return True
    return False
