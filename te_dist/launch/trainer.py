"""The loop of a run: steps, looks at the loss, evaluations, checkpoints."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from te_dist import checkpoints, fsdp2, optim
from te_dist.launch import measure, parallelize, progress
from te_dist.launch.batches import Share, TrainingOrder, Windows, validation_batches
from te_dist.launch.config import Config
from te_dist.launch.corpus import Corpus
from te_dist.launch.errors import JobError, require
from te_dist.launch.finite import not_finite
from te_dist.launch.journal import Journal
from te_dist.launch.layout import Layout
from te_dist.launch.model import Decoder, next_token_loss
from te_dist.launch.progress import Progress
from te_dist.launch.schedule import learning_rate
from te_dist.launch.unigram import unigram_loss
from te_dist.launch.world import World
from te_dist.nn.moe import MoE, scale_aux_losses, update_expert_biases


class Meter:
    """Loss and time since the last look. The loss stays on the device until then: a step waits for no copy.

    Attributes:
        loss: scalar, sum over the steps since the last look; None right after one.
        gradient_norm: scalar, of the latest step, before clipping.
        steps: since the last look.
        started: seconds of a clock that evaluation and checkpoints stop.
    """

    loss: Tensor | None
    gradient_norm: Tensor
    steps: int
    started: float

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begins anew, now."""
        self.loss = None
        self.steps = 0
        self.started = time.perf_counter()

    def add(self, loss: Tensor, gradient_norm: Tensor) -> None:
        """Takes in a step."""
        self.loss = loss if self.loss is None else self.loss + loss
        self.gradient_norm = gradient_norm
        self.steps += 1


class Trainer:
    """A run on this rank.

    Attributes:
        progress: how far the run has come.
        unigram: loss of the unigram model on the held-out sequences that are evaluated, in nats.
        validation_loss: of the latest evaluation on the same sequences; None before one.
        gathered_bytes: what all-gathers of weights deliver to this rank in one step; None before the first step.
        mixtures: the parts of the model that have experts.
        weights: this rank's parts of the parameters by name, in every state of the model those which are updated.
    """

    progress: Progress
    unigram: float
    validation_loss: float | None
    gathered_bytes: int | None
    mixtures: list[MoE]
    weights: dict[str, Tensor]

    def __init__(self, config: Config, layout: Layout, world: World, *, device: torch.device, corpus: Corpus) -> None:
        self.config = config
        self.layout = layout
        self.world = world
        self.device = device
        self.share = Share(world.rank // layout.tp, layout.dp, config.train.micro_batch)
        # Before any collective: one rank alone may fail to read the text.
        unigram = world.agree(lambda: self._cut(corpus))
        mesh = parallelize.make_mesh(layout, device, config.timeout_seconds)
        self.unigram = self._mean(torch.tensor(unigram, device=device))
        self.model = self._build(mesh)
        self.weights = dict(self.model.named_parameters())
        self.mixtures = [module for module in self.model.modules() if isinstance(module, MoE)]
        scale_aux_losses(self.model, 1 / layout.accumulate)
        self.optimizer = parallelize.build_optimizer(self.model, config.optimizer)
        self.precision = parallelize.Precision(config)
        self.progress = Progress(step=0, position=0, text=corpus.digest, recipe=config.recipe)
        self.validation_loss = None
        self.gathered_bytes = None

    def _cut(self, corpus: Corpus) -> float:
        """Cuts the text into sequences; the unigram model's loss on this rank's part of those held out."""
        length = self.config.data.sequence_length
        self.order = TrainingOrder(Windows(corpus.training, length, "training"), self.config.seed)
        held_out = Windows(corpus.validation, length, "held-out")
        self.held_out = validation_batches(held_out, self.config.evaluation.sequences, self.share)
        return unigram_loss(corpus.counts, self.held_out)

    def _build(self, mesh: DeviceMesh) -> Decoder:
        experts = parallelize.make_expert_mesh(self.layout, self.device, self.config.timeout_seconds)
        try:
            return parallelize.build_model(self.config, mesh, self.device, expert_mesh=experts)
        except ValueError as error:
            raise JobError(
                f"recipe {self.config.recipe}",
                got=error,
                wanted="sizes that its format can hold and the mesh can cut",
                remedy="change [model], mesh or recipe",
            ) from error

    def restore(self, path: Path) -> str:
        """Goes on from a checkpoint, with the optimizer as it is configured now; what to say of it."""
        configured = [dict(group) for group in self.optimizer.param_groups]
        with parallelize.histories_of(self.model, progress.saved_recipe(path), self.config.recipe):
            found = progress.load(path, self.config, self.progress.text, model=self.model, optimizer=self.optimizer)
        rate = self.optimizer.param_groups[0]["lr"]
        for group, its in zip(self.optimizer.param_groups, configured, strict=True):
            group.update(its)
        self.progress = found.of_run(self.config, path)
        converted = found.recipe not in ("", self.config.recipe)
        change = f", which {found.recipe} saved and {self.config.recipe} goes on with" if converted else ""
        now = learning_rate(found.step - 1, self.config.train.steps, self.config.optimizer)
        if not math.isclose(rate, now, rel_tol=1e-6):
            change += (
                f"; step {found.step} had a learning rate of {rate:.2e}, and has {now:.2e} by the schedule of this "
                "configuration, whose train.steps or [optimizer] is another"
            )
        return f"resumed from {path}{change}"

    def run(self, journal: Journal) -> None:
        """Trains up to the last step. A run that came that far before is evaluated only.

        Raises:
            JobError: on every rank, once a loss, the gradient's norm or a weight to be saved is no longer finite.
        """
        config, steps = self.config, self.config.train.steps
        meter = Meter()
        while self.progress.step < steps:
            meter.add(*self._step())
            step = self.progress.step
            saves = step % config.checkpoint.every == 0 or step == steps
            evaluates = step % config.evaluation.every == 0 or step == steps
            # A checkpoint is never written past a loss nobody has looked at.
            if step % config.train.log_every == 0 or saves or evaluates:
                self._look(meter, journal)
            if evaluates:
                self._evaluate(journal)
            if saves:
                self._save(journal)
            if saves or evaluates:
                meter.reset()
        if self.validation_loss is None:
            self._evaluate(journal)
            journal.draw(self.unigram)

    def _step(self) -> tuple[Tensor, Tensor]:
        """One optimizer step; its loss, a mean over this rank's part of the batch, and the gradient's norm."""
        config, now = self.config, self.progress
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(now.step, config.train.steps, config.optimizer)
        self._seed_rounding()
        micro_batches = self.order.micro_batches(now.position, config.train.batch, self.share)
        losses = []
        assert isinstance(self.model, FSDPModule)
        with fsdp2.count_traffic(self.model) if self.gathered_bytes is None else nullcontext() as counted:
            for index, batch in enumerate(micro_batches):
                # Gradients are reduced over the ranks once, after the last micro batch.
                self.model.set_requires_gradient_sync(index == len(micro_batches) - 1)
                loss = self._loss(batch) / len(micro_batches)
                # A rank has one device, and loses time by handing its backward pass to another thread.
                with torch.autograd.set_multithreading_enabled(False):
                    loss.backward()
                losses.append(loss.detach())
        if counted is not None:
            self.gathered_bytes = counted.nbytes(fsdp2.Purpose.FORWARD_GATHER, fsdp2.Purpose.BACKWARD_GATHER)
        norm = optim.clip_grad_norm_(self.model.parameters(), config.optimizer.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        update_expert_biases(self.model)
        self.progress = replace(now, step=now.step + 1, position=now.position + config.train.batch)
        return torch.stack(losses).sum(), norm

    def _loss(self, batch: Tensor) -> Tensor:
        """Mean loss of a micro batch. batch: (n, length + 1) int64 on the host."""
        tokens = batch.to(self.device, non_blocking=True)
        with self.precision.forward():
            logits = self.model(tokens[:, :-1])
        return next_token_loss(logits, tokens[:, 1:])

    def _seed_rounding(self) -> None:
        """Makes stochastic rounding a function of the step: a restart needs no generator's state.

        Ranks along tp hold copies of the same values and must round them alike.
        """
        seeds = np.random.SeedSequence([self.config.seed, self.progress.step, self.share.index])
        torch.manual_seed(int(seeds.generate_state(1)[0]))

    def _look(self, meter: Meter, journal: Journal) -> None:
        """Brings the loss to the host: the one place where a run waits for the device."""
        config = self.config
        assert meter.loss is not None
        loss = self._mean(meter.loss / meter.steps)
        norm = self._mean(meter.gradient_norm)
        for name, value in (("loss", loss), ("gradient norm", norm)):
            self._require_finite(math.isfinite(value), name, got=value, wanted="a finite number")
        tokens = meter.steps * config.train.batch * config.data.sequence_length
        journal.training(
            self.progress.step,
            loss=loss,
            gradient_norm=norm,
            learning_rate=self.optimizer.param_groups[0]["lr"],
            tokens_per_second=tokens / (time.perf_counter() - meter.started),
            memory_bytes=measure.memory_in_use(self.device),
            **self._dropped(tokens),
        )
        meter.reset()

    def _require_finite(self, is_finite: bool, what: str, *, got: object, wanted: str) -> None:
        newest = None if is_finite else checkpoints.latest(progress.folder(self.config))
        require(
            is_finite,
            f"{what} at step {self.progress.step}",
            got=got,
            wanted=wanted,
            remedy="lower optimizer.learning_rate or raise optimizer.warmup_steps; "
            + (f"the newest checkpoint is {newest}" if newest else "there is no checkpoint yet"),
        )

    def _dropped(self, tokens: int) -> dict[str, float]:
        """What part of the choices of `tokens` found no slot at their experts; nothing where all find one."""
        counts = [mixture.dropped for mixture in self.mixtures if mixture.dropped is not None]
        if not counts:
            return {}
        total = self._mean(torch.stack(counts).sum()) * self.world.size
        for count in counts:
            count.zero_()
        return {"dropped": total / (tokens * self.config.model.experts.top_k * len(counts))}

    @torch.no_grad()
    def _evaluate(self, journal: Journal) -> None:
        self.model.eval()
        losses = [self._loss(batch) for batch in self.held_out]
        self.model.train()
        loss = self._mean(torch.stack(losses).mean())
        self._require_finite(math.isfinite(loss), "validation loss", got=loss, wanted="a finite number")
        self.validation_loss = loss
        journal.record(self.progress.step, validation_loss=loss, unigram_loss=self.unigram)
        journal.note(f"step {self.progress.step}  validation loss {loss:.4f}")

    def _save(self, journal: Journal) -> None:
        # The losses so far are those of the weights before the latest step.
        found = not_finite(self.weights, self.optimizer, dict(self.model.named_buffers()))
        self._require_finite(
            found is None,
            f"{'weight' if found in self.weights else 'buffer'} {found}",
            got="values that are not finite, which are not saved",
            wanted="finite numbers",
        )
        progress.save(self.config, self.progress, self.model, optimizer=self.optimizer)
        if self.world.rank == 0:
            try:
                checkpoints.prune(progress.folder(self.config), self.config.checkpoint.keep)
            except OSError as error:
                journal.note(f"old checkpoints are kept: {error}")
        journal.draw(self.unigram)

    def _mean(self, value: Tensor) -> float:
        """Mean of a scalar over all ranks, the same on each; not finite as soon as one rank's is not."""
        value = value.float()
        dist.all_reduce(value)
        return float(value) / self.world.size
