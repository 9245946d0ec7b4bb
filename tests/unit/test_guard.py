"""The guard: which thresholds an iteration passes, what fires, and what the learner makes of it."""

import math

import pytest
import torch

from fp8rl import guard as guarding
from fp8rl.guard import Verdict, judge, rollout_is_bf16
from fp8rl.journal import StepRecord
from fp8rl.model.tiny import tiny_dims
from fp8rl.recipe.guard import METRIC_OF, Action, Guard, GuardRule, Watched, guard_problems
from fp8rl.recipe.rules import RecipeError, require_valid
from fp8rl.recipe.schema import Recipe
from tests.unit.test_learner_objective import learner_for, logprobs_of, samples

HEALTHY = {
    "mismatch/token_mult_prob_error": 1.01,
    "mismatch/sequence_mult_prob_error_max": 1.1,
    "mismatch/kl_k3": 1e-4,
    "mismatch/ess": 0.99,
    "mismatch/nan_share": 0.0,
    "train/masked_share": 0.0,
    "train/entropy": 1.0,
    "train/grad_norm": 0.5,
}


def guard_of(*rules, **options) -> Guard:
    return Guard(rules=tuple(GuardRule(**rule) for rule in rules), **options)


# --- what is passed, and what fires


def test_healthy_figures_pass_nothing():
    assert judge(Guard(), HEALTHY) == Verdict()


@pytest.mark.parametrize(
    ("rule", "value", "passes"),
    [
        ({"watch": "mismatch", "above": 1.05}, 1.05, False),
        ({"watch": "mismatch", "above": 1.05}, 1.0501, True),
        ({"watch": "ess", "below": 0.3}, 0.3, False),
        ({"watch": "ess", "below": 0.3}, 0.29, True),
        ({"watch": "entropy", "below": 0.1, "above": 3.0}, 0.05, True),
        ({"watch": "entropy", "below": 0.1, "above": 3.0}, 3.5, True),
        ({"watch": "entropy", "below": 0.1, "above": 3.0}, 1.0, False),
    ],
)
def test_a_threshold_is_passed_beyond_it_and_not_at_it(rule, value, passes):
    metric = METRIC_OF[Watched(rule["watch"])]
    verdict = judge(guard_of(rule), HEALTHY | {metric: value})
    assert bool(verdict.breached) is passes
    assert [f.value for f in verdict.firings] == ([value] if passes else [])


def test_every_watched_figure_is_one_that_the_learner_gives():
    learner = learner_for()
    batch, advantages = samples()
    metrics = learner.train(batch, advantages, iteration=1, version=0).metrics
    assert set(METRIC_OF.values()) - {"train/reference_kl"} <= metrics.keys()


def test_a_rule_fires_once_enough_of_the_last_iterations_passed_it():
    rule = {"watch": "mismatch", "above": 1.05, "breaches": 3, "of": 4}
    guard, name = guard_of(rule), "mismatch > 1.05"
    bad = HEALTHY | {"mismatch/token_mult_prob_error": 2.0}
    yes, no = [name], []
    for history, fires in (
        ([], False),
        ([yes, yes], True),
        ([yes, no, yes], True),
        ([yes, yes, no, no], False),  # the first is out of the window
        ([yes, yes, yes, no, no], False),
        ([no, yes, yes], True),
    ):
        verdict = judge(guard, bad, history)
        assert verdict.breached == (name,)
        assert bool(verdict.firings) is fires, history
    assert judge(guard, bad, [yes, yes]).firings[0].breaches == 3
    # However it was before, an iteration that is healthy itself fires nothing.
    assert judge(guard, HEALTHY, [yes, yes, yes]) == Verdict()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None])
def test_what_is_not_a_number_passes_every_threshold_at_once(value):
    rules = (
        {"watch": "mismatch", "above": 5.0, "breaches": 3, "of": 5, "actions": ["stop"]},
        {"watch": "ess", "below": 0.1},
    )
    metrics = dict(HEALTHY)
    if value is None:
        del metrics["mismatch/ess"]
    else:
        metrics["mismatch/ess"] = value
    verdict = judge(guard_of(*rules), metrics)
    assert [f.rule for f in verdict.firings] == ["mismatch > 5", "ess < 0.1"]
    assert verdict.firings[1].value == ("missing" if value is None else str(value))
    assert verdict.actions == {"stop", "warn"}
    # A figure that no rule watches does not matter.
    assert judge(guard_of({"watch": "kl", "above": 1.0}), metrics) == Verdict()


def test_only_skip_pause_and_stop_leave_the_weights_alone():
    for action in Action:
        rule = {"watch": "kl", "above": 0.1, "actions": [action]}
        if action is Action.MASK:
            continue
        verdict = judge(guard_of(rule), HEALTHY | {"mismatch/kl_k3": 1.0})
        assert verdict.skips_update is (action in ("skip_update", "pause", "stop"))


def test_two_verdicts_of_one_iteration_become_one():
    rules = ({"watch": "kl", "above": 0.1}, {"watch": "grad_norm", "above": 1.0})
    first = judge(guard_of(*rules), HEALTHY | {"mismatch/kl_k3": 1.0})
    second = judge(guard_of(*rules), HEALTHY | {"mismatch/kl_k3": 2.0, "train/grad_norm": 2.0})
    both = first.joined(second)
    assert both.breached == ("kl > 0.1", "grad_norm > 1")
    assert [f.value for f in both.firings] == [1.0, 2.0]


# --- rules of the recipe


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ([{"watch": "kl"}], "no threshold"),
        ([{"watch": "reference_kl", "above": 1}], "no reference policy"),
        ([{"watch": "kl", "above": 1, "breaches": 3, "of": 2}], "3 breaches of 2"),
        ([{"watch": "kl", "above": 1}, {"watch": "kl", "above": 1.0}], "stands there twice"),
        ([{"watch": "entropy", "above": 1, "below": 2}], "every value passes"),
        ([{"watch": "kl", "above": 1, "actions": ["mask"]}], "watch=sequence_mismatch"),
        ([{"watch": "sequence_mismatch", "below": 1, "actions": ["mask"]}], "above"),
    ],
)
def test_rules_that_cannot_be_meant_are_refused(rules, words):
    recipe = Recipe.model_validate({"guard": {"rules": rules}})
    with pytest.raises(RecipeError, match=words) as refused:
        require_valid(recipe, tiny_dims(recipe.model.tiny))
    assert "guard.rules" in str(refused.value)


def test_the_usual_rules_only_warn():
    assert not list(guard_problems(Guard(), has_reference=False))
    assert {a for rule in Guard().rules for a in rule.actions} == {Action.WARN}


# --- in the learner

# The samples' log-probs are off by noise of 0.4: this is passed by some sequences and not by others.
SEQUENCE_LIMIT = 1.5


def trained(rules, *, spoil=(), before=None, history=(), **sections):
    learner = learner_for(guard={"rules": rules}, **sections)
    invalid = sections.get("correction", {}).get("invalid", "error")
    batch, advantages = samples(spoil=spoil, invalid=invalid)
    if before:
        before(learner)
    table = learner.model.table.detach().clone()
    result = learner.train(batch, advantages, iteration=1, version=0, history=history)
    return result, learner.model.table.detach() - table, batch


@pytest.mark.parametrize("action", ["skip_update", "pause", "stop"])
def test_a_skipped_update_leaves_the_weights_and_counts_up(action):
    rules = [{"watch": "mismatch", "above": 1.0001, "actions": [action]}]
    result, step, _ = trained(rules)
    assert not step.any()
    assert result.version == 1
    assert result.guard["skipped"]
    assert result.metrics["guard/skipped_update"] == result.metrics["guard/fired"] == 1
    assert result.metrics["train/grad_norm"] > 0  # it was there, and was not applied


def test_a_warning_changes_nothing():
    warned, with_guard, _ = trained([{"watch": "mismatch", "above": 1.0001}])
    silent, without, _ = trained([])
    assert torch.equal(with_guard, without)
    assert with_guard.any()
    assert warned.guard["breached"] == ["mismatch > 1.0001"]
    assert not any(name.startswith("guard/") for name in silent.metrics)
    assert {k: v for k, v in warned.metrics.items() if not k.startswith("guard/")} == silent.metrics


def test_the_gradient_norm_is_judged_before_the_step_that_it_belongs_to():
    rules = [{"watch": "grad_norm", "above": 1e-6, "actions": ["skip_update"]}]
    result, step, _ = trained(rules, learner={"updates": 2})
    assert not step.any()
    assert result.guard["firings"][0]["metric"] == "train/grad_norm"


def test_of_several_updates_those_before_the_firing_stay():
    _, whole, _ = trained([], learner={"updates": 2, "lr": 0.5})
    norms = []

    def watching(learner):
        clip = learner._clip

        def noted():
            norms.append(clip())
            return norms[-1]

        learner._clip = noted

    trained([], learner={"updates": 2, "lr": 0.5}, before=watching)
    assert norms[0] != norms[1]
    limit = (norms[0] + norms[1]) / 2
    side = {"above": limit} if norms[1] > limit else {"below": limit}
    rules = [{"watch": "grad_norm", **side, "actions": ["skip_update"]}]
    result, step, _ = trained(rules, learner={"updates": 2, "lr": 0.5})
    assert step.any()
    assert not torch.equal(step, whole)
    assert result.guard["skipped"]


def test_masked_sequences_leave_the_loss_and_its_denominator():
    rules = [{"watch": "sequence_mismatch", "above": SEQUENCE_LIMIT, "actions": ["mask"]}]
    result, step, batch = trained(rules)
    p = logprobs_of(learner_for().model.table.detach(), batch)
    error = torch.where(batch.mask, (p - batch.g).abs().exp(), 0.0).sum(1) / batch.mask.sum(1)
    kept = error <= SEQUENCE_LIMIT
    assert 0 < int(kept.sum()) < len(kept)
    assert result.guard["masked"] == int((~kept).sum())
    masked_tokens = int(batch.mask[~kept].sum())
    assert result.metrics["train/masked_share"] == pytest.approx(masked_tokens / int(batch.mask.sum()))
    # As if only the others had been sampled.
    learner = learner_for(guard={"rules": []})
    _, advantages = samples()
    learner.train(batch, advantages, iteration=1, version=0, trained=kept)
    alone = learner.model.table.detach() - learner_for().model.table.detach()
    assert torch.allclose(step, alone, atol=1e-6)
    # The panel shows what was masked, and beside it what was kept.
    assert result.metrics["mismatch/sequence_mult_prob_error_max"] > SEQUENCE_LIMIT
    assert result.metrics["mismatch/kept/sequence_mult_prob_error_max"] <= SEQUENCE_LIMIT


def test_mask_waits_for_its_breaches_like_every_action():
    rule = {
        "watch": "sequence_mismatch",
        "above": SEQUENCE_LIMIT,
        "breaches": 2,
        "of": 2,
        "actions": ["mask"],
    }
    once, _, _ = trained([rule])
    assert (once.guard["masked"], once.guard["firings"]) == (0, [])
    again, _, _ = trained([rule], history=[once.guard["breached"]])
    assert again.guard["masked"] > 0


def test_a_nan_of_the_learner_stops_the_update_where_a_rule_can():
    def spoil(learner):
        learner.model.table.data[0, 0] = math.nan

    rules = [{"watch": "mismatch", "above": 1e9, "actions": ["skip_update"]}]
    result, step, _ = trained(rules, before=spoil)
    assert result.guard["skipped"]
    assert not step[1:].any()
    assert result.metrics["mismatch/nan_share"] > 0
    for none in ([], [{"watch": "mismatch", "above": 1e9}]):
        with pytest.raises(FloatingPointError, match="skip_update"):
            trained(none, before=spoil)


def test_a_dropped_sample_counts_in_the_shares():
    rules = [{"watch": "nan_share", "above": 0.0}, {"watch": "masked_share", "above": 0.0}]
    result, _, batch = trained(rules, spoil=(2,), correction={"invalid": "drop"})
    tokens = int(batch.mask.sum())
    assert result.metrics["mismatch/nan_share"] == 1 / tokens
    assert result.metrics["train/masked_share"] == pytest.approx(int(batch.mask[2].sum()) / tokens)
    assert result.guard["breached"] == ["nan_share > 0", "masked_share > 0"]


# --- what the journal says


class FakeJournal:
    """Train records by iteration, without files."""

    def __init__(self, found: dict[int, dict], folder=None):
        self.found, self.folder = found, folder

    def is_committed(self, iteration, step):
        return step == "train" and iteration in self.found

    def record(self, iteration, step):
        return StepRecord(step, iteration, 0.0, output={"guard": self.found[iteration]})

    def steps(self):
        return [(n, "train") for n in self.found] + [(0, "requantize")]


def fired(*actions):
    firing = {"rule": "r", "metric": "m", "value": 2.0, "breaches": 1, "of": 1}
    return {
        "breached": ["r"],
        "firings": [firing | {"actions": list(actions)}],
        "masked": 3,
        "skipped": False,
    }


QUIET = {"breached": [], "firings": [], "masked": 0, "skipped": False}


def test_bf16_lasts_as_long_as_the_recipe_says_and_goes():
    journal = FakeJournal({1: QUIET, 2: fired("rollout_bf16"), 3: QUIET, 4: QUIET, 5: fired("warn")})
    rule = {"watch": "kl", "above": 1, "actions": ["rollout_bf16"]}

    def versions(count, origin=0):
        guard = guard_of(rule, bf16_iterations=count)
        return [v for v in range(origin, 6) if rollout_is_bf16(journal, guard, v, origin)]

    assert versions(1) == [2]
    assert versions(3) == [2, 3, 4]
    assert versions(3, origin=2) == []  # a fork starts in its recipe's precision
    assert not rollout_is_bf16(journal, Guard(), 2, 0)


def test_the_history_of_a_fork_begins_with_its_parents(monkeypatch):
    rule = {"watch": "kl", "above": 1, "breaches": 2, "of": 4}
    guard = guard_of(rule)
    parent = FakeJournal({n: fired("warn") if n == 5 else QUIET for n in range(1, 7)})
    kept = guarding.window(parent, guard, 6, 0)
    assert kept == {"4": [], "5": ["r"], "6": []}
    monkeypatch.setattr(guarding, "read_identity", lambda folder: {"parent": {"guard": kept}})
    child = FakeJournal({7: QUIET})
    assert guarding.history(child, guard, 8, origin=6) == [["r"], [], []]
    assert guarding.history(child, guard, 7, origin=6) == [[], ["r"], []]
    assert guarding.history(parent, guard, 2, origin=0) == [[]]
    assert guarding.history(parent, Guard(rules=()), 3, origin=0) == []


def test_events_have_a_row_for_each_firing():
    journal = FakeJournal({1: QUIET, 3: fired("warn"), 2: fired("skip_update", "rollout_bf16")})
    table = guarding.events(journal)
    assert table["iteration"] == [2, 3]
    assert table["actions"] == ["skip_update, rollout_bf16", "warn"]
    assert table["masked"] == [3, 3]
    assert len({len(column) for column in table.values()}) == 1
    text = guarding.describe(fired("warn")["firings"][0])
    assert text == "r (it is 2): warn"
