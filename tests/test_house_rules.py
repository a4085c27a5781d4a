"""The house rules hold in the whole tree. Messages name the place and how to mend it; tests/house has the rules."""

import gc
import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import pytest

from tests.house import imports, shape, text
from tests.house.source import Module, Violation, read_tree

Rule = Callable[[Sequence[Module]], Iterator[Violation]]

RULES: tuple[Rule, ...] = (
    shape.files_are_short,
    shape.functions_are_short,
    shape.parameters_are_few,
    shape.options_are_keywords,
    shape.bools_come_alone,
    shape.everything_public_is_documented,
    shape.no_code_is_commented_out,
    imports.imports_go_down,
    imports.imports_stand_at_the_top,
    imports.only_env_reads_the_environment,
    imports.only_one_module_knows_private_torch,
    imports.integrations_name_no_format,
    imports.codecs_are_never_told_apart,
    text.block_extents_have_one_home,
    text.native_sources_need_no_torch,
    text.texts_name_no_machine,
    text.no_test_file_is_about_one_format,
    text.tests_never_time,
    text.gpu_tests_are_marked,
)


@cache
def tree() -> tuple[Module, ...]:
    """All modules, parsed once; nobody looks for garbage meanwhile, which would take twice as long as to parse."""
    gc.disable()
    try:
        modules = tuple(read_tree())
        assert all(module.nodes for module in modules)
        return modules
    finally:
        gc.enable()


def broken_by(rule: Rule, path: str, source: str, *others: Module) -> list[str]:
    """Messages of a rule about one made-up module."""
    return [str(violation) for violation in rule([Module(path, source), *others]) if violation.path == path]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_holds(rule: Rule) -> None:
    violations = [str(violation) for violation in rule(tree())]
    if violations:
        listing = "\n".join(violations)
        pytest.fail(f"{len(violations)} places break the rule: {inspect.getdoc(rule)}\n{listing}", pytrace=False)


def test_all_rules_are_run() -> None:
    defined = {
        function
        for module in (imports, shape, text)
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and not name.startswith("_")
    }
    assert defined == set(RULES)


DOC = '"""Doc."""\n'
CODEC = Module(
    "te_dist/codecs/base.py", f"{DOC}class Codec:\n    {DOC}    def encode(self):\n        {DOC}        x = 1"
)

USES = "from te_dist.codecs.block import Block\n"

# (rule, path, source that breaks it, source beside it that does not)
CASES = [
    (shape.files_are_short, "tests/a.py", "x = 1\n" * 501, "x = 1\n" * 500),
    (shape.functions_are_short, "tests/a.py", "def f():\n" + "    x = 1\n" * 60, "def f():\n" + "    x = 1\n" * 59),
    (
        shape.functions_are_short,
        "te_dist/a.py",
        "class A:\n    def f(self):\n" + "        x = 1\n" * 60,
        "def f():\n    '''One\n" + "\n" * 70 + "    '''\n" + "    x = 1\n" * 59,
    ),
    (
        shape.parameters_are_few,
        "te_dist/a.py",
        "def f(a, b, *, c, d, e, g, h): ...",
        "class A:\n    def f(self, a, b, *, c, d, e, g): ...",
    ),
    (
        shape.options_are_keywords,
        "te_dist/a.py",
        "def f(a, b, c, d): ...",
        "def f(a, b, c, *, d): ...\ndef _g(a, b, c, d): ...\nclass A:\n    def f(self, a, b, c): ...",
    ),
    (
        shape.options_are_keywords,
        "te_dist/a.py",
        "def f(a, b, c=1): ...",
        "def f(a, b=1, *, c=1): ...\nclass A(Codec):\n    def encode(self, a, b, c, d): ...",
    ),
    (
        shape.bools_come_alone,
        "te_dist/a.py",
        "def f(*, a: bool, b: bool | None): ...",
        "def f(*, a: bool, b: int): ...",
    ),
    (
        shape.everything_public_is_documented,
        "te_dist/a.py",
        f"{DOC}def f():\n    x = 1\n    return x",
        f"{DOC}def _f(): ...\nclass _A:\n    def f(self):\n        x = 1\n        return x",
    ),
    (shape.everything_public_is_documented, "te_dist/a.py", f"{DOC}class A: ...", f"{DOC}class A:\n    {DOC}"),
    (shape.everything_public_is_documented, "tests/a.py", "x = 1", DOC),
    (
        shape.everything_public_is_documented,
        "te_dist/a.py",
        f"{DOC}class A(Codec):\n    {DOC}    def decode(self):\n        x = 1\n        return x",
        f"{DOC}class A(Codec):\n    {DOC}    def encode(self):\n        x = 1\n        return x",
    ),
    (
        shape.no_code_is_commented_out,
        "te_dist/a.py",
        "# x = f(y)\n",
        "# load(store(x)) == x\n# NOTE: x\n# (m, k)\n# return nothing here\nx = 1  # f(x)\n",
    ),
    (shape.no_code_is_commented_out, "te_dist/a.py", "    # return x\n", "# y = x * scale\n"),
    (imports.imports_go_down, "te_dist/formats/a.py", "from te_dist import tensor", "from te_dist import env"),
    (imports.imports_go_down, "te_dist/fsdp2/a.py", "from te_dist.optim import x", "from te_dist.tensor import x"),
    (imports.imports_go_down, "te_dist/nn/a.py", "import te_dist as te", "from te_dist.tensor import x"),
    (imports.imports_go_down, "te_dist/launch/a.py", "from te_dist import testing", "import te_dist as te"),
    (imports.imports_go_down, "te_dist/nn/a.py", "import te_dist.testing.pool", "import te_dist.fsdp2.api"),
    (imports.imports_go_down, "te_dist/unknown/a.py", "x = 1", None),
    (
        imports.imports_stand_at_the_top,
        "te_dist/a.py",
        "def f():\n    import os",
        "if TYPE_CHECKING:\n    import os\ntry:\n    import numpy\nexcept ImportError:\n    numpy = None",
    ),
    (imports.imports_stand_at_the_top, "te_dist/a.py", "if x:\n    import os", "import os"),
    (imports.only_env_reads_the_environment, "te_dist/a.py", "os.environ['X']", "env.RANK.get()"),
    (imports.only_env_reads_the_environment, "te_dist/a.py", "from os import getenv", "from os import path"),
    (
        imports.only_one_module_knows_private_torch,
        "te_dist/a.py",
        "from torch._C import x",
        "from te_dist._torch_private import x",
    ),
    (
        imports.only_one_module_knows_private_torch,
        "te_dist/a.py",
        "from torch.distributed.fsdp._fully_shard import x",
        "from torch.distributed.fsdp import fully_shard",
    ),
    (
        imports.only_one_module_knows_private_torch,
        "te_dist/a.py",
        "group._reshard_after_forward",
        "dtensor._local_tensor\ntorch.ops._c10d_functional.wait_tensor\nself._mine = 1\nother._mine",
    ),
    (imports.integrations_name_no_format, "te_dist/fsdp2/a.py", "x = MXFP8Codec()", f"{DOC}x = 1  # MXFP8"),
    (imports.integrations_name_no_format, "te_dist/offload/a.py", "x == 'nvfp4'", '"""An NVFP4 weight."""'),
    (imports.integrations_name_no_format, "te_dist/optim/a.py", "from te_dist import catalog", "x = 1"),
    (imports.codecs_are_never_told_apart, "te_dist/nn/a.py", f"{USES}isinstance(c, Block)", "isinstance(x, Block)"),
    (imports.codecs_are_never_told_apart, "te_dist/nn/a.py", "x.format == catalog.mxfp8()", "a.codec == b.codec"),
    (imports.codecs_are_never_told_apart, "te_dist/nn/a.py", f"{USES}type(codec) is Block", f"{USES}x = Block()"),
    (text.block_extents_have_one_home, "te_dist/tensor/a.py", "x = y % 128", "x = y % 64\n_ALIGNMENT = 16"),
    (text.no_test_file_is_about_one_format, "tests/fsdp2/test_mxfp8.py", "", None),
    (text.tests_never_time, "tests/a.py", "start = time.perf_counter()", "time.sleep(1)"),
    (
        text.gpu_tests_are_marked,
        "tests/a.py",
        "def test_a():\n    x.to('cuda')",
        "@pytest.mark.gpu\ndef test_a():\n    x.to('cuda')",
    ),
    (
        text.gpu_tests_are_marked,
        "tests/a.py",
        "@pytest.mark.skipif(not torch.cuda.is_available())\ndef test_a(): ...",
        "pytestmark = pytest.mark.gpu\ndef test_a():\n    torch.cuda.synchronize()",
    ),
]


@pytest.mark.parametrize(("rule", "path", "bad", "good"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_rule_catches_what_breaks_it_and_nothing_else(rule: Rule, path: str, bad: str, good: str | None) -> None:
    assert len(broken_by(rule, path, bad, CODEC)) == 1
    if good is not None:
        assert broken_by(rule, path, good, CODEC) == []


def test_machine_paths_are_found_in_texts() -> None:
    bad = ["/wor" + "k/main/x", "cd /roo" + "t/", "a=/wor" + "k"]
    good = ["a/work/b", "network/work", "/workspace/x", "/rooted"]
    assert all(text.MACHINE_PATH.search(line) for line in bad)
    assert not any(text.MACHINE_PATH.search(line) for line in good)


def test_the_allow_lists_hold_nothing_stale() -> None:
    places = {f"{module.path}::{function.qualname}" for module in tree() for function in module.functions}
    for entry in (*shape.WIDE_SIGNATURES, *imports.NAMES_FORMATS):
        assert any(place == entry or place.startswith(entry) for place in places), f"{entry} is no longer in the tree"
