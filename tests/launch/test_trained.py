"""The model of a run outside of jobs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import te_dist as te
from te_dist.launch import corpus, train, trained
from te_dist.launch.batches import Share, Windows, validation_batches
from te_dist.launch.errors import JobError
from te_dist.launch.model import next_token_loss

pytestmark = [
    pytest.mark.usefixtures("own_process"),
    pytest.mark.filterwarnings("ignore:Unable to enable fault handler"),  # pytest holds stderr
]
EXPERTS = """
[model.experts]
count = 4
ffn = 128
"""
SHORT = ("--train.steps", "2", "--checkpoint.every", "1", "--evaluation.every", "1", "--train.batch", "4")


def held_out_loss(run: trained.Trained) -> float:
    """As jobs find it, of the text that is beside the vocabulary."""
    config = run.config
    windows = Windows(corpus._open(run.tokenizer.parent).validation, config.data.sequence_length, "held-out")
    batches = validation_batches(windows, config.evaluation.sequences, Share(0, 1, config.train.micro_batch))
    with torch.no_grad(), te.autocast(enabled=run.recipe is not None, recipe=run.recipe):
        losses = [next_token_loss(run.model(batch[:, :-1]), batch[:, 1:]) for batch in batches]
    return torch.stack(losses).mean().item()


@pytest.mark.parametrize("recipe", ["bf16", "float8_delayed", "float8_block", "nvfp4"])
def test_it_has_the_losses_that_the_run_recorded(recipe: str, tiny_job: Callable) -> None:
    job = tiny_job(recipe)
    train.main([str(job.path), *SHORT])
    losses = job.metrics("validation_loss")
    assert held_out_loss(trained.load(job.run_dir)) == losses[2] != losses[1]
    first = trained.load(job.run_dir, checkpoint=job.run_dir / "checkpoints" / "step_00000001")
    assert held_out_loss(first) == losses[1]
    assert not first.model.training


@pytest.mark.parametrize(
    ("experts", "mesh"), [("", "{dp = 1, tp = 2}"), (EXPERTS, "{dp = 2, tp = 1, ep = 2}")], ids=["tp", "ep"]
)
def test_a_model_of_any_mesh_is_loaded_whole(experts: str, mesh: str, tiny_job: Callable, two_ranks) -> None:
    job = tiny_job("float8_block")
    job.path.write_text(f"mesh = {mesh}\n{job.path.read_text()}{experts}")
    code, output = two_ranks(*job.command(*SHORT))
    assert code == 0, output
    want = job.metrics("validation_loss")[2]
    assert held_out_loss(trained.load(job.run_dir)) == pytest.approx(want, rel=1e-3)


def test_what_is_no_run_is_named(tiny_job: Callable, tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"config.json"):
        trained.load(tmp_path)
    job = tiny_job("bf16")
    train.main([str(job.path), *SHORT])
    with pytest.raises(JobError, match="another program"):
        trained.load(job.run_dir, checkpoint=tmp_path)
