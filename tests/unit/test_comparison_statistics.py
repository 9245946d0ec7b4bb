"""The interval covers what it says, and the verdict follows its rule in all directions."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8rl.comparison.statistics import Estimate, Sample, estimate, paired, widening
from fp8rl.comparison.verdict import Word, fewest_prompts, judge, more_data, rule, verdict
from fp8rl.validation import interval
from tests import comparison_oracle as oracle


def names(count, seed=0):
    return tuple(f"{seed}/{i}" for i in range(count))


def test_over_one_seed_it_is_the_interval_of_an_evaluation():
    counts = [(4, right % 5) for right in range(40)]
    found = estimate([Sample(0, names(40), np.array([c / n for n, c in counts]))])
    assert (found.low, found.high) == pytest.approx(interval(counts))
    assert (found.seeds, found.prompts) == (1, 40)


def test_prompts_that_seeds_share_are_drawn_together():
    """Seeds that agree on every prompt say no more about the prompts than one of them."""
    values = np.random.default_rng(0).random(50)
    one = estimate([Sample(0, names(50), values)])
    shared = estimate([Sample(seed, names(50), values) for seed in range(8)])
    apart = estimate([Sample(seed, names(50, seed), values) for seed in range(8)])
    assert (shared.low, shared.high) == pytest.approx((one.low, one.high), abs=0.01)
    assert apart.high - apart.low < 0.5 * (one.high - one.low)
    assert (shared.prompts, apart.prompts) == (50, 400)


def test_it_equals_a_bootstrap_computed_draw_by_draw():
    generator = np.random.default_rng(3)
    samples = [Sample(s, names(9 + s, s % 2), generator.random(9 + s)) for s in range(4)]
    wanted = oracle.interval([dict(zip(s.prompts, s.values, strict=True)) for s in samples], 0, 1)
    found = estimate(samples)
    assert (found.mean, found.low, found.high) == pytest.approx(wanted)
    assert estimate(samples) == found
    assert estimate(samples, draw_seed=1) != found


def test_many_prompts_are_drawn_in_blocks_with_the_same_result(monkeypatch):
    samples = [Sample(s, names(30, s), np.random.default_rng(s).random(30)) for s in range(3)]
    whole = estimate(samples)
    monkeypatch.setattr("fp8rl.comparison.statistics._BLOCK", 1000)
    assert estimate(samples) == whole


@pytest.mark.parametrize("seeds", [2, 4])
@pytest.mark.parametrize("spread", [0.0, 0.2])
@pytest.mark.parametrize("shared", [False, True])
def test_it_covers_the_truth_in_simulated_experiments(seeds, spread, shared):
    """Seeds differ by `spread`, prompts by 0.2; the truth is 0. A plain bootstrap of two seeds that
    differ covers it in about half of them."""
    generator = np.random.default_rng(seeds)
    covered = 0
    for _ in range(60):
        common = generator.normal(0, 0.2, 16)
        samples = []
        for seed in range(seeds):
            prompts = common if shared else generator.normal(0, 0.2, 16)
            values = generator.normal(0, spread) + prompts + generator.normal(0, 0.1, 16)
            samples.append(Sample(seed, names(16, 0 if shared else seed), values))
        found = estimate(samples, (-9.0, 9.0))
        covered += found.low <= 0 <= found.high
    assert covered >= 0.87 * 60


def test_the_seeds_part_is_as_wide_as_students_interval():
    """Without any spread over prompts what is left is Student's t of the seeds' means."""
    from scipy import stats

    means = np.random.default_rng(5).normal(0, 1, 12)
    samples = [Sample(s, names(2, s), np.full(2, mean)) for s, mean in enumerate(means)]
    found = estimate(samples, (-9.0, 9.0))
    low, high = stats.t.interval(0.95, 11, means.mean(), stats.sem(means))
    assert (found.low, found.high) == pytest.approx((low, high), rel=0.1, abs=0.1)
    assert widening(2) > widening(3) > widening(10) > widening(1000)
    assert widening(1000) == pytest.approx(1, abs=0.01)


def test_bounds_and_what_cannot_be_estimated():
    samples = [Sample(s, names(3, s), np.array([1.0, 1.0, s])) for s in (0, 1)]
    assert estimate(samples).high == 1.0
    with pytest.raises(ValueError, match="needs a seed"):
        estimate([])
    with pytest.raises(ValueError, match="needs a seed"):
        estimate([Sample(0, (), np.array([]))])


def test_pairs_are_of_the_same_prompt_in_any_order():
    one = Sample(1, ("a", "b", "c"), np.array([1.0, 0.5, 0.0]))
    other = Sample(1, ("c", "x", "a"), np.array([0.25, 9.0, 0.5]))
    found = paired(one, other)
    assert found.prompts == ("a", "c")
    assert list(found.values) == [0.5, -0.25]
    with pytest.raises(ValueError, match="no prompt in common"):
        paired(one, Sample(1, ("y",), np.array([1.0])))


# The verdict.

ORDER = {Word.WORSE: 0, Word.EQUAL: 1, Word.OPEN: 1, Word.BETTER: 2}
values = st.floats(-1, 1)
widths = st.floats(0, 1)
margins = st.floats(0.001, 0.5)


@given(values, st.floats(0, 1), widths, margins)
def test_a_higher_interval_never_has_a_lower_verdict(low, more, width, margin):
    assert (
        ORDER[judge(low + more, low + more + width, margin)] >= ORDER[judge(low, low + width, margin)]
    )


@given(values, widths, st.floats(0, 1), st.floats(0, 1), margins)
def test_a_narrower_interval_is_never_less_decided(low, width, first, second, margin):
    wide = judge(low, low + width, margin)
    inner = sorted((low + first * width, low + second * width))
    narrow = judge(inner[0], min(inner[1], low + width), margin)
    allowed = {
        Word.OPEN: set(Word),
        Word.EQUAL: {Word.EQUAL},
        Word.WORSE: {Word.WORSE, Word.EQUAL},
        Word.BETTER: {Word.BETTER, Word.EQUAL},
    }
    assert narrow in allowed[wide]


@given(values, widths, margins, margins)
def test_a_wider_margin_never_takes_equal_away(low, width, one, other):
    small, large = sorted((one, other))
    if judge(low, low + width, small) is Word.EQUAL:
        assert judge(low, low + width, large) is Word.EQUAL


def made(low, high, seeds=(0.0, 0.0), prompts=1000):
    return Estimate((low + high) / 2, low, high, dict(enumerate(seeds)), prompts)


def test_each_branch_of_the_rule():
    words = {
        Word.EQUAL: [(-0.02, 0.02), (-0.02, -0.01), (0.0, 0.0)],
        Word.WORSE: [(-0.03, -0.01), (-0.5, -0.4)],
        Word.BETTER: [(0.01, 0.03), (0.4, 0.5)],
        Word.OPEN: [(-0.03, 0.01), (-0.01, 0.03), (-0.5, 0.5), (-0.03, 0.0), (0.0, 0.03)],
    }
    for word, intervals in words.items():
        for low, high in intervals:
            assert verdict(made(low, high), 0.02).word is word, (low, high)
    assert verdict(made(-0.5, -0.4), 0.02).why == "by more than the margin"
    assert "below 0, but by less" in verdict(made(-0.02, -0.01), 0.02).why
    assert {word for word, _ in rule(0.02)} == {word.value for word in Word} - {"reference"}


def test_what_holds_a_verdict_open():
    sure = made(0.1, 0.2)
    assert verdict(None, 0.02).word is Word.OPEN
    one_seed = dataclasses.replace(sure, by_seed={0: 0.1})
    assert "one seed" in verdict(one_seed, 0.02).why
    assert "run-7" in verdict(sure, 0.02, ["run-7"]).why
    # No difference in few prompts says little; one in many does.
    few = verdict(made(0.0, 0.0, prompts=fewest_prompts(0.02) - 1), 0.02)
    assert (few.word, "too few" in few.why) == (Word.OPEN, True)
    assert verdict(made(0.0, 0.0, prompts=fewest_prompts(0.02)), 0.02).word is Word.EQUAL
    count = fewest_prompts(0.02)
    assert (1 - 0.02) ** count <= 0.025 < (1 - 0.02) ** (count - 10)


@pytest.mark.parametrize(("mean", "sd"), [(0.0, 0.01), (0.03, 0.02), (0.0, 0.02)])
def test_the_seeds_that_are_asked_for_would_decide(mean, sd):
    """Simulated with so many seeds whose differences have that mean and spread."""
    from scipy import stats

    now = made(-0.1, 0.1 + 2 * mean, seeds=(mean - sd / 2**0.5, mean + sd / 2**0.5))
    count = int(more_data(now, 0.02).split()[1])
    half = stats.t.ppf(0.975, count - 1) * sd / count**0.5
    assert judge(mean - half, mean + half, 0.02) is not Word.OPEN
    half = stats.t.ppf(0.975, count - 2) * sd / (count - 1) ** 0.5
    assert count == 3 or judge(mean - half, mean + half, 0.02) is Word.OPEN
    assert "more than 100 seeds" in more_data(made(-1, 1, seeds=(-0.9, 0.9)), 0.02)
