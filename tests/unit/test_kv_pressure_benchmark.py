"""What the KV pressure benchmark makes of its turns."""

import pytest

from benchmarks.kv_pressure import AT_REST, SETTINGS, UNDER_PRESSURE, result_of
from fp8rl.rollout.pressure import Pressure


def turn(speed, capacity, preemptions=0):
    pressure = Pressure(capacity, 0.9, preemptions, steps=10, running=50, waiting_max=2)
    return {"tokens_per_sec": speed, "pressure": pressure.to_dict()}


def test_ratios_are_of_the_same_round_and_the_medians_of_them():
    # The machine is three times as fast in the second round: ratios of medians would tell nothing.
    free = {
        "bf16": [turn(s, 100) for s in (100, 300, 110)],
        "fp8": [turn(s, 200) for s in (140, 420, 154)],
    }
    tight = {
        "bf16": [turn(s, 10, 7) for s in (50, 150, 40)],
        "fp8": [turn(s, 20, 2) for s in (105, 315, 84)],
    }
    turns = {name: free for name in SETTINGS} | {UNDER_PRESSURE: tight}
    parts = {"rollout": 5.0, "reward": 1.0, "train": 3.5, "requantize": 0.25, "recalibrate_kv": 0.25}
    result = result_of(turns, parts)
    assert result["throughput_ratio_no_pressure"] == pytest.approx(1.4)
    assert result["throughput_ratio_pressure"] == pytest.approx(2.1)
    assert result["gain_from_capacity"] == pytest.approx(1.5)
    assert result["gain_from_capacity_by_turn"] == pytest.approx([1.5] * 3)
    assert (result["preemptions_bf16"], result["preemptions_fp8"]) == (7, 2)
    assert result["capacity_ratio"] == 2.0
    assert result["recalibration_share"] == 0.025
    assert result["pressures"].keys() == SETTINGS.keys()
    assert result["pressures"][AT_REST]["bf16"]["preemptions"] == 0


def test_the_sizes_are_what_their_reasons_say():
    block, needed = 30 * 2 * 3 * 64 * 2 * 128, 64
    for setting in SETTINGS.values():
        held = setting.kv_mib * 2**20 // block - 1
        assert needed / held == pytest.approx(setting.demand, abs=0.05)
    half = SETTINGS["half"].kv_mib * 2**20 // (block // 2) - 1
    assert half >= needed
