"""Text: which files are read, which are held out, what becomes of them."""

import glob
import io
import json
import os
import random
import shutil
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer

from te_dist.launch import corpus, text
from te_dist.launch.claim import claimed
from te_dist.launch.config import Config, DataConfig, ModelConfig
from te_dist.launch.errors import JobError
from te_dist.launch.unigram import unigram_loss
from te_dist.launch.world import World


def data(*files: object, **options: object) -> DataConfig:
    """A configuration of these files."""
    return DataConfig(files=tuple(map(str, files)), **{"exclude": (), "validation_fraction": 0.2, **options})


def job(text_folder: Path, run_dir: Path) -> Config:
    """A configuration of a small vocabulary of the text in a folder."""
    return Config(run_dir=str(run_dir), model=ModelConfig(vocab_size=400), data=data(text_folder / "*.txt"))


def alone() -> World:
    """One rank."""
    return World(dist.HashStore(), 0, 1)


def folder_of(tokens: corpus.Corpus, run_dir: Path) -> Path:
    """Where a corpus lies."""
    return run_dir / "text" / (tokens.digest + corpus.LAYOUT)


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
        ("latin.txt", ("invalid continuation byte at byte 0", "readable UTF-8")),
        ("one.txt", ("1 different files", "on both sides")),
        ("pipe", ("a pipe or a device", "a text file")),
    ],
)
def test_text_that_cannot_be_used_is_told_by_name(tmp_path: Path, entry: str, words: tuple[str]) -> None:
    (tmp_path / "empty.txt").touch()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "one.txt").write_text("once upon a time")
    (tmp_path / "latin.txt").write_bytes("\xe9t\xe9".encode("latin-1"))
    with pytest.raises(JobError) as caught:
        text.split(data(tmp_path / entry))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_corpus_decodes_to_the_files_and_counts_its_tokens(text_folder: Path, tmp_path: Path) -> None:
    config = Config(run_dir=str(tmp_path), model=ModelConfig(vocab_size=400), data=data(text_folder / "*.txt"))
    tokens = corpus.prepare(World(dist.HashStore(), 0, 1), config)
    tokenizer = Tokenizer.from_file(str(folder_of(tokens, tmp_path) / "tokenizer.json"))
    end = tokenizer.token_to_id(corpus.END_OF_TEXT)
    split = text.split(config.data)
    for stream, sources in ((tokens.training, split.training), (tokens.validation, split.validation)):
        files = np.split(stream, np.flatnonzero(stream == end) + 1)
        assert [tokenizer.decode(file.tolist()) for file in files[:-1]] == [
            "".join(text.pieces(one)) for one in sources
        ]
        assert files[-1].size == 0
    assert tokens.counts.sum() == len(tokens.training)
    assert tokens.counts[end] == len(split.training)


def test_equal_text_is_tokenized_once(text_folder: Path, tmp_path: Path) -> None:
    config = Config(run_dir=str(tmp_path), model=ModelConfig(vocab_size=400), data=data(text_folder / "*.txt"))
    world = World(dist.HashStore(), 0, 1)
    first = corpus.prepare(world, config)
    built = (folder_of(first, tmp_path) / "training.bin").stat().st_mtime_ns
    assert corpus.prepare(world, config).digest == first.digest
    assert (folder_of(first, tmp_path) / "training.bin").stat().st_mtime_ns == built
    other = Config(run_dir=str(tmp_path), model=ModelConfig(vocab_size=401), data=config.data)
    assert corpus.prepare(world, other).digest != first.digest


# -- ends of lines, and the end of a text in a text ----------------------------------------------------------------


def test_copies_with_other_ends_of_lines_never_lie_on_both_sides(tmp_path: Path) -> None:
    for index in range(8):
        for ending in ("\n", "\r\n", "\r"):
            lines = [f"{index}.{line}" for line in range(9)]
            (tmp_path / f"{index}{len(ending)}{ord(ending[-1])}.txt").write_bytes(ending.join(lines).encode())
    mixed = text.split(data(tmp_path / "*.txt"))
    plain, windows = (text.split(data(tmp_path / pattern)) for pattern in ("*110.txt", "*210.txt"))
    assert digests(mixed.training) == digests(plain.training)
    assert digests(mixed.validation) == digests(plain.validation)
    assert [source.text for source in windows.validation] == digests(plain.validation)
    assert not set(digests(windows.training)) & set(digests(plain.training))


def test_ends_of_lines_are_kept(tmp_path: Path) -> None:
    (tmp_path / "1.txt").write_bytes(b"one\r\ntwo\rthree\n")
    assert "".join(text.pieces(text._inspect(tmp_path / "1.txt"))) == "one\r\ntwo\rthree\n"


def test_the_end_token_is_that_of_a_file_alone(text_folder: Path, tmp_path: Path) -> None:
    for path in text_folder.iterdir():
        (tmp_path / path.name).write_text(f"{corpus.END_OF_TEXT}{path.read_text()}{corpus.END_OF_TEXT} and more")
    tokens = corpus.prepare(alone(), job(tmp_path, tmp_path))
    tokenizer = Tokenizer.from_file(str(folder_of(tokens, tmp_path) / "tokenizer.json"))
    end = tokenizer.token_to_id(corpus.END_OF_TEXT)
    assert (tokens.training == end).sum() == 8 and (tokens.validation == end).sum() == 2
    first, *_ = np.split(tokens.validation, np.flatnonzero(tokens.validation == end))
    assert tokenizer.decode(first.tolist()).startswith(corpus.END_OF_TEXT)


# -- texts in pieces -----------------------------------------------------------------------------------------------

WHITE_SPACE = tuple(filter(str.isspace, map(chr, range(0x110000))))  # of Python, some of which is none to tokenizers
WORDS = (
    "a",
    "word",
    "'s",
    "'ll",
    "'",
    ".",
    "...",
    "7",
    "½",
    "\u0663",
    "Ä",
    "e\u0301",
    "字",
    "😀",
    "\u200b",
    "\r\n",
    " ",
)


def test_a_text_in_pieces_has_the_vocabulary_and_the_tokens_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index in range(50):
        drawn = random.Random(index).choices(WORDS + WHITE_SPACE, k=300)
        (tmp_path / f"{index}.txt").write_bytes("".join(drawn).encode())
    sources = [text._inspect(path) for path in tmp_path.iterdir()]
    found, numbers = [], []
    for block in (None, 3, 64, 1 << 16):
        with monkeypatch.context() as patch:
            if block is None:
                patch.setattr(text, "pieces", lambda source: [source.path.read_bytes().decode()])
            else:
                patch.setattr(text, "BLOCK", block)
            tokenizer = corpus._train(sources, 500)
            found.append((tokenizer.to_str(), list(chain.from_iterable(corpus._encode(tokenizer, sources)))))
            numbers.append(sum(len(list(text.pieces(source))) for source in sources))
    assert found[1:] == found[:1] * 3
    assert numbers[1] > numbers[2] > 4 * numbers[0]


def test_hashes_do_not_depend_on_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "1.txt").write_bytes("é\r\n字\r\r\n\n😀\r".encode())
    whole = text._inspect(tmp_path / "1.txt")
    (tmp_path / "2.txt").write_bytes("é\n字\n\n\n😀\n".encode())
    for block in range(1, 9):
        monkeypatch.setattr(text, "BLOCK", block)
        assert text._inspect(tmp_path / "1.txt") == whole
        assert text._inspect(tmp_path / "2.txt").digest == whole.text


@pytest.mark.parametrize(
    ("content", "words"), [(b"nine four\xff", "byte at byte 9"), (b"seven s\xe2\x82", "data at byte 7")]
)
def test_what_is_not_utf8_is_found_in_any_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, words: str
) -> None:
    monkeypatch.setattr(text, "BLOCK", 4)
    (tmp_path / "1.txt").write_bytes(content)
    with pytest.raises(JobError, match=words):
        text._inspect(tmp_path / "1.txt")


def test_memory_follows_from_no_length_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "BLOCK", 64)
    monkeypatch.setattr(corpus, "AT_ONCE", 256)
    (tmp_path / "1.txt").write_text("some more words " * 1000)
    (tmp_path / "2.txt").write_text("one" * 1000)  # which nothing may cut
    batches = []

    def encode(texts: list[str], **_: object) -> list[SimpleNamespace]:
        batches.append([len(each) for each in texts])
        return [SimpleNamespace(ids=[1] * len(each)) for each in texts]

    tokenizer = SimpleNamespace(token_to_id=lambda _: 0, encode_batch=encode)
    sources = [text._inspect(tmp_path / name) for name in ("1.txt", "2.txt")]
    tokens = list(chain.from_iterable(corpus._encode(tokenizer, sources)))
    assert tokens == [1] * 16000 + [0] + [1] * 3000 + [0]
    lengths = list(chain.from_iterable(batches))
    assert lengths.count(3000) == 1 and max({*lengths} - {3000}) <= 2 * 64
    assert all(sum(lengths[:-1]) < 256 for lengths in batches)


@pytest.mark.parametrize("change", [lambda path: path.write_text("other words"), lambda path: path.unlink()])
@pytest.mark.parametrize("step", ["_train", "_encode"])
def test_a_text_that_changes_while_the_job_starts_is_refused(
    text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, change: Callable[[Path], object]
) -> None:
    shutil.copytree(text_folder, tmp_path / "text of mine")
    config, original = job(tmp_path / "text of mine", tmp_path), getattr(corpus, step)
    changed = text.split(config.data).training[0].path

    def late(*args: object) -> object:
        change(changed)
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(corpus, step, late)
        with pytest.raises(JobError, match=rf"text file .*{changed.name}.*(changed while it was read|No such file)"):
            corpus.prepare(alone(), config)
    assert list((tmp_path / "text").iterdir()) == []
    shutil.copy(text_folder / changed.name, changed)
    again, other = corpus.prepare(alone(), config), corpus.prepare(alone(), job(text_folder, tmp_path / "other"))
    assert again.digest == other.digest
    assert again.training.tolist() == other.training.tolist()


# -- files left out, and names with wildcards ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "entry",
    [
        "./text/1.txt",
        "text/../text/1.txt",
        "text//1.txt",
        "{here}/text/1.txt",
        "{here}/text/[1].txt",
        "*/1.txt",
        "*1.txt",
    ],
)
@pytest.mark.parametrize("files", ["text/*.txt", "{here}/text/*.txt", "./text/*.txt"])
def test_a_file_is_left_out_however_it_is_spelled(
    text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str, files: str
) -> None:
    here = tmp_path / "a[b]"
    here.mkdir()
    (here / "text").symlink_to(text_folder)
    monkeypatch.chdir(here)
    pattern = glob.escape(str(here))
    excluded = entry.replace("{here}", pattern if "[" in entry else str(here))
    found = text.find(data(files.replace("{here}", pattern), exclude=(excluded,)))
    assert sorted(path.name for path in found) == [f"{index}.txt" for index in range(10) if index != 1]


@pytest.mark.parametrize("entry", ["absent.txt", "0.txt", "*.md", "{folder}", "{folder}/absent*"])
def test_an_exclusion_of_no_file_is_refused(text_folder: Path, entry: str) -> None:
    entry = entry.replace("{folder}", str(text_folder))
    with pytest.raises(JobError, match="none of the files of data.files; wanted .*; remedy: ") as caught:
        text.find(data(text_folder / "*.txt", exclude=(f"{text_folder}/1.txt", entry)))
    assert f"data.exclude entry {entry!r}" in str(caught.value)


def test_the_default_exclusions_fit_any_files(text_folder: Path) -> None:
    assert len(text.find(data(text_folder / "*.txt", exclude=DataConfig().exclude))) == 10


def test_a_pattern_that_begins_with_a_star_fits_in_any_directory(text_folder: Path) -> None:
    assert len(text.find(data(text_folder / "*.txt", exclude=("*/1.txt",)))) == 9


def test_an_empty_file_may_be_excluded(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "full.txt").write_text("full")
    found = text.find(data(tmp_path / "*.txt", exclude=(f"{tmp_path}/e*",)))
    assert [path.name for path in found] == ["full.txt"]


def test_a_file_whose_name_has_wildcards_is_found_and_excluded(tmp_path: Path) -> None:
    for name in ("g[1].txt", "g1.txt"):
        (tmp_path / name).write_text(name)
    assert [path.name for path in text.find(data(tmp_path / "g[1].txt"))] == ["g[1].txt"]
    assert [path.name for path in text.find(data(tmp_path / "*", exclude=(f"{tmp_path}/g[[]1].txt",)))] == ["g1.txt"]


def test_a_standard_library_whose_path_has_wildcards_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "p[3]").mkdir()
    for name in ("os.py", "test.py"):
        (tmp_path / "p[3]" / name).write_text(name)
    monkeypatch.setattr(text.sysconfig, "get_path", lambda _: str(tmp_path / "p[3]"))
    assert [path.name for path in text.find(data("{stdlib}/*.py", exclude=("{stdlib}/t*",)))] == ["os.py"]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: folders with a file each, hidden ones too, and links that lead to no folder above."""
    for folder in ("here", "here/a", "here/a/b", "here/.hidden/a", "here/a[1]/b", "there/a"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "1.txt").write_text(folder)
    (tmp_path / "here/beside").symlink_to("../there")
    (tmp_path / "here/dead").symlink_to("nowhere")
    (tmp_path / "here/itself").symlink_to("itself")
    (tmp_path / "here/a/2.txt").symlink_to("1.txt")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


@pytest.mark.parametrize("top", ["", "./", "../here/", "../*/", "{here}/", "nowhere/"])
@pytest.mark.parametrize(
    "below",
    ["**", "**/", "**/*.txt", "*/**/*.txt", "**/a/**/1.txt", "**//b/*", "**/**/b/*.txt", ".*/**", "a**/*", "**/*/"],
)
def test_any_depth_means_what_it_means_to_python(tree: Path, top: str, below: str) -> None:
    pattern = top.replace("{here}", str(tree / "here")) + below
    found, wanted = text._expand(pattern), glob.glob(pattern, recursive=True)
    assert {Path(name) for name in found if os.path.isfile(name)} == set(filter(Path.is_file, map(Path, wanted)))


@pytest.mark.parametrize(("link", "target"), [("a/up", ".."), ("a/b/top", "../.."), ("../there/back", "../here")])
def test_links_to_folders_above_are_not_followed_and_others_are(tree: Path, link: str, target: str) -> None:
    Path(link).symlink_to(target)  # one: with several, whoever follows them comes to no end
    Path("a/far").symlink_to("../../there/a")
    found = text.find(data("**/*.txt", exclude=("*/far/*",)))
    expected = ("1.txt", "a/1.txt", "a/2.txt", "a/b/1.txt", "a[1]/b/1.txt", "beside/a/1.txt")
    assert sorted(map(str, found)) == sorted(expected)


# -- what lies in the run directory --------------------------------------------------------------------------------


def truncate(folder: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 4 * 2])


def rewrite(folder: Path, **changes: object) -> None:
    record = json.loads((folder / "corpus.json").read_text())
    (folder / "corpus.json").write_text(json.dumps(record | changes))


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: truncate(folder, "training.bin"),
        lambda folder: truncate(folder, "validation.bin"),
        lambda folder: truncate(folder, "counts.npy"),
        lambda folder: (folder / "counts.npy").write_bytes(b""),
        lambda folder: np.save(folder / "counts.npy", np.ones(400, np.int64)),
        lambda folder: (folder / "corpus.json").write_text("[]"),
        lambda folder: (folder / "corpus.json").write_text("3"),
        lambda folder: (folder / "corpus.json").write_bytes(b"\xff"),
        lambda folder: rewrite(folder, dtype=[1]),
        lambda folder: rewrite(folder, dtype="float64"),
        lambda folder: rewrite(folder, tokens=7),
        lambda folder: (folder / "validation.bin").unlink(),
    ],
)
def test_damaged_tokens_are_refused(text_folder: Path, tmp_path: Path, damage: Callable[[Path], object]) -> None:
    folder = folder_of(corpus.prepare(alone(), job(text_folder, tmp_path)), tmp_path)
    damage(folder)
    with pytest.raises(JobError, match="wanted what rank 0 wrote there; remedy: .* delete that folder"):
        corpus.prepare(alone(), job(text_folder, tmp_path))
    shutil.rmtree(folder)
    assert corpus.prepare(alone(), job(text_folder, tmp_path)).counts.sum()


def test_who_builds_what_another_job_is_building_harms_neither(
    text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, digests = corpus._publish, []

    def late(draft: Path, folder: Path) -> None:
        monkeypatch.setattr(corpus, "_publish", original)
        digests.append(corpus.prepare(alone(), job(text_folder, tmp_path)).digest)  # a second job, from start to end
        original(draft, folder)

    monkeypatch.setattr(corpus, "_publish", late)
    tokens = corpus.prepare(alone(), job(text_folder, tmp_path))
    assert [tokens.digest] == digests
    assert list((tmp_path / "text").iterdir()) == [folder_of(tokens, tmp_path)]


def test_drafts_of_killed_jobs_are_removed_and_others_are_not(text_folder: Path, tmp_path: Path) -> None:
    for name, age in (("old.draft", 2 * corpus.ABANDONED), ("young.draft", corpus.ABANDONED / 2)):
        (tmp_path / "text" / name).mkdir(parents=True)
        (tmp_path / "text" / name / "training.bin").touch()
        for path in (tmp_path / "text" / name / "training.bin", tmp_path / "text" / name):
            os.utime(path, (tmp_path.stat().st_mtime - age,) * 2)
    tokens = corpus.prepare(alone(), job(text_folder, tmp_path))
    assert {path.name for path in (tmp_path / "text").iterdir()} == {"young.draft", tokens.digest + corpus.LAYOUT}


def test_a_run_that_has_its_directory_alone_removes_all_drafts(text_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text" / "young.draft").mkdir(parents=True)
    config = job(text_folder, tmp_path)
    with claimed(alone(), config):
        tokens = corpus.prepare(alone(), config)
    assert list((tmp_path / "text").iterdir()) == [folder_of(tokens, tmp_path)]


def test_text_that_another_version_of_tokenizers_has_made_is_gone_on_with(
    text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = corpus.prepare(alone(), job(text_folder, tmp_path))
    monkeypatch.setattr(corpus, "_version", lambda: "a later one")
    assert corpus.prepare(alone(), job(text_folder, tmp_path)).digest == first.digest
    anew = corpus.prepare(alone(), job(text_folder, tmp_path / "anew"))
    assert anew.digest != first.digest
    assert corpus.made_of(folder_of(anew, tmp_path / "anew"))["tokenizers"] == "a later one"
    rewrite(folder_of(first, tmp_path), made_of=None)  # as it was before this was written down
    assert corpus.prepare(alone(), job(text_folder, tmp_path)).digest == anew.digest


@pytest.mark.parametrize("name", ["tokenizer.json", "training.bin"])
def test_a_full_disk_is_named_and_leaves_no_draft(
    text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    original = io.open

    def full(file: object, *args: object, **kwargs: object) -> object:
        return original("/dev/full" if str(file).endswith(name) else file, *args, **kwargs)

    monkeypatch.setattr(io, "open", full)
    with pytest.raises(
        JobError, match="No space left on device; wanted .*; remedy: change run_dir, or make room there"
    ):
        corpus.prepare(alone(), job(text_folder, tmp_path))
    assert list((tmp_path / "text").iterdir()) == []


def test_tokens_can_be_read_by_whoever_reads_new_folders(text_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    folder = folder_of(corpus.prepare(alone(), job(text_folder, tmp_path)), tmp_path)
    assert folder.stat().st_mode == (tmp_path / "other").stat().st_mode


def test_unigram_loss_is_the_smoothed_cross_entropy() -> None:
    counts = np.array([3, 0, 0])  # smoothed: 4/6, 1/6, 1/6
    batches = [torch.tensor([[2, 0, 1]]), torch.tensor([[0, 0, 0]])]
    expected = -(3 * np.log(4 / 6) + np.log(1 / 6)) / 4
    assert unigram_loss(counts, batches) == pytest.approx(expected)
