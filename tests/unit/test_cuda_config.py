"""What a recipe means to vLLM's own FP8 on CUDA: the part that needs neither vLLM nor a GPU."""

from dataclasses import replace

import pytest

from fp8rl.device import resolve
from fp8rl.model.dims import dims_from_hf
from fp8rl.model.precision import make_plan
from fp8rl.model.tiny import hf_config
from fp8rl.recipe.precision import Precision
from fp8rl.recipe.rules import RecipeError, plan_rules
from fp8rl.recipe.schema import TinyModel
from fp8rl.rollout import cuda_config
from tests.models import RAGGED, recipe_with

TINY = dims_from_hf(hf_config(TinyModel()))  # 256, 512, 4 heads of 64: q 256 rows, k and v 128
LLAMA = replace(TINY, hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128, layers=4)


def precision(**values) -> Precision:
    return Precision.model_validate({"rollout": "fp8", **values})


def plan_of(dims, **values):
    asked = precision(**values)
    return make_plan(plan_rules(asked, asked.rollout), dims)


def test_whole_blocks_give_one_grid_on_both_sides():
    for dims in (TINY, LLAMA):
        assert cuda_config.unequal_grids(dims, plan_of(dims)) == []


def test_a_ragged_last_part_is_no_harm():
    """Only what comes after an incomplete block would share it."""
    dims = replace(TINY, hidden=192)
    assert cuda_config.unequal_grids(dims, plan_of(dims, include=["*.down_proj"])) == []
    assert cuda_config.unequal_grids(dims, plan_of(dims))  # q, k, v have 192 columns


def test_parts_that_end_inside_a_block_are_refused_by_name():
    dims = dims_from_hf(hf_config(RAGGED))  # k and v 64 rows, intermediate 320, hidden 192
    found = "\n".join(cuda_config.unequal_grids(dims, plan_of(dims)))
    for line in (
        "layers.0.self_attn.k_proj.weight: 64 rows are no multiple of 128, and "
        "model.layers.0.self_attn.qkv_proj.weight goes on with the next projection",
        "layers.1.mlp.gate_proj.weight: 320 rows",
        "layers.0.self_attn.q_proj.weight: 192 columns",
        "layers.1.mlp.down_proj.weight: 320 columns",
    ):
        assert line in found
    assert "v_proj.weight: 64 rows" not in found
    assert cuda_config.unequal_grids(dims, plan_of(dims, rollout="bf16")) == []


def test_layers_kept_in_bf16_are_not_held_to_blocks():
    dims = dims_from_hf(hf_config(RAGGED))
    found = cuda_config.unequal_grids(dims, plan_of(dims, first_layers_bf16=1))
    assert found
    assert not any("layers.0." in line for line in found)


def test_config_names_the_layers_that_stay_bf16():
    config = cuda_config.quantization_config(
        plan_of(TINY, last_layers_bf16=1, exclude=["*.0.*qkv_proj"])
    )
    assert config == {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "ignored_layers": [
            *(f"model.layers.0.self_attn.{p}_proj" for p in "qkv"),
            *(f"model.layers.3.self_attn.{p}_proj" for p in "qkvo"),
            *(f"model.layers.3.mlp.{p}_proj" for p in ("gate", "up", "down")),
        ],
    }
    assert cuda_config.quantization_config(plan_of(TINY, rollout="bf16")) is None


@pytest.mark.parametrize("kv_cache", ["bf16", "fp8"])
@pytest.mark.parametrize("rollout", ["bf16", "fp8"])
def test_options_say_the_precision_that_was_asked_for(rollout, kv_cache, tmp_path):
    recipe = recipe_with(precision={"rollout": rollout, "kv_cache": kv_cache})
    plan = make_plan(plan_rules(recipe.precision, recipe.precision.rollout), TINY)
    options = cuda_config.engine_options(recipe, plan, tmp_path, max_len=64)
    assert options["quantization"] == ("fp8" if rollout == "fp8" else None)
    assert bool(options["hf_overrides"]) == (rollout == "fp8")
    assert options["kv_cache_dtype"] == ("fp8" if kv_cache == "fp8" else "auto")


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"scaling": "tensor"}, "precision.scaling"),
        (
            {"rollout_scales": {"activations": "pow2"}},
            "precision.rollout_scales.activations",
        ),
    ],
)
def test_what_vllm_cannot_do_is_refused_by_its_key(values, key):
    assert [k for k, _ in cuda_config.problems(precision(**values))] == [key]
    assert list(cuda_config.problems(precision(**values, rollout="bf16"))) == []
    assert list(cuda_config.problems(precision(rollout_scales={"weights": "pow2"}))) == []


def test_no_recipe_reaches_it_yet():
    with pytest.raises(RecipeError, match="cuda is not built yet"):
        resolve(recipe_with(device="cuda"))
