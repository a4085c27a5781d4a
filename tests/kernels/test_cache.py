"""The kernel cache: whole entries or none, whoever writes at the same time and whatever the folder is like."""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path

import pytest

from te_dist.kernels import cache, compiler, movement, runtime
from te_dist.kernels.cache import Compiled, Entry, KernelCache
from te_dist.testing import pool

KERNEL = Compiled(b"\x7fELF and so on" * 1000, registers=40, spilled=8, serialized=True)
ENTRY = Entry("sm_90a", "a" * 32, "13.0.88")
RANKS = 4


def stored(folder: Path) -> Path:
    (file,) = folder.glob("*/*")
    return file


def test_an_entry_comes_back(tmp_path):
    entries = KernelCache(tmp_path)
    assert entries.get(ENTRY) is None
    entries.put(ENTRY, KERNEL)
    assert entries.get(ENTRY) == KERNEL
    assert entries.entries() == [(stored(tmp_path), KERNEL)]


def test_key_architecture_and_compiler_are_told_apart(tmp_path):
    entries = KernelCache(tmp_path)
    entries.put(ENTRY, KERNEL)
    others = (
        Entry("sm_100a", ENTRY.key, ENTRY.version),
        Entry(ENTRY.arch, "b" * 32, ENTRY.version),
        Entry(ENTRY.arch, ENTRY.key, "13.1"),
    )
    assert [entries.get(entry) for entry in others] == [None, None, None]


def test_without_a_compiler_an_entry_of_any_version_serves(tmp_path):
    entries = KernelCache(tmp_path)
    entries.put(ENTRY, KERNEL)
    assert entries.get(Entry(ENTRY.arch, ENTRY.key, None)) == KERNEL


def test_the_newest_version_serves_first(tmp_path):
    entries = KernelCache(tmp_path)
    for minor in (9, 10):
        made = Compiled(KERNEL.cubin, registers=minor, spilled=0, serialized=False)
        entries.put(Entry(ENTRY.arch, ENTRY.key, f"12.{minor}.1"), made)
    assert entries.get(Entry(ENTRY.arch, ENTRY.key, None)).registers == 10


EMPTY = cache._MAGIC + hashlib.sha256(b"").digest()  # with the right digest


@pytest.mark.parametrize("damage", [b"", b"short", KERNEL.cubin, EMPTY, "cut", "flipped"])
def test_a_damaged_entry_is_missing_and_is_written_anew(tmp_path, damage):
    entries = KernelCache(tmp_path)
    entries.put(ENTRY, KERNEL)
    file = stored(tmp_path)
    content = file.read_bytes()
    flipped = content[:-5] + bytes([content[-5] ^ 1]) + content[-4:]
    file.write_bytes({"cut": content[:-1], "flipped": flipped}.get(damage, damage))
    assert entries.get(ENTRY) is None
    entries.put(ENTRY, KERNEL)
    assert entries.get(ENTRY) == KERNEL


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="directory"):
        KernelCache(tmp_path / "file").put(ENTRY, KERNEL)


def test_a_full_disk_is_an_error_and_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        KernelCache(tmp_path).put(ENTRY, KERNEL)
    assert list((tmp_path / ENTRY.arch).iterdir()) == []


@pytest.mark.parametrize("call", ["flush", "fsync", "close"])
def test_a_file_that_cannot_be_written_to_its_end_is_no_entry(tmp_path, monkeypatch, call):
    def fail(*_: object) -> None:
        raise OSError(122, "Disk quota exceeded")

    class File(io.FileIO):
        def flush(self) -> None:
            fail() if call == "flush" else super().flush()

        def close(self) -> None:
            closed = self.closed
            super().close()
            if call == "close" and not closed:
                fail()

    monkeypatch.setattr(cache, "open", File, raising=False)
    if call == "fsync":
        monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="quota"):
        KernelCache(tmp_path).put(ENTRY, KERNEL)
    assert list((tmp_path / ENTRY.arch).iterdir()) == []


def _write_and_read(rank: int, world: int, folder: Path) -> bool:
    entries = KernelCache(folder)
    for _ in range(20):
        entries.put(ENTRY, KERNEL)
        if entries.get(ENTRY) != KERNEL:
            return False
    return True


def test_many_ranks_may_write_the_same_entry_at_once(tmp_path):
    assert all(pool(RANKS).run(_write_and_read, tmp_path))
    assert len(list(tmp_path.glob("*/*"))) == 1


@pytest.fixture
def built(tmp_path, monkeypatch):
    """An empty cache, and a compiler that notes what it compiles."""
    built = []

    def compile_kernel(spec, arch):
        built.append((spec.template, arch))
        return KERNEL

    monkeypatch.setenv("TE_DIST_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setattr(compiler, "version", lambda: "1.2.3")
    monkeypatch.setattr(compiler, "compile_kernel", compile_kernel)
    return built


def test_a_kernel_is_compiled_once(built):
    for _ in range(2):
        assert runtime.compiled(movement.transform(8), "sm_90a") == KERNEL
    assert built == [("Hadamard<8>", "sm_90a")]


def test_a_kernel_that_cannot_be_kept_is_used_all_the_same(built, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TE_DIST_KERNEL_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match=r"not kept in .*file: Not a directory.* until TE_DIST_KERNEL_CACHE names"):
        assert runtime.compiled(movement.transform(8), "sm_90a") == KERNEL


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
