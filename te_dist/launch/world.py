"""The ranks of a job: how they meet, how they agree before a collective, how they part."""

# torch documents its stores but lists them nowhere:
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, rendezvous

from te_dist import env
from te_dist.launch.errors import JobError, require

T = TypeVar("T")
# What gloo and NCCL say when another rank is gone or silent; gloo raises plain RuntimeErrors.
LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "remote process exited",
    "collective operation timeout",
    "communicator was aborted",
)
PARTING = timedelta(seconds=5)
PREPARATION = 10  # preparing the text may take this many times the collectives' timeout


@dataclass
class World:
    """The ranks, before and beside the process group: they exchange words through the rendezvous store.

    Attributes:
        store: key-value store that all ranks reach.
        rank: of this process.
        size: number of ranks.
    """

    store: Store
    rank: int
    size: int
    _rounds: count[int] = field(default_factory=count)

    @classmethod
    def meet(cls) -> World:
        """Meets the ranks that `torchrun` started; without `torchrun` this process is all there is.

        Raises:
            JobError: another launcher started several processes, or words of an earlier attempt could not be told from
                those of this one; on every rank alike.
        """
        if not dist.is_torchelastic_launched():
            require(
                env.WORLD_SIZE.get() == 1,
                env.WORLD_SIZE.name,
                got=f"{env.WORLD_SIZE.get()} in the environment of a process that torchrun did not start",
                wanted="processes that torchrun starts, or a single one",
                remedy="start the job by torchrun, as launch/README.md shows, or unset it to train with one process",
            )
            return cls(HashStore(), rank=0, size=1)
        has_own_store = env.OWN_STORES.get()
        # NOTE: a node that joins anew without such a store never gets here: its torchrun waits in vain before that.
        require(
            env.NODES.get() == 1 or env.MAX_RESTARTS.get() == 0 or has_own_store,
            "torchrun --max-restarts",
            got=f"{env.MAX_RESTARTS.get()} on {env.NODES.get()} nodes, all attempts of which share one store",
            wanted="a store for each attempt",
            remedy=f"set {env.OWN_STORES.name}=1 on every node, as launch/torchrun_nodes.sh does, or leave it out",
        )
        store, rank, size = next(iter(rendezvous("env://")))
        # NOTE: of one node; each of several counts for itself how often it has started processes again.
        return cls(store if has_own_store else PrefixStore(f"attempt_{env.RESTARTS.get()}", store), rank, size)

    def set_timeout(self, seconds: float) -> None:
        """How long `agree` waits for the slowest rank."""
        self.store.set_timeout(timedelta(seconds=seconds))

    def agree(self, call: Callable[[], T]) -> T:
        """Runs `call`; if it fails on any rank, every rank raises that rank's `JobError`.

        Whatever may fail on one rank alone goes through here, so that no rank enters a collective that another one
        never reaches. An error other than `JobError` is raised where it happened and reported on the others.
        """
        key = f"agree/{next(self._rounds)}"
        failure: Exception | None = None
        result = None
        try:
            result = call()
        except Exception as error:
            failure = error
            text = str(error) if isinstance(error, JobError) else f"rank {self.rank}: {type(error).__name__}: {error}"
            # The first word counts: ranks that fail alike fail with one message.
            self.store.compare_set(f"{key}/failure", "", text)
        if self.store.add(f"{key}/arrived", 1) == self.size:
            self.store.set(f"{key}/complete", "yes")
        self._wait(key)
        if failure is not None and not isinstance(failure, JobError):
            raise failure
        if self.store.check([f"{key}/failure"]):
            raise _Reported(self.store.get(f"{key}/failure").decode())
        return result  # type: ignore[return-value]

    def share(self, call: Callable[[], str]) -> str:
        """Runs `call` on rank 0 and returns its text on every rank; its failure is every rank's."""
        key = f"share/{next(self._rounds)}"

        def publish() -> None:
            if self.rank == 0:
                self.store.set(key, json.dumps(call()))

        self.agree(publish)
        return json.loads(self.store.get(key))

    def any(self, holds: bool) -> bool:
        """Whether it holds on one of the ranks at least."""
        key = f"any/{next(self._rounds)}"
        self.agree(lambda: self.store.set(key, "yes") if holds else None)
        return self.store.check([key])

    def part(self) -> None:
        """Waits a moment for ranks that end with the same message: `torchrun` stops them all as soon as one is gone."""
        with suppress(dist.DistError):
            if self.store.add("parting", 1) == self.size:
                self.store.set("parted", "yes")
            self.store.wait(["parted"], PARTING)

    def _wait(self, key: str) -> None:
        try:
            self.store.wait([f"{key}/complete"])
        except dist.DistError as error:
            raise JobError(
                "meeting of all ranks",
                got=f"{self.store.add(f'{key}/arrived', 0)} of {self.size} ranks in time",
                wanted="all of them",
                remedy="look for the first message of another rank; raise timeout_seconds if none had failed",
            ) from error


class _Reported(JobError):
    """A `JobError` whose text came from another rank."""

    def __init__(self, text: str) -> None:
        Exception.__init__(self, text)


def choose_device(name: str) -> torch.device:
    """The device of this rank; "auto" is the local rank's GPU where there is one."""
    available = torch.cuda.is_available()
    require(
        name != "cuda" or available,
        "device",
        got='"cuda" on a machine where torch finds no GPU',
        wanted="a GPU",
        remedy='set device = "cpu" or check the driver',
    )
    if name == "cpu" or not available:
        return torch.device("cpu")
    index = env.LOCAL_RANK.get()
    require(
        index < torch.cuda.device_count(),
        "local rank",
        got=f"{index} with {torch.cuda.device_count()} GPUs visible",
        wanted="a GPU for each process of a node",
        remedy="lower --nproc-per-node",
    )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def open_process_group(world: World, device: torch.device, timeout_seconds: float) -> None:
    """Makes the default process group: gloo for the CPU, NCCL beside it where the job has GPUs."""
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=PrefixStore("collectives", world.store),
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=timeout_seconds),
        device_id=device if on_gpu else None,
    )


def lost_peer(error: RuntimeError) -> bool:
    """Whether a collective failed because another rank is gone, not through a fault of this one."""
    return any(sign in str(error) for sign in LOST_PEER)
