"""The tokenized text: a byte-pair vocabulary trained on it, and token files that every rank maps into memory."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from te_dist.checkpoints.folder import sync
from te_dist.launch import text
from te_dist.launch.config import Config
from te_dist.launch.errors import JobError, unwritable
from te_dist.launch.text import Source, Split
from te_dist.launch.world import World

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|end of text|>"
FILES_AT_ONCE = 64  # encoded together, in as many threads as there are cores
LAYOUT = "-2"  # of the folder, after the digest: what lies there under another name is not looked at
DRAFT = ".draft"
ABANDONED = 24 * 3600.0  # seconds after which a draft that nobody writes to belongs to no job
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


def _build(config: Config) -> Path:
    """Writes the corpus beside its final place and renames it: what stands there is complete."""
    split = text.split(config.data)
    folder = Path(config.run_dir, "text", _digest(split, config.model.vocab_size) + LAYOUT)
    if folder.exists():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder.parent)
        # NOTE: of this job alone, another one may build the same beside it.
        with tempfile.TemporaryDirectory(DRAFT, folder.name, folder.parent, ignore_cleanup_errors=True) as own:
            draft = Path(own, folder.name)  # with the mode of any folder, not that of a temporary one
            draft.mkdir()
            _fill(draft, split, config.model.vocab_size)
            _publish(draft, folder)
    except OSError as error:
        raise unwritable(config.run_dir, error) from error
    return folder


def _remove_abandoned(parent: Path) -> None:
    """Removes drafts of jobs that were killed."""
    for draft in parent.glob("*" + DRAFT):
        with suppress(OSError):  # it ends or is removed meanwhile
            written = max(path.stat().st_mtime for path in (draft, *draft.rglob("*")))
            if time.time() - written > ABANDONED:
                shutil.rmtree(draft, ignore_errors=True)


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
    }
    (draft / "corpus.json").write_text(json.dumps(record, indent=2))


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
        record = json.loads((folder / "corpus.json").read_text())
        dtype, sizes = record["dtype"], record["tokens"]
        if dtype not in DTYPES:
            raise ValueError(f"corpus.json with dtype {dtype!r}")
        training, validation = (np.memmap(folder / f"{name}.bin", dtype, "r") for name in ("training", "validation"))
        counts = np.load(folder / "counts.npy")
        found = {"training": training.size, "validation": validation.size}
        if sizes != found or counts.ndim != 1 or counts.sum() != training.size:
            raise ValueError(f"files of {found} tokens, where corpus.json says {sizes} and counts.npy {counts.sum()}")
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise JobError(
            f"tokenized text {folder}",
            got=f"{type(error).__name__}: {error}",
            wanted="what rank 0 wrote there",
            remedy="let run_dir be a directory that all nodes share; if it is, delete that folder",
        ) from error
    return Corpus(folder.name.removesuffix(LAYOUT), training, validation, counts)


def _digest(split: Split, vocab_size: int) -> str:
    names = [source.digest for side in (split.validation, split.training) for source in (*side, Source(Path(), "|"))]
    seed = json.dumps([names, vocab_size, END_OF_TEXT, importlib.metadata.version("tokenizers")])
    return hashlib.sha256(seed.encode()).hexdigest()[:24]


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
    tokenizer.train_from_iterator(map(text.read, sources), trainer)
    tokenizer.encode_special_tokens = True  # as any text, where a file holds END_OF_TEXT
    return tokenizer


def _encode(tokenizer: Tokenizer, sources: Sequence[Source]) -> Iterator[list[int]]:
    end = tokenizer.token_to_id(END_OF_TEXT)
    assert end is not None
    for first in range(0, len(sources), FILES_AT_ONCE):
        texts = [text.read(source) for source in sources[first : first + FILES_AT_ONCE]]
        for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
            yield [*encoding.ids, end]


def _write(path: Path, files: Iterator[list[int]], dtype: np.dtype, counts: NDArray[np.int64]) -> None:
    """Appends the tokens of each file and adds them to `counts`."""
    with path.open("wb") as out:
        for tokens in files:
            counts += np.bincount(tokens, minlength=len(counts))
            out.write(np.asarray(tokens, dtype).tobytes())
