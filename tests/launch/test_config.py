"""Configuration: what a file may say, what the command line may change, and how a mistake is told."""

import json
from pathlib import Path

import pytest

from te_dist.launch import config_file, layout
from te_dist.launch.config import Config, MeshConfig, ModelConfig, TrainConfig
from te_dist.launch.errors import JobError

CONFIGURATIONS = sorted((Path(__file__).parents[2] / "launch" / "configs").glob("*.toml"))


def written(tmp_path: Path, text: str) -> str:
    """The path of a file with this text."""
    path = tmp_path / "job.toml"
    path.write_text(text)
    return str(path)


def test_command_line_wins_over_file_and_file_over_defaults(tmp_path: Path) -> None:
    path = written(tmp_path, 'recipe = "mxfp8"\nmesh = {dp = 2, tp = 1}\n[train]\nsteps = 7\nlog_every = 3\n')
    config = config_file.load([path, "--train.steps", "9", "--data.files", "a", "b", "--offload", "1.5GiB"])
    assert (config.recipe, config.mesh, config.train) == ("mxfp8", MeshConfig(2, 1), TrainConfig(steps=9, log_every=3))
    assert (config.data.files, config.offload, config.recompute) == (("a", "b"), "1.5GiB", False)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[train]\nstepz = 1", ("train.stepz", "unknown key", "did you mean train.steps")),
        ("[training]\nsteps = 1", ("training", "unknown key", "one of recipe, mesh")),
        ('[train]\nsteps = "many"', ("train.steps", "'many'", "an integer")),
        ("[train]\nsteps = true", ("train.steps", "True", "an integer")),
        ("[train]\nsteps = 0", ("train.steps", "got 0", "at least 1")),
        ("train = 3", ("train", "got 3", "a table")),
        ('recipe = "fp3"', ("recipe", "'fp3'", '"float8_block"')),
        ("recompute = 0", ("recompute", "got 0", 'false or "full"')),
        ('offload = "lots"', ("offload", "'lots'", "2GiB")),
        ("mesh = {dp = 0}", ("mesh.dp", "got 0", "at least 1")),
        ('data = {files = ["a", 2]}', ("data.files[1]", "got 2", "a text in quotes")),
        ("data = {files = []}", ("data.files", "no entry", "paths or globs")),
        ("model = {hidden = 100, heads = 3}", ("model.hidden", "100 over 3 heads", "even number")),
        ("model = {heads = 4, kv_heads = 3}", ("model.kv_heads", "3 for 4", "a divisor")),
        ("optimizer = {beta1 = 1.0}", ("optimizer.beta1", "1.0", "a fraction")),
        ("model = {experts = {capacity_factor = inf}}", ("model.experts.capacity_factor", "inf", "a finite number")),
        ("model = {experts = {scaling_factor = nan}}", ("model.experts.scaling_factor", "nan", "a finite number")),
        ("model = {rope_base = inf}", ("model.rope_base", "inf", "a finite number")),
        ("model = {norm_epsilon = inf}", ("model.norm_epsilon", "inf", "a finite number")),
        ("optimizer = {learning_rate = inf}", ("optimizer.learning_rate", "inf", "a finite number")),
        ("optimizer = {weight_decay = inf}", ("optimizer.weight_decay", "inf", "a finite number")),
        ("optimizer = {epsilon = inf}", ("optimizer.epsilon", "inf", "a finite number")),
        ("optimizer = {epsilon = 0}", ("optimizer.epsilon", "0", "at least 1.17")),
        ("optimizer = {epsilon = 1e-50}", ("optimizer.epsilon", "1e-50", "at least 1.17")),
        ("model = {experts = {bias_update_rate = inf}}", ("model.experts.bias_update_rate", "inf", "a finite number")),
        ("seed = 9223372036854775808", ("seed", "9223372036854775808", "less than 2^63")),
        ("timeout_seconds = 10000000000000000", ("timeout_seconds", "got 10000000000000000", "at most 100000000,")),
        ("timeout_seconds = 100000001", ("timeout_seconds", "got 100000001", "at most 100000000,")),
        ("recipe = ?", ("configuration", "line 1", "valid TOML")),
    ],
)
def test_mistakes_in_a_file_name_key_value_and_what_is_wanted(tmp_path: Path, text: str, words: tuple[str]) -> None:
    with pytest.raises(JobError) as caught:
        config_file.load([written(tmp_path, text)])
    assert all(word in str(caught.value) for word in (*words, "remedy:")), str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--train.stepz", "3"], ("command line", "--train.stepz", "--train.steps INT")),
        (["--train.steps", "few"], ("command line", "--train.steps", "'few'")),
        (["--train.steps", "0"], ("train.steps", "got 0", "at least 1")),
        (["--recipe", "fp3"], ("command line", "--recipe", "fp3")),
        (["absent.toml"], ("absent.toml", "No such file", "working directory")),
    ],
)
def test_mistakes_on_the_command_line_are_one_line(
    arguments: list[str], words: tuple[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(JobError) as caught:
        config_file.load(arguments)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: path.stem)
def test_shipped_configurations_are_valid(path: Path) -> None:
    assert config_file.read(path).run_dir.startswith("runs/")


def test_layout_shares_the_batch_over_dp_alone() -> None:
    config = Config(mesh=MeshConfig(tp=2), train=TrainConfig(batch=24, micro_batch=2))
    assert layout.plan(config, 8) == layout.Layout(dp=4, tp=2, accumulate=3)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (Config(mesh=MeshConfig(dp=3)), ("mesh", "dp 3 x tp 1 with 4 ranks")),
        (Config(mesh=MeshConfig(tp=3)), ("mesh.tp", "3 with 4 ranks")),
        (Config(mesh=MeshConfig(tp=4), model=ModelConfig(kv_heads=2)), ("mesh.tp", "2 key and value heads")),
        (Config(train=TrainConfig(batch=12, micro_batch=4)), ("train.batch", "12 sequences", "a multiple of 16")),
    ],
)
def test_layouts_that_do_not_fit_the_ranks_are_refused(config: Config, words: tuple[str]) -> None:
    with pytest.raises(JobError) as caught:
        layout.plan(config, 4)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_no_clipping_is_a_clip_norm_without_end(tmp_path: Path) -> None:
    assert config_file.load([written(tmp_path, "optimizer = {clip_norm = inf}")]).optimizer.clip_norm == float("inf")


def test_what_is_written_down_is_json(tmp_path: Path) -> None:
    config = config_file.load(["--optimizer.clip-norm", "inf"])

    def refuse(name: str) -> None:
        raise AssertionError(name)

    table = json.loads(config_file.dump(config), parse_constant=refuse)
    assert table["optimizer"]["clip_norm"] == "inf"
    assert config_file.build(Config, table) == config
