"""Mixtures of experts of Hugging Face's transformers, converted: the same numbers, saved under the same names."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import te_dist as te
from te_dist import checkpoints, recipe
from te_dist.nn.moe import Routing, StackedExperts, TopKRouter
from te_dist.tensor import QuantizedTensor
from te_dist.testing import assert_bitwise
from tests.nn.recipes import relative_error

WHY = "needs Hugging Face's library: pip install transformers"
transformers = pytest.importorskip("transformers", minversion="5.0", reason=WHY)

BLOCK = recipe.Float8BlockScaling()
IDS = torch.arange(40).view(2, 20) * 3 % 128
SIZES = dict(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    eos_token_id=1,
    bos_token_id=1,
    pad_token_id=0,
)
LOW_RANK = dict(q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16)
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": dict(num_local_experts=6),
    "Qwen3Moe": dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16),
    "Olmoe": dict(num_experts=6, num_experts_per_tok=2),
    "DeepseekV3": LOW_RANK
    | dict(n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, n_group=2, topk_group=1)
    | dict(first_k_dense_replace=1, num_key_value_heads=4),
}


# As the table in docs/moe.md, with fewer experts.
ROUTINGS = {
    "Mixtral": Routing(6, 2),
    "Qwen3Moe": Routing(6, 2),
    "Olmoe": Routing(6, 2, normalizes=False),
    "DeepseekV3": Routing(8, 2, "sigmoid", scaling_factor=2.5, num_groups=2, top_groups=1, bias_update_rate=1e-3),
}


def make(name: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES | options)
    return getattr(transformers, f"{name}ForCausalLM")(config)


@pytest.mark.parametrize("name", MODELS)
def test_converted_models_compute_the_same(name: str) -> None:
    model = make(name, **MODELS[name])
    plain = copy.deepcopy(model)
    made = te.convert(plain, {"*": None})
    assert any(isinstance(module, StackedExperts) for module in made.values())
    assert list(plain.state_dict()) == list(model.state_dict())
    found = [each(IDS, labels=IDS) for each in (model, plain)]
    for each in found:
        each.loss.backward()
    assert relative_error(found[1].logits, found[0].logits) < 1e-6
    for (key, want), got in zip(model.named_parameters(), plain.parameters(), strict=True):
        if want.grad is not None and want.grad.any():
            assert relative_error(got.grad, want.grad) < 1e-5, key


@pytest.mark.every_run(name=("Qwen3Moe", "DeepseekV3"))
@pytest.mark.parametrize("name", MODELS)
def test_quantized_experts_train_and_are_saved_under_their_names(name: str, tmp_path: Path) -> None:
    model = make(name, **MODELS[name])
    with torch.no_grad():
        want = model(IDS).logits
    te.convert(model, {"lm_head": None, "model.layers.*": BLOCK})
    with te.autocast(recipe=BLOCK):
        found = model(IDS, labels=IDS)
    assert relative_error(found.logits, want) < 0.1
    found.loss.backward()
    experts = [module for module in model.modules() if isinstance(module, StackedExperts)]
    assert all(parameter.grad.any() for module in experts for parameter in module.parameters())
    model.save_pretrained(tmp_path, state_dict=checkpoints.high_precision_state_dict(model))
    loaded = type(model).from_pretrained(tmp_path).state_dict()
    for key, value in model.state_dict().items():
        assert_bitwise(loaded[key], value.dequantize() if isinstance(value, QuantizedTensor) else value, key)


@pytest.mark.parametrize("computed_by", ["eager", "grouped_mm", "batched_mm"])
def test_experts_as_many_as_their_columns_are_exchanged(computed_by: str) -> None:
    config = transformers.Qwen3NextConfig(vocab_size=128, num_hidden_layers=1)
    config._experts_implementation = computed_by
    assert config.num_experts == config.moe_intermediate_size == config.shared_expert_intermediate_size
    with torch.device("meta"):
        model = transformers.Qwen3NextForCausalLM(config)
    with pytest.warns(UserWarning, match=r"as they are: \['model.layers.0.mlp.shared_expert_gate'\] stay in high"):
        made = te.convert(model, {"model.layers.*": BLOCK})
    assert isinstance(made["model.layers.0.mlp.experts"], StackedExperts)
    maps = {f"model.layers.0.mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")}
    assert {name for name in made if ".shared_expert" in name} == maps


@pytest.mark.parametrize(
    ("name", "router", "options"),
    [
        ("HunYuanMoEV1", "gate.wg", dict(num_experts=16, moe_topk=2)),
        ("Afmoe", "router.gate", dict(num_experts=16, num_dense_layers=0, moe_intermediate_size=32)),
    ],
)
def test_routers_that_are_linear_maps_stay_as_they_are(name: str, router: str, options: dict[str, Any]) -> None:
    model = make(name, head_dim=16, **options)
    routers = [f"model.layers.{layer}.mlp.{router}" for layer in range(2)]
    with pytest.warns(UserWarning, match="te_dist.convert leaves routers") as told:
        made = te.convert(model, {"model.layers.*": BLOCK})
    assert str(routers) in str(told[0].message)
    assert all(type(model.get_submodule(each)) is nn.Linear for each in routers)
    assert sum(isinstance(module, StackedExperts) for module in made.values()) == 2


@pytest.mark.parametrize(("name", "options"), [("GptOss", {}), ("Llama4", dict(head_dim=16))])
def test_other_experts_are_refused(name: str, options: dict[str, Any]) -> None:
    config = "Llama4Text" if name == "Llama4" else name
    made_of = getattr(transformers, f"{config}Config")(**SIZES | dict(num_local_experts=4, head_dim=16) | options)
    model = getattr(transformers, f"{name}ForCausalLM")(made_of)
    with pytest.raises(ValueError, match="experts: the matrices of .* would stay in torch.float32"):
        te.convert(model, {"model.layers.*": BLOCK})


@pytest.mark.parametrize("name", ROUTINGS)
def test_routers_choose_and_weigh_as_those_of_models(name: str) -> None:
    norm = dict(norm_topk_prob=True) if name == "Qwen3Moe" else {}
    model = make(name, **MODELS[name] | norm)
    block = model.model.layers[1].mlp
    router = TopKRouter(SIZES["hidden_size"], ROUTINGS[name])
    with torch.no_grad():
        block.gate.weight.normal_()
        router.weight.copy_(block.gate.weight)
        if router.expert_bias is not None:
            router.expert_bias.copy_(block.gate.e_score_correction_bias.normal_(std=0.1))
    given = []
    block.experts.register_forward_pre_hook(lambda module, args: given.append(args))
    model(IDS % 126 + 2)  # padding is zeros, whose experts are all alike
    (x, chosen, weights), *_ = given
    found = router(x)
    order, its = (ids.argsort(1) for ids in (chosen, found.experts))
    assert_bitwise(found.experts.gather(1, its), chosen.gather(1, order), "experts")
    torch.testing.assert_close(found.probabilities.gather(1, its), weights.gather(1, order), rtol=1e-5, atol=1e-6)
