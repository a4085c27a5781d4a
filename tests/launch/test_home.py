"""Home directories in the paths of a configuration."""

import shutil
from pathlib import Path

import pytest

from te_dist.launch import config_file, home, text
from te_dist.launch.config import Config, DataConfig
from te_dist.launch.errors import JobError


@pytest.fixture(params=["h", "h[1]"])
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text_folder: Path, request: pytest.FixtureRequest) -> Path:
    """A home directory, which may have wildcards in its name, with text in it; another one is the working directory."""
    place = tmp_path / request.param
    shutil.copytree(text_folder, place / "text")
    monkeypatch.setenv("HOME", str(place))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return place


def test_paths_of_a_run_begin_at_home(at_home: Path, tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('run_dir = "~/runs/one"\n[checkpoint]\nresume = "~/runs/other"\n')
    config = config_file.load([str(file)])
    assert (config.run_dir, config.checkpoint.resume) == (f"{at_home}/runs/one", f"{at_home}/runs/other")
    overridden = config_file.load([str(file), "--run-dir=~", "--checkpoint.resume=auto"])
    assert (overridden.run_dir, overridden.checkpoint.resume) == (str(at_home), "auto")
    assert config_file.build(Config, {"run_dir": "runs/~"}).run_dir == "runs/~"
    assert config_file.build(Config, {"run_dir": "$HOME/runs"}).run_dir == "$HOME/runs"


@pytest.mark.parametrize("entry", ["~/text/*.txt", "~/**/*.txt", "~/text/?.txt"])
@pytest.mark.parametrize("left_out", ["~/text/1.txt", "~/text/[1].txt", "~/*/1.txt"])
def test_text_is_found_and_left_out_at_home(at_home: Path, entry: str, left_out: str) -> None:
    found = text.find(DataConfig(files=(entry,), exclude=(left_out,)))
    assert sorted(found) == [at_home / "text" / f"{index}.txt" for index in range(10) if index != 1]


def test_one_file_at_home_is_named(at_home: Path) -> None:
    assert text.find(DataConfig(files=("~/text/1.txt",), exclude=())) == [at_home / "text" / "1.txt"]


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ({"run_dir": "~nobody of this name/runs"}, "run_dir"),
        ({"checkpoint": {"resume": "~nobody of this name"}}, "checkpoint.resume"),
        ({"data": {"files": ["a", "~nobody of this name/*"]}}, r"data.files\[1\]"),
        ({"data": {"exclude": ["~$*"]}}, r"data.exclude\[0\]"),
    ],
)
def test_homes_that_nobody_knows_are_refused(table: dict, key: str) -> None:
    with pytest.raises(JobError, match=f"^{key}: got '~.*, which begins with no home .*; remedy: .*write ./~"):
        config_file.build(Config, table)


@pytest.mark.parametrize(
    ("path", "parts"),
    [("~/a", ("/h", "/a")), ("~", ("/h", "")), ("a/~", ("", "a/~")), ("", ("", "")), ("./~/a", ("", "./~/a"))],
)
def test_what_is_behind_a_home_is_as_it_was(path: str, parts: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/h")
    assert home.split(path) == parts
