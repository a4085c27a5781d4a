"""Checkpoints that cannot be read or written: every rank says the same, and nothing was changed."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import te_dist as te
from te_dist import checkpoints, optim, recipe
from te_dist.checkpoints import folder, store
from te_dist.tensor.placement import local_tensor
from te_dist.testing import device
from tests.distributed.checkpoint_zoo import assert_plain, assert_weights, data_parallel, random_matrix, zoo

SAVED = ("float8_block_2d", "mxfp8_1d")


def save(rank: int, world: int, path: Path, seed: int = 1) -> None:
    model = zoo(seed, data_parallel(world), SAVED)
    checkpoints.save(path, model=model, optimizer=torch.optim.SGD(plain(model), lr=0.5, momentum=0.9))


def plain(model: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if "weights" not in name]


def loaded(rank: int, world: int, path: Path, seed: int, names: tuple[str, ...] = SAVED) -> None:
    """Loads, and checks that the weights are those of `seed`."""
    model = zoo(0, data_parallel(world), names)
    checkpoints.load(path, model=model)
    assert_weights(model, seed)


def refused(rank: int, world: int, path: Path, how: str) -> str:
    """The message of a load that fails and changes nothing."""
    model = zoo(2, data_parallel(world), ("mxfp8_1d", "mxfp8_2d") if how == "another model" else SAVED)
    if how == "another shape":
        model.register_buffer("seen", torch.zeros(2, device=device()))
    if how == "another format":
        model.weights["float8_block_2d"] = zoo(2, data_parallel(world), ("float8_block_1d",)).weights["float8_block_1d"]
    if how == "histories":
        layer = te.Linear(128, 128, device=device())
        with te.autocast(recipe=recipe.DelayedScaling()):
            layer(torch.ones(2, 128, device=device()))
        model.histories = layer.gemm.scaling
    if how == "on meta":
        model.seen = model.seen.to("meta")
    optimizer = optimizer_of(model, how)
    before = {name: local_tensor(p).detach().float().cpu().clone() for name, p in model.named_parameters()}
    with pytest.raises(checkpoints.CheckpointError) as error:
        checkpoints.load(path, model=model, optimizer=optimizer)
    for name, param in model.named_parameters():
        assert torch.equal(local_tensor(param).detach().float().cpu(), before[name]), f"{name} was changed"
    return str(error.value)


def optimizer_of(model: nn.Module, how: str) -> torch.optim.Optimizer | None:
    match how:
        case "another optimizer":
            return optim.FusedAdam(plain(model))
        case "other groups":
            return torch.optim.SGD([{"params": [p]} for p in plain(model)], lr=0.5)
        case "fewer parameters":
            return torch.optim.SGD(plain(model)[1:], lr=0.5)
        case "no optimizer was saved":
            return torch.optim.SGD(plain(model), lr=0.5)
    return None


def message_of(ranks: Callable, path: Path, how: str) -> str:
    first, second = ranks(2).run(refused, path, how)
    assert first == second
    return first


# -- the checkpoint of another model -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("another model", ["weights.mxfp8_2d.weight is not in it", "choose another checkpoint@"]),
        ("histories", ["histories.scale is not in it", "made by a recipe of the same weights without any@"]),
        ("another shape", ["seen has shape [1] in it, wanted [2]"]),
        ("another format", ["Block(tile=(128, 128)", "Block(tile=(1, 128)", "te_dist.optim.FusedAdam"]),
        ("on meta", ["meta device: seen", "to_empty"]),
        ("another optimizer", ["torch.optim.sgd.SGD", "te_dist.optim.fused_adam.FusedAdam"]),
        ("other groups", ["1 parameter groups, wanted 3"]),
        ("fewer parameters", ["optimizer state of norm.weight"]),
    ],
)
def test_what_does_not_fit_is_named(ranks, tmp_path: Path, how: str, said: list[str]) -> None:
    ranks(2).run(save, tmp_path / "c")
    message = message_of(ranks, tmp_path / "c", how)
    assert all(part in message + "@" for part in said), message  # "@" for the end


def save_more(rank: int, world: int, path: Path) -> None:
    checkpoints.save(path, model=zoo(1, data_parallel(world), (*SAVED, "mxfp8_2d")))


def test_what_is_in_the_checkpoint_only_is_named(ranks, tmp_path: Path) -> None:
    ranks(2).run(save_more, tmp_path / "c")
    assert "have not: weights.mxfp8_2d.weight" in message_of(ranks, tmp_path / "c", "fewer weights")
    message = message_of(ranks, tmp_path / "c", "no optimizer was saved")
    assert "no optimizer state; make the optimizer that was saved" in message and "its state begins anew" in message


def save_plain(path: Path, dtype: torch.dtype) -> None:
    """What a model has whose weights, and one plain parameter of another dtype, are plain tensors of `dtype`."""
    model = zoo(1, names=SAVED)
    for name, layer in model.weights.items():
        values = random_matrix(*layer.weight.shape, 1) if dtype == torch.float64 else torch.ones(layer.weight.shape)
        model.weights[name].weight = nn.Parameter(values.to(dtype), requires_grad=False)
    model.head.weight = nn.Parameter(model.head.weight.detach().to(dtype), requires_grad=False)
    checkpoints.save(path, model=model)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int64, torch.bool], ids=str)
def test_what_is_not_high_precision_is_no_value_of_a_weight(ranks, tmp_path: Path, dtype: torch.dtype) -> None:
    save_plain(tmp_path / "c", dtype)
    message = message_of(ranks, tmp_path / "c", "as saved")
    for name in ("weights.float8_block_2d.weight", "weights.mxfp8_1d.weight", "head.weight"):
        said = f"{name} has dtype {str(dtype)[6:]}, wanted one of float64, float32, bfloat16, float16"
        assert said in message, message
    assert "decode or convert it before it is saved" in message


def test_weights_are_quantized_from_float64_by_way_of_fp32(ranks, tmp_path: Path) -> None:
    save_plain(tmp_path / "c", torch.float64)
    ranks(2).run(loaded, tmp_path / "c", 1)


def test_a_state_dict_is_no_model(tmp_path: Path) -> None:
    model = zoo(1, names=SAVED)
    for call in (checkpoints.save, checkpoints.load):
        with pytest.raises(checkpoints.CheckpointError, match="model: got OrderedDict, wanted the torch.nn.Module"):
            call(tmp_path / "c", model=model.state_dict())
        checkpoints.save(tmp_path / "c", model=model)


# -- damage --------------------------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


@pytest.mark.each_value
@pytest.mark.parametrize("file", ["__0_0.distcp", "__1_0.distcp", ".metadata", "manifest.json"])
@pytest.mark.parametrize("harm", [truncate, flip_a_bit, Path.unlink], ids=lambda f: f.__name__)
def test_damage_is_found_on_every_rank(ranks, tmp_path: Path, file: str, harm: Callable[[Path], None]) -> None:
    ranks(2).run(save, tmp_path / "c")
    harm(tmp_path / "c" / file)
    message = message_of(ranks, tmp_path / "c", "as saved")
    assert file in message, message
    assert ("is damaged" in message) != (file == "manifest.json" and harm is Path.unlink), message


def test_a_checkpoint_that_is_not_there(ranks, tmp_path: Path) -> None:
    assert "no such directory" in message_of(ranks, tmp_path / "step_000002", "as saved")
    ranks(2).run(save, tmp_path / "step_000001")
    assert "step_000001" in message_of(ranks, tmp_path / "step_000002", "as saved")
    assert "checkpoints.latest()" in message_of(ranks, tmp_path, "as saved")


def test_a_manifest_of_another_layout(ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks(2).run(save, tmp_path / "c")
    path = tmp_path / "c" / "manifest.json"
    outer = json.loads(path.read_text())
    body = json.dumps(json.loads(outer["body"]) | {"layout": 99})
    path.write_text(json.dumps({"body": body, "crc32": zlib.crc32(body.encode())}))
    assert "layout 99" in message_of(ranks, tmp_path / "c", "as saved")


# -- what cannot be saved ------------------------------------------------------------------------------------------


def save_refused(rank: int, world: int, path: Path, how: str) -> str:
    model = zoo(1, data_parallel(world), SAVED)
    extra, optimizer = {}, None
    if how == "unsettled" and rank == 1:
        local_tensor(model.weights["mxfp8_1d"].weight).storage.unsettled = torch.zeros(1)
    if how == "extra" and rank == 0:
        extra = {"a": [1, {"b": object()}]}
    elif how == "shards":
        extra = {"average": {name: value.detach() * 1.0 for name, value in model.state_dict().items()}}
    if how == "no dictionary" and rank == 0:
        extra = object()
    if how == "stranger":
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2, device=device()))], lr=0.1)
    if how == "local state":
        optimizer = torch.optim.SGD(plain(model), lr=0.1)
        optimizer.state[plain(model)[0]]["history"] = torch.zeros(3)
    if how == "misplaced":
        storage = local_tensor(model.weights["mxfp8_1d"].weight).storage
        storage.region = storage.region.whole(*storage.shape)
    with pytest.raises(checkpoints.CheckpointError) as error:
        checkpoints.save(path, model=model, optimizer=optimizer, extra=extra)
    assert error.value.__cause__ is None  # it would say the same again
    return str(error.value)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("unsettled", "rank 1: weights.mxfp8_1d.weight"),
        ("extra", "rank 0: extra.a[1].b: got object"),
        ("shards", "got DTensor, wanted plain tensors: extra is that of rank 0 alone"),
        ("no dictionary", "rank 0: extra: got object, wanted a dictionary"),
        ("stranger", "none of the model"),
        ("local state", "history is a plain tensor"),
        ("misplaced", "rank 1: weights.mxfp8_1d.weight is said to be"),
        ("no checkpoint", "is no checkpoint"),
    ],
)
def test_what_cannot_be_saved_is_named(ranks, tmp_path: Path, how: str, said: str) -> None:
    path = tmp_path / "c"
    if how == "no checkpoint":
        path.mkdir()
        (path / "notes.txt").touch()
    first, second = ranks(2).run(save_refused, path, how)
    assert first == second
    assert said in first
    assert not (path / "manifest.json").exists()


# -- complete or not there -----------------------------------------------------------------------------------------


class PowerCut(BaseException):
    """The process ends here."""


def cut_power_at(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, call: int) -> None:
    """The `call`-th call of a function does not happen, nor does anything after it."""
    original, calls = getattr(owner, name), []

    def cut(*args: object, **kwargs: object) -> object:
        calls.append(args)
        if len(calls) > call:
            raise PowerCut
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, cut)


@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [(folder, "begin", 0), (store, "write", 0), (folder, "sync", 0), (folder, "sync", 1), (Path, "rename", 0),
     (Path, "rename", 1), (shutil, "rmtree", 0), (shutil, "rmtree", 1)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)  # fmt: skip
def test_an_interrupted_save_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: object, name: str, call: int
) -> None:
    path = tmp_path / "step_000007"
    checkpoints.save(path, model=zoo(1, names=SAVED))
    with monkeypatch.context() as patches:
        if name == "rename":
            original = store.write
            patches.setattr(store, "write", lambda *args: (original(*args), cut_power_at(patches, Path, name, call)))
        else:
            cut_power_at(patches, owner, name, call)
        with pytest.raises(PowerCut):
            checkpoints.save(path, model=zoo(3, names=SAVED))
    assert checkpoints.latest(tmp_path) == path
    load_here(path, 3 if (name, call) == ("rmtree", 1) else 1)
    checkpoints.save(path, model=zoo(4, names=SAVED))
    load_here(path, 4)
    assert [p.name for p in tmp_path.iterdir()] == ["step_000007"]


def load_here(path: Path, seed: int) -> None:
    model = zoo(0, names=SAVED)
    checkpoints.load(path, model=model)
    assert_weights(model, seed)


def write_fails(rank: int, world: int, path: Path) -> str:
    """One rank cannot write its file."""
    if rank == 1:
        (path.parent / f".{path.name}.tmp").mkdir()
    model = zoo(3, data_parallel(world), SAVED)
    original = folder.begin
    folder.begin = lambda p: (original(p), (folder.temporary(p) / "__1_0.distcp").mkdir())[0]
    try:
        with pytest.raises(checkpoints.CheckpointError) as error:
            checkpoints.save(path, model=model)
    finally:
        folder.begin = original
    return str(error.value)


def test_a_rank_that_cannot_write_stops_all(ranks, tmp_path: Path) -> None:
    ranks(2).run(save, tmp_path / "c")
    first, second = ranks(2).run(write_fails, tmp_path / "c")
    assert first == second
    assert "rank 1: IsADirectoryError" in first
    ranks(2).run(loaded, tmp_path / "c", 1)


# -- a run directory -----------------------------------------------------------------------------------------------


def test_latest_and_prune_count_complete_checkpoints(tmp_path: Path) -> None:
    assert checkpoints.latest(tmp_path / "nowhere") is None
    assert checkpoints.latest(tmp_path) is None
    with pytest.raises(checkpoints.CheckpointError, match="path: got None, as `latest` gives .*; train from the start"):
        checkpoints.load(checkpoints.latest(tmp_path), model=nn.Linear(2, 2))
    for step in (5, 20, 100):
        checkpoints.save(tmp_path / f"step_{step:06d}", model=nn.Linear(2, 2))
    (tmp_path / "step_000200").mkdir()  # somebody else's
    (tmp_path / ".step_000050.tmp").mkdir()  # of an interrupted save
    (tmp_path / ".step_000150.tmp").mkdir()  # of a save that may be going on
    (tmp_path / "step_000020").rename(tmp_path / ".step_000020.old")  # interrupted between two renames
    with pytest.raises(checkpoints.CheckpointError, match=f"got a checkpoint, wanted .* pass {tmp_path}, or load"):
        checkpoints.latest(tmp_path / "step_000100")
    with pytest.raises(checkpoints.CheckpointError, match="there is no such directory; check the path"):
        checkpoints.load(tmp_path / "step_000100" / "model", model=nn.Linear(2, 2))
    assert checkpoints.latest(tmp_path) == tmp_path / "step_000100"
    assert checkpoints.prune(tmp_path, keep=2) == [tmp_path / "step_000005"]
    left = {p.name for p in tmp_path.iterdir()}
    assert left == {".step_000020.old", "step_000100", "step_000200", ".step_000150.tmp"}
    checkpoints.load(tmp_path / "step_000020", model=nn.Linear(2, 2))
    assert checkpoints.prune(tmp_path, keep=1) == [tmp_path / "step_000020"]
    assert checkpoints.prune(tmp_path, keep=1) == []
    with pytest.raises(ValueError, match="keep=0"):
        checkpoints.prune(tmp_path, keep=0)


# -- beside the model ----------------------------------------------------------------------------------------------


def test_extra_comes_back_as_it_was(tmp_path: Path) -> None:
    state = torch.get_rng_state()
    extra = {
        "step": 7, "loss": 0.1, "far": float("inf"), "name": "a", "none": None, "nested": [1, {"x": (2, (3.5,))}],
        "rng": [state, state + 1], "half": torch.arange(3).bfloat16(), "empty": {},
    }  # fmt: skip
    rates = torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD(nn.Linear(2, 2).parameters()), [3, 5, 5])
    extra |= {"rates": rates.state_dict(), "by number": {1: "a", "1": torch.zeros(0).tolist(), -7: (1,)}}
    checkpoints.save(tmp_path / "c", model=nn.Linear(2, 2), extra=extra)
    got = checkpoints.load(tmp_path / "c", model=nn.Linear(2, 2))
    assert torch.equal(got["rng"][0], state)
    assert torch.equal(got["rng"][1], state + 1)
    assert torch.equal(got["half"], extra["half"])
    assert got["half"].dtype == torch.bfloat16
    for key in ("step", "loss", "far", "name", "none", "nested", "empty", "rates", "by number"):
        assert got[key] == extra[key], key
    assert type(got["rates"]["milestones"]) is type(extra["rates"]["milestones"])


def save_rank_in_extra(rank: int, world: int, path: Path) -> dict:
    extra = {"rank": rank, "tensor": torch.tensor([rank])}
    checkpoints.save(path, model=zoo(1, data_parallel(world), SAVED), extra=extra)
    return checkpoints.load(path, model=zoo(2, data_parallel(world), SAVED))


def test_extra_is_that_of_rank_0(ranks, tmp_path: Path) -> None:
    assert ranks(3).run(save_rank_in_extra, tmp_path / "c") == [{"rank": 0, "tensor": torch.tensor([0])}] * 3


# -- in the background ---------------------------------------------------------------------------------------------


def save_in_background(rank: int, world: int, path: Path) -> None:
    """What is saved is what was there at the call, not what training makes of it while it is written."""
    model = zoo(1, data_parallel(world), SAVED)
    optimizer = torch.optim.SGD(plain(model), lr=0.5, momentum=0.9)
    future = checkpoints.async_save(path, model=model, optimizer=optimizer, extra={"step": 3})
    for param in model.parameters():
        with torch.no_grad():
            local_tensor(param).mul_(0.0)
    model.seen.fill_(99)
    model(torch.ones(2, 160, device=device())).backward()  # collectives of training, meanwhile
    assert future.result() is None
    again = zoo(2, data_parallel(world), SAVED)
    assert checkpoints.load(path, model=again, optimizer=torch.optim.SGD(plain(again), lr=0.5)) == {"step": 3}
    assert_weights(again, 1)
    assert_plain(again, zoo(1, names=()))


@pytest.mark.gloo_only("its expected values are made on the CPU")
def test_async_save_saves_the_moment_of_the_call(ranks, tmp_path: Path) -> None:
    ranks(2).run(save_in_background, tmp_path / "c")
    ranks(3).run(loaded, tmp_path / "c", 1)


def save_twice_in_background(rank: int, world: int, path: Path) -> None:
    """A second save, to another path, waits for the first."""
    futures = [
        checkpoints.async_save(path / str(seed), model=zoo(seed, data_parallel(world), SAVED)) for seed in (1, 2)
    ]
    assert [future.result() for future in futures] == [None, None]
    for seed in (1, 2):
        again = zoo(3, data_parallel(world), SAVED)
        checkpoints.load(path / str(seed), model=again)
        assert_weights(again, seed)


@pytest.mark.gloo_only("its expected values are made on the CPU")
def test_saves_in_the_background_wait_for_one_another(ranks, tmp_path: Path) -> None:
    ranks(2).run(save_twice_in_background, tmp_path)
