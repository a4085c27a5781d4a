"""Jobs of one process, without a launcher: resuming by every recipe, and every way to end that needs no second rank."""

from __future__ import annotations

import importlib
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

import te_dist
from te_dist import checkpoints
from te_dist.launch import config_file, corpus, parallelize, train
from te_dist.launch.claim import LOCK, claimed
from te_dist.launch.config import Config
from te_dist.launch.journal import METRICS
from te_dist.launch.world import World

pytestmark = [
    pytest.mark.usefixtures("own_process"),
    pytest.mark.filterwarnings("ignore:Unable to enable fault handler"),  # pytest holds stderr
]
SHORT = ("--train.steps", "4", "--checkpoint.every", "2", "--train.batch", "4")


def run(job, *overrides: str) -> None:
    """Runs a job in this process, in the run directory of its file."""
    train.main([str(job.path), *SHORT, *overrides])


def reason(job, capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    """The one line with which a job ends that cannot go on."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        run(job, *overrides)
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("te_dist, rank 0: ")
    if dist.is_initialized():
        dist.destroy_process_group()
    return line


# Without state, with histories, with scales that ranks agree on, with numbers that are drawn.
@pytest.mark.every_run(recipe=("float8_delayed", "nvfp4"))
@pytest.mark.parametrize("recipe", ["bf16", "float8_delayed", "float8_block", "nvfp4"])
def test_a_resumed_run_repeats_the_losses_of_the_unbroken_one(recipe: str, tiny_job: Callable) -> None:
    unbroken, resumed = tiny_job(recipe), tiny_job(recipe)
    run(unbroken)
    run(resumed, "--checkpoint.resume", str(unbroken.run_dir / "checkpoints" / "step_00000002"))
    losses = unbroken.metrics("loss")
    assert resumed.metrics("loss") == {step: losses[step] for step in (3, 4)}
    assert resumed.metrics("validation_loss") == unbroken.metrics("validation_loss")


def test_switches_that_save_memory_change_no_loss(tiny_job: Callable) -> None:
    plain = tiny_job("float8_block")
    run(plain)
    expected = plain.metrics("loss")
    for switch in (("--recompute", "full"), ("--offload", "1.5MiB"), ("--train.micro-batch", "4")):
        saving = tiny_job("float8_block")
        run(saving, *switch)
        if switch[0] == "--train.micro-batch":  # one sum instead of two rounded ones
            assert saving.metrics("loss") == pytest.approx(expected, rel=1e-2)
        else:
            assert saving.metrics("loss") == expected, switch


@pytest.fixture
def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which torch finds none."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.fixture(scope="module")
def finished(tiny_job: Callable):
    """A job with checkpoints at steps 2 and 4."""
    job = tiny_job()
    run(job)
    return job


def test_a_finished_job_is_evaluated_and_not_trained_again(finished, capsys: pytest.CaptureFixture[str]) -> None:
    before = finished.metrics("loss")
    run(finished)
    assert finished.metrics("loss") == before
    assert "unigram model" in capsys.readouterr().out


def test_a_finished_job_that_is_evaluated_otherwise_is_drawn_anew(finished) -> None:
    picture = finished.run_dir / "loss.png"
    before = finished.metrics("validation_loss")
    picture.unlink()
    run(finished, "--evaluation.sequences", "4")
    after = finished.metrics("validation_loss")
    assert after.keys() == before.keys() and after[4] != before[4]
    assert picture.exists()


def test_a_run_that_goes_on_in_another_format_says_so(tiny_job: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    job = tiny_job("float8_block")
    said = []
    formats = (
        "float8_block",
        "float8_block",
        "mxfp8",
        "float8_delayed",
        "float8_delayed",
        "nvfp4",
        "float8_delayed",
        "bf16",
    )
    for number, recipe in enumerate(formats, start=1):
        capsys.readouterr()
        run(job, "--train.steps", str(2 * number), "--recipe", recipe)
        said.append(" ".join(capsys.readouterr().out.split()))
    assert "resumed from" not in said[0]
    assert "resumed from" in said[1]
    assert "goes on with" not in said[1]
    assert "step_00000004, which float8_block saved and mxfp8 goes on with" in said[2]
    assert "which mxfp8 saved and float8_delayed goes on with" in said[3]
    assert "goes on with" not in said[4]
    assert "which float8_delayed saved and nvfp4 goes on with" in said[5]
    assert "which float8_delayed saved and bf16 goes on with" in said[7]
    losses = list(job.metrics("loss").values())
    assert len(losses) == 2 * len(formats)
    assert losses[-1] < losses[0]


def test_a_line_that_a_killed_run_left_unfinished_is_dropped(tiny_job: Callable) -> None:
    job = tiny_job()
    run(job, "--train.steps", "2")
    with (job.run_dir / "metrics.jsonl").open("a") as out:
        out.write('{"step": 3, "lo')
    run(job, "--optimizer.warmup-steps", "1")
    assert set(job.metrics("loss")) == {1, 2, 3, 4}


def test_packages_that_are_missing_are_named(
    tiny_job: Callable, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(te_dist, "launch", te_dist.launch)  # which comes back behind its modules
    for name in [name for name in sys.modules if name.startswith("te_dist.launch")]:
        monkeypatch.delitem(sys.modules, name)
    for package in ("matplotlib", "tokenizers"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit, match="1"):
        importlib.import_module("te_dist.launch.train").main([str(tiny_job().path)])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("te_dist, rank 0: packages: got no matplotlib and no tokenizers; wanted those of te_dist's")
    assert line.endswith("remedy: pip install matplotlib tokenizers")


def test_a_journal_that_cannot_be_written_is_told(tiny_job: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    job = tiny_job()
    (job.run_dir / "config.json").mkdir(parents=True)
    assert "Is a directory" in reason(job, capsys)


def test_a_run_directory_with_checkpoints_is_not_started_anew(finished, capsys: pytest.CaptureFixture[str]) -> None:
    line = reason(finished, capsys, "--checkpoint.resume", "none")
    assert 'checkpoint.resume: got "none" while there is' in line
    assert "step_00000004; wanted a run directory without checkpoints" in line


def test_what_lies_where_a_run_will_save_is_told_before_it_trains(
    tiny_job: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tiny_job()
    place = job.run_dir / "checkpoints" / "step_00000004"
    place.mkdir(parents=True)
    (place / "notes").touch()
    assert f"run_dir: got {place}: no checkpoint; wanted" in reason(job, capsys)
    assert not (job.run_dir / "metrics.jsonl").exists()


def test_a_checkpoint_that_is_not_there_is_named(finished, capsys: pytest.CaptureFixture[str]) -> None:
    line = reason(finished, capsys, "--checkpoint.resume", "nowhere")
    assert "got 'nowhere', which is no directory" in line
    assert "step_00000004" in line


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("--model.ffn", "192"), ("cannot load", "feed_forward", "choose another checkpoint")),
        (("--model.layers", "3"), ("cannot load", "blocks.2")),
        (("--seed", "1"), ("seed: got 0 in the checkpoint; wanted 1",)),
        (("--model.rope-base", "5000"), ("model.rope_base: got 10000.0",)),
        (("--model.norm-epsilon", "1.0"), ("model.norm_epsilon: got 1e-05",)),
        (("--data.validation-fraction", "0.4"), (": text.files: got",)),
    ],
)
def test_a_checkpoint_of_another_model_or_text_is_refused(
    finished, capsys: pytest.CaptureFixture[str], overrides: tuple[str, str], words: tuple[str]
) -> None:
    line = reason(finished, capsys, *overrides)
    assert all(word in line for word in words), line


def test_a_run_that_began_with_a_named_checkpoint_goes_on_from_its_own(
    finished, tiny_job: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    job, named = tiny_job(), ("--checkpoint.resume", str(finished.run_dir / "checkpoints" / "step_00000002"))
    said = []
    for steps, resume in (("3", named), ("4", named), ("5", ()), ("6", (named[0], named[1] + "/"))):
        capsys.readouterr()
        run(job, "--train.steps", steps, "--checkpoint.every", "1", *resume)
        said.append("".join(capsys.readouterr().out.split()))
    assert f"resumedfrom{named[1]}" in said[0]
    for line in said[:2]:  # up to the peak they are those of any number of steps
        assert "learningrateof" not in line
    for line in said[2:]:
        assert re.search(r"step\dhadalearningrateof.*andhas.*bythescheduleofthisconfiguration", line)
    for step in (3, 4, 5):
        assert f"resumedfrom{job.run_dir / 'checkpoints' / f'step_{step:08d}'}" in said[step - 2]


def test_a_run_goes_on_however_it_was_named_where_it_began(
    finished, tiny_job: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    job, theirs = tiny_job(), ("--checkpoint.resume", str(finished.run_dir / "checkpoints" / "step_00000002"))
    own = ("--checkpoint.resume", str(job.run_dir / "checkpoints" / "step_00000003"))
    said = []
    for steps, resume in enumerate((theirs, own, own, theirs, own), start=3):
        capsys.readouterr()
        run(job, "--train.steps", str(steps), "--checkpoint.every", "1", *resume)
        said.append("".join(capsys.readouterr().out.split()))
    for step in (3, 4, 5, 6):  # of which two are kept
        assert f"resumedfrom{job.run_dir / 'checkpoints' / f'step_{step:08d}'}" in said[step - 2]


def test_a_run_does_not_begin_anew_among_the_checkpoints_of_another(
    finished, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = finished.run_dir / "checkpoints"
    before = sorted(folder.iterdir())
    line = reason(finished, capsys, "--checkpoint.resume", str(folder / "step_00000002"))
    assert f"step_00000002' while there is {folder / 'step_00000004'}; wanted the newest one" in line
    assert sorted(folder.iterdir()) == before
    run(finished, "--checkpoint.resume", str(folder / "step_00000004"))


def test_a_run_goes_on_by_another_version_of_tokenizers_and_no_other_run_with_it(
    tiny_job: Callable, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, other, version = tiny_job(), tiny_job(), corpus._version()
    run(job, "--train.steps", "2")
    monkeypatch.setattr(corpus, "_version", lambda: "a later one")
    run(job)
    assert set(job.metrics("loss")) == {1, 2, 3, 4}
    line = reason(other, capsys, "--checkpoint.resume", str(job.run_dir / "checkpoints" / "step_00000004"))
    assert f"step_00000004: text.tokenizers: got {version!r} in the checkpoint; wanted 'a later one'" in line


def test_a_run_goes_on_that_did_not_write_down_what_its_text_is_made_of(
    tiny_job: Callable, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, other = tiny_job(), tiny_job()
    with monkeypatch.context() as patch:
        patch.setattr(corpus, "made_of", lambda _: {})
        run(job, "--train.steps", "2")
    run(job)
    assert set(job.metrics("loss")) == {1, 2, 3, 4}
    monkeypatch.setattr(corpus, "_version", lambda: "a later one")
    with monkeypatch.context() as patch:
        patch.setattr(corpus, "made_of", lambda _: {})
        named = str(job.run_dir / "checkpoints" / "step_00000002")
        assert "step_00000002: text: got" in reason(other, capsys, "--checkpoint.resume", named)


def test_the_optimizer_of_a_run_that_goes_on_is_that_of_its_configuration(tiny_job: Callable) -> None:
    jobs = [tiny_job(), tiny_job()]
    for job, decay in zip(jobs, ("0", "50"), strict=True):
        run(job, "--train.steps", "2", "--optimizer.weight-decay", "0")
        run(job, "--optimizer.weight-decay", decay)
    kept, decayed = (job.metrics("loss") for job in jobs)
    assert kept[3] == decayed[3]  # weights decay after it
    assert abs(decayed[4] - kept[4]) > 1e-3


def test_a_damaged_checkpoint_is_refused(finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = tmp_path / "step_00000002"
    shutil.copytree(finished.run_dir / "checkpoints" / "step_00000002", damaged)
    data = next(damaged.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-10])
    line = reason(finished, capsys, "--checkpoint.resume", str(damaged), "--run-dir", str(tmp_path / "run"))
    assert "it is damaged" in line
    assert data.name in line


def test_only_the_newest_checkpoints_are_kept(tiny_job: Callable) -> None:
    job = tiny_job()
    run(job, "--checkpoint.every", "1", "--checkpoint.keep", "2")
    folder = job.run_dir / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step_00000003", "step_00000004"]
    assert checkpoints.latest(folder) == folder / "step_00000004"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("--data.files", "absent.txt"), ("data.files entry 'absent.txt'", "no such file")),
        (("--data.sequence-length", "100000"), ("training text", "shorten the sequences")),
        (("--evaluation.sequences", "1"), ("evaluation", "at least dp x train.micro_batch = 2")),
        (("--run-dir", "/dev/null/run"), ("run directory /dev/null/run", "Not a directory", "change run_dir")),
        (("--mesh.tp", "2"), ("mesh.tp", "2 with 1 ranks")),
        (("--device", "cuda"), ("device", "finds no GPU")),
        (("--recipe", "nvfp4", "--model.ffn", "101"), ("recipe nvfp4", "101 rows", "change [model], mesh or recipe")),
    ],
)
def test_what_cannot_be_run_is_told_in_one_line(
    tiny_job: Callable,
    capsys: pytest.CaptureFixture[str],
    without_gpus: None,
    overrides: tuple[str, ...],
    words: tuple[str],
) -> None:
    line = reason(tiny_job(), capsys, *overrides)
    assert all(word in line for word in words), line


def test_help_lists_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    train.main(["--help"])
    text = capsys.readouterr().out
    assert "--train.steps" in text
    assert config_file.USAGE.splitlines()[0] in text.replace("\n", " ")


# The update of a step comes after its loss: the checkpoint of that step is the first to have its weights.
@pytest.mark.parametrize("recipe", ["bf16", "float8_block", "nvfp4"])
def test_weights_that_are_not_finite_are_not_saved(
    recipe: str, tiny_job: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tiny_job(recipe)
    run(job, "--train.steps", "2")
    overflows = ("--optimizer.learning-rate", "1e38", "--optimizer.weight-decay", "1e5", "--checkpoint.every", "1")
    line = reason(job, capsys, *overflows)
    assert "te_dist, rank 0: weight " in line and " at step 3: got values that are not finite" in line
    assert line.endswith(f"the newest checkpoint is {job.run_dir / 'checkpoints' / 'step_00000002'}")
    assert [path.name for path in (job.run_dir / "checkpoints").iterdir()] == ["step_00000002"]


def test_checkpoints_that_cannot_be_removed_end_no_job(
    tiny_job: Callable, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path, keep: int) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(checkpoints, "prune", refuse)
    job = tiny_job()
    run(job)
    assert "old checkpoints are kept: [Errno 13] Permission denied" in capsys.readouterr().out
    assert len(list((job.run_dir / "checkpoints").iterdir())) == 2  # noqa: PLR2004


def test_a_validation_loss_that_is_not_finite_ends_the_job(
    tiny_job: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tiny_job()
    line = reason(job, capsys, "--optimizer.learning-rate", "1e38", "--evaluation.every", "1")
    assert "validation loss at step 1: got nan" in line and line.endswith("there is no checkpoint yet")


def test_two_runs_do_not_share_a_run_directory(tiny_job: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    job = tiny_job()
    with claimed(World(dist.HashStore(), 0, 1), Config(run_dir=str(job.run_dir))):
        line = reason(job, capsys)
    assert f"run directory {job.run_dir}: got one that another run writes in" in line
    assert [path.name for path in job.run_dir.iterdir()] == [LOCK]
    run(job)


def test_a_finished_job_that_is_started_again_records_no_evaluation_twice(tiny_job: Callable) -> None:
    job = tiny_job()
    run(job)
    before = (job.run_dir / METRICS).read_text()
    run(job)
    assert (job.run_dir / METRICS).read_text() == before


def test_a_run_goes_on_when_the_checkpoint_it_began_with_is_gone(
    tiny_job: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    first, job = tiny_job(), tiny_job()
    run(first, "--train.steps", "2")
    folder, link = first.run_dir / "checkpoints", first.run_dir / "good"
    link.symlink_to(folder / "step_00000002")
    for number, name in enumerate((str(folder / "step_00000002"), str(link))):
        own = ("--run-dir", str(job.run_dir.with_name(f"run_{number}")), "--checkpoint.resume", name)
        run(job, "--train.steps", "3", *own)
    (folder / "step_00000002").rename(folder / "step_00000009")
    for number, name in enumerate((str(folder / "step_00000002"), str(link))):
        own = ("--run-dir", str(job.run_dir.with_name(f"run_{number}")), "--checkpoint.resume", name)
        capsys.readouterr()
        run(job, *own)
        assert "step_00000003" in "".join(capsys.readouterr().out.split())
    link.unlink()
    link.symlink_to(folder / "step_00000009")
    run(job, *own, "--train.steps", "5")


def test_a_run_that_is_not_to_resume_goes_on_when_its_launcher_starts_it_again(
    tiny_job: Callable, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, anew = tiny_job(), ("--checkpoint.resume", "none")
    run(job, *anew, "--train.steps", "2")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    run(job, *anew)
    assert "step_00000002" in "".join(capsys.readouterr().out.split())
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert 'got "none" while there is' in reason(job, capsys, *anew)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert 'got "none" while there is' in reason(job, capsys, *anew)


def test_text_that_one_rank_cannot_read_is_found_before_any_collective(
    tiny_job: Callable, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallelize, "make_mesh", None)
    assert "at least dp x train.micro_batch = 2" in reason(tiny_job(), capsys, "--evaluation.sequences", "1")
