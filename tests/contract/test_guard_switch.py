"""The linears of a live engine, switched to BF16 and back: equal to engines that were never switched.

Relied on in vLLM: a linear asks its `quant_method` attribute at each call, and its parameters may be
registered anew on the live module.
"""

import pytest

from fp8rl.model.manifest import PublishedWeightsError
from fp8rl.recipe.precision import Linear
from fp8rl.rollout.engine import Engine
from tests.contract.pairs import Pair

pytestmark = pytest.mark.engine


def outcome(engine: Engine, pair: Pair, version: int):
    requests = pair.requests()
    return (
        engine.generate(requests, version=version, temperature=0.0),
        engine.generate(requests, version=version),
        engine.score([r.prompt for r in requests], version=version),
    )


def load(engine, pair, learner, version, *, bf16):
    folder = pair.folder / f"switch{version}-{bf16}"
    learner.publish(folder, version=version, bf16=bf16)
    engine.load_weights(folder, version, bf16=bf16)
    engine.apply_kv_scales(pair.scales(learner, version))
    return folder


def formats(engine):
    return {row["effective"] for row in engine.precision_report()["parameters"]}


def test_to_bf16_and_back_is_as_if_the_engine_had_been_built_so(pairs):
    pair = pairs("fp8-e2e-kv")
    learner = pair.new_learner()
    engine = pair.engine
    precision = pair.recipe.precision
    bf16 = pair.recipe.model_copy(
        update={
            "precision": precision.model_copy(update={"rollout": Linear.BF16, "learner": Linear.BF16})
        }
    )
    pair.sync(learner, 0)
    in_fp8 = outcome(engine, pair, 0)
    assert formats(engine) == {"bf16", "fp8_block"}

    folder = load(engine, pair, learner, 0, bf16=True)
    switched = outcome(engine, pair, 0)
    assert formats(engine) == {"bf16"}
    fresh = Engine(pair.model_dir, bf16, max_len=64)
    fresh.load_weights(folder, 0)
    fresh.apply_kv_scales(pair.scales(learner, 0))
    assert switched == outcome(fresh, pair, 0)
    assert switched != in_fp8

    load(engine, pair, learner, 0, bf16=False)
    assert outcome(engine, pair, 0) == in_fp8
    assert formats(engine) == {"bf16", "fp8_block"}


def test_a_precision_that_nobody_asked_for_is_refused(pairs):
    pair = pairs("fp8-e2e-kv")
    learner = pair.new_learner()
    for published, told in ((True, False), (False, True)):
        folder = pair.folder / f"wrong-{published}"
        learner.publish(folder, version=0, bf16=published)
        with pytest.raises(PublishedWeightsError, match="q_proj"):
            pair.engine.load_weights(folder, 0, bf16=told)
        assert pair.engine.version is None
    pair.sync(learner, 0)
    outcome(pair.engine, pair, 0)
