"""KV pressure: what vLLM's statistics add up to, and chunks of several engines as one rollout."""

from types import SimpleNamespace

import pytest

from fp8rl.rollout.pressure import BIN_ENDS, Decoding, Pressure, PressureGauge, bin_name, combine
from fp8rl.rollout.samples import rollout_metrics


@pytest.mark.parametrize(
    ("length", "name"),
    [(1, "1-16"), (16, "1-16"), (17, "17-64"), (256, "65-256"), (4096, "1025-4096"), (4097, "4097-")],
)
def test_bins_meet_at_their_ends(length, name):
    assert bin_name(length) == name


def test_every_length_has_one_bin():
    assert len({bin_name(n) for n in range(1, 5000)}) == len(BIN_ENDS) + 1


def engine(blocks=4, block_size=8, manager="vLLM's"):
    cache = SimpleNamespace(num_gpu_blocks=blocks, block_size=block_size)
    return SimpleNamespace(
        llm_engine=SimpleNamespace(
            logger_manager=manager, vllm_config=SimpleNamespace(cache_config=cache)
        )
    )


def scheduler(use, running, waiting=0, skipped=0, queries=0, hits=0):
    return SimpleNamespace(
        kv_cache_usage=use,
        num_running_reqs=running,
        num_waiting_reqs=waiting,
        num_skipped_waiting_reqs=skipped,
        prefix_cache_stats=SimpleNamespace(queries=queries, hits=hits),
    )


def outputs(preempted=0, finished=()):
    done = [SimpleNamespace(num_generation_tokens=n, decode_time=s) for n, s in finished]
    return SimpleNamespace(num_preempted_reqs=preempted, finished_requests=done)


def test_a_gauge_adds_up_the_steps_since_its_start():
    llm = engine()
    gauge = PressureGauge(llm)
    assert llm.llm_engine.logger_manager is gauge
    gauge.record(scheduler(1.0, 9, 9), outputs(5), engine_idx=0)
    gauge.start()
    gauge.record(scheduler(0.5, 3, 1, 1, 30, 8), outputs(), mm_cache_stats=None)
    gauge.record(scheduler(0.9, 2, 2), None)  # a step that brought no tokens
    gauge.record(scheduler(0.2, 0), outputs(2, [(10, 3.0), (1, 0.0), (4, 1.0), (20, 4.0)]))
    got = gauge.pressure
    assert got == Pressure(
        capacity_tokens=32,
        peak_use=0.9,
        preemptions=2,
        steps=3,
        running=5,
        running_max=3,
        waiting=4,
        waiting_max=2,
        prefix_queries=30,
        prefix_hits=8,
        decoding={"1-16": Decoding(9 + 3, 4.0), "17-64": Decoding(19, 4.0)},
    )
    metrics = got.metrics()
    assert metrics["kv/running_mean"] == 5 / 3
    assert metrics["kv/waiting_mean"] == 4 / 3
    assert metrics["perf/sequence_tokens_per_sec/1-16"] == 3.0
    assert metrics["perf/sequence_tokens_per_sec/17-64"] == 4.75
    assert "perf/sequence_tokens_per_sec/65-256" not in metrics


def test_a_gauge_refuses_an_engine_without_statistics():
    with pytest.raises(ValueError, match="disable_log_stats=False"):
        PressureGauge(engine(manager=None))


ONE = Pressure(100, 0.5, 3, 10, 40, 6, 5, 2, 64, 16, {"1-16": Decoding(20, 2.0)})
OTHER = Pressure(
    80, 0.25, 1, 30, 60, 4, 35, 7, 32, 0, {"1-16": Decoding(10, 4.0), "17-64": Decoding(7, 7.0)}
)


def test_chunks_of_two_engines_are_one_rollout():
    both = combine([ONE, OTHER])
    assert both == combine([OTHER, ONE])
    assert both == Pressure(
        80, 0.5, 4, 40, 100, 6, 40, 7, 96, 16, {"1-16": Decoding(30, 6.0), "17-64": Decoding(7, 7.0)}
    )
    # A mean over all steps, not of the chunks' means; a speed over all time, not of the chunks' speeds.
    assert both.metrics()["kv/running_mean"] == 2.5
    assert both.metrics()["perf/sequence_tokens_per_sec/1-16"] == 5.0
    assert ONE.decoding == {"1-16": Decoding(20, 2.0)}  # untouched


def test_a_committed_chunk_gives_its_pressure_back():
    assert Pressure.from_dict(ONE.to_dict()) == ONE
    with pytest.raises(TypeError):
        Pressure.from_dict(ONE.to_dict() | {"unknown": 1})


def test_a_rollouts_metrics_have_those_of_its_cache():
    columns = {
        "tokens": [[1, 2], [3]],
        "logprobs": [[-1.0, -2.0], [-3.0]],
        "finish_reason": ["stop"] * 2,
    }
    metrics = rollout_metrics(columns, 2.0, [ONE, OTHER])
    assert metrics["perf/rollout_tokens_per_sec"] == 1.5
    assert metrics["kv/preemptions"] == 4
    assert {name.partition("/")[0] for name in metrics} == {"rollout", "perf", "kv"}
