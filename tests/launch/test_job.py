"""Whole jobs on two ranks: what they leave behind, how they resume, how they end; under torchrun where it counts."""

from __future__ import annotations

import math
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from te_dist import env
from te_dist.launch.journal import METRICS

LAUNCH = Path(__file__).parents[2] / "launch"
RECIPE = "float8_block"
LIMIT = 120  # seconds, of a job, which takes about ten where nothing else runs
ANOTHER_DEVICE = """
import os

import pytest
import torch

from te_dist.launch import train

with pytest.MonkeyPatch.context() as patch:
    if os.environ["RANK"] == "1":
        patch.setattr(train, "choose_device", lambda name: torch.device("meta"))
    train.main()
"""


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
    monkeypatch.setenv(env.OWN_STORES.name, "1")
    job, own = tiny_job(RECIPE), ("--checkpoint.every", "2", "--checkpoint.resume", "none")
    agents = start_two_nodes(launcher, "--max-restarts", "1", *job.command(*own))
    kill_a_rank_after(job, 3, agents[1].pid)
    outputs = [process.communicate(timeout=LIMIT)[0] for process in agents]
    assert not any(process.returncode for process in agents), outputs
    assert "resumed from" in outputs[0]
    assert job.metrics("loss") == unbroken[0].metrics("loss")


def test_a_node_that_is_started_anew_joins_the_other_and_they_resume_to_the_bit(
    unbroken, tiny_job: Callable, launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a pod of `kubernetes.yaml` is: the second node falls silent, and what starts there finds the round over."""
    for name, value in environment_of(LAUNCH / "kubernetes.yaml").items():
        monkeypatch.setenv(name, value)
    job, port, own = tiny_job(RECIPE), free_port(), ("--checkpoint.every", "2", "--timeout-seconds", "60")
    # The first node has the store, and soon takes a silent one for gone.
    first, second, again = (
        (f"is_host={host},keep_alive_interval=1,keep_alive_max_attempt=5", *job.command(*own)) for host in (1, 0, 0)
    )
    nodes = [start_node(launcher, port, "--rdzv-conf", *node) for node in (first, second)]
    wait_for_step(job, 3)
    silent = worker_of(nodes[1].pid)
    os.kill(silent, signal.SIGSTOP)
    nodes[1].kill()
    try:
        nodes[1] = start_node(launcher, port, "--rdzv-conf", *again)
        outputs = [process.communicate(timeout=LIMIT)[0] for process in nodes]
    finally:
        os.kill(silent, signal.SIGKILL)
    assert not any(process.returncode for process in nodes), outputs
    assert "resumed from" in outputs[0]
    assert job.metrics("loss") == unbroken[0].metrics("loss")


def test_nodes_meet_anew_in_stores_of_their_own_by_every_launcher() -> None:
    files = ("kubernetes.yaml", "slurm.sbatch", "torchrun_nodes.sh")
    assert [environment_of(LAUNCH / name) for name in files] == [{env.OWN_STORES.name: "1"}] * 3


def test_a_requeued_job_keeps_the_log_of_why_it_was() -> None:
    options = re.findall(r"^#SBATCH (\S+)$", (LAUNCH / "slurm.sbatch").read_text(), re.MULTILINE)
    assert {"--requeue", "--open-mode=append"} <= set(options)


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


def test_ranks_that_find_devices_of_two_types_end_with_one_message(tiny_job: Callable, two_ranks, tmp_path) -> None:
    """As where the driver of one node is broken: they would make two process groups and wait for each other."""
    program = tmp_path / "train.py"
    program.write_text(ANOTHER_DEVICE)
    code, output = two_ranks(str(program), str(tiny_job().path))
    assert code != 0
    said = messages(output)
    assert len(said) == 2, output
    assert said[0] == said[1]
    assert re.match(r"device of rank 1: got meta on \S+; wanted cpu, as on rank 0; remedy: check the driver", said[0])


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


def environment_of(path: Path) -> dict[str, str]:
    """What a file of `launch/` sets for the processes of a node."""
    return dict(
        re.findall(r'^(?:export |\s+- name: )([A-Z_]+)(?:=|\n\s+value: ")(\w+)"?$', path.read_text(), re.MULTILINE)
    )


def free_port() -> int:
    """For a store through which nodes meet."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def start_node(launcher, port: int, *command: str):
    """One of two nodes: a `torchrun` with one process; `command` may begin with more of its options."""
    node = ("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--local-addr", "localhost")
    return launcher.start(*node, "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "two-nodes", *command)


def start_two_nodes(launcher, *command: str) -> list:
    """Both of them."""
    port = free_port()
    return [start_node(launcher, port, *command) for _ in range(2)]


def wait_for_step(job, step: int) -> None:
    """Waits until the metrics of a running job show `step`."""
    deadline = time.monotonic() + LIMIT
    while not (job.run_dir / METRICS).exists() or max(job.metrics("loss"), default=0) < step:
        assert time.monotonic() < deadline, "the job never came that far"
        time.sleep(0.02)


def worker_of(launcher_pid: int) -> int:
    """The process of its last rank."""
    with open(f"/proc/{launcher_pid}/task/{launcher_pid}/children") as children:
        return int(children.read().split()[-1])


def kill_a_rank_after(job, step: int, launcher_pid: int) -> None:
    """Kills a worker of a running job once the metrics show `step`."""
    wait_for_step(job, step)
    os.kill(worker_of(launcher_pid), signal.SIGKILL)


def test_losses_start_at_the_logarithm_of_the_vocabulary(unbroken) -> None:
    job, _ = unbroken
    assert job.metrics("loss")[1] == pytest.approx(math.log(320), abs=0.7)
