"""The decoder and its schedule."""

import math
from dataclasses import replace

import pytest
import torch

from te_dist.launch.config import ModelConfig, OptimizerConfig
from te_dist.launch.model import Decoder, next_token_loss, rotary_table, rotate
from te_dist.launch.schedule import learning_rate

CONFIG = ModelConfig(vocab_size=300, hidden=64, ffn=96, layers=2, heads=4, kv_heads=2)


@pytest.fixture
def model() -> Decoder:
    """A small decoder in bf16."""
    torch.manual_seed(0)
    return Decoder(CONFIG)


@torch.no_grad()
def test_logits_have_one_column_per_token_of_the_vocabulary(model: Decoder) -> None:
    logits = model(torch.zeros(3, 7, dtype=torch.int64))
    assert (logits.shape, logits.dtype) == ((3, 7, 300), torch.float32)


@torch.no_grad()
def test_no_token_sees_a_later_one(model: Decoder) -> None:
    tokens = torch.randint(300, (2, 12))
    changed = tokens.clone()
    changed[:, 8:] = (changed[:, 8:] + 1) % 300
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :8], after[:, :8])
    assert not torch.equal(before[:, 8:], after[:, 8:])


def test_every_parameter_gets_a_gradient(model: Decoder) -> None:
    tokens = torch.randint(300, (2, 9))
    next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


def test_key_and_value_projections_are_narrower_than_the_query() -> None:
    attention = Decoder(CONFIG).blocks[0].attention
    rows = [projection.weight.shape[0] for projection in (attention.query, attention.key, attention.value)]
    assert rows == [64, 32, 32]


def test_heads_may_be_wider_than_their_share_of_the_residual_stream() -> None:
    model = Decoder(replace(CONFIG, head_width=32))
    attention = model.blocks[0].attention
    shapes = [tuple(p.weight.shape) for p in (attention.query, attention.key, attention.out)]
    assert shapes == [(128, 64), (64, 64), (64, 128)]
    assert model(torch.zeros(2, 5, dtype=torch.int64)).shape == (2, 5, 300)


def test_rotation_keeps_lengths_and_depends_on_distance_alone() -> None:
    torch.manual_seed(0)
    table = rotary_table(20, 8, 10000.0, device=torch.device("cpu"))
    query, key = torch.randn(2, 1, 1, 1, 8).expand(2, 1, 1, 20, 8)
    turned_query, turned_key = rotate(query, table), rotate(key, table)
    torch.testing.assert_close(turned_query.norm(dim=-1), query.norm(dim=-1))
    scores = (turned_query @ turned_key.transpose(-1, -2))[0, 0]
    for distance in (0, 3, 11):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)
    assert torch.equal(rotate(query, table)[..., 0, :], query[..., 0, :])


def test_loss_is_in_nats() -> None:
    loss = next_token_loss(torch.zeros(2, 3, 50), torch.zeros(2, 3, dtype=torch.int64))
    assert float(loss) == pytest.approx(math.log(50))


def test_learning_rate_warms_up_to_its_peak_and_ends_at_its_last_fraction() -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=4, final_fraction=0.1)
    rates = [learning_rate(step, 14, config) for step in range(14)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[13] == pytest.approx(0.1)
    assert all(later <= earlier for earlier, later in zip(rates[4:], rates[5:], strict=False))
    assert rates[4 + 4] > 0.55 > rates[4 + 5]


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_runs_shorter_than_their_warmup_have_a_rate(steps: int) -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=2)
    assert [0.0 < learning_rate(step, steps, config) <= 1.0 for step in range(steps)] == [True] * steps
