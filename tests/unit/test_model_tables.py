"""Names, dimensions and the precision plan."""

from dataclasses import replace

import pytest
import torch

from fp8rl.model.dims import UnsupportedModelError, dims_from_hf, read_dims
from fp8rl.model.names import megatron_row_order, name_table
from fp8rl.model.precision import (
    Format,
    PlanRules,
    PrecisionPlanError,
    assert_effective,
    decide,
    make_plan,
)
from fp8rl.model.tiny import hf_config
from fp8rl.numerics.linear import Projections
from fp8rl.recipe.schema import TinyModel

CONFIG = hf_config(TinyModel())
DIMS = dims_from_hf(CONFIG)


def test_tiny_model_is_of_the_intended_size():
    table = name_table(DIMS)
    parameters = sum(rows * (slot.columns or 1) for slot in table for rows in slot.rows)
    assert 2e6 < parameters < 3e6
    linears = [slot for slot in table if slot.is_linear]
    assert min(min(*slot.rows, slot.columns) for slot in linears) >= 128


@pytest.mark.parametrize("tied", [True, False])
def test_table_names_each_parameter_once(tied):
    table = name_table(replace(DIMS, tied_embeddings=tied))
    for names in (
        [n for s in table for n in s.hf],
        [s.megatron for s in table],
        [s.vllm for s in table],
    ):
        assert len(names) == len(set(names))
    assert ("lm_head.weight" in {s.vllm for s in table}) is not tied


def test_megatron_interleaves_by_kv_group():
    dims = replace(DIMS, heads=4, kv_heads=2, head_dim=1)
    slot = next(s for s in name_table(dims) if s.interleaved)
    # Megatron rows: q0 q1 k0 v0 q2 q3 k1 v1; projections: q0 q1 q2 q3 | k0 k1 | v0 v1
    assert megatron_row_order(slot, dims) == [0, 1, 4, 5, 2, 6, 3, 7]


def test_projections_split_and_join_are_inverses():
    slot = next(s for s in name_table(DIMS) if s.interleaved)
    projections = Projections(slot.hf, slot.rows, torch.tensor(megatron_row_order(slot, DIMS)))
    fused = torch.randn(sum(slot.rows), 3)
    assert torch.equal(projections.join(projections.split(fused)), fused)
    assert [len(p) for p in projections.split(fused)] == list(slot.rows)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model_type": "mamba"}, "model_type"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8}}, "rope_parameters"),
    ],
)
def test_unsupported_model_is_refused_by_field(change, field):
    with pytest.raises(UnsupportedModelError, match=field):
        dims_from_hf({**CONFIG, **change})


def test_dims_read_old_and_new_rope_fields(tmp_path):
    old = {k: v for k, v in CONFIG.items() if k != "rope_parameters"} | {"rope_theta": 5e5}
    assert dims_from_hf(old).rope_theta == 5e5
    with pytest.raises(UnsupportedModelError, match=r"no config\.json"):
        read_dims(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"missing hidden_size, .*num_attention_heads"):
        dims_from_hf({"model_type": "llama"})


def test_plan_decides_every_parameter():
    plan = make_plan(PlanRules(Format.FP8_BLOCK), DIMS)
    fp8 = {name for name, d in plan.items() if d.format is Format.FP8_BLOCK}
    assert len(fp8) == 7 * DIMS.layers
    assert all(name.endswith("_proj.weight") for name in fp8)
    for name in (
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.0.input_layernorm.weight",
    ):
        assert plan[name].format is Format.BF16


def test_first_and_last_layers_and_kept_names():
    rules = PlanRules(
        Format.FP8_BLOCK, first_layers_bf16=1, last_layers_bf16=1, keep_bf16=("*.2.mlp.down_proj",)
    )
    plan = make_plan(rules, DIMS)
    bf16 = {n for n, d in plan.items() if d.format is Format.BF16 and "_proj" in n}
    assert {n.split(".")[2] for n in bf16} == {"0", "3", "2"}
    assert [n for n in bf16 if ".2." in n] == ["model.layers.2.mlp.down_proj.weight"]
    assert plan["model.layers.0.self_attn.q_proj.weight"].rule == "first_layers_bf16=1"


def test_uncovered_parameter_is_an_error():
    for name in (
        "model.layers.0.mlp.router.weight",
        "model.extra.weight",
        "model.layers.0.q_proj.bias",
    ):
        with pytest.raises(PrecisionPlanError, match="no precision rule"):
            decide(name, PlanRules(Format.FP8_BLOCK), layers=4)


def test_pattern_is_anchored():
    """`mlp.gate` must not keep `mlp.gate_proj` in BF16, nor `layers.1` the layers 10 to 19."""
    with pytest.raises(PrecisionPlanError, match="matches no parameter"):
        make_plan(PlanRules(Format.FP8_BLOCK, keep_bf16=("*.mlp.gate",)), DIMS)
    deep = replace(DIMS, layers=12)
    plan = make_plan(PlanRules(Format.FP8_BLOCK, keep_bf16=("model.layers.1.*",)), deep)
    assert plan["model.layers.11.mlp.up_proj.weight"].format is Format.FP8_BLOCK


def test_effective_precision_that_is_not_the_plan_is_refused():
    plan = make_plan(PlanRules(Format.FP8_BLOCK), DIMS)
    effective = {name: d.format for name, d in plan.items()}
    assert_effective(plan, effective, where="test")
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(PrecisionPlanError, match=rf"{name}: requested fp8_block, effective bf16"):
        assert_effective(plan, effective | {name: Format.BF16}, where="the learner")
    del effective[name]
    with pytest.raises(PrecisionPlanError, match="effective missing"):
        assert_effective(plan, effective, where="the learner")
