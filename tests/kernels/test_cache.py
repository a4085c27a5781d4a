"""The kernel cache: whole entries or none, whoever writes at the same time and whatever the folder is like."""

from __future__ import annotations

import multiprocessing
import os
import warnings
from pathlib import Path

import pytest

from te_dist.kernels import CompilerError, compiler, movement, runtime
from te_dist.kernels.cache import Entry, KernelCache

CUBIN = b"\x7fELF and so on" * 1000
ENTRY = Entry("sm_90a", "a" * 32, "13.0.88")
RANKS = 8


def stored(folder: Path) -> Path:
    (file,) = folder.glob("*/*")
    return file


def test_an_entry_comes_back(tmp_path):
    cache = KernelCache(tmp_path)
    assert cache.get(ENTRY) is None
    cache.put(ENTRY, CUBIN)
    assert cache.get(ENTRY) == CUBIN
    assert cache.entries() == [(stored(tmp_path), True)]


def test_key_architecture_and_compiler_are_told_apart(tmp_path):
    cache = KernelCache(tmp_path)
    cache.put(ENTRY, CUBIN)
    others = (
        Entry("sm_100a", ENTRY.key, ENTRY.version),
        Entry(ENTRY.arch, "b" * 32, ENTRY.version),
        Entry(ENTRY.arch, ENTRY.key, "13.1"),
    )
    assert [cache.get(entry) for entry in others] == [None, None, None]


def test_without_a_compiler_an_entry_of_any_version_serves(tmp_path):
    cache = KernelCache(tmp_path)
    cache.put(ENTRY, CUBIN)
    assert cache.get(Entry(ENTRY.arch, ENTRY.key, None)) == CUBIN


@pytest.mark.parametrize("damage", [b"", b"short", CUBIN, "cut", "flipped"])
def test_a_damaged_entry_is_missing_and_is_written_anew(tmp_path, damage):
    cache = KernelCache(tmp_path)
    cache.put(ENTRY, CUBIN)
    file = stored(tmp_path)
    content = file.read_bytes()
    flipped = content[:-5] + bytes([content[-5] ^ 1]) + content[-4:]
    file.write_bytes({"cut": content[:-1], "flipped": flipped}.get(damage, damage))
    assert cache.get(ENTRY) is None
    cache.put(ENTRY, CUBIN)
    assert cache.get(ENTRY) == CUBIN


def test_a_folder_that_cannot_be_made_costs_a_warning(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(UserWarning, match="TE_DIST_KERNEL_CACHE"):
        KernelCache(tmp_path / "file").put(ENTRY, CUBIN)


def test_a_full_disk_costs_a_warning_and_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.warns(UserWarning, match="No space left"):
        KernelCache(tmp_path).put(ENTRY, CUBIN)
    assert list((tmp_path / ENTRY.arch).iterdir()) == []


def _write_and_read(folder: Path) -> bool:
    cache = KernelCache(folder)
    for _ in range(20):
        cache.put(ENTRY, CUBIN)
        if cache.get(ENTRY) != CUBIN:
            return False
    return True


def test_many_ranks_may_write_the_same_entry_at_once(tmp_path):
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert all(pool.map(_write_and_read, [tmp_path] * RANKS))
    assert len(list(tmp_path.glob("*/*"))) == 1


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """An empty cache, in memory and on disk."""
    monkeypatch.setenv("TE_DIST_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setattr(runtime, "_cubins", {})
    monkeypatch.setattr(compiler, "version", lambda: "1.2.3")
    return tmp_path


def test_a_kernel_is_compiled_once(fresh, monkeypatch):
    built = []

    def build(spec, arch):
        built.append((spec.template, arch))
        return compiler.Compiled(CUBIN, 32, 0)

    spec = movement.transform(8)
    assert runtime.cubin_of(spec, "sm_90a", build=build) == CUBIN
    assert runtime.cubin_of(spec, "sm_90a", build=build) == CUBIN
    monkeypatch.setattr(runtime, "_cubins", {})
    assert runtime.cubin_of(spec, "sm_90a", build=build) == CUBIN
    assert built == [("Hadamard<8>", "sm_90a")]


def test_a_kernel_that_cannot_be_kept_is_used_all_the_same(fresh, monkeypatch):
    (fresh / "file").write_text("in the way")
    monkeypatch.setenv("TE_DIST_KERNEL_CACHE", str(fresh / "file"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cubin = runtime.cubin_of(movement.transform(8), "sm_90a", build=lambda *_: compiler.Compiled(CUBIN, 32, 0))
    assert cubin == CUBIN


def test_without_cupy_the_message_names_the_extra(fresh, monkeypatch):
    monkeypatch.setattr(compiler, "_BINDING", "te_dist.no_such_module")
    compiler._binding.cache_clear()
    try:
        with pytest.raises(CompilerError, match=r"install te_dist\[cuda13\]"):
            runtime.cubin_of(movement.transform(8), "sm_90a")
    finally:
        compiler._binding.cache_clear()


def test_without_a_driver_a_launch_says_so():
    with pytest.raises(RuntimeError, match="CUDA"):
        runtime.arch_of(63)


@pytest.mark.parametrize(("capability", "message"), [((10, 0), "TE_DIST_UNMEASURED_KERNELS=1"), ((8, 0), "8.0")])
def test_architectures_that_never_ran_or_are_unknown_are_refused(monkeypatch, capability, message):
    monkeypatch.setattr(runtime._C.cuda, "compute_capability", lambda device: capability)
    with pytest.raises(RuntimeError, match=message):
        runtime.arch_of.__wrapped__(0)


def test_an_architecture_that_never_ran_may_be_allowed(monkeypatch):
    monkeypatch.setattr(runtime._C.cuda, "compute_capability", lambda device: (10, 0))
    monkeypatch.setenv("TE_DIST_UNMEASURED_KERNELS", "1")
    assert runtime.arch_of.__wrapped__(0) == "sm_100a"
