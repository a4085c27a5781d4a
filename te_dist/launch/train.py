"""Trains a decoder on text files, its weights in a quantized format, over as many ranks as `torchrun` starts.

torchrun --standalone --nproc-per-node 2 -m te_dist.launch.train launch/configs/quickstart.toml --train.steps 100
"""

from __future__ import annotations

import importlib.util
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import FSDPModule

from te_dist import env
from te_dist.checkpoints import CheckpointError
from te_dist.launch import config_file, corpus, layout, measure, progress
from te_dist.launch.claim import Claim, claimed
from te_dist.launch.config import Config
from te_dist.launch.errors import JobError, require
from te_dist.launch.journal import PICTURE, Journal
from te_dist.launch.measure import size
from te_dist.launch.trainer import Trainer
from te_dist.launch.world import PREPARATION, World, choose_device, lost_peer, open_process_group

EXTRA = ("matplotlib", "tokenizers")  # of the extra `train`: imported where they are used, after they were looked for


@record
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the job of a command line.

    Args:
        arguments: a TOML file, then overrides; `sys.argv` where not given.
    """
    try:
        world = World.meet()
    except JobError as error:
        _end(None, str(error))
    try:
        config = _agree_on_config(world, sys.argv[1:] if arguments is None else arguments)
        run(world, config)
    except (JobError, CheckpointError) as error:
        _end(world, str(error))
    except RuntimeError as error:
        if not lost_peer(error):
            raise
        _end(
            world,
            f"another rank ended or stopped answering ({str(error).splitlines()[0]}); its own message or the "
            'launcher\'s summary says why; remedy: start again with checkpoint.resume = "auto"',
        )


def run(world: World, config: Config) -> None:
    """Trains as configured; the process group lives as long as this call.

    Raises:
        JobError: on every rank alike.
    """
    started = time.perf_counter()
    world.set_timeout(PREPARATION * config.timeout_seconds)
    world.agree(_check_extra)
    plan = world.agree(lambda: layout.plan(config, world.size))
    device = _agree_on_device(world, config)
    with claimed(world, config) as claim:
        # One rank looks: on a shared file system the others may still see an older state.
        start = world.share(lambda: _choose(config, claim))
        text = corpus.prepare(world, config)
        open_process_group(world, device, config.timeout_seconds)
        with Journal(Path(config.run_dir), config.train.steps, writes=world.rank == 0) as journal:
            if claim.warning:
                journal.note(claim.warning)
            trainer = world.agree(lambda: Trainer(config, plan, world, device=device, corpus=text))
            if start:
                journal.note(trainer.restore(Path(start)))
            if trainer.progress.step >= config.train.steps:
                journal.note(
                    f"no steps are left of {config.train.steps}, the model is evaluated alone; raise train.steps, or "
                    "train another one in another run_dir"
                )
            world.agree(lambda: journal.start(trainer.progress.step, config_file.dump(config)))
            trainer.run(journal)
    _report(journal, trainer)
    journal.note(f"{time.perf_counter() - started:.0f} s; the loss is drawn in {journal.folder / PICTURE}")
    dist.destroy_process_group()


def _choose(config: Config, claim: Claim) -> str:
    """The path of the checkpoint to start from, "" for none; what later attempts of this launch may go on with."""
    start = progress.choose(config, goes_on=claim.goes_on)
    claim.begin()
    return str(start or "")


def _check_extra() -> None:
    missing = [name for name in EXTRA if importlib.util.find_spec(name) is None]
    require(
        not missing,
        "packages",
        got=f"no {' and no '.join(missing)}",
        wanted="those of te_dist's extra `train`",
        remedy=f"pip install {' '.join(EXTRA)}",
    )


def _end(world: World | None, reason: str) -> NoReturn:
    """Ends this rank. One write: the lines of several ranks must not run into each other."""
    sys.stderr.write(f"te_dist, rank {env.RANK.get() if world is None else world.rank}: {reason}\n")
    sys.stderr.flush()
    if world is not None:
        world.part()
    sys.exit(1)


def _agree_on_config(world: World, arguments: Sequence[str]) -> Config:
    """Reads the configuration on every rank and makes sure that it is the same."""
    config = world.agree(lambda: config_file.load(arguments))
    theirs = world.share(lambda: config_file.dump(config))
    world.agree(
        lambda: require(
            config_file.dump(config) == theirs,
            f"configuration on rank {world.rank}",
            got="other values than on rank 0",
            wanted="one configuration for the job",
            remedy="start every node with the same file and the same overrides",
        )
    )
    return config


def _agree_on_device(world: World, config: Config) -> torch.device:
    """Chooses the device of every rank and makes sure that they are of one type, as process groups have to be."""
    device = world.agree(lambda: choose_device(config.device))
    theirs = world.share(lambda: device.type)
    world.agree(
        lambda: require(
            device.type == theirs,
            f"device of rank {world.rank}",
            got=f"{device.type} on {socket.gethostname()}",
            wanted=f"{theirs}, as on rank 0",
            remedy='check the driver where torch finds no GPU, or set device = "cpu"',
        )
    )
    return device


def _report(journal: Journal, trainer: Trainer) -> None:
    """The table at the end, each figure beside what bf16 would need."""
    model, config = trainer.model, trainer.config
    assert isinstance(model, FSDPModule)
    model.reshard()  # an evaluation leaves what the root holds gathered
    plain_gathered = measure.plain_gathered_bytes(model, trainer.layout.accumulate)
    gathered = "-" if trainer.gathered_bytes is None else size(trainer.gathered_bytes)
    mesh = f"dp {trainer.layout.dp} x tp {trainer.layout.tp}"
    mesh += f", experts over {trainer.layout.ep}" if config.model.experts.count else ""
    journal.table(
        f"{config.recipe}, {mesh}, step {trainer.progress.step}",
        ("", "this run", "bf16"),
        (
            ("parameters", f"{measure.num_parameters(model):,}", f"{measure.num_parameters(model):,}"),
            ("weights a rank holds", size(measure.held_bytes(model)), size(measure.plain_held_bytes(model))),
            ("weights a rank gathers in a step", gathered, size(plain_gathered)),
        ),
    )
    journal.table(
        "loss on held-out text",
        ("", "nats per token"),
        (("this run", f"{trainer.validation_loss:.4f}"), ("unigram model", f"{trainer.unigram:.4f}")),
    )


if __name__ == "__main__":
    main()
