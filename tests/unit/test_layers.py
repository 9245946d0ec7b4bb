"""Linears of the learner, whatever the strides of their input."""

import pytest
import torch
from torch import nn

from fp8rl.model.layers import rows_linear


@pytest.mark.parametrize("bias", [None, torch.arange(96.0)])
def test_a_linear_of_a_transposed_input_copies_no_weight(bias):
    """Activations are [s, b, h] with the strides of [b, s, h] from the engine's attention on: torch's
    own linear then multiplies batch by batch, with a copy of the weight for each."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=generator).bfloat16()
    x = torch.randn(4, 50, 64, generator=generator).bfloat16().transpose(0, 1)
    bias = None if bias is None else bias.bfloat16()

    def operations(function):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            out = function(x, weight, bias)
        return out, {event.key for event in profile.key_averages()}

    out, ours = operations(rows_linear)
    _, torchs = operations(nn.functional.linear)
    assert "aten::bmm" not in ours
    assert "aten::bmm" in torchs  # else rows_linear has outlived its reason
    assert torch.equal(out, nn.functional.linear(x.contiguous(), weight, bias))
