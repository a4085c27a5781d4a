"""Text: which files are read, which are held out, what becomes of them."""

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer

from te_dist.launch import corpus, text
from te_dist.launch.config import Config, DataConfig, ModelConfig
from te_dist.launch.errors import JobError
from te_dist.launch.unigram import unigram_loss
from te_dist.launch.world import World


def data(*files: object, **options: object) -> DataConfig:
    """A configuration of these files."""
    return DataConfig(files=tuple(map(str, files)), **{"exclude": (), "validation_fraction": 0.2, **options})


def digests(sources: tuple[text.Source, ...]) -> list[str]:
    """Content hashes of one side."""
    return [source.digest for source in sources]


def test_split_depends_on_content_alone(text_folder: Path, tmp_path: Path) -> None:
    names = [f"{index}.txt" for index in range(10)]
    random.Random(0).shuffle(names)
    for index, name in enumerate(names):
        shutil.copy(text_folder / name, tmp_path / f"copy-{index}.text")
    ours, theirs = text.split(data(text_folder / "*.txt")), text.split(data(tmp_path / "*.text"))
    assert len(ours.validation) == 2
    assert digests(ours.validation) == digests(theirs.validation)
    assert digests(ours.training) == digests(theirs.training)


def test_a_file_with_two_names_never_lies_on_both_sides(text_folder: Path, tmp_path: Path) -> None:
    for path in text_folder.iterdir():
        shutil.copy(path, tmp_path / path.name)
    split = text.split(data(text_folder / "*.txt", tmp_path / "*.txt"))
    assert len(split.training) + len(split.validation) == 10
    assert not set(digests(split.training)) & set(digests(split.validation))


def test_standard_library_is_found_without_installed_packages() -> None:
    found = text.find(Config().data)
    assert any(path.name == "argparse.py" for path in found)
    assert not any("site-packages" in path.parts for path in found)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("absent.txt", ("no such file", "a text file")),
        ("", ("a directory", "write a glob")),
        ("empty.txt", ("an empty file", "take it out")),
        ("*.none", ("0 matches", "check the pattern")),
        ("empty*", ("1 matches and no text", "check the pattern")),
        ("latin.txt", ("codec can't decode", "readable UTF-8")),
        ("one.txt", ("1 different files", "on both sides")),
    ],
)
def test_text_that_cannot_be_used_is_told_by_name(tmp_path: Path, entry: str, words: tuple[str]) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "one.txt").write_text("once upon a time")
    (tmp_path / "latin.txt").write_bytes("\xe9t\xe9".encode("latin-1"))
    with pytest.raises(JobError) as caught:
        text.split(data(tmp_path / entry))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_corpus_decodes_to_the_files_and_counts_its_tokens(text_folder: Path, tmp_path: Path) -> None:
    config = Config(run_dir=str(tmp_path), model=ModelConfig(vocab_size=400), data=data(text_folder / "*.txt"))
    tokens = corpus.prepare(World(dist.HashStore(), 0, 1), config)
    tokenizer = Tokenizer.from_file(str(tmp_path / "text" / tokens.digest / "tokenizer.json"))
    end = tokenizer.token_to_id(corpus.END_OF_TEXT)
    split = text.split(config.data)
    for stream, sources in ((tokens.training, split.training), (tokens.validation, split.validation)):
        files = np.split(stream, np.flatnonzero(stream == end) + 1)
        assert [tokenizer.decode(file.tolist()) for file in files[:-1]] == [text.read(source) for source in sources]
        assert files[-1].size == 0
    assert tokens.counts.sum() == len(tokens.training)
    assert tokens.counts[end] == len(split.training)


def test_equal_text_is_tokenized_once(text_folder: Path, tmp_path: Path) -> None:
    config = Config(run_dir=str(tmp_path), model=ModelConfig(vocab_size=400), data=data(text_folder / "*.txt"))
    world = World(dist.HashStore(), 0, 1)
    first = corpus.prepare(world, config)
    built = (tmp_path / "text" / first.digest / "training.bin").stat().st_mtime_ns
    assert corpus.prepare(world, config).digest == first.digest
    assert (tmp_path / "text" / first.digest / "training.bin").stat().st_mtime_ns == built
    other = Config(run_dir=str(tmp_path), model=ModelConfig(vocab_size=401), data=config.data)
    assert corpus.prepare(world, other).digest != first.digest


def test_unigram_loss_is_the_smoothed_cross_entropy() -> None:
    counts = np.array([3, 0, 0])  # smoothed: 4/6, 1/6, 1/6
    batches = [torch.tensor([[2, 0, 1]]), torch.tensor([[0, 0, 0]])]
    expected = -(3 * np.log(4 / 6) + np.log(1 / 6)) / 4
    assert unigram_loss(counts, batches) == pytest.approx(expected)
