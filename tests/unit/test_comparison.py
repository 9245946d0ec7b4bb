"""A comparison's numbers against an independent reading of the same run folders, and its cases."""

import csv
import io
import math

import numpy as np
import pytest

from fp8rl.comparison.compare import Request, compare
from fp8rl.comparison.page import make_page
from fp8rl.comparison.render_csv import arms_csv, runs_csv
from fp8rl.comparison.render_html import to_html
from fp8rl.comparison.selection import ComparisonError
from fp8rl.comparison.verdict import Word
from fp8rl.identity import COPY, IDENTITY
from fp8rl.journal import JournalError
from fp8rl.runs import NoRunError
from tests import comparison_oracle as oracle
from tests.comparison_runs import FP8, make_run
from tests.folders import flipped


@pytest.fixture
def runs(tmp_path):
    return tmp_path / "runs"


def table_of(text):
    return {row[next(iter(row))]: row for row in csv.DictReader(io.StringIO(text))}


def arms_of(comparison):
    return {arm.name: arm for arm in comparison.arms}


def same(one, wanted):
    assert (one.mean, one.low, one.high) == pytest.approx(wanted, abs=1e-12)


def test_every_number_equals_an_independent_reading(runs):
    """Three seeds beside two, another machine, runs that came to other iterations."""
    made = [make_run(runs, "bf16", seed) for seed in (0, 1)]
    made += [make_run(runs, "fp8", 0, overrides=FP8, chances={0: 0.2, 2: 0.9, 4: 0.5})]
    made += [make_run(runs, "fp8", seed, overrides=FP8, host="another") for seed in (1, 7)]
    comparison = compare(Request(runs))
    raw = [oracle.RawRun(run.folder) for run in made]
    bf16, fp8 = raw[:2], raw[2:]
    found = arms_of(comparison)
    assert list(found) == ["bf16", "fp8"]
    for arm, its in ((found["bf16"], bf16), (found["fp8"], fp8)):
        same(arm.last, oracle.accuracy(its))
        same(arm.best, oracle.accuracy(its, best=True))
        same(arm.greedy, oracle.accuracy(its, kind="greedy"))
    assert found["fp8"].best.mean > found["fp8"].last.mean
    same(found["fp8"].difference.sampled, oracle.difference(fp8, bf16))
    same(found["fp8"].difference.greedy, oracle.difference(fp8, bf16, "greedy"))
    assert found["fp8"].difference.iterations == {0: 4, 1: 4}
    speeds = [np.median(r.over("perf/tokens_per_sec_per_gpu", steady=True)) for r in (*bf16, fp8[0])]
    assert found["fp8"].speed == pytest.approx(speeds[2] / np.mean(speeds[:2]))
    runs_table = table_of(runs_csv(comparison))
    for run, its in zip(made, raw, strict=True):
        row = runs_table[run.name]
        numbers = {
            "val_accuracy_after": its.accuracy[4],
            "val_accuracy_best": max(its.accuracy.values()),
            "token_mult_prob_error": its.median("mismatch/token_mult_prob_error"),
            "token_mult_prob_error_max": max(its.over("mismatch/token_mult_prob_error")),
            "kl_k3": its.median("mismatch/kl_k3"),
            "ess": its.median("mismatch/ess"),
            "ess_min": min(its.over("mismatch/ess")),
            "entropy": its.median("rollout/entropy"),
            "response_length": its.median("rollout/response_length_mean"),
            "kv_preemptions": sum(its.over("kv/preemptions")),
            **{f"share_{step}": share for step, share in its.shares().items()},
        }
        for key, wanted in numbers.items():
            assert float(row[key]) == pytest.approx(wanted), key
        assert (row["arm"], int(row["seed"])) == (its.arm, its.seed)
    row = table_of(arms_csv(comparison))["fp8"]
    wanted = oracle.difference(fp8, bf16)
    keys = ("difference", "difference_low", "difference_high")
    assert [float(row[key]) for key in keys] == pytest.approx(wanted)
    assert float(row["mean_entropy"]) == pytest.approx(
        np.mean([r.median("rollout/entropy") for r in fp8])
    )


def test_the_page_shows_those_numbers_and_needs_nothing_else(runs):
    made = [
        make_run(runs, arm, s, overrides=o) for arm, o in (("bf16", ()), ("fp8", FP8)) for s in (0, 1)
    ]
    raw = [oracle.RawRun(run.folder) for run in made]
    html = to_html(make_page(compare(Request(runs))))
    page = oracle.PageReader(html)
    last, best = oracle.accuracy(raw[2:]), oracle.accuracy(raw[2:], best=True)
    row = page.tables["Accuracy"][0][2]
    assert row[:3] == ["fp8", "2", "24"]
    assert row[3] == f"{last[0]:.1%} ({last[1]:.1%} to {last[2]:.1%})"
    assert row[4] == f"{best[0]:.1%} ({best[1]:.1%} to {best[2]:.1%})"
    mean, low, high = (f"{100 * v:+.1f}" for v in oracle.difference(raw[2:], raw[:2]))
    assert page.tables["Verdict"][0][2][2] == f"{mean} ({low} to {high})"
    images = [value for tag, key, value in page.attributes if (tag, key) == ("img", "src")]
    assert len(images) == 3
    assert all(value.startswith("data:image/png;base64,") for value in images)
    outside = [
        v for _, key, v in page.attributes if key in ("href", "src") and not v.startswith("data:")
    ]
    assert not outside
    assert "url(" not in html
    assert "emulation" in page.text


def test_equal_worse_better_and_open_verdicts(runs):
    sure = {"prompts": 100}
    for seed in range(3):
        make_run(runs, "bf16", seed, chances={4: 0.5}, **sure)
        make_run(runs, "same", seed, chances={4: 0.5}, overrides=FP8, **sure)
        make_run(runs, "worse", seed, chances={4: 0.2}, overrides=FP8, **sure)
        make_run(runs, "better", seed, chances={4: 0.9}, overrides=FP8, **sure)
        if seed == 0:
            make_run(runs, "once", seed, chances={4: 0.9}, overrides=FP8, **sure)
    words = {
        name: arm.verdict.word for name, arm in arms_of(compare(Request(runs, margin=0.2))).items()
    }
    assert words == {
        **{"bf16": Word.REFERENCE, "same": Word.EQUAL, "worse": Word.WORSE, "better": Word.BETTER},
        "once": Word.OPEN,
    }
    strict = arms_of(compare(Request(runs, margin=0.001)))["same"].verdict
    assert strict.word is Word.OPEN
    other = arms_of(compare(Request(runs, reference="better", margin=0.2)))
    assert other["bf16"].verdict.word is Word.WORSE
    assert next(iter(other)) == "better"


def test_runs_that_ended_early_hold_the_verdict_open_and_are_named(runs):
    for seed in range(3):
        make_run(runs, "bf16", seed, prompts=100, chances={2: 0.5, 4: 0.5})
        state, done = ("failed", 3) if seed == 1 else ("finished", 4)
        make_run(
            *(runs, "fp8", seed),
            **{"overrides": FP8, "prompts": 100, "chances": {2: 0.5, 4: 0.5}},
            **{"done": done, "state": state, "name": f"fp8-{seed}"},
        )
    make_run(runs, "fp8", 3, overrides=FP8, done=-1, state="running", name="fp8-3")
    comparison = compare(Request(runs, margin=0.2))
    arm = arms_of(comparison)["fp8"]
    assert arm.verdict.word is Word.OPEN
    assert "fp8-1, fp8-3" in arm.verdict.why
    assert arm.difference.iterations == {0: 4, 1: 2, 2: 4}
    assert [run.state.state for run in arm.runs] == ["finished", "failed", "finished", "killed"]
    text = " ".join(arm.notes)
    assert "fp8-1 (failed) came to iteration 3 of 4" in text
    assert "fp8-3 (killed) has no evaluation yet" in text
    page = oracle.PageReader(to_html(make_page(comparison)))
    assert page.tables["Verdict"][0][2][3:5] == ["3", "2, 4"]
    shown = page.tables["Runs"][0]
    assert shown[5][:5] == ["fp8-1", "fp8", "1", "failed", "3 of 4"]
    assert shown[5][-1] == "it is failed"
    without = ("run-0", "run-2", "run-4", "fp8-0", "fp8-2")
    assert arms_of(compare(Request(runs, runs=without, margin=0.2)))["fp8"].verdict.word is Word.EQUAL


def test_a_run_that_was_made_shorter_is_compared_where_it_was_evaluated(runs):
    """Its last iteration has no evaluation then, and it is complete all the same."""
    for seed in (0, 1):
        make_run(runs, "bf16", seed, prompts=100, chances={2: 0.5, 4: 0.5})
        make_run(runs, "fp8", seed, prompts=100, chances={2: 0.5}, overrides=FP8, name=f"short-{seed}")
    arm = arms_of(compare(Request(runs, margin=0.9)))["fp8"]
    assert arm.verdict.word is Word.EQUAL
    assert arm.difference.iterations == {0: 2, 1: 2}
    assert "short-1 (finished) came to iteration 4 of 4; its last evaluation is that of 2" in arm.notes


def test_without_any_evaluation_the_page_is_there_and_says_so(runs):
    make_run(runs, "bf16", done=-1, state="running")
    make_run(runs, "fp8", done=3, chances={}, overrides=FP8)
    comparison = compare(Request(runs))
    assert [arm.last for arm in comparison.arms] == [None, None]
    arm = comparison.arms[1]
    assert (arm.verdict.word, arm.difference, arm.speed) == (Word.OPEN, None, None)
    page = oracle.PageReader(to_html(make_page(comparison)))
    assert page.tables["Accuracy"][0][1:] == [
        ["bf16", "0", "0", "-", "-", "-", "-"],
        ["fp8", "0", "0", "-", "-", "-", "-"],
    ]
    assert table_of(runs_csv(comparison))["run-0"]["val_accuracy_after"] == ""


def test_one_arm_alone_is_shown_without_a_verdict(runs):
    make_run(runs, "fp8", overrides=FP8)
    comparison = compare(Request(runs))
    assert comparison.reference is None
    assert comparison.arms[0].verdict is None
    page = oracle.PageReader(to_html(make_page(comparison)))
    assert "Verdict" not in page.tables
    assert "no arm to compare with" in page.text
    make_run(runs, "bf16-alone", overrides=["tracking.experiment=other"])
    assert compare(Request(runs, "other")).reference == "bf16-alone"


def test_guard_firings_are_counted_by_rule(runs):
    make_run(runs, "bf16", firings={2: ["high kl"], 3: ["high kl", "low ess"]})
    comparison = compare(Request(runs))
    assert comparison.runs[0].firings == {"high kl": 2, "low ess": 1}
    page = oracle.PageReader(to_html(make_page(comparison)))
    rows = page.tables["Guard"][0][1:]
    assert rows == [["bf16", "run-0", "high kl", "2"], ["bf16", "run-0", "low ess", "1"]]
    assert table_of(runs_csv(comparison))["run-0"]["guard_fired"] == "2"


def test_a_mismatch_that_is_no_number_is_the_worst_there_is(runs):
    make_run(runs, "bf16", metrics={"mismatch/token_mult_prob_error": math.nan})
    figures = compare(Request(runs)).runs[0].figures
    assert math.isnan(figures["token_mult_prob_error_max"])


# What is refused.


def refused(folder, **asked):
    with pytest.raises((ComparisonError, NoRunError)) as error:
        compare(Request(folder, **asked))
    return str(error.value)


def test_experiments_and_runs_that_are_not_there_are_named(runs, tmp_path):
    assert "no runs in" in refused(tmp_path / "nowhere")
    make_run(runs, "bf16", name="a")
    make_run(runs, "bf16", name="b", overrides=["tracking.experiment=second"])
    text = refused(runs)
    assert "'fp8rl' (1 runs)" in text
    assert "'second' (1 runs)" in text
    assert "did you mean 'second'" in refused(runs, experiment="secund")
    assert "no run 'c'" in refused(runs, runs=("c",))
    assert "not of experiment 'second': a" in refused(runs, experiment="second", runs=("a", "b"))
    assert "no arm 'fp8'; there are bf16" in refused(runs, experiment="second", reference="fp8")
    for margin in (0.0, -1.0, 2.0, math.nan):
        assert "--margin" in refused(runs, experiment="second", margin=margin)
    assert compare(Request(runs, runs=("b",))).experiment == "second"


def test_two_runs_of_an_arm_and_seed_are_refused_until_one_is_chosen(runs):
    for name in ("a", "b"):
        make_run(runs, "bf16", 3, name=name)
    assert "arm 'bf16', seed 3: a, b" in refused(runs)
    assert [run.name for run in compare(Request(runs, runs=("b",))).runs] == ["b"]


def test_recipes_that_differ_in_more_are_refused_by_key_unless_allowed(runs):
    make_run(runs, "bf16", name="a")
    make_run(
        *(runs, "fp8"),
        name="b",
        overrides=[*FP8, "learner.lr=0.1", "correction.truncate=3", "iterations=6", "retry.attempts=9"],
    )
    text = refused(runs)
    assert "learner.lr: 0.0001 in a; 0.1 in b" in text
    assert "correction.truncate: 2.0 in a; 3.0 in b" in text
    assert "iterations: 4 in a; 6 in b" in text
    assert "retry" not in text
    assert "precision" not in text.replace("in more than precision", "")
    assert "learner.lr" not in refused(runs, allowed=("learner",))
    assert "did you mean 'learner.lr'" in refused(runs, allowed=("lerner.lr",))
    found = compare(Request(runs, allowed=("learner.lr", "correction", "iterations")))
    shown = oracle.PageReader(to_html(make_page(found))).tables["What differs"][0]
    assert ["learner.lr", "0.0001", "0.1"] in shown


def test_precision_may_differ_between_arms_only(runs):
    make_run(runs, "fp8", 0, name="a", overrides=FP8)
    make_run(runs, "fp8", 1, name="b", overrides=["precision.kv_cache=fp8"])
    text = refused(runs)
    assert "precision.kv_cache (within arm 'fp8'): bf16 in a; fp8 in b" in text
    assert len(compare(Request(runs, allowed=("precision",))).runs) == 2


def test_without_one_bf16_arm_the_reference_must_be_named(runs):
    make_run(runs, "one", overrides=FP8)
    make_run(runs, "two", overrides=["precision.kv_cache=fp8"])
    assert "no arm is BF16 everywhere: choose one with --reference, of one, two" in refused(runs)
    assert compare(Request(runs, reference="two")).reference == "two"
    make_run(runs, "bf16")
    make_run(runs, "other-bf16", overrides=["precision.kv_margin=1.2"])
    assert "2 arms are BF16 everywhere" in refused(runs)


def test_other_validation_prompts_are_refused_unless_allowed(runs):
    make_run(runs, "bf16", name="a")
    make_run(runs, "fp8", name="b", overrides=FP8, data="others")
    text = refused(runs)
    assert "seed 0: a / b" in text
    alone = arms_of(compare(Request(runs, allowed=("prompts",))))["fp8"]
    assert alone.difference is None  # none in common
    assert alone.verdict.word is Word.OPEN


def test_damage_is_named_and_a_damaged_run_left_out_of_an_experiment(runs):
    make_run(runs, "bf16", name="a")
    lost = make_run(runs, "fp8", name="b", overrides=FP8)
    for name in (IDENTITY, COPY):
        (lost.folder / name).write_text("{}")
    comparison = compare(Request(runs))
    assert [run.name for run in comparison.runs] == ["a"]
    assert "run b is damaged" in " ".join(comparison.notes)
    table = runs / "a" / "iterations" / "00004" / "evaluation.parquet"
    table.write_bytes(flipped(table.read_bytes()))
    with pytest.raises(JournalError, match=r"00004/evaluation\.parquet"):
        compare(Request(runs))


def test_the_command_refuses_before_anything_starts(runs):
    from typer.testing import CliRunner

    from flows.cli import app

    make_run(runs, "bf16")
    before = set(runs.iterdir())
    for arguments in (["elsewhere"], ["--margin", "3"], ["--runs", "nothing"], ["--reference", "x"]):
        assert CliRunner().invoke(app, ["compare", *arguments, "--runs-dir", str(runs)]).exit_code == 2
    assert set(runs.iterdir()) == before
