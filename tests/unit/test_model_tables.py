"""Names and dimensions."""

import math
from dataclasses import replace

import pytest
import torch

from fp8rl.model.dims import Llama3Rope, UnsupportedModelError, dims_from_hf, read_dims
from fp8rl.model.names import megatron_row_order, name_table
from fp8rl.model.rotary import Rotary, llama3_frequencies
from fp8rl.model.tiny import hf_config
from fp8rl.numerics.backends import Projections
from fp8rl.recipe.schema import TinyModel

CONFIG = hf_config(TinyModel())
DIMS = dims_from_hf(CONFIG)


def test_tiny_model_is_of_the_intended_size():
    table = name_table(DIMS)
    parameters = sum(rows * (slot.columns or 1) for slot in table for rows in slot.rows)
    assert 2e6 < parameters < 3e6
    linears = [slot for slot in table if slot.is_linear]
    assert min(min(*slot.rows, slot.columns) for slot in linears) >= 128


def test_a_family_has_what_its_definition_says():
    """Configs of Qwen2 and Qwen3 do not say that there are biases, or QK-norm."""
    kinds = {f: dims_from_hf({**CONFIG, "model_type": f}) for f in ("llama", "qwen2", "qwen3")}
    has = {f: (dims.qkv_bias, dims.qk_norm) for f, dims in kinds.items()}
    assert has == {"llama": (False, False), "qwen2": (True, False), "qwen3": (False, True)}
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = {**CONFIG, "rope_parameters": rope | {"original_max_position_embeddings": 64}}
    assert dims_from_hf(config).rope_scaling == Llama3Rope(8.0, 1.0, 4.0, 64)


def test_llama3_frequencies_stay_where_waves_are_short_and_stretch_where_they_are_long():
    rope = Llama3Rope(8.0, 1.0, 4.0, 64)
    # Waves of 8, 32 and 128 positions: 8 turns in 64, 2 turns, half a turn.
    waves = torch.tensor([8.0, 32.0, 128.0])
    got = 2 * math.pi / llama3_frequencies(2 * math.pi / waves, rope)
    mixed = 1 / ((1 - 1 / 3) / (8 * 32) + (1 / 3) / 32)  # (2 - 1) / (4 - 1) of the way
    assert got.tolist() == pytest.approx([8.0, mixed, 8 * 128.0])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_table_names_each_parameter_once(model_type, tied):
    dims = dims_from_hf({**CONFIG, "model_type": model_type})
    table = name_table(replace(dims, tied_embeddings=tied))
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
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8}}, "rope_parameters.*low_freq"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 8}}, "rope_parameters"),
        ({"rope_scaling": {"type": "dynamic"}, "rope_parameters": None}, "rope_scaling"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window"),
        ({"use_qk_norm": True}, "use_qk_norm"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ({"mamba_d_state": 128}, "mamba_d_state"),
        ({"linear_num_key_heads": 16}, "linear_num_key_heads"),
        ({"hybrid_override_pattern": "M-M*"}, "hybrid_override_pattern"),
    ],
)
def test_unsupported_model_is_refused_by_field(change, field):
    with pytest.raises(UnsupportedModelError, match=field):
        dims_from_hf({**CONFIG, **change})


@pytest.mark.parametrize("model_type", ["llama", "qwen3_next"])
def test_recurrent_layers_are_named_as_the_reason(model_type):
    config = {**CONFIG, "model_type": model_type, "linear_conv_kernel_dim": 4}
    with pytest.raises(UnsupportedModelError, match=r"linear_conv_kernel_dim=4: only full attention"):
        dims_from_hf(config)


def test_llama_has_full_attention_and_no_qk_norm():
    config = {**CONFIG, "layer_types": ["full_attention"] * 4, "mamba_d_state": None}
    assert dims_from_hf(config) == DIMS
    assert not DIMS.qk_norm


def test_dims_read_old_and_new_rope_fields(tmp_path):
    old = {k: v for k, v in CONFIG.items() if k != "rope_parameters"} | {"rope_theta": 5e5}
    assert dims_from_hf(old).rope_theta == 5e5
    with pytest.raises(UnsupportedModelError, match=r"no config\.json"):
        read_dims(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"missing hidden_size, .*num_attention_heads"):
        dims_from_hf({"model_type": "llama"})


@pytest.mark.parametrize("once", [True, False])
def test_rotation_rounds_at_the_end_or_after_every_product(once):
    """Against float64 from the rounded cosines: one rounding is the nearest BF16, three are not."""
    x = torch.randn(50, 2, 3, DIMS.head_dim, generator=torch.Generator().manual_seed(0)).bfloat16()
    rotary = Rotary(DIMS)
    cos, sin = (t.double()[:, None, None] for t in rotary.table(50, torch.bfloat16))
    first, second = x.double().chunk(2, -1)
    exact = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    got = rotary(x, once=once)
    apart = (got != exact.float().bfloat16()).double().mean()
    assert apart < 1e-3 if once else apart > 0.05
    assert (got.double() - exact).abs().max() < 0.04
    assert torch.equal(rotary(x[:7], once=once), got[:7])


def test_positions_turn_by_their_number_and_in_fp32_nothing_is_rounded():
    rotary = Rotary(DIMS)
    x = torch.randn(9, 1, 1, DIMS.head_dim)
    y = rotary(x, once=True)
    assert torch.equal(y[0], x[0])
    half = DIMS.head_dim // 2
    angles = torch.arange(9.0)  # the fastest pair turns by one radian a position
    turned = torch.view_as_complex(torch.stack((x[..., 0], x[..., half]), -1)).squeeze()
    turned = turned * torch.polar(torch.ones(9), angles)
    torch.testing.assert_close(y[:, 0, 0, 0], turned.real)
    torch.testing.assert_close(y[:, 0, 0, half], turned.imag)
    torch.testing.assert_close(rotary(x, once=False), y)
