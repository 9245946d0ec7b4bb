"""A run at a glance, and watching one through its folder."""

import math

import pytest
from rich.console import Console

from flows.watching import watch
from fp8rl.glance import HEADINGS, cells, markdown, sparkline, trends
from fp8rl.journal import StepRecord
from fp8rl.report import STEPS
from tests.folders import make_run


def records(*metrics):
    return [StepRecord("iteration", n, 1.0, metrics=one) for n, one in enumerate(metrics)]


def test_a_sparkline_goes_from_the_least_to_the_greatest():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([3.0, 3.0]) == "▁▁"
    assert sparkline([]) == ""
    assert sparkline([1.0, math.nan, 2.0, math.inf]) == "▁ █ "


@pytest.mark.parametrize("count", [41, 100, 1000])
def test_a_long_sparkline_is_of_means_and_keeps_its_shape(count):
    line = sparkline([float(n) for n in range(count)], width=40)
    assert len(line) == 40
    assert (line[0], line[-1]) == ("▁", "█")
    assert list(line) == sorted(line)


def test_rows_leave_empty_what_an_iteration_has_not():
    row = dict(zip(HEADINGS, cells(3, {"val/accuracy": 0.25, "kv/preemptions": math.nan}), strict=True))
    assert (row["iteration"], row["accuracy"]) == ("3", "25.0%")
    assert (row["preempted"], row["reward"]) == ("", "")


def test_trends_are_of_what_is_there():
    found = trends(records({"val/accuracy": 0.5}, {"train/reward_mean": 1.0}, {"val/accuracy": 0.75}))
    assert found == [("accuracy", "▁█", "50.0% → 75.0%"), ("reward", "▁", "1.000 → 1.000")]
    assert trends([]) == []


def test_the_markdown_is_a_table_of_the_last_iterations_with_links():
    text = markdown(
        records(*[{"val/accuracy": n / 20} for n in range(20)]), 30, {"MLflow": "http://x/#/y"}
    )
    lines = text.splitlines()
    assert lines[0] == "**Iteration 19 of 30**"
    assert "- [MLflow](http://x/#/y)" in lines
    results, times = (part.splitlines() for part in text.split("\n\n")[2:])
    for table in (results, times):
        assert [row.split("|")[1].strip() for row in table[2:]] == [str(n) for n in range(12, 20)]
        assert len({row.count("|") for row in table}) == 1
    cells = [cell.strip() for table in (results, times) for cell in table[0].split("|")[1:-1]]
    assert cells == [*HEADINGS[: len(HEADINGS) - len(STEPS)], "iteration", *HEADINGS[-len(STEPS) :]]
    assert "Iteration 0 of 30" in markdown([], 30, {})


@pytest.mark.parametrize("once", [True, False])
def test_watching_a_run_that_is_over_shows_it_and_ends(tmp_path, once):
    run = make_run(tmp_path)
    console = Console(record=True, width=200, force_terminal=False)
    watch(run, console, every=0.1, once=once)
    text = console.export_text()
    assert f"{run.name}: " in text
    assert "last committed" in text
    last = max(record.iteration for record in run.journal.iterations())
    assert (f"iteration {last} of" in text) if once else (f"iteration {last}" in text)
    assert run.resume_command() in text
