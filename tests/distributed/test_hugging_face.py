"""A Hugging Face model, converted, trained by its Trainer and by accelerate over FSDP2, saved and loaded again."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import te_dist as te
from te_dist import checkpoints, fsdp2, optim, recipe, tensor
from te_dist.tensor import QuantizedTensor
from te_dist.tensor.placement import local_tensor
from te_dist.testing import assert_bitwise, mesh, pool

WHY = "needs Hugging Face's libraries: pip install 'te_dist[hf]'"
transformers = pytest.importorskip("transformers", reason=WHY)
accelerate = pytest.importorskip("accelerate", reason=WHY)

RECIPES = {
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(disable_stochastic_rounding=True),
}
LAYER, NUM_STEPS, SAVED_AT, BATCH = "LlamaDecoderLayer", 4, 2, 4
DATA = [{"input_ids": torch.arange(32) * k % 128, "labels": torch.arange(32) * k % 128} for k in range(1, 33)]


def llama(name: str, *, seed: int = 0, keeps: bool = False) -> nn.Module:
    """Two layers of random weights, their projections quantized; `keeps`: they know of what."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = transformers.LlamaForCausalLM(config)
    te.convert(model, {"lm_head": None, "model.layers.*": RECIPES[name]}, preserve_high_precision_init_val=keeps)
    return model


def sharded_llama(name: str, *, seed: int = 0, keeps: bool = False) -> nn.Module:
    model, over = llama(name, seed=seed, keeps=keeps), mesh((dist.get_world_size(),), ("dp",))
    for layer in model.model.layers:
        fsdp2.fully_shard(layer, mesh=over)
    return fsdp2.fully_shard(model, mesh=over)


@contextmanager
def launched(rank: int, world: int) -> Iterator[None]:
    """What a launcher tells the libraries, nothing on one rank; what they keep is forgotten afterwards."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500}
    with mock.patch.dict("os.environ", {key: str(value) for key, value in told.items()} if world > 1 else {}):
        try:
            yield
        finally:
            importlib.import_module("accelerate.state").AcceleratorState._reset_state(reset_partial_state=True)


def over_fsdp2(accelerator: Any, wrapped: str, *, from_first: bool = False) -> Any:
    """accelerate takes FSDP for GPUs only; told so, it does the same on processors."""
    for state in (accelerate.PartialState(), accelerator.state):
        state.distributed_type = accelerate.utils.DistributedType.FSDP
    accelerator.state.fsdp_plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[wrapped],
        state_dict_type="SHARDED_STATE_DICT",
        cpu_ram_efficient_loading=from_first,
    )
    return accelerator


class QuantizedTrainer(transformers.Trainer):
    """What a user adds: the autocast."""

    name: str

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        with te.autocast(recipe=RECIPES[self.name]):
            return super().compute_loss(*args, **kwargs)


class ShardingTrainer(QuantizedTrainer):
    """Over FSDP2, which it takes for GPUs only."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        made_here = isinstance(next(self.model.parameters()), DTensor)
        over_fsdp2(self.accelerator, f"FSDP{LAYER}" if made_here else LAYER)
        self.is_fsdp_enabled = True


class SavingTrainer(QuantizedTrainer):
    """Without FSDP2: what a user adds to have the library save every few steps, as docs/recipes.md shows it."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        checkpoints.save(f"{output_dir or self.args.output_dir}/model", model=self.model)

    def _load_from_checkpoint(self, folder: str, model: nn.Module | None = None) -> None:
        checkpoints.load(f"{folder}/model", model=self.model)

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)


def trainer(
    kind: type[QuantizedTrainer], name: str, model: nn.Module, where: str, *, lr: float = 1e-2, **options: Any
) -> QuantizedTrainer:
    made = type(f"{name}Trainer", (kind,), {"name": name})
    args = transformers.TrainingArguments(
        output_dir=where,
        use_cpu=True,
        per_device_train_batch_size=BATCH,
        max_steps=NUM_STEPS,
        logging_steps=1,
        lr_scheduler_type="constant",
        report_to=[],
        disable_tqdm=True,
        **{"save_steps": SAVED_AT} | options,
    )
    adam = (optim.FusedAdam, {"lr": lr})
    return made(model=model, args=args, train_dataset=DATA, eval_dataset=DATA[:8], optimizer_cls_and_kwargs=adam)


def losses(trained: Any) -> list[float]:
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]


def assert_quantized(model: nn.Module) -> None:
    """Projections of layers are quantized shards."""
    weights = {n: p for n, p in model.named_parameters() if n.endswith("proj.weight")}
    assert len(weights) == 14
    for name, param in weights.items():
        assert isinstance(param, DTensor), name
        assert isinstance(local_tensor(param), QuantizedTensor), name


def train(rank: int, world: int, name: str, where: str, wrapped_here: bool) -> list[list[float]]:
    """Losses of a run, and of one that goes on from its middle."""
    make, found = sharded_llama if wrapped_here else llama, []
    for seed, start in ((0, None), (1, f"{where}/checkpoint-{SAVED_AT}")):
        with launched(rank, world):
            run = trainer(ShardingTrainer, name, make(name, seed=seed), where)
            run.train(resume_from_checkpoint=start)
        assert_quantized(run.model)
        num_params = len(list(run.model.parameters()))
        assert len(run.optimizer.optimizer.state) == num_params, "the optimizer has lost parameters"
        found.append(losses(run))
    check_pretrained(rank, name, run.model, f"{where}/pretrained")
    return found


def check_pretrained(rank: int, name: str, model: nn.Module, where: str) -> None:
    """Weights in high precision, as the library saves and loads them, and as a sharded model does."""
    values = checkpoints.high_precision_state_dict(model)
    assert bool(values) == (rank == 0)
    if rank == 0:
        llama(name).save_pretrained(where, state_dict=values)
    dist.barrier()
    saved, other = transformers.LlamaForCausalLM.from_pretrained(where), sharded_llama(name, seed=2)
    checkpoints.import_safetensors(other, where)
    for (key, got), param, shard in zip(saved.named_parameters(), model.parameters(), other.parameters(), strict=True):
        whole = param.full_tensor()
        is_quantized = isinstance(whole, QuantizedTensor)
        assert_bitwise(got.detach(), (whole.dequantize() if is_quantized else whole).detach(), key)
        if is_quantized:
            want = tensor.quantize(got.detach(), whole.format)
            assert torch.equal(shard.full_tensor(), want), key


@pytest.mark.every_run(name=("block",))
@pytest.mark.parametrize("name", ["block", "nvfp4"])
def test_a_trainer_trains_a_converted_model(name: str, tmp_path: Path) -> None:
    (by_library, resumed), again = pool(2).run(train, name, str(tmp_path / "a"), False, timeout=120)
    assert again == [by_library, resumed]
    assert by_library == resumed
    assert by_library[-1] < by_library[0]
    (by_us, resumed), _ = pool(2).run(train, name, str(tmp_path / "b"), True, timeout=120)
    assert by_us == resumed == by_library


def train_whole(rank: int, world: int, name: str, where: str) -> list[list[float]]:
    """Losses of a run of whole weights on every rank, and of one that goes on from its middle."""
    found = []
    for seed, start in ((0, None), (1, f"{where}/checkpoint-{SAVED_AT}")):
        with launched(rank, world):
            run = trainer(SavingTrainer, name, llama(name, seed=seed), where)
            run.train(resume_from_checkpoint=start)
        assert all(isinstance(p, QuantizedTensor) for n, p in run.model.named_parameters() if n.endswith("proj.weight"))
        found.append(losses(run))
    return found


# DistributedDataParallel sends values when it wraps, which NVFP4 quantizes to an amax that may differ in the last bit.
@pytest.mark.every_run(name=("block", "nvfp4"))
@pytest.mark.each_value
@pytest.mark.parametrize(("name", "world"), [*((name, 1) for name in RECIPES), ("block", 2), ("mxfp8", 2)])
def test_a_trainer_without_fsdp_saves_and_resumes(name: str, world: int, tmp_path: Path) -> None:
    for first, resumed in pool(world).run(train_whole, name, str(tmp_path), timeout=120):
        assert len(first) == NUM_STEPS
        assert first == resumed


def train_to_the_best(rank: int, world: int, kind: type[QuantizedTrainer], where: str) -> None:
    """What is in memory behind a run that gets worse is the best it had, and what is exported is too."""
    name, each_step = "block", {"save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    with launched(rank, world):
        run = trainer(kind, name, llama(name), where, lr=0.1, load_best_model_at_end=True, **each_step)
        run.train()
        found = [entry["eval_loss"] for entry in run.state.log_history if "eval_loss" in entry]
        best = min(found)
        assert run.state.best_metric == best < found[-1]
        assert run.evaluate()["eval_loss"] == best
        values = checkpoints.high_precision_state_dict(run.model, optimizer=run.optimizer)
    for key, param in run.model.named_parameters():
        whole = param.full_tensor() if isinstance(param, DTensor) else param
        want = (whole.dequantize() if isinstance(whole, QuantizedTensor) else whole).detach()
        if rank == 0:
            assert_bitwise(values[key], want, key)


@pytest.mark.each_value
@pytest.mark.parametrize(("kind", "world"), [(SavingTrainer, 1), (SavingTrainer, 2), (ShardingTrainer, 2)])
def test_a_trainer_ends_with_the_best(kind: type[QuantizedTrainer], world: int, tmp_path: Path) -> None:
    pool(world).run(train_to_the_best, kind, str(tmp_path), timeout=120)


def loop(rank: int, world: int, name: str, where: str, from_first: bool) -> tuple[list[float], list[float]]:
    """A loop of accelerate's: prepare, backward, clip, save_state and load_state.

    Args:
        from_first: whether the weights of the first rank are given to all.
    """
    with launched(rank, world):
        accelerator = over_fsdp2(accelerate.Accelerator(cpu=True), LAYER, from_first=from_first)
        model = llama(name, seed=rank if from_first else 0)
        optimizer = optim.FusedAdam(model.parameters(), lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
        assert_quantized(model)
        first = steps(accelerator, model, optimizer, name)
        accelerator.save_state(where)
        second = steps(accelerator, model, optimizer, name)
        accelerator.load_state(where)
        third = steps(accelerator, model, optimizer, name)
    assert first != second
    return second, third


def loop_whole(rank: int, world: int, name: str, where: str) -> tuple[list[float], list[float]]:
    """The same loop of whole weights, which are pickled."""
    with launched(rank, world):
        accelerator, model = accelerate.Accelerator(cpu=True), llama(name)
        model, optimizer = accelerator.prepare(model, optim.FusedAdam(model.parameters(), lr=1e-2))
        steps(accelerator, model, optimizer, name)
        accelerator.save_state(where, safe_serialization=False)
        second = steps(accelerator, model, optimizer, name)
        accelerator.load_state(where)
        return second, steps(accelerator, model, optimizer, name)


@pytest.mark.each_value
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", RECIPES)
def test_accelerate_saves_whole_weights_as_pickles(name: str, world: int, tmp_path: Path) -> None:
    for second, third in pool(world).run(loop_whole, name, str(tmp_path), timeout=120):
        assert second == third


def steps(accelerator: Any, model: nn.Module, optimizer: Any, name: str) -> list[float]:
    found: list[Tensor] = []
    for index in range(2):
        rows = [DATA[(index * 2 + accelerator.process_index) % len(DATA)]["input_ids"]]
        with te.autocast(recipe=RECIPES[name]):
            found.append(model(input_ids=torch.stack(rows), labels=torch.stack(rows)).loss)
        accelerator.backward(found[-1])
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [float(loss) for loss in found]


@pytest.mark.every_run(name=("block",))
@pytest.mark.parametrize(("name", "from_first"), [*((name, False) for name in RECIPES), ("block", True)])
def test_accelerate_prepares_saves_and_loads(name: str, from_first: bool, tmp_path: Path) -> None:
    for second, third in pool(2).run(loop, name, str(tmp_path), from_first, timeout=120):
        assert second == third


def begin_on_meta(rank: int, world: int, where: str) -> None:
    """The order of docs/recipes.md: initialized by the library's own rule, then filled with weights that it saved."""
    whole = llama("block", seed=1, keeps=True)
    checkpoints.export_safetensors(whole, where)
    with torch.device("meta"):
        model = sharded_llama("block", keeps=True)
    fsdp2.materialize(model, device="cpu", seed=0, initialize=model._init_weights)
    assert (model.model.norm.weight.full_tensor() == 1).all()
    wide = model.config.initializer_range
    for name, param in model.named_parameters():  # as the library's own constructor has it
        if param.dim() > 1:
            values = param.full_tensor()
            values = values.dequantize() if isinstance(values, QuantizedTensor) else values
            assert abs(float(values.std()) / wide - 1) < 0.1, name  # noqa: PLR2004
    for (name, got), want in zip(model.named_buffers(), whole.buffers(), strict=True):
        assert_bitwise(got, want, name)
    checkpoints.import_safetensors(model, where)
    tokens = torch.stack([each["input_ids"] for each in DATA[:2]])
    with te.autocast(recipe=RECIPES["block"]):
        got, want = (each(input_ids=tokens).logits for each in (model, whole))
    assert_bitwise(got, want, "logits")


def test_a_model_may_begin_on_meta(tmp_path: Path) -> None:
    pool(2).run(begin_on_meta, str(tmp_path))
