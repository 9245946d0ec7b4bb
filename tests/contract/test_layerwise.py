"""Engine and learner point by point: what the hooks see in vLLM and in Megatron-core."""

import pytest
import torch

from fp8rl.layerwise.compare import differences, first, summary, verdict
from fp8rl.layerwise.engine_points import see_engine, watched
from fp8rl.layerwise.learner_points import replay, see_learner
from fp8rl.layerwise.points import FINAL_POINTS, LAYER_POINTS, ParityError, Seen
from fp8rl.model.rounding import ENGINE, MEGATRON
from tests.contract.pairs import Pair
from tests.contract.test_parity import ARMS, EXACT


@pytest.fixture(scope="module", params=["bf16", "fp8-e2e-kv"])
def pair(request, tmp_path_factory):
    pair = Pair(ARMS[request.param], tmp_path_factory.mktemp("layerwise"))
    pair.learner = pair.new_learner()
    if pair.engine.fp8_kv:
        pair.learner.use_kv_scales(0, pair.scales(pair.learner, 0))
    pair.layers = pair.learner.dims.layers
    return pair


@pytest.fixture(scope="module")
def sequences():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(4, 90, (n,), generator=generator).tolist() for n in (20, 7, 33, 20, 12)]


@pytest.fixture(scope="module")
def engine(pair, sequences):
    return see_engine(pair.engine, sequences, version=0)


@pytest.fixture(autouse=True)
def _as_the_engine(pair):
    pair.learner.model.set_rounding(ENGINE)


def test_every_point_of_every_layer_is_seen_on_both_sides(pair, sequences, engine):
    learner = see_learner(pair.learner.model, sequences)
    dims, tokens = pair.learner.dims, sum(map(len, sequences))
    for seen in (engine, learner):
        keys = set(seen.ordered(pair.layers))
        assert keys == seen.points.keys()
        assert len(keys) == len(LAYER_POINTS) * pair.layers + len(FINAL_POINTS)
        for (_, point), value in seen.points.items():
            if point == "logprob":
                assert value.shape == (tokens - len(sequences),)
                continue
            widths = {"q": dims.q_rows, "q_rotated": dims.q_rows, "attention": dims.q_rows}
            widths |= dict.fromkeys(("k", "v", "k_rotated"), dims.kv_rows)
            widths |= dict.fromkeys(("gate", "up", "activation"), dims.intermediate)
            assert value.shape == (tokens, widths.get(point, dims.hidden)), point
            assert value.dtype is torch.bfloat16, point
    # They are those of the scores that the engine and the learner give without hooks.
    scores = pair.engine.score(sequences, version=0)
    assert engine[pair.layers - 1, "logprob"].tolist() == [value for row in scores for value in row]
    scores = pair.learner.score(sequences, version=0)
    assert learner[pair.layers - 1, "logprob"].tolist() == [value for row in scores for value in row]


def test_both_sides_are_alike_at_every_point(pair, sequences, engine):
    model = pair.learner.model
    made = differences(engine, replay(model, engine), pair.layers)
    grown = differences(engine, see_learner(model, sequences), pair.layers)
    assert {(one.layer, one.point) for one in grown} == engine.points.keys()
    assert {(one.layer, one.point) for one in made} == engine.points.keys() - {(0, "residual")}
    if EXACT:
        assert first(made) is first(grown) is None
        assert verdict(made, grown) == [
            "Engine and learner are equal bit for bit, at every point of every layer."
        ]


# What each rounding makes differ when it is as Megatron-core has it, given the engine's inputs.
MADE = {
    "norm": {"input_norm", "post_norm", "final_norm"},
    "residual": {"input_norm", "post_norm", "final_norm"},
    "rotary": {"q_rotated", "k_rotated"},
}


@pytest.mark.skipif(not EXACT, reason="with AMX vLLM's linears are other kernels than torch's")
@pytest.mark.parametrize("point", MADE)
def test_a_difference_is_found_where_it_is_made_and_nowhere_else(pair, sequences, engine, point):
    model = pair.learner.model
    model.set_rounding(ENGINE.but(**{point: False}))
    made = differences(engine, replay(model, engine), pair.layers)
    assert {one.point for one in made if one.differ > 0} == MADE[point]
    at = first(made)
    grown = differences(engine, see_learner(model, sequences), pair.layers)
    assert (first(grown).layer, first(grown).point) == (at.layer, at.point)
    text = " ".join(verdict(made, grown))
    assert f"First difference made: layer {at.layer}, {at.point}" in text


def test_a_planted_difference_of_one_layer_is_named(pair, engine):
    """One weight of the learner's second layer is another: its down_proj alone makes a difference."""
    model = pair.learner.model
    kept = model.export()
    moved = {name: value.clone() for name, value in kept.items()}
    moved["model.layers.1.mlp.down_proj.weight"][:, 5] += 0.5
    try:
        model.load(moved)
        made = differences(engine, replay(model, engine), pair.layers)
    finally:
        model.load(kept)
    worst = max(made, key=lambda one: one.relative)
    assert (worst.layer, worst.point) == (1, "down_proj")
    row = next(row for row in summary(made, made) if row.point == "down_proj")
    assert row.made_most > 0.5 > row.made_share - 0.25


def test_rounding_as_megatron_grows_from_layer_to_layer(pair, sequences, engine):
    model = pair.learner.model
    model.set_rounding(MEGATRON)
    grown = differences(engine, see_learner(model, sequences), pair.layers)
    stream = [one.relative for one in grown if one.point == "residual"]
    assert stream[0] == 0 < stream[1]


def test_sequences_that_do_not_fit_and_a_pass_of_other_tokens_are_refused(pair, engine):
    with pytest.raises(ParityError, match="17 sequences of 34 tokens do not fit"):
        see_engine(pair.engine, [[5, 6]] * 17, version=0)
    with (
        pytest.raises(ParityError, match="other tokens than were sent"),
        watched(pair.engine.weights.model, pair.engine.dims, Seen([[5, 6, 7]])),
    ):
        pair.engine.score([[5, 6, 8]], version=0)
    assert pair.engine.score([[5, 6, 8]], version=0)  # it goes on
