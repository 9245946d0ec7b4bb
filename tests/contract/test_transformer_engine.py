"""What the Transformer Engine side says to Megatron-core, held against Megatron-core's own source.

Nothing here runs Transformer Engine: it is not installed on a machine without a GPU.
"""

import inspect
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch.nn.functional as F

from fp8rl.model import transformer_engine as te
from fp8rl.model.dims import dims_from_hf
from fp8rl.model.names import name_table
from fp8rl.model.tiny import hf_config
from fp8rl.numerics.formats import BackendError
from fp8rl.recipe.precision import Precision
from fp8rl.recipe.schema import TinyModel

DIMS = dims_from_hf(hf_config(TinyModel()))
LLAMA = replace(DIMS, hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128, layers=4)


def precision(**values) -> Precision:
    return Precision.model_validate({"rollout": "fp8", "learner": "fp8", **values})


@pytest.mark.parametrize("scaling", ["block", "tensor", "mxfp8"])
@pytest.mark.parametrize("fmt", ["e4m3", "hybrid"])
def test_megatron_accepts_the_fields(scaling, fmt):
    from megatron.core.transformer.transformer_config import TransformerConfig

    asked = precision(scaling=scaling, learner_format=fmt, first_layers_bf16=1, last_layers_bf16=1)
    given = te.config_fields(asked)
    assert given.keys() <= {field.name for field in fields(TransformerConfig)}
    config = TransformerConfig(
        num_layers=4, hidden_size=256, num_attention_heads=4, activation_func=F.silu, **given
    )
    assert (config.fp8, config.num_layers_at_end_in_bf16) == (fmt, 1)


def test_the_recipes_that_megatron_maps_to_transformer_engine_are_those_named_here():
    from megatron.core import fp8_utils
    from megatron.core.enums import Fp8Recipe

    assert {
        te.config_fields(precision(scaling=s))["fp8_recipe"] for s in ("block", "tensor", "mxfp8")
    } <= {recipe.value for recipe in Fp8Recipe}
    source = inspect.getsource(fp8_utils)
    for recipe in ("Float8BlockScaling", "Float8CurrentScaling", "MXFP8BlockScaling"):
        assert f"transformer_engine.common.recipe.{recipe}" in source


def test_megatron_without_transformer_engine_trains_unquantised_and_we_refuse():
    """Relies on: get_fp8_context is a null context then, which is why `require` exists."""
    from megatron.core import fp8_utils

    if fp8_utils.HAVE_TE:
        pytest.skip("Transformer Engine is installed")
    assert "nullcontext()" in inspect.getsource(fp8_utils.get_fp8_context)
    for ask in (te.layer_spec, lambda: te.build(DIMS, precision())):
        with pytest.raises(BackendError, match="would train in FP32 and not say so"):
            ask()


def test_model_is_built_of_arguments_that_megatron_has(monkeypatch):
    """Transformer Engine is not here: its spec and the model that it goes into are stood in for."""
    from megatron.core.models.gpt import gpt_model

    built = {}

    def model(config, spec, **options):
        inspect.signature(real).bind(config, spec, **options)
        built.update(config=config, spec=spec)
        return "model"

    real = gpt_model.GPTModel
    monkeypatch.setattr(gpt_model, "GPTModel", model)
    monkeypatch.setattr(te, "layer_spec", lambda **_: "spec")
    assert te.build(DIMS, precision(learner_format="hybrid")) == "model"
    config = built["config"]
    assert (config.fp8, config.fp8_recipe, config.bf16) == ("hybrid", "blockwise", True)
    assert (config.num_query_groups, config.kv_channels) == (DIMS.kv_heads, DIMS.head_dim)


def test_norms_are_held_by_the_layer_that_they_feed():
    from megatron.core.post_training.modelopt.gpt import state_dict_hooks

    names = {te.parameter_name(slot.megatron) for slot in name_table(DIMS)}
    assert len(names) == len(name_table(DIMS))
    source = Path(inspect.getfile(state_dict_hooks)).read_text()
    for fused in ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"):
        assert f"decoder.layers.0.{fused}" in names
        assert f'"{fused}"' in source
    assert "decoder.final_layernorm.weight" in names


def test_scale_switch_is_in_the_environment():
    assert te.environment(precision()) == {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}
    pow2 = {"weights": "pow2", "activations": "pow2"}
    assert te.environment(precision(learner_scales=pow2)) == {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "0"}


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"scaling": "channel"}, "precision.scaling"),
        ({"learner_scales": {"weights": "pow2"}}, "precision.learner_scales"),
        ({"scaling": "tensor", "learner_scales": {"weights": "pow2"}}, "precision.learner_scales"),
        ({"exclude": ["*.o_proj"]}, "precision.include, precision.exclude"),
    ],
)
def test_what_transformer_engine_cannot_do_is_refused_by_its_key(values, key):
    assert [k for k, _ in te.problems(precision(**values))] == [key]
    assert list(te.problems(precision())) == []


def test_grids_are_equal_where_heads_and_shards_come_in_whole_blocks():
    assert te.unequal_grids(LLAMA, precision()) == []
    assert te.unequal_grids(LLAMA, precision(), tensor_parallel=8) == []
    small = replace(LLAMA, head_dim=64)
    assert any("head_dim" in reason for reason in te.unequal_grids(small, precision()))
    odd = replace(LLAMA, intermediate=14336 + 64)
    assert any("intermediate" in reason for reason in te.unequal_grids(odd, precision()))
    assert "one scale" in te.unequal_grids(LLAMA, precision(scaling="tensor"))[0]
