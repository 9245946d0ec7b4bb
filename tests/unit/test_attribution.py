"""Attribution of the mismatch: units, ranking of a planted fault, choice, the command's errors."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from flows.cli import app
from fp8rl.layerwise.attribution import Effect, Fall, Measure, attribute, choose
from fp8rl.layerwise.attribution_recipe import measured_recipe
from fp8rl.layerwise.setup import trained_model
from fp8rl.layerwise.units import exclude_override, units_of
from fp8rl.learner.batch import make_batch
from fp8rl.learner.learner import Learner
from fp8rl.learner.publishing import published_specs
from fp8rl.model.precision import Format, PlanRules, make_plan
from fp8rl.model.tiny import tiny_dims
from fp8rl.recipe.load import load_recipe, with_overrides
from fp8rl.recipe.rules import RecipeError, plan_rules, rollout_fp8
from tests.models import recipe_with
from tests.planted import KIND, LAYER, MODEL, write_planted

DIMS = tiny_dims(MODEL)
RECIPE = recipe_with(model={"tiny": MODEL.model_dump()}, precision={"rollout": "fp8"})
SCHEME = rollout_fp8(RECIPE.precision).weight
FP8_ROLLOUT = "configs/tiny/fp8-rollout.yaml"


def plan_of(recipe):
    return make_plan(plan_rules(recipe.precision, recipe.precision.rollout), DIMS)


def formats(plan):
    return {name: decision.format for name, decision in plan.items()}


@pytest.fixture(scope="module")
def learner(tmp_path_factory):
    folder = write_planted(tmp_path_factory.mktemp("planted"))
    learner = Learner(folder, RECIPE)
    learner.load(folder, 0)
    return learner


@pytest.fixture(scope="module")
def batch():
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(4, 90, (24,), generator=generator).tolist() for _ in range(12)]
    return make_batch([r[:6] for r in rows], [r[6:] for r in rows])


# Units.


def test_units_are_layers_and_kinds_and_their_patterns_keep_just_them():
    units = units_of(plan_of(RECIPE), DIMS, SCHEME)
    assert [u.name for u in units.units] == [
        *("layer 0", "layer 1", "layer 2", "qkv", "o", "gate_up", "down")
    ]
    assert sum(u.share for u in units.units if u.is_layer) == pytest.approx(1)
    assert sum(u.share for u in units.units if not u.is_layer) == pytest.approx(1)
    for kept in (*([u] for u in units.units), units.units[1::3]):
        recipe = with_overrides(RECIPE, [exclude_override((), kept)])
        assert formats(plan_of(recipe)) == formats(units.kept(kept))
    down = formats(units.alone(units.units[-1]))
    assert {n for n, f in down.items() if f.is_fp8} == {
        f"model.layers.{n}.mlp.down_proj.weight" for n in range(3)
    }
    assert not any(f.is_fp8 for f in formats(units.alone(None)).values())


def test_layer_1_is_not_layer_10():
    dims = replace(DIMS, layers=12)
    plan = make_plan(PlanRules(Format.FP8_BLOCK), dims)
    units = units_of(plan, dims, SCHEME)
    kept = make_plan(PlanRules(Format.FP8_BLOCK, exclude=(units.units[1].pattern,)), dims)
    assert formats(kept) == formats(units.kept([units.units[1]]))


def test_what_the_recipe_keeps_in_bf16_is_no_unit_and_stays_excluded():
    recipe = with_overrides(
        RECIPE, ["precision.first_layers_bf16=1", "precision.exclude=[re:.*o_proj]"]
    )
    units = units_of(plan_of(recipe), DIMS, SCHEME)
    assert [u.name for u in units.units] == ["layer 1", "layer 2", "qkv", "gate_up", "down"]
    override = exclude_override(recipe.precision.exclude, [units.units[0]])
    assert override == 'precision.exclude=["re:.*o_proj", "model.layers.1.*"]'
    assert formats(plan_of(with_overrides(recipe, [override]))) == formats(units.kept([units.units[0]]))


def test_bytes_are_those_of_the_published_weights(learner):
    units = units_of(plan_of(RECIPE), DIMS, SCHEME)

    def published(plan):
        return sum(spec.size for spec in published_specs(learner.model, plan, SCHEME))

    for kept in ([units.units[0]], [units.units[0], units.units[-1]]):
        more = published(units.kept(kept)) - published(units.plan)
        assert units.bytes_more(kept) == more > 0


# Formats of a live learner.


def test_a_learner_that_changes_its_formats_is_as_one_built_with_them(learner, batch, tmp_path):
    fp8 = with_overrides(RECIPE, ["precision.learner=fp8"])
    built = Learner(write_planted(tmp_path), fp8)
    built.load(tmp_path, 0)
    measure = Measure(learner, batch)
    expected = built.logprobs(batch, version=0, temperature=1.0)
    assert torch.equal(measure.logprobs(built.plan), expected)
    assert torch.equal(learner.logprobs(batch, version=0, temperature=1.0), measure.reference)
    assert not torch.equal(expected, measure.reference)


def test_what_stays_in_fp8_is_not_quantised_again(learner):
    units = units_of(plan_of(RECIPE), DIMS, SCHEME)
    linears = [module for _, module in learner.model.linears.values()]
    learner.model.set_formats(units.plan)
    before = [module.fp8 for module in linears]
    learner.model.set_formats(units.kept([units.units[0]]))
    same = [module.fp8 is fp8 for module, fp8 in zip(linears, before, strict=True)]
    learner.model.set_formats(learner.plan)
    assert same == [False] * 4 + [True] * 8
    assert all(module.fp8 is None for module in linears)


# Ranking and choice.


def test_a_planted_fault_is_found(learner, batch):
    units = units_of(plan_of(RECIPE), DIMS, SCHEME)
    found = attribute(units, Measure(learner, batch), most=2, budget=0.6)
    for name in (f"layer {LAYER}", KIND):
        (row,) = (row for row in found.rows if row.unit.name == name)
        others = [r for r in found.rows if r.unit.name not in (f"layer {LAYER}", KIND)]
        assert row.fall.is_beyond(found.noise)
        assert row.fall.value > 5 * max(r.fall.value for r in others)
        assert row.alone.kl_k3 > 5 * max(r.alone.kl_k3 for r in others)
    assert {row.unit.name for row in found.rows[:2]} == {f"layer {LAYER}", KIND}
    assert found.suggestion[0] in [row.unit for row in found.rows[:2]]
    assert found.steps[0].effect.kl_k3 < found.all_fp8.kl_k3 / 5
    assert 0 < found.floor < found.all_fp8.kl_k3


def effect(*sums):
    sums = np.array(sums)
    tokens = np.full(len(sums), 10)
    return Effect(1.0, float(sums.sum() / tokens.sum()), sums, tokens)


def some_units():
    return units_of(plan_of(RECIPE), DIMS, SCHEME)


def test_fall_and_its_interval():
    same = Fall.between(effect(3.0, 5.0, 4.0), effect(2.0, 4.0, 3.0))
    assert (same.value, same.low, same.high) == pytest.approx((0.1, 0.1, 0.1))
    assert same.is_beyond(0.05)
    assert not same.is_beyond(0.2)
    mixed = Fall.between(effect(9.0, 5.0, 4.0), effect(2.0, 7.0, 6.0))
    assert mixed.low < 0 < mixed.value < mixed.high
    assert not mixed.is_beyond(0.0)


def test_choice_is_greedy_and_ends_with_noise_budget_or_number():
    units = some_units()
    worth = {"layer 0": 0.5, "layer 1": 2.0, "layer 2": 1.0, "qkv": 0.0, "o": 0.1, "down": 3.0}
    calls = []

    def left(kept):
        return effect(*([10.0 - sum(worth.get(u.name, 0) for u in kept)] * 4))

    def measure(plan):
        in_bf16 = {name for name in units.sizes if not plan[name].format.is_fp8}
        kept = [unit for unit in units.units if unit.parameters <= in_bf16]
        calls.append(kept)
        return left(kept)

    left_out = {u: left([u]) for u in units.units}
    options = {"all_fp8": left([]), "most": 1, "noise": 0.01, "budget": 0.9}

    def chosen(**changed):
        taken = choose(units, left_out, measure, **(options | changed))
        return [(step.unit.name, step.taken) for step in taken]

    assert chosen() == [("down", True)]
    assert calls == []
    assert chosen(most=2) == [("down", True), ("layer 1", True)]
    assert len(calls) == len(units.units) - 1
    assert all("down" in [unit.name for unit in kept] for kept in calls)
    # Small steps are taken together, once both are beyond the noise.
    names = ["down", "layer 1", "layer 2"]
    for noise, taken in ((0.05, [1, 1, 1]), (0.15, [1, 1, 0]), (0.35, [0, 1, 0]), (0.9, [0, 0, 0])):
        assert chosen(noise=noise, most=3) == list(zip(names, map(bool, taken), strict=True))
    (small,) = chosen(budget=0.2)
    assert small[0] in {u.name for u in units.units if u.share <= 0.2}
    assert chosen(budget=0.01) == []


# The recipe and the command.


def test_measured_recipe_has_a_learner_that_can_stand_in():
    values = ["precision.rollout_scales.weights=pow2", "precision.learner_kv=fp8"]
    recipe = load_recipe("configs/tiny/fp8-e2e-kv.yaml", values).recipe
    precision = measured_recipe(recipe, weights=None).precision
    assert (precision.rollout, precision.learner, precision.kv_cache) == ("fp8", "bf16", "bf16")
    assert precision.learner_kv == "bf16"
    assert precision.learner_scales == recipe.precision.rollout_scales
    assert precision.backend != "auto"


def test_the_tiny_model_needs_weights_that_mean_something(tmp_path):
    recipe = load_recipe(FP8_ROLLOUT, [f"runs_dir={tmp_path}"]).recipe
    with pytest.raises(RecipeError, match=r"no weights to look at yet.*--weights"):
        trained_model(recipe, tmp_path / "model")
    assert trained_model(recipe, tmp_path / "model", weights=tmp_path) == tmp_path


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["configs/tiny/bf16.yaml"], "precision.rollout: the recipe rolls out in BF16"),
        ([FP8_ROLLOUT, "precision.parity=false"], "Set precision.parity=true"),
        ([FP8_ROLLOUT, "rollout.sample=3"], "did you mean 'rollout.samples'"),
        ([FP8_ROLLOUT, "--weights", "nowhere"], "no config.json"),
    ],
)
def test_command_refuses(arguments, text, tmp_path):
    done = CliRunner().invoke(app, ["attribute", *arguments, f"runs_dir={tmp_path / 'runs'}"])
    assert done.exit_code == 2
    assert text in " ".join(done.output.split())
    assert not (tmp_path / "runs").exists()
