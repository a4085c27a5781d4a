"""Jobs with experts: what is refused, that they resume, that ranks which share experts take the same steps."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from te_dist.launch import config_file, parallelize, train
from te_dist.launch.config import Config, ModelConfig
from te_dist.launch.errors import JobError
from te_dist.launch.layout import plan
from te_dist.launch.model import Decoder, next_token_loss

CONFIGS = Path(__file__).parents[2] / "launch" / "configs"
EXPERTS = """
[model.experts]
count = 4
ffn = 128
aux_loss_coefficient = 0.01
bias_update_rate = 0.01
"""
RECOMPUTE = ("--recompute", "full")
SLOTS = (*RECOMPUTE, "--model.experts.capacity-factor", "0.6", "--model.experts.payload", "quantized")
TOKENS = (*RECOMPUTE, "--model.experts.travels", "tokens", "--model.experts.payload", "quantized")

BATCHES = (*RECOMPUTE, "--model.experts.travels", "batches", "--model.experts.capacity-factor", "2.0")


@pytest.fixture
def expert_job(tiny_job: Callable):
    """Makes a tiny job whose blocks have experts."""

    def make(recipe: str):
        job = tiny_job(recipe)
        job.path.write_text(job.path.read_text() + EXPERTS)
        return job

    return make


def configured(**changes: dict) -> Config:
    return config_file.build(Config, {"model": {"experts": {"count": 4}}} | changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mesh": {"dp": 1, "tp": 2}}, "mesh.ep: got 1 with mesh.tp = 2 and 4 experts"),
        ({"mesh": {"ep": 2}, "model": {}}, "mesh.ep: got 2 without experts"),
        ({"mesh": {"ep": 4}}, "mesh.ep: got 4 with 2 ranks and 4 experts"),
        ({"mesh": {"ep": 2}, "model": {"experts": {"count": 3}}}, "mesh.ep: got 2 with 2 ranks and 3 experts"),
        ({"mesh": {"ep": 2}, "recipe": "float8_delayed"}, "recipe: got float8_delayed with mesh.ep = 2"),
        ({"model": {"experts": {"count": 4, "capacity_factor": 1.5}}}, "capacity_factor: got 1.5 with mesh.ep = 1"),
        ({"model": {"experts": {"count": 4, "payload": "quantized"}}}, "payload: got quantized with mesh.ep = 1"),
        ({"model": {"experts": {"count": 4, "travels": "tokens"}}}, "travels: got tokens with mesh.ep = 1; wanted "),
        ({"model": {"experts": {"travels": "batches"}}}, 'travels: got batches with mesh.ep = 1; wanted "copies" '),
    ],
)
def test_what_does_not_fit_the_ranks_is_named(changes: dict, words: str) -> None:
    with pytest.raises(JobError, match=words):
        plan(configured(**changes), 2)


@pytest.mark.parametrize("recipe", ["bf16", "float8_current", "nvfp4"])
def test_rows_that_cannot_travel_quantized_are_named(recipe: str) -> None:
    experts = {"experts": {"count": 4, "payload": "quantized"}}
    config = configured(recipe=recipe, model=experts, mesh={"ep": 2})
    with pytest.raises(JobError, match=f"model.experts.payload: got quantized with recipe {recipe}; wanted a recipe"):
        parallelize.expert_style(config, mesh=None)  # which is not asked


def test_more_choices_than_experts_are_named() -> None:
    with pytest.raises(JobError, match=r"model.experts.top_k: got 5 of 4 experts"):
        config_file.build(Config, {"model": {"experts": {"count": 4, "top_k": 5}}})


def test_the_quickstart_of_experts_is_a_job_for_two_ranks() -> None:
    config = config_file.read(CONFIGS / "moe.toml")
    layout = plan(config, 2)
    assert (layout.dp, layout.ep, config.model.experts.count) == (2, 2, 8)
    assert parallelize.expert_capacity(config) is None


def test_the_file_of_experts_is_a_job_for_eight_ranks_at_other_sizes() -> None:
    path = CONFIGS / "moe.toml"
    lines = [line.removeprefix("#").strip().rstrip("\\") for line in path.read_text().splitlines() if "--" in line]
    words = shlex.split(" ".join(lines[lines.index(next(line for line in lines if "nproc-per-node 8" in line)) :]))
    config = config_file.load([str(path), *words[words.index("launch/configs/moe.toml") + 1 :]])
    layout = plan(config, 8)
    assert (layout.dp, layout.ep, layout.accumulate) == (8, 8, 1)
    assert (config.model.experts.count, config.model.columns_of_a_head) == (128, 128)


def test_a_capacity_is_a_multiple_of_what_ranks_send_on_average() -> None:
    config = configured(mesh={"ep": 2}, model={"experts": {"count": 4, "capacity_factor": 1.5}})
    assert parallelize.expert_capacity(config) == 1.5 * config.train.micro_batch * config.data.sequence_length * 2 / 2


def test_every_parameter_of_a_mixture_gets_a_gradient() -> None:
    torch.manual_seed(0)
    experts = config_file.build(ModelConfig, {"experts": {"count": 4, "ffn": 64, "shared_ffn": 32}}).experts
    model = Decoder(ModelConfig(300, hidden=64, ffn=96, layers=2, heads=4, kv_heads=2, experts=experts))
    tokens = torch.randint(300, (2, 33))
    next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


@pytest.mark.usefixtures("own_process")
@pytest.mark.filterwarnings("ignore:Unable to enable fault handler")
def test_a_resumed_run_repeats_the_losses_of_the_unbroken_one(expert_job: Callable) -> None:
    unbroken, resumed = expert_job("float8_block"), expert_job("float8_block")
    short = ("--train.steps", "4", "--checkpoint.every", "2", "--train.batch", "4")
    train.main([str(unbroken.path), *short])
    checkpoint = unbroken.run_dir / "checkpoints" / "step_00000002"
    train.main([str(resumed.path), *short, "--checkpoint.resume", str(checkpoint)])
    losses = unbroken.metrics("loss")
    assert resumed.metrics("loss") == {step: losses[step] for step in (3, 4)}


@pytest.mark.usefixtures("own_process")
@pytest.mark.filterwarnings("ignore:Unable to enable fault handler")
def test_sizes_that_products_in_groups_do_not_take_are_told_in_one_line(expert_job: Callable, capsys) -> None:
    with pytest.raises(SystemExit):
        train.main([str(expert_job("mxfp8").path), "--model.experts.ffn", "96"])
    (line,) = capsys.readouterr().err.splitlines()
    assert "recipe mxfp8: got experts.fc2: in_features=96 does not fit" in line


def test_capacities_are_not_for_tokens() -> None:
    with pytest.raises(JobError, match=r"model.experts.travels: got tokens with capacity_factor = 1\.5"):
        configured(model={"experts": {"count": 4, "capacity_factor": 1.5, "travels": "tokens"}}, mesh={"ep": 2})


@pytest.fixture
def job_of_two(expert_job: Callable, two_ranks):
    """Trains a job whose ranks share experts, with these options; asserts that it learns. The job, and its output."""

    def run(*options: str) -> tuple[Any, str]:
        job = expert_job("float8_block")
        code, output = two_ranks(*job.command("--mesh.ep", "2", *options))
        assert code == 0, output
        loss = job.metrics("loss")
        assert loss[8] < loss[1] == pytest.approx(math.log(320), abs=0.7)
        return job, output

    return run


@pytest.mark.parametrize("options", [TOKENS, BATCHES], ids=["tokens", "batches"])
def test_ranks_share_experts_to_which_tokens_travel(job_of_two: Callable, options: tuple[str, ...]) -> None:
    job_of_two(*options)


def test_ranks_with_parts_of_sequences_share_experts(job_of_two: Callable) -> None:
    """Tensor parallelism around experts gives the losses of data parallelism, but for the order of sums."""
    parts, _ = job_of_two("--mesh.dp", "1", "--mesh.tp", "2", "--train.micro-batch", "8")
    whole, _ = job_of_two()
    want = whole.metrics("loss")
    assert parts.metrics("loss") == {step: pytest.approx(loss, rel=2e-3) for step, loss in want.items()}


def test_ranks_share_experts_and_tell_what_they_drop(job_of_two: Callable) -> None:
    job, output = job_of_two(*SLOTS)
    assert all(0.1 < part < 0.5 for part in job.metrics("dropped").values())  # four tenths of evenly spread choices
    assert "dropped" in output
