"""`te-dist plan`: what it computes is what a job stores and sends; what it prints; how it ends."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

import te_dist as te
from te_dist import __main__ as command
from te_dist import fsdp2, testing
from te_dist._torch_private import pretended_ranks
from te_dist.fsdp2 import Purpose
from te_dist.fsdp2.footprint import kinds_of_ranks
from te_dist.launch import config_file, layout, parallelize, plan
from te_dist.launch.model import next_token_loss
from te_dist.launch.plan import plan_job
from te_dist.tensor.placement import local_tensor
from te_dist.testing.memory import allocated_bytes

CONFIGS = Path(__file__).parents[2] / "launch" / "configs"
SMALL = ["--model.hidden", "64", "--model.vocab-size", "320", "--model.layers", "2", "--data.sequence-length", "32"]
JOBS = {
    "uneven": (3, ["quickstart.toml", "--mesh.dp", "3", "--train.batch", "48", "--recipe", "float8_current"]),
    "recomputed": (2, ["quickstart.toml", "--recipe", "mxfp8", "--recompute", "full", "--train.batch", "16"]),
    "tensor_parallel": (4, ["tensor_parallel.toml", "--recipe", "float8_block"]),
    "experts": (4, ["moe.toml", "--mesh.dp", "4", "--train.batch", "32", "--model.experts.ffn", "128"]),
    "large_units": (2, ["quickstart.toml", "--recipe", "mxfp8", "--model.layers", "3", "--mesh.unit-blocks", "2"]),
    "plain": (2, ["quickstart.toml", "--recipe", "bf16"]),
}


def arguments(job: str) -> list[str]:
    name, *overrides = JOBS[job][1]
    return [str(CONFIGS / name), *SMALL, "--train.micro-batch", "4", *overrides]


def run_a_step(rank: int, world: int, job: str) -> tuple[dict[str, dict[Purpose, int]], int, dict[str, list[int]]]:
    """One step: bytes sent by parameter and purpose, bytes stored, bytes of the optimizer's state by parameter."""
    config = config_file.load(arguments(job))
    found = layout.plan(config, world)
    mesh = parallelize.make_mesh(found, testing.device(), 60)
    experts = parallelize.make_expert_mesh(found, testing.device(), 60)
    model = parallelize.build_model(config, mesh, testing.device(), expert_mesh=experts)
    assert isinstance(model, FSDPModule)
    stored = allocated_bytes(local_tensor(param) for param in model.parameters())
    optimizer = parallelize.build_optimizer(model, config.optimizer)
    precision = parallelize.Precision(config)
    with fsdp2.count_traffic(model) as counted:
        for index in range(found.accumulate):
            model.set_requires_gradient_sync(index == found.accumulate - 1)
            tokens = torch.randint(0, config.model.vocab_size, (config.train.micro_batch, 33))
            with precision.forward():
                logits = model(tokens[:, :-1])
            next_token_loss(logits, tokens[:, 1:]).backward()
        optimizer.step()
    names = [name for name, _ in model.named_parameters()]
    sent = {name: {purpose: counted.sent[name, purpose] for purpose in Purpose} for name in names}
    states = {name: optimizer.state[param] for name, param in model.named_parameters()}
    sizes = {n: sorted(local_tensor(v).nbytes for k, v in state.items() if k != "step") for n, state in states.items()}
    return sent, stored, sizes


@pytest.mark.every_run(job=("tensor_parallel", "experts"))
@pytest.mark.parametrize("job", JOBS)
def test_a_job_stores_and_sends_what_was_planned(ranks: Callable, job: str) -> None:
    world = JOBS[job][0]
    plan = plan_job(arguments(job))
    assert len(plan.ranks) == world
    for rank, (sent, stored, states) in zip(plan.ranks, ranks(world).run(run_a_step, job), strict=True):
        for each in rank.parameters:
            name = each.footprint.name
            planned = fsdp2.sent_per_step([each.footprint], micro_batches=plan.layout.accumulate)
            assert sent[name] == planned, name
            masters = [each.masters] if each.masters else []
            assert states[name] == sorted([*masters, *[each.moments // 2] * 2]), name
        assert stored == sum(each.stored for each in rank.parameters)
        assert sent.keys() == {each.footprint.name for each in rank.parameters}


# Of few rows over many ranks: parts begin and end inside of tiles, are of several sizes, or empty.
FEW = ("--model.layers", "1", "--train.batch", "{dp}", "--train.micro-batch", "1", "--data.sequence-length", "32")
ODD = (*FEW, "--model.hidden", "192", "--model.vocab-size", "331")
KEYS = ("--model.hidden", "256", "--model.ffn", "512", "--model.heads", "8", "--model.head-width", "96")
KEYS += ("--model.kv-heads", "2", "--model.vocab-size", "512")
CUT = {
    "blocks": ("quickstart.toml", 7, 1, ("--model.ffn", "448")),
    "one scale": ("quickstart.toml", 7, 1, ("--model.ffn", "488", "--recipe", "float8_current")),
    "two directions": ("quickstart.toml", 6, 1, ("--model.ffn", "416", "--recipe", "hybrid_float8_mxfp8")),
    "halves of bytes": ("quickstart.toml", 6, 1, ("--model.ffn", "416", "--recipe", "nvfp4", "--recompute", "full")),
    "empty parts": ("quickstart.toml", 24, 1, ("--model.kv-heads", "1", "--model.head-width", "4")),
    "columns": ("tensor_parallel.toml", 3, 2, ("--model.ffn", "448", "--recipe", "float8_block")),
    "keys alone through tiles": ("tensor_parallel.toml", 2, 2, ("--recipe", "float8_block", *KEYS)),
    "experts": ("moe.toml", 6, 1, ("--mesh.ep", "2", "--model.experts.count", "10")),
    "experts of few ranks": ("moe.toml", 6, 1, ("--mesh.ep", "1", "--model.experts.count", "4")),
    "experts beside columns": ("moe.toml", 3, 2, ("--mesh.ep", "2", "--model.experts.shared-ffn", "384")),
}


@pytest.mark.every_run(job=("blocks", "keys alone through tiles", "experts beside columns"))
@pytest.mark.parametrize("job", CUT)
def test_ranks_of_a_kind_are_planned_once_and_all_as_if_each_were(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, dp, tp, options = CUT[job]
    mesh = ("--mesh.dp", str(dp), "--mesh.tp", str(tp))
    given = [str(CONFIGS / name), *(word.format(dp=dp) for word in ODD), *mesh, *options]
    built, original = [], plan._plan_rank
    monkeypatch.setattr(plan, "_plan_rank", lambda *args: built.append(args[-1]) or original(*args))
    found = plan_job(given)
    assert len(built) < len(found.ranks) + len(found.plain)
    for rank in range(dp * tp):
        alone = plan_job(given, ranks=[rank])
        assert (found.ranks[rank], found.plain[rank]) == (alone.ranks[0], alone.plain[0]), rank


def test_a_thousand_ranks_that_are_alike_take_two_models(monkeypatch: pytest.MonkeyPatch) -> None:
    built, original = [], plan._plan_rank
    monkeypatch.setattr(plan, "_plan_rank", lambda *args: built.append(args[-1]) or original(*args))
    sizes = ("--model.hidden", "1024", "--model.ffn", "1024", "--model.kv-heads", "4", "--model.vocab-size", "1024")
    given = [str(CONFIGS / "quickstart.toml"), *FEW, *sizes, "--mesh.dp", "1024"]
    found = plan_job([word.format(dp=1024) for word in given])
    assert len(found.ranks) == 1024
    assert built == [0, 0]  # and one of them in bf16


def test_kinds_of_ranks_do_not_tell_replicas_apart() -> None:
    """Of a mesh with replicas, which jobs have not: footprints are equal where kinds are, and kinds are few."""
    footprints, kinds = {}, []
    for rank in range(9):
        with pretended_ranks(9, rank):
            mesh = init_device_mesh("cpu", (3, 3), mesh_dim_names=("replica", "shard"))
            with te.quantized_model_init(recipe=te.recipe.Float8BlockScaling()), torch.device("meta"):
                model = nn.Sequential(te.Linear(128, 448, bias=False), nn.Linear(448, 5))
            for module in (*model, model):
                fsdp2.fully_shard(module, mesh=mesh)
            kind = kinds_of_ranks(model)(dict(zip(("replica", "shard"), divmod(rank, 3), strict=True)))
            assert footprints.setdefault(kind, fsdp2.footprints(model)) == fsdp2.footprints(model)
            kinds.append(kind)
    assert kinds == kinds[:3] * 3 and len(footprints) > 1


@pytest.fixture
def run(te_dist_command):
    """Runs `te-dist plan` with these arguments; returns what it printed and its exit status."""
    return partial(te_dist_command, "plan")


def test_tables_show_layers_and_ranks(run) -> None:
    printed, status = run(str(CONFIGS / "quickstart.toml"), *SMALL, "--world-size", "2", "--rank", "1")
    lines = [line.split() for line in printed.splitlines()]
    assert status == 0 and "parameters of rank 1" in printed
    weight = next(line for line in lines if "blocks.0-1.attention.query.weight" in line)
    assert weight[3:8:2] == ["64x64", "float8_block_2d", "32x64"] and weight[9:11] == ["2.0", "KiB"]
    assert [line[1] for line in lines if line[:1] == ["│"]].count("0-1") == 2  # ranks that are alike, in two formats


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["tensor_parallel.toml", "--world-size", "4"], "exchange for tensor parallelism, are not counted"),
        (["moe.toml", "--mesh.ep", "2", "--world-size", "2"], "exchange for experts, are not counted"),
        (["quickstart.toml", "--world-size", "2"], ""),
    ],
    ids=["tensor parallelism", "experts", "neither"],
)
def test_tables_say_what_is_not_counted(run, options: list[str], words: str) -> None:
    config, *rest = options
    printed, status = run(str(CONFIGS / config), *SMALL, *rest)
    said = " ".join(printed.split())
    assert status == 0 and words in said and ("not counted" in said) == bool(words)


def test_json_holds_every_figure(run) -> None:
    printed, _ = run(str(CONFIGS / "quickstart.toml"), "--json", *SMALL)
    found = json.loads(printed)
    assert len(found["ranks"]) == len(found["bf16"]) == 2
    for rank in found["ranks"]:
        for key in ("forward", "backward", "gradients", "scales", "sum"):
            by_layer = [layer[key] for layer in rank["layers"].values()]
            assert sum(by_layer) == sum(each["step"][key] for each in rank["parameters"]) == rank["step"][key]
        assert rank["stored"] == sum(each["codes"] + each["scales"] for each in rank["parameters"])
    assert found["ranks"][0]["step"]["sum"] < found["bf16"][0]["step"]["sum"]


@pytest.mark.parametrize("terminal", ["0", "1"])
def test_a_terminal_shows_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: str
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", terminal)
    monkeypatch.setattr(sys, "argv", ["te-dist", "plan", str(CONFIGS / "quickstart.toml"), "--json", *SMALL])
    command.main()
    printed = capsys.readouterr()
    assert json.loads(printed.out)["recipe"] == "float8_block"
    assert [f"planning ranks in {name}" in printed.err for name in ("float8_block", "bf16")] == [terminal == "1"] * 2


def test_a_configuration_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    config = CONFIGS / "quickstart.toml"
    (tmp_path / "marked.toml").write_text(config.read_text(), encoding="utf-8-sig")
    assert config_file.read(tmp_path / "marked.toml") == config_file.read(config)


def test_who_reads_may_have_seen_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(sys, "argv", ["te-dist", "plan", str(CONFIGS / "quickstart.toml"), "--json", *SMALL])
    with open(writer, "w") as out, pytest.raises(SystemExit) as ended:
        monkeypatch.setattr(sys, "stdout", out)
        command.main()
    assert ended.value.code == 1


@pytest.mark.parametrize("config", sorted(path.name for path in CONFIGS.glob("*.toml")))
def test_every_configuration_can_be_planned(config: str) -> None:
    plan = plan_job(
        [str(CONFIGS / config), "--model.layers", "1", "--train.batch", "64"], 4 if "tensor" in config else 2
    )
    assert all(rank.peak.bytes > sum(each.stored for each in rank.parameters) for rank in plan.ranks)


def test_a_job_whose_rows_travel_quantized_is_planned_beside_one_in_bf16() -> None:
    plan = plan_job([str(CONFIGS / "moe.toml"), "--model.experts.payload", "quantized"], ranks=[0])
    assert plan.recipe == "float8_block"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["llama_8gpu.toml"], "--world-size: got none"),
        (["quickstart.toml", "--world-size", "3"], "mesh: got dp 2 x tp 1 with 3 ranks"),
        (["quickstart.toml", "--world-size", "3"], "te-dist plan --world-size"),
        (["quickstart.toml", "--rank", "2", *SMALL], "--rank: got 2, wanted one of 2 ranks"),
        (["moe.toml", "--model.experts.ffn", "72"], "in_features=72 does not fit Float8BlockScaling"),
        (["none.toml"], "configuration"),
        (["quickstart.toml", "--world-size", "-1"], "--world-size: got -1; wanted a number of ranks"),
    ],
)
def test_what_cannot_be_planned_is_named(run, options: list[str], words: str) -> None:
    printed, status = run(str(CONFIGS / options[0]), *options[1:])
    assert status in (1, 2) and words in printed
