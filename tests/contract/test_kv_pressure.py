"""A real vLLM engine whose KV cache is too small: it preempts, and our counts are what it did.

Each test names the vLLM behaviour it relies on, so that an upgrade fails here and says where.
"""

from pathlib import Path

import pytest
import torch

from fp8rl.learner.batch import make_batch
from fp8rl.learner.learner import Learner
from fp8rl.rollout.engine import Engine
from fp8rl.rollout.requests import Request
from tests.models import RAGGED, recipe_with, write_model

pytestmark = pytest.mark.engine

TINY = RAGGED.model_copy(update={"max_positions": 256})
BLOCK = 128  # tokens, vLLM's default on a CPU
# 1 MiB in BF16: 2 layers x (K and V) x 2 heads x 32 numbers x 2 bytes = 512 bytes a token.
BLOCKS = {"bf16": 16, "fp8": 32}
NEW = 40


class Small:
    """An engine with a KV cache of 1 MiB, its weights and its scales."""

    def __init__(self, kv: str, folder: Path) -> None:
        recipe = recipe_with(
            model={"tiny": TINY.model_dump()},
            precision={"rollout": "bf16", "kv_cache": kv},
            rollout={"max_new_tokens": NEW, "chunk_size": 32, "kv_cache_mib": 1},
        )
        model_dir = write_model(TINY, folder / "model")
        learner = Learner(model_dir, recipe)
        learner.load(model_dir, 0)
        learner.publish(folder / "v0", version=0)
        self.engine = Engine(model_dir, recipe, max_len=192)
        self.engine.load_weights(folder / "v0", 0)
        if kv == "fp8":
            batch = make_batch([r.prompt for r in requests(8)], [[5, 6]] * 8)
            self.engine.apply_kv_scales(learner.calibrate_kv(batch, version=0, source="test"))

    def generate(self, wanted: list[Request]):
        return self.engine.generate(wanted, version=0, ignore_end=True)


def requests(count: int, length: int = 120) -> list[Request]:
    """Prompts that fit one block, with answers that need a second one."""
    generator = torch.Generator().manual_seed(3)
    return [
        Request(torch.randint(4, 90, (length,), generator=generator).tolist(), seed)
        for seed in range(count)
    ]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    made: dict[str, Small] = {}

    def get(kv: str) -> Small:
        if kv not in made:
            made[kv] = Small(kv, tmp_path_factory.mktemp(kv))
        return made[kv]

    return get


@pytest.fixture
def told(monkeypatch):
    """Has an engine's scheduler and outputs note by themselves what happens to them."""

    def watch(engine: Engine) -> dict:
        seen: dict = {"preempted": 0, "use": [], "outputs": []}
        scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
        preempt, schedule, generate = (
            scheduler._preempt_request,
            scheduler.schedule,
            engine.llm.generate,
        )

        def preempting(*args, **kwargs):
            seen["preempted"] += 1
            return preempt(*args, **kwargs)

        def scheduling(*args, **kwargs):
            output = schedule(*args, **kwargs)
            seen["use"].append(scheduler.kv_cache_manager.usage)
            return output

        def generating(*args, **kwargs):
            outputs = generate(*args, **kwargs)
            seen["outputs"] += outputs
            return outputs

        monkeypatch.setattr(scheduler, "_preempt_request", preempting)
        monkeypatch.setattr(scheduler, "schedule", scheduling)
        monkeypatch.setattr(engine.llm, "generate", generating)
        return seen

    return watch


@pytest.mark.parametrize("kv", BLOCKS)
def test_capacity_is_what_the_cache_holds(small, kv):
    """Relies on: cache_config.num_gpu_blocks and block_size; Attention.kv_cache. Both engines live in
    this process. The same bytes hold twice as many tokens in FP8."""
    engine = small(kv).engine
    small("bf16")
    assert engine.pressure.capacity_tokens == BLOCKS[kv] * BLOCK
    caches = engine.inside(
        lambda model: [m.kv_cache for m in model.modules() if hasattr(m, "kv_cache_dtype")]
    )
    held = sum(cache.numel() * cache.element_size() for cache in caches)
    assert held == 2**20


@pytest.mark.parametrize("kv", BLOCKS)
def test_a_cache_that_is_too_small_preempts_and_all_counts_are_vllms(small, told, kv):
    """Relies on: scheduler_stats and iteration_stats of each step, as rollout/pressure.py says."""
    case = small(kv)
    seen = told(case.engine)
    count = BLOCKS[kv]  # a block more than are free for them: one block is vLLM's own
    completions = case.generate(requests(count))
    got = case.engine.pressure
    assert [len(c.tokens) for c in completions] == [NEW] * count
    assert got.preemptions == seen["preempted"] > 0
    assert got.preemptions == sum(output.metrics.num_preemptions for output in seen["outputs"])
    assert got.peak_use == max(seen["use"]) == 1.0
    assert got.steps == len(seen["use"])
    assert got.running_max == count - 1
    assert got.waiting_max >= 1
    assert 0 < got.running / got.steps < count
    assert got.prefix_queries == 120 * count
    spans = [o.metrics.last_token_ts - o.metrics.first_token_ts for o in seen["outputs"]]
    assert got.decoding.keys() == {"17-64"}
    assert got.decoding["17-64"].tokens == (NEW - 1) * count
    assert got.decoding["17-64"].seconds == pytest.approx(sum(spans))


@pytest.mark.parametrize("kv", BLOCKS)
def test_the_same_chunk_under_pressure_is_the_same_chunk(small, kv):
    """Relies on: preempted sequences keeping their random generator, and scheduling without a clock."""
    case, wanted = small(kv), requests(BLOCKS[kv])
    first, counts = case.generate(wanted), case.engine.pressure.metrics()
    assert case.generate(wanted) == first
    again = case.engine.pressure.metrics()
    assert again.keys() == counts.keys()
    for name, value in counts.items():
        assert name.startswith("perf/") or again[name] == value, name


def test_a_cache_with_room_does_not_preempt(small):
    case = small("bf16")
    case.generate(requests(6))
    got = case.engine.pressure
    assert (got.preemptions, got.waiting_max, got.running_max) == (0, 0, 6)
    assert got.peak_use == pytest.approx(2 * 6 / 15)


def test_whole_blocks_of_a_shared_prompt_are_prefix_hits(small):
    """Relies on: a prompt's full blocks being found by the next sample of it, in the same step."""
    case = small("bf16")
    (prompt,) = requests(1, length=BLOCK + 12)
    case.generate([Request(prompt.prompt, seed) for seed in range(4)])
    got = case.engine.pressure
    assert (got.prefix_queries, got.prefix_hits) == (4 * (BLOCK + 12), 3 * BLOCK)
    case.generate([prompt])  # from a clean prefix cache
    assert case.engine.pressure.prefix_hits == 0
