"""The restated vLLM weight rule of the parity report against vLLM's own function."""

import pytest
import torch

from fp8rl.numerics.engine_rules import RULES, cut


@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_rule_is_that_of_vllm(dtype, pow2):
    """Relies on: vllm.utils.deep_gemm.per_block_cast_to_fp8, run as it is written, uncompiled."""
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    function = getattr(per_block_cast_to_fp8, "_torchdynamo_orig_callable", per_block_cast_to_fp8)
    rule = next(r for r in RULES if r.name == "vllm-weights" and r.pow2 == pow2)
    torch.manual_seed(0)
    w = torch.randn(300, 500) * 0.02 * torch.exp2(torch.randint(-20, 5, (300, 1)).float())
    w[:128, :128] = 0
    w[128:256, :128] *= 1e-6 / w[128:256, :128].abs().max()  # below vLLM's floor of 1e-4
    w = w.to(dtype)
    codes, descales = function(w, use_ue8m0=pow2)
    blocks = cut(w, (128, 128))
    scales = rule.scales(blocks.amax(), w.dtype)
    assert torch.equal(descales.flatten(), scales.descale)
    assert torch.equal(blocks.whole(rule.codes(blocks.values, scales)), codes.view(torch.uint8))
