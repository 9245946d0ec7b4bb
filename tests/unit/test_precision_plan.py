"""The precision plan: which rule decides which parameter, and what is refused."""

from dataclasses import replace

import pytest

from fp8rl.model.dims import dims_from_hf
from fp8rl.model.precision import (
    Format,
    PlanRules,
    PrecisionPlanError,
    assert_effective,
    assert_same_sets,
    decide,
    make_plan,
)
from fp8rl.model.tiny import hf_config
from fp8rl.recipe.schema import TinyModel

DIMS = dims_from_hf(hf_config(TinyModel()))
FP8 = PlanRules(Format.FP8_BLOCK)


def fp8_names(rules: PlanRules, dims=DIMS) -> set[str]:
    return {name for name, d in make_plan(rules, dims).items() if d.format.is_fp8}


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
        Format.FP8_BLOCK, first_layers_bf16=1, last_layers_bf16=1, exclude=("*.2.mlp.down_proj",)
    )
    plan = make_plan(rules, DIMS)
    bf16 = {n for n, d in plan.items() if d.format is Format.BF16 and "_proj" in n}
    assert {n.split(".")[2] for n in bf16} == {"0", "3", "2"}
    assert [n for n in bf16 if ".2." in n] == ["model.layers.2.mlp.down_proj.weight"]
    assert plan["model.layers.0.self_attn.q_proj.weight"].rule == "first_layers_bf16=1"


def test_uncovered_parameter_is_an_error():
    for name in ("model.extra.weight", "model.layers.0.conv.bias", "model.layers.0.mlp.conv.weight"):
        with pytest.raises(PrecisionPlanError, match="no precision rule"):
            decide(name, PlanRules(Format.FP8_BLOCK), layers=4)


def test_pattern_is_anchored():
    """`mlp.gate` must not keep `mlp.gate_proj` in BF16, nor `layers.1` the layers 10 to 19."""
    with pytest.raises(PrecisionPlanError, match="matches no whole name"):
        make_plan(PlanRules(Format.FP8_BLOCK, exclude=("*.mlp.gate",)), DIMS)
    deep = replace(DIMS, layers=12)
    plan = make_plan(PlanRules(Format.FP8_BLOCK, exclude=("model.layers.1.*",)), deep)
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


def test_routers_are_never_quantised():
    """A router's output decides which experts run: it stays in BF16 even where a pattern asks."""
    for name in ("model.layers.0.mlp.gate.weight", "model.layers.0.mlp.router.weight"):
        rules = PlanRules(Format.FP8_BLOCK, include=("*",))
        assert decide(name, rules, layers=4).rule.startswith("never")


@pytest.mark.parametrize(
    "pattern",
    [
        "model.layers.1.self_attn.qkv_proj",  # vLLM's fused name
        "model.layers.1.self_attn.qkv_proj.weight",
        "decoder.layers.1.self_attention.linear_qkv",  # Megatron-core's
        "re:model\\.layers\\.1\\.self_attn\\.[qkv]_proj",
        "model.layers.1.self_attn.[qkv]_proj",
    ],
)
def test_include_and_exclude_take_fused_names_globs_and_regexes(pattern):
    wanted = {f"model.layers.1.self_attn.{p}_proj.weight" for p in "qkv"}
    assert fp8_names(PlanRules(Format.FP8_BLOCK, include=(pattern,))) == wanted
    excluding = PlanRules(Format.FP8_BLOCK, exclude=(pattern,))
    assert fp8_names(FP8) - fp8_names(excluding) == wanted


def test_exclude_wins_over_include_and_bf16_layers_too():
    rules = PlanRules(
        Format.FP8_BLOCK, first_layers_bf16=1, include=("*.mlp.*",), exclude=("*.3.mlp.down_proj",)
    )
    names = fp8_names(rules)
    assert {n.split(".")[2] for n in names} == {"1", "2", "3"}
    assert all(".mlp." in n for n in names)
    assert "model.layers.3.mlp.down_proj.weight" not in names


def test_regex_is_anchored_and_a_bad_one_is_refused():
    deep = replace(DIMS, layers=12)
    rules = PlanRules(Format.FP8_BLOCK, include=("re:model\\.layers\\.1\\..*",))
    assert {n.split(".")[2] for n in fp8_names(rules, deep)} == {"1"}
    with pytest.raises(PrecisionPlanError, match="matches no linear's whole name"):
        make_plan(PlanRules(Format.FP8_BLOCK, include=("re:layers",)), DIMS)
    with pytest.raises(PrecisionPlanError, match=r"exclude: 're:\(' is no regular expression"):
        make_plan(PlanRules(Format.FP8_BLOCK, exclude=("re:(",)), DIMS)


@pytest.mark.parametrize("pattern", ["model.embed_tokens", "*norm", "lm_head"])
def test_include_of_what_is_never_quantised_is_refused(pattern):
    with pytest.raises(PrecisionPlanError, match="matches no linear's whole name"):
        make_plan(PlanRules(Format.FP8_BLOCK, include=(pattern,)), DIMS)


def test_sides_that_quantise_different_parameters_are_refused():
    learner = {name: d.format for name, d in make_plan(FP8, DIMS).items()}
    assert_same_sets(learner, dict(learner))
    bf16 = dict.fromkeys(learner, Format.BF16)
    assert_same_sets(bf16, learner)  # an arm with one side in BF16 asked for that
    name = "model.layers.1.mlp.down_proj.weight"
    with pytest.raises(PrecisionPlanError, match=rf"{name}: learner fp8_block, rollout bf16"):
        assert_same_sets(learner, learner | {name: Format.BF16})
    missing = {n: f for n, f in learner.items() if n != name}
    with pytest.raises(PrecisionPlanError, match="rollout missing"):
        assert_same_sets(learner, missing)
