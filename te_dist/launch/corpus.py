"""The tokenized text: a byte-pair vocabulary trained on it, and token files that every rank maps into memory."""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import importlib.metadata
import json
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from te_dist.checkpoints.folder import sync
from te_dist.launch import text
from te_dist.launch.claim import LOCK
from te_dist.launch.config import Config
from te_dist.launch.errors import JobError, unwritable
from te_dist.launch.text import Source, Split
from te_dist.launch.world import World

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|end of text|>"
AT_ONCE = 1 << 23  # characters encoded together, in as many threads as there are cores; each takes 20 bytes or more
END_OF_FILE = ""  # behind its pieces, which hold a character or more
RECORD = "corpus.json"
LAYOUT = "-2"  # of the folder, after the digest: what lies there under another name is not looked at
DRAFT = ".draft"
ABANDONED = 24 * 3600.0  # seconds after which a draft that nobody writes to belongs to no job, where locks do not tell
DTYPES = ("uint16", "uint32")


@dataclass(frozen=True)
class Corpus:
    """Tokenized text.

    Attributes:
        digest: of the files, their split and the vocabulary; equal digests are equal tokens.
        training: (num_tokens,) unsigned integers, files one after the other, each ended by `END_OF_TEXT`.
        validation: (num_tokens,) of the files held out.
        counts: (vocab_size,) int64, how often each token occurs in `training`.
    """

    digest: str
    training: NDArray[np.unsignedinteger]
    validation: NDArray[np.unsignedinteger]
    counts: NDArray[np.int64]


def prepare(world: World, config: Config) -> Corpus:
    """Tokenizes the text on rank 0 unless the run directory holds it already, and opens it on every rank.

    Raises:
        JobError: on every rank alike, whichever rank met the reason.
    """
    folder = Path(world.share(lambda: str(_build(config))))
    return world.agree(lambda: _open(folder))


def folder_in(run_dir: str | Path, digest: str) -> Path:
    """Where a run keeps the corpus of a digest."""
    return Path(run_dir, "text", digest + LAYOUT)


def made_of(folder: Path) -> dict[str, str]:
    """What decides the tokens of a corpus, by name; nothing where it does not say.

    Returns:
        `files`: digest of all but the version of `tokenizers`, which is the other one.
    """
    with suppress(OSError, ValueError, KeyError, TypeError):
        return dict(json.loads((folder / RECORD).read_text())["made_of"])
    return {}


def _build(config: Config) -> Path:
    """Writes the corpus beside its final place and renames it: what stands there is complete."""
    split = text.split(config.data)
    folder = folder_in(config.run_dir, _digest(split, config.model.vocab_size, _version()))
    if folder.exists():
        return folder
    # What another version of `tokenizers` has made is what the run of this directory goes on with.
    files = _digest(split, config.model.vocab_size)
    for other in sorted(folder.parent.glob("*" + LAYOUT)):
        if made_of(other).get("files") == files:
            return other
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder.parent, config)
        # NOTE: of this job alone, another one may build the same beside it.
        with tempfile.TemporaryDirectory(DRAFT, folder.name, folder.parent, ignore_cleanup_errors=True) as own:
            draft = Path(own, folder.name)  # with the mode of any folder, not that of a temporary one
            draft.mkdir()
            _fill(draft, split, config.model.vocab_size)
            _publish(draft, folder)
    except OSError as error:
        raise unwritable(config.run_dir, error) from error
    return folder


def _remove_abandoned(parent: Path, config: Config) -> None:
    """Removes drafts of jobs that were killed: all of them where a lock keeps other jobs out, as it does in a run."""
    is_alone = _is_locked(Path(config.run_dir, LOCK))
    for draft in parent.glob("*" + DRAFT):
        with suppress(OSError):  # it ends or is removed meanwhile
            written = max(path.stat().st_mtime for path in (draft, *draft.rglob("*")))
            if is_alone or time.time() - written > ABANDONED:
                shutil.rmtree(draft, ignore_errors=True)


def _is_locked(file: Path) -> bool:
    """Whether somebody holds the lock of a file; not so where there are no locks."""
    try:
        with file.open("r+b") as opened:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True
    except OSError:
        return False
    return False


def _fill(draft: Path, split: Split, vocab_size: int) -> None:
    tokenizer = _train(split.training, vocab_size)
    # NOTE: `tokenizer.save` raises plain Exceptions.
    (draft / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    dtype = np.dtype(np.uint16 if vocab_size <= np.iinfo(np.uint16).max + 1 else np.uint32)
    counts, held_out = np.zeros((2, vocab_size), np.int64)
    _write(draft / "training.bin", _encode(tokenizer, split.training), dtype, counts)
    _write(draft / "validation.bin", _encode(tokenizer, split.validation), dtype, held_out)
    np.save(draft / "counts.npy", counts)
    record = {
        "dtype": dtype.name,
        "tokens": {"training": int(counts.sum()), "validation": int(held_out.sum())},
        "validation": [str(source.path) for source in split.validation],
        "made_of": {"files": _digest(split, vocab_size), "tokenizers": _version()},
    }
    (draft / RECORD).write_text(json.dumps(record, indent=2))


def _publish(draft: Path, folder: Path) -> None:
    for path in (*draft.iterdir(), draft):
        sync(path)
    try:
        draft.rename(folder)
    except OSError:
        if not folder.is_dir():  # otherwise another job was faster, by which it is complete
            raise
    sync(folder.parent)


def _open(folder: Path) -> Corpus:
    try:
        record = json.loads((folder / RECORD).read_text())
        dtype, sizes = record["dtype"], record["tokens"]
        if dtype not in DTYPES:
            raise ValueError(f"{RECORD} with dtype {dtype!r}")
        training, validation = (np.memmap(folder / f"{name}.bin", dtype, "r") for name in ("training", "validation"))
        counts = np.load(folder / "counts.npy")
        found = {"training": training.size, "validation": validation.size}
        if sizes != found or counts.ndim != 1 or counts.sum() != training.size:
            raise ValueError(f"files of {found} tokens, where {RECORD} says {sizes} and counts.npy {counts.sum()}")
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise JobError(
            f"tokenized text {folder}",
            got=f"{type(error).__name__}: {error}",
            wanted="what rank 0 wrote there",
            remedy="let run_dir be a directory that all nodes share; if it is, delete that folder",
        ) from error
    return Corpus(folder.name.removesuffix(LAYOUT), training, validation, counts)


def _digest(split: Split, vocab_size: int, version: str = "") -> str:
    names = [name for side in (split.validation, split.training) for name in (*(each.digest for each in side), "|")]
    seed = json.dumps([names, vocab_size, END_OF_TEXT, version])
    return hashlib.sha256(seed.encode()).hexdigest()[:24]


def _version() -> str:
    return importlib.metadata.version("tokenizers")


def _train(sources: Sequence[Source], vocab_size: int) -> Tokenizer:
    """A byte-level byte-pair encoding: every text can be encoded, whatever the training files hold."""
    tokenizers = importlib.import_module("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(chain.from_iterable(map(text.pieces, sources)), trainer)
    tokenizer.encode_special_tokens = True  # as any text, where a file holds END_OF_TEXT
    return tokenizer


def _encode(tokenizer: Tokenizer, sources: Sequence[Source]) -> Iterator[list[int]]:
    """The tokens of each piece of each file, and behind a file the end of a text."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    assert end is not None
    for batch in _batches(piece for source in sources for piece in chain(text.pieces(source), [END_OF_FILE])):
        for encoding in tokenizer.encode_batch(batch, add_special_tokens=False):
            yield encoding.ids or [end]


def _batches(pieces: Iterable[str]) -> Iterator[list[str]]:
    """Pieces of `AT_ONCE` characters together, of fewer at the end."""
    batch, size = [], 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece)
        if size >= AT_ONCE:
            yield batch
            batch, size = [], 0
    yield batch


def _write(path: Path, pieces: Iterator[list[int]], dtype: np.dtype, counts: NDArray[np.int64]) -> None:
    """Appends the tokens of each piece and adds them to `counts`."""
    with path.open("wb") as out:
        for tokens in pieces:
            counts += np.bincount(tokens, minlength=len(counts))
            out.write(np.asarray(tokens, dtype).tobytes())
