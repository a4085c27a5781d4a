"""FusedAdam in fewer bits: what combines, that state follows, that parameters are their masters quantized."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from te_dist import checkpoints, grouped, optim
from te_dist.catalog import FORMATS
from te_dist.fsdp2 import GroupedParameter, QuantizedParameter
from te_dist.tensor import QuantizedTensor, quantize
from te_dist.testing import assert_bitwise
from tests.tensor.samples import FAMILIES, signed

BF16, BYTES = torch.bfloat16, torch.uint8
OPTIONS: dict[str, dict[str, Any]] = {
    "bf16 moments": {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16},
    "moments in bytes": {"exp_avg_dtype": torch.float8_e4m3fn, "exp_avg_sq_dtype": BYTES},
    "one moment in bytes": {"exp_avg_sq_dtype": BYTES},
    "remainders": {"store_param_remainders": True},
    "remainders, moments in bytes": {
        "store_param_remainders": True,
        "exp_avg_dtype": BYTES,
        "exp_avg_sq_dtype": BYTES,
    },
    "bf16 masters": {"master_weight_dtype": BF16, "exp_avg_dtype": BF16},
    "no masters": {"master_weights": False, "stochastic_rounding": True, "seed": 5},
    "no masters, to nearest": {"master_weights": False, "exp_avg_sq_dtype": BF16},
}


class Model(nn.Module):
    """Quantized matrices, alone and in a group, and plain parameters; the same at every call."""

    def __init__(self, name: str = "float8_block_2d") -> None:
        super().__init__()
        self.weight = nn.Parameter(QuantizedParameter(quantize(signed(), FORMATS[name]).storage))
        experts = grouped.quantize(signed(3, 96, 160, seed=1), FORMATS[name])
        self.experts = nn.Parameter(GroupedParameter(experts.storage))
        self.matrix = nn.Parameter(signed(33, 300, seed=2))
        self.vector = nn.Parameter(signed(301, seed=3))
        self.fp32 = nn.Parameter(signed(7, 130, seed=4).float())

    def step(self, optimizer: torch.optim.Optimizer, turn: int) -> None:
        for seed, param in enumerate(self.parameters()):
            param.grad = signed(*param.shape, seed=100 * turn + seed).to(param.dtype)
        optimizer.step()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All that a step writes, by name."""
    found = {}
    for name, param in model.named_parameters():
        found |= {f"{key} of {name}": value for key, value in optimizer.state[param].items()}
        if isinstance(param, QuantizedTensor):
            found |= {f"{field} of {name}": buffer for field, buffer in param.storage.buffers.items()}
        else:
            found[name] = param.detach()
    return found


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in got.items():
        assert_bitwise(value, want[name], name)


IN_BYTES, SMALL = OPTIONS["remainders, moments in bytes"], OPTIONS["bf16 masters"]


@pytest.mark.every_run(name=(*FAMILIES, "float8_block_2d", "float8_tensorwise"))
@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, SMALL) for name in FORMATS), ("float8_block_2d", IN_BYTES), ("float8_tensorwise", IN_BYTES)],
)
def test_parameters_are_their_masters_quantized(name: str, options: dict[str, Any]) -> None:
    model = Model(name)
    optimizer = optim.FusedAdam(model.parameters(), lr=0.1, **options)
    for turn in range(2):
        model.step(optimizer, turn)
    master = optimizer.state[model.weight]["master_param"]
    assert master.dtype == options.get("master_weight_dtype", torch.float32)
    want = quantize(master, FORMATS[name]).storage
    for field, buffer in model.weight.storage.buffers.items():
        assert_bitwise(buffer, want.buffers[field], field)
    masters = model.experts.storage.split(optimizer.state[model.experts]["master_param"])
    for member, own in zip(model.experts.members, masters, strict=True):
        want = quantize(own, FORMATS[name]).storage
        for field, buffer in member.storage.buffers.items():
            assert_bitwise(buffer, want.buffers[field], f"{field} of a member")


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_state_has_the_types_that_were_asked_for(options: dict[str, Any]) -> None:
    model = Model()
    optimizer = optim.FusedAdam(model.parameters(), **options)
    model.step(optimizer, 0)
    for name, param in model.named_parameters():
        state = optimizer.state[param]
        for moment in ("exp_avg", "exp_avg_sq"):
            wanted = options.get(f"{moment}_dtype", torch.float32)
            if wanted == torch.float8_e4m3fn:
                wanted = BYTES
            in_bytes = wanted == BYTES and param.dim() > 1
            assert state[moment].dtype == (wanted if in_bytes or wanted != BYTES else torch.float32), name
            blocks = (*param.shape[:-1], -(-param.shape[-1] // 128))
            assert (state.get(f"{moment}_scale") is not None) == in_bytes
            assert not in_bytes or tuple(state[f"{moment}_scale"].shape) == blocks
    has_remainder = "master_remainder" in optimizer.state[model.matrix]
    assert has_remainder == options.get("store_param_remainders", False)
    assert "master_param" not in optimizer.state[model.fp32]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_training_stays_near_fp32(options: dict[str, Any]) -> None:
    """Of 20 steps, what they change all together."""
    model, exact = Model("high_precision"), Model("high_precision")
    starts = [param.detach().clone() for param in (model.matrix, model.fp32)]
    optimizers = [optim.FusedAdam(model.parameters(), lr=0.01, **options), optim.FusedAdam(exact.parameters(), lr=0.01)]
    for turn in range(20):
        model.step(optimizers[0], turn)
        exact.step(optimizers[1], turn)
    for got, want, start in zip((model.matrix, model.fp32), (exact.matrix, exact.fp32), starts, strict=True):
        change = (want - start).float()
        off = ((got - want).float().norm() / change.norm()).item()
        assert off < 0.3, off


def test_remainders_are_fp32_masters() -> None:
    split, plain = Model(), Model()
    optimizers = [
        optim.FusedAdam(split.parameters(), lr=1e-4, store_param_remainders=True),
        optim.FusedAdam(plain.parameters(), lr=1e-4),
    ]
    for turn in range(5):
        for model, optimizer in zip((split, plain), optimizers, strict=True):
            model.step(optimizer, turn)
        for own, other in ((split.matrix, plain.matrix), (split.vector, plain.vector)):
            low = optimizers[0].state[own]["master_remainder"].view(torch.int16)[..., 0].int()
            bits = own.detach().float().view(torch.int32) + low
            assert_bitwise(bits.view(torch.float32), optimizers[1].state[other]["master_param"], f"step {turn}")


@pytest.mark.every_run(
    options=[OPTIONS[name] for name in ("moments in bytes", "remainders, moments in bytes", "no masters")]
)
@pytest.mark.parametrize("through", ["state_dict", "deepcopy", "checkpoint"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_training_goes_on_as_if_nothing_had_happened(options: dict[str, Any], through: str, tmp_path) -> None:
    model = Model()
    optimizer = optim.FusedAdam(model.parameters(), lr=0.1, **options)
    for turn in range(2):
        model.step(optimizer, turn)
    if through == "deepcopy":
        twin, other = copy.deepcopy((model, optimizer))
    else:
        twin = Model()
        other = optim.FusedAdam(twin.parameters(), lr=0.1, **options)
    if through == "checkpoint":
        checkpoints.save(tmp_path / "c", model=model, optimizer=optimizer)
        checkpoints.load(tmp_path / "c", model=twin, optimizer=other)
    elif through == "state_dict":
        twin.load_state_dict(copy.deepcopy(model.state_dict()))
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, its in ((model, optimizer), (twin, other)):
        each.step(its, 2)
    assert_same(state_of(twin, other), state_of(model, optimizer))


def test_chances_follow_from_the_seed() -> None:
    results = []
    for seed in (1, 1, 2):
        model = Model()
        optimizer = optim.FusedAdam(model.parameters(), master_weights=False, stochastic_rounding=True, seed=seed)
        torch.manual_seed(len(results))
        model.step(optimizer, 0)
        results.append(model.matrix.detach())
    assert_bitwise(results[0], results[1], "of one seed")
    assert not torch.equal(results[0], results[2])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"exp_avg_dtype": torch.float16}, "exp_avg_dtype: got torch.float16"),
        ({"exp_avg_sq_dtype": torch.int8}, "exp_avg_sq_dtype: got torch.int8"),
        ({"master_weight_dtype": torch.float16}, "master_weight_dtype: got torch.float16"),
        ({"store_param_remainders": True, "master_weights": False}, "store_param_remainders .* got no masters"),
        ({"store_param_remainders": True, "master_weight_dtype": BF16}, "store_param_remainders .* torch.bfloat16;"),
        ({"stochastic_rounding": True}, "stochastic_rounding .* master_weights=False"),
        ({"amsgrad": True}, "MasterWeights"),
        ({"seed": -1}, "seed: got -1"),
    ],
)
def test_what_there_is_not_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        optim.FusedAdam(Model().parameters(), **options)


def test_what_stands_elsewhere_in_transformer_engine_is_passed_by_name() -> None:
    with pytest.raises(TypeError, match="positional arguments"):
        optim.FusedAdam(Model().parameters(), 0.1, (0.9, 0.95))


@pytest.mark.parametrize("options", [OPTIONS["no masters"], OPTIONS["bf16 masters"]])
def test_fp16_is_not_rounded_by_chance(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="got torch.float16, wanted bfloat16"):
        optim.FusedAdam([nn.Parameter(torch.zeros(3, dtype=torch.float16))], **options)


@pytest.mark.parametrize(
    "values",
    [torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.zeros(3, 4).t(), torch.zeros(3).double()],
    ids=["channels_last", "transposed", "float64"],
)
def test_parameters_that_no_kernel_updates_are_refused_at_once(values: Tensor) -> None:
    with pytest.raises(ValueError, match=r"got torch.float\d\d with strides .* contiguous; convert it before"):
        optim.FusedAdam([nn.Parameter(values)])
    frozen = nn.Parameter(values, requires_grad=False)
    optimizer = optim.FusedAdam([frozen, nn.Parameter(torch.zeros(3))])
    frozen.requires_grad_().grad = torch.zeros_like(frozen)
    with pytest.raises(ValueError, match="convert it before"):
        optimizer.step()


def test_a_refused_group_is_not_added() -> None:
    weight = nn.Parameter(torch.zeros(3))
    optimizer = optim.FusedAdam([weight])
    other, bad = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3, dtype=torch.float64))
    with pytest.raises(ValueError, match="torch.float64"):
        optimizer.add_param_group({"params": iter([other, bad])})
    assert [group["params"] for group in optimizer.param_groups] == [[weight]]
    optimizer.add_param_group({"params": [other]})
    assert len(optimizer.param_groups) == 2


def test_state_of_other_types_is_refused() -> None:
    model = Model()
    saved = optim.FusedAdam(model.parameters(), **OPTIONS["moments in bytes"])
    model.step(saved, 0)
    for options, words in (({}, "exp_avg_scale.*wanted"), ({"store_param_remainders": True}, "options it was saved")):
        with pytest.raises(ValueError, match=words):
            optim.FusedAdam(model.parameters(), **options).load_state_dict(saved.state_dict())


def test_lr_becomes_a_tensor_where_steps_are_to_be_captured() -> None:
    model, plain = Model(), Model()
    optimizer = optim.FusedAdam(model.parameters(), lr=0.25, capturable=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    other = optim.FusedAdam(plain.parameters(), lr=0.25)
    for turn in range(3):
        model.step(optimizer, turn)
        plain.step(other, turn)
        schedule.step()
        other.param_groups[0]["lr"] /= 2
    assert isinstance(optimizer.param_groups[0]["lr"], Tensor)
    assert_same(state_of(model, optimizer), state_of(plain, other))


def test_a_rate_on_the_device_is_loaded_into_an_optimizer_that_has_not_stepped(tmp_path) -> None:
    """By torch's own checkpoints, which tell tensors from numbers."""
    model, other = nn.Linear(8, 8), nn.Linear(8, 8)
    stepped, fresh = (optim.FusedAdam(m.parameters(), lr=0.25, capturable=True) for m in (model, other))
    model(torch.ones(8)).sum().backward()
    stepped.step()
    stepped.param_groups[0]["lr"].fill_(0.125)
    dcp.save(get_optimizer_state_dict(model, stepped), checkpoint_id=tmp_path, no_dist=True)
    state = get_optimizer_state_dict(other, fresh)
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    set_optimizer_state_dict(other, fresh, state)
    assert_bitwise(fresh.param_groups[0]["lr"], torch.tensor(0.125), "the rate")


def test_a_rate_has_values_where_parameters_have_none_yet() -> None:
    params = [nn.Parameter(torch.empty(4, device="meta"))]
    optimizer = optim.FusedAdam(params, lr=0.25, capturable=True)
    assert_bitwise(optimizer.param_groups[0]["lr"], torch.tensor(0.25), "the rate")


def test_gradients_are_zeroed_as_it_was_said() -> None:
    model = Model()
    optimizer = optim.FusedAdam(model.parameters(), set_grad_none=False, bias_correction=False)
    model.step(optimizer, 0)
    optimizer.zero_grad()
    assert all(not param.grad.any() for param in model.parameters())


def test_moments_are_not_corrected_where_it_was_said() -> None:
    param = nn.Parameter(torch.ones(4))
    optimizer = optim.FusedAdam([param], lr=1.0, betas=(0.5, 0.75), eps=0.0, bias_correction=False)
    param.grad = torch.full((4,), 2.0)
    optimizer.step()
    assert param.tolist() == [0.0] * 4  # 1 - (0.5 * 2) / sqrt(0.25 * 4)
