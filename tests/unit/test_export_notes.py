"""What readers of an FP8 export make of matrices without whole blocks, and what the user is told."""

import torch

from fp8rl.export import partial_blocks
from fp8rl.model.precision import Format, PlanRules, make_plan
from fp8rl.model.tiny import tiny_dims
from fp8rl.recipe.schema import TinyModel
from tests.models import RAGGED


def partial(tiny: TinyModel, fmt: Format = Format.FP8_BLOCK) -> list[str]:
    dims = tiny_dims(tiny)
    return partial_blocks(dims, make_plan(PlanRules(fmt), dims))


def test_matrices_with_a_last_block_that_is_not_whole_are_named():
    assert partial(TinyModel()) == []
    assert partial(RAGGED, Format.BF16) == []
    found = partial(RAGGED)
    assert "model.layers.0.mlp.up_proj.weight (320 x 192)" in found
    assert len(found) == 7 * RAGGED.layers
    # One block is a whole side, however small.
    small = TinyModel(hidden_size=64, intermediate_size=96, layers=1, heads=2, kv_heads=1)
    assert partial(small) == []


def test_transformers_takes_blocks_of_equal_size():
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    codes, scales = torch.ones(192, 128).to(torch.float8_e4m3fn), torch.tensor([[1.0], [2.0]])
    read = Fp8Dequantize(None)._dequantize_one(codes, scales, output_dtype=torch.float32)
    assert read[:, 0].tolist() == [1.0] * 96 + [2.0] * 96  # the format says 128 and 64
