"""`te-dist kernels build` and `list`: what they leave in the cache, what they print, how they end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from te_dist import __main__ as command
from te_dist.kernels import CompilerError, compiler, movement
from te_dist.kernels.cache import Compiled, Entry, KernelCache
from te_dist.testing import pool

KERNEL = Compiled(b"cubin" * 1000, registers=40, spilled=0, serialized=False)
LISTED = [movement.transform(8), movement.copies(16), movement.copies(4)]


def pretend(patch: pytest.MonkeyPatch) -> None:
    """Three kernels are listed, and compiled without a compiler."""
    patch.setattr(command, "variants", lambda *_: LISTED)
    patch.setattr(compiler, "version", lambda: "1.2.3")
    patch.setattr(compiler, "compile_kernel", lambda *_: KERNEL)


@pytest.fixture
def run(tmp_path, monkeypatch, te_dist_command):
    """Runs `te-dist` with these arguments over an empty cache; returns what it printed last and its exit status."""
    monkeypatch.setenv("TE_DIST_KERNEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    pretend(monkeypatch)

    def run(*arguments: str) -> tuple[str, object]:
        printed, status = te_dist_command(*arguments)
        return " ".join(printed.split()), status

    return run


def test_build_fills_the_cache_once(run, tmp_path):
    first, again = run("kernels", "build"), run("kernels", "build")
    made = f"3 kernels for sm_90a by NVRTC 1.2.3 in {tmp_path / 'cache'}:"
    assert first == (f"{made} 3 compiled now, 0.0 MiB", 0)
    assert again == (f"{made} 0 compiled now, 0.0 MiB", 0)


def test_build_takes_several_architectures(run, tmp_path):
    printed, status = run("kernels", "build", "--arch", "sm_90a,sm_100a")
    assert "6 compiled now" in printed and status == 0
    assert {folder.name for folder in (tmp_path / "cache").iterdir()} == {"sm_90a", "sm_100a"}


def test_a_build_that_is_stopped_says_so(run, monkeypatch, tmp_path):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_compile", stop)
    printed, status = run("kernels", "build")
    assert printed.startswith("compiling 3 of 3 kernels for sm_90a")
    assert printed.endswith(f"stays in {tmp_path / 'cache'}") and status == 130


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a,", "sm_90a, sm_100a", ""])
def test_an_unknown_architecture_is_refused_before_anything_is_compiled(run, arch, tmp_path):
    printed, status = run("kernels", "build", "--arch", arch)
    assert "choose from sm_90a, sm_100a" in printed and status == 2
    assert not (tmp_path / "cache").exists()


def test_damaged_entries_are_listed_and_built_anew(run, tmp_path):
    run("kernels", "build")
    damaged = sorted((tmp_path / "cache").glob("*/*"))[0]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert "sm_90a │ 2 │ 0 │ 1 │ 14" in run("kernels", "list")[0]
    assert "1 compiled now" in run("kernels", "build")[0]
    assert "sm_90a │ 3 │ 0 │ 0 │ 14" in run("kernels", "list")[0]


def test_entries_of_other_sources_and_compilers_are_listed_as_stale(run, tmp_path):
    run("kernels", "build")
    entries = KernelCache(tmp_path / "cache")
    entries.put(Entry("sm_90a", "0" * 32, "1.2.3"), KERNEL)
    entries.put(Entry("sm_90a", LISTED[0].key, "1.2.4"), KERNEL)
    printed, _ = run("kernels", "list")
    assert "sm_90a │ 3 │ 2 │ 0 │ 24" in printed and "by NVRTC 1.2.3; others are stale" in printed


def test_without_a_compiler_entries_of_any_are_used(run, monkeypatch, tmp_path):
    run("kernels", "build")
    KernelCache(tmp_path / "cache").put(Entry("sm_90a", "0" * 32, "1.2.3"), KERNEL)
    monkeypatch.setattr(compiler, "version", lambda: None)
    printed, _ = run("kernels", "list")
    assert "sm_90a │ 3 │ 1 │ 0 │ 19" in printed and "any NVRTC" in printed
    assert "3 kernels for sm_90a by NVRTC of any version" in run("kernels", "build")[0]


def test_without_a_home_the_message_names_the_variable(run, monkeypatch):
    monkeypatch.setenv("TE_DIST_KERNEL_CACHE", "~nobody-has-this-name/kernels")
    printed, status = run("kernels", "list")
    assert "TE_DIST_KERNEL_CACHE='~nobody-has-this-name/kernels': no home" in printed and status == 2


def test_entries_that_lead_nowhere_or_vanish_are_listed(run, monkeypatch, tmp_path):
    run("kernels", "build")
    (tmp_path / "cache" / "sm_90a" / "away.cubin").symlink_to("nowhere")
    original = KernelCache.entries

    def vanish(cache: KernelCache) -> object:
        found = original(cache)
        next(file for file, kernel in found if kernel).unlink()
        return found

    assert "sm_90a │ 3 │ 0 │ 1 │ 14" in run("kernels", "list")[0]
    monkeypatch.setattr(KernelCache, "entries", vanish)
    printed, status = run("kernels", "list")
    assert "sm_90a │ 3 │ 0 │ 1 │ 9" in printed and status == 0


def test_a_cache_that_is_a_file_is_named(run, tmp_path):
    (tmp_path / "cache").write_text("in the way")
    printed, status = run("kernels", "list")
    assert f"TE_DIST_KERNEL_CACHE: got {tmp_path / 'cache'}, a file; wanted a folder" in printed and status == 2


def test_an_empty_cache_is_listed(run, tmp_path):
    printed, status = run("kernels", "list")
    assert "architecture" in printed and status == 0


def test_a_folder_that_cannot_be_written_ends_the_build(run, tmp_path):
    (tmp_path / "cache").write_text("in the way")
    printed, status = run("kernels", "build")
    assert "Not a directory" in printed and "TE_DIST_KERNEL_CACHE" in printed and status == 1


def test_a_full_disk_ends_the_build(run, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    printed, status = run("kernels", "build")
    assert "No space left" in printed and "TE_DIST_KERNEL_CACHE" in printed and status == 1


def test_a_kernel_that_does_not_compile_ends_the_build(run, monkeypatch):
    def fail(spec, arch):
        raise CompilerError(f"{spec.template} does not compile for {arch}")

    monkeypatch.setattr(compiler, "compile_kernel", fail)
    printed, status = run("kernels", "build")
    assert "does not compile for sm_90a" in printed and status == 1


def test_without_a_command_the_usage_is_shown(run):
    (nothing, status), (asked, success) = run(), run("--help")
    assert nothing == asked and (status, success) == (2, 0)
    assert all(f"te-dist {name}" in asked for name in ("kernels build", "kernels list", "plan"))


def test_an_unknown_command_is_named(run):
    printed, status = run("kernel")
    assert printed.startswith("te-dist: got 'kernel', wanted a command of these:") and status == 2


def _build(rank: int, world: int, folder: Path) -> int:
    cache = KernelCache(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "_cache", lambda: cache)
        pretend(patch)
        command.build()
    return len(cache.entries())


def test_two_builds_at_once_leave_a_whole_cache(tmp_path):
    assert pool(2).run(_build, tmp_path) == [3, 3]
    assert not [file for file in tmp_path.glob("*/*") if file.name.startswith(".")]
