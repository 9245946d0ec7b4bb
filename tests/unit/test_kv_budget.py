"""Which sequences KV calibration takes, and how many elements an FP8 cache cannot hold."""

import numpy as np
import pytest
import torch

from fp8rl.data.calibration import choose
from fp8rl.model.kv_scales import KvScalesError
from fp8rl.numerics.kv_cache import cached, for_cpu_kernel
from fp8rl.rollout.kv_observation import batches
from fp8rl.rollout.kv_shares import kv_metrics, total
from fp8rl.rollout.kv_writes import bounds_of, unheld

GROUPS = [7, 7, 7, 3, 3, 3, 5, 5, 5]
LENGTHS = [10, 20, 30] * 3


def test_no_budget_takes_all():
    assert choose(GROUPS, LENGTHS, None) == list(range(9))
    assert choose(GROUPS, LENGTHS, sum(LENGTHS)) == list(range(9))


@pytest.mark.parametrize(
    ("budget", "chosen"),
    [
        (1, [0, 3, 6]),  # one of each prompt, whatever the budget
        (49, [0, 3, 6]),
        (50, [0, 1, 3, 6]),
        (119, [0, 1, 3, 4, 6, 7]),
        (120, [0, 1, 2, 3, 4, 6, 7]),
    ],
)
def test_a_budget_takes_whole_sequences_of_every_prompt_in_turn(budget, chosen):
    assert choose(GROUPS, LENGTHS, budget) == chosen


def test_groups_need_not_stand_together():
    assert choose([1, 2, 1, 2], [5, 5, 5, 5], 15) == [0, 1, 2]


# --- counts


def test_shares_are_over_k_and_v_of_all_chunks():
    one = {
        "elements": [100, 100],
        "k_saturated": [3, 0],
        "v_saturated": [0, 1],
        "k_underflow": [0, 0],
        "v_underflow": [10, 10],
    }
    counts = total([one, one])
    assert counts["elements"] == [200, 200]
    assert counts["k_saturated"] == [6, 0]
    assert kv_metrics(counts) == {"kv/saturated_share": 8 / 800, "kv/underflow_share": 40 / 800}


def all_magnitudes():
    """Every finite BF16 number."""
    patterns = torch.arange(0x7F80, dtype=torch.int32)
    return torch.cat([patterns, patterns | 0x8000]).to(torch.int16).view(torch.bfloat16)


SCALES = [1.0, 0.0123, 3.7e-5, 250.0, 2.0**-12]


@pytest.mark.parametrize("scale", SCALES)
def test_what_e4m3_cannot_hold_is_counted_exactly(scale):
    """Against float64: above 448 s, and of at most half of E4M3's least times s."""
    x = all_magnitudes()
    magnitudes = np.abs(x.double().numpy())

    def wanted(s):
        saturated = int((magnitudes > 448 * s).sum())
        return [saturated, int(((magnitudes > 0) & (magnitudes <= 2.0**-10 * s)).sum())]

    got = unheld(torch.stack((x, x)), bounds_of(scale, scale * 3)).T.tolist()
    assert got == [wanted(scale), wanted(scale * 3)]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("kernel", ["cuts off", "rounds"])
def test_numbers_are_rounded_so_that_any_kernel_stores_the_nearest(scale, kernel):
    """All BF16 numbers, against PyTorch's cast of x / scale, which rounds to nearest."""
    x = all_magnitudes()
    want = (x.float() / torch.tensor(scale)).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    assert torch.equal(cached(x, scale), want * torch.tensor(scale))
    seen = for_cpu_kernel(x, scale).float()
    # A kernel may divide, or multiply by an inverse that was rounded.
    for scaled in (seen / torch.tensor(scale), seen * (1 / torch.tensor(scale))):
        codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        if kernel == "rounds":
            stored = scaled.clamp(-448, 448).to(torch.float8_e4m3fn).float().abs()
        else:
            stored = codes[torch.searchsorted(codes, scaled.abs().contiguous(), right=True) - 1]
        assert torch.equal(stored, want.abs())
        assert not bool(((scaled < 0) != (want < 0))[want != 0].any())


def test_sequences_are_split_into_forward_passes():
    assert batches([], most_tokens=10, most_sequences=2) == []
    assert batches([5, 5, 1, 9, 1], most_tokens=10, most_sequences=9) == [
        slice(0, 2),
        slice(2, 4),
        slice(4, 5),
    ]
    assert batches([1, 1, 1], most_tokens=10, most_sequences=2) == [slice(0, 2), slice(2, 3)]
    with pytest.raises(KvScalesError, match="sequence 1 has 11 tokens, one forward pass takes 10"):
        batches([1, 11], most_tokens=10, most_sequences=2)
