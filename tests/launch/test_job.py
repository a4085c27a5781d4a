"""Whole jobs on two ranks: what they leave behind, how they resume, how they end; under torchrun where it counts."""

from __future__ import annotations

import math
import os
import re
import signal
import socket
import time
from collections.abc import Callable

import pytest

from te_dist.launch.journal import METRICS

RECIPE = "float8_block"
LIMIT = 120  # seconds, of a job, which takes about ten where nothing else runs


@pytest.fixture(scope="module")
def unbroken(tiny_job: Callable, two_ranks: Callable):
    """A job that ran to its end on two ranks, and its output."""
    job = tiny_job(RECIPE)
    code, output = two_ranks(*job.command())
    assert code == 0, output
    return job, output


def messages(output: str) -> list[str]:
    """What the ranks said at their end, without their numbers."""
    return re.findall(r"^te_dist, rank \d: (.*)$", output, re.MULTILINE)


def test_a_job_leaves_metrics_picture_checkpoints_and_a_table(unbroken) -> None:
    job, output = unbroken
    assert list(job.metrics("loss")) == list(range(1, 9))
    assert list(job.metrics("validation_loss")) == [4, 8]
    assert job.metrics("loss")[8] < job.metrics("loss")[1]
    assert (job.run_dir / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (job.run_dir / "checkpoints").iterdir()) == ["step_00000004", "step_00000008"]
    for word in ("parameters", "weights a rank holds", "weights a rank gathers in a step", "unigram model", "bf16"):
        assert word in output, output


def test_a_job_on_two_nodes_that_lost_a_rank_ends_and_resumes_to_the_bit(
    unbroken, tiny_job: Callable, two_ranks: Callable, launcher
) -> None:
    job = tiny_job(RECIPE)
    agents = start_two_nodes(launcher, *job.command("--checkpoint.every", "2"))
    kill_a_rank_after(job, 3, agents[1].pid)
    outputs = [process.communicate(timeout=LIMIT)[0] for process in agents]
    assert all(process.returncode for process in agents), outputs
    assert "SIGKILL" in outputs[1]
    (said,) = messages(outputs[0])
    assert "another rank ended or stopped answering" in said
    assert not messages(outputs[1])
    code, output = two_ranks(*job.command("--checkpoint.every", "2"))
    assert code == 0, output
    assert "resumed from" in output
    assert job.metrics("loss") == unbroken[0].metrics("loss")
    assert job.metrics("validation_loss") == unbroken[0].metrics("validation_loss")


def test_a_job_whose_processes_are_started_again_resumes_to_the_bit(unbroken, tiny_job: Callable, launcher) -> None:
    job = tiny_job(RECIPE)
    again = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    process = launcher.start(*again, *job.command("--checkpoint.every", "2"))
    kill_a_rank_after(job, 3, process.pid)
    output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, output
    assert "resumed from" in output
    assert job.metrics("loss") == unbroken[0].metrics("loss")


def test_a_job_on_two_nodes_is_started_again_and_resumes_to_the_bit(
    unbroken, tiny_job: Callable, launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One node starts its process again since that was killed, the other since it is alone: each counts for itself."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    job = tiny_job(RECIPE)
    agents = start_two_nodes(launcher, *job.command("--checkpoint.every", "2"), options=("--max-restarts", "1"))
    kill_a_rank_after(job, 3, agents[1].pid)
    outputs = [process.communicate(timeout=LIMIT)[0] for process in agents]
    assert not any(process.returncode for process in agents), outputs
    assert "resumed from" in outputs[0]
    assert job.metrics("loss") == unbroken[0].metrics("loss")


@pytest.mark.exhaustive
def test_torchrun_ends_well_where_the_job_does(unbroken, tiny_job: Callable, launcher) -> None:
    job = tiny_job(RECIPE)
    process = launcher.start("--standalone", "--nproc-per-node", "2", *job.command())
    output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, output
    assert job.metrics("loss") == unbroken[0].metrics("loss")


def test_ranks_that_share_multiplications_take_the_same_steps(unbroken, tiny_job: Callable, two_ranks) -> None:
    job = tiny_job(RECIPE)
    code, output = two_ranks(*job.command("--mesh.dp", "1", "--mesh.tp", "2", "--train.micro-batch", "8"))
    assert code == 0, output
    for key in ("loss", "gradient_norm", "validation_loss"):
        assert job.metrics(key) == pytest.approx(unbroken[0].metrics(key), rel=2e-2)


def test_blocks_that_are_gathered_together_take_the_same_steps(unbroken, tiny_job: Callable, two_ranks) -> None:
    job = tiny_job(RECIPE)
    code, output = two_ranks(*job.command("--mesh.unit-blocks", "2"))
    assert code == 0, output
    for key in ("loss", "gradient_norm", "validation_loss"):
        assert job.metrics(key) == unbroken[0].metrics(key)


def test_a_loss_that_is_not_finite_ends_all_ranks_with_one_message(tiny_job: Callable, two_ranks) -> None:
    job = tiny_job()
    code, output = two_ranks(*job.command("--optimizer.learning-rate", "1e38"))
    assert code != 0
    said = messages(output)
    assert len(said) == 2, output
    assert said[0] == said[1]
    assert re.match(r"(loss|gradient norm) at step 2: got nan; wanted a finite number; remedy: lower", said[0])
    assert not (job.run_dir / "checkpoints").exists()


def test_a_wrong_key_ends_all_ranks_with_one_message_and_no_traceback_of_theirs(tiny_job: Callable, two_ranks) -> None:
    job = tiny_job()
    job.path.write_text(job.path.read_text().replace("log_every", "log_evry"))
    code, output = two_ranks(*job.command())
    assert code != 0
    said = messages(output)
    assert len(said) == 2, output
    assert said[0] == said[1]
    assert said[0].startswith("train.log_evry: got an unknown key; wanted one of steps, ")
    assert "te_dist/launch" not in output


def start_two_nodes(launcher, *command: str, options: tuple[str, ...] = ()) -> list:
    """A `torchrun` for each, with one process."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    node = ("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--local-addr", "localhost")
    rendezvous = ("--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "two-nodes")
    return [launcher.start(*node, *rendezvous, *options, *command) for _ in range(2)]


def kill_a_rank_after(job, step: int, launcher_pid: int) -> None:
    """Kills a worker of a running job once the metrics show `step`."""
    deadline = time.monotonic() + LIMIT
    while not (job.run_dir / METRICS).exists() or max(job.metrics("loss"), default=0) < step:
        assert time.monotonic() < deadline, "the job never came that far"
        time.sleep(0.02)
    with open(f"/proc/{launcher_pid}/task/{launcher_pid}/children") as children:
        os.kill(int(children.read().split()[-1]), signal.SIGKILL)


def test_losses_start_at_the_logarithm_of_the_vocabulary(unbroken) -> None:
    job, _ = unbroken
    assert job.metrics("loss")[1] == pytest.approx(math.log(320), abs=0.7)
