"""What a person does with the services of `fp8rl up`, in a browser: starts a run from the form, watches
it, cancels one, and compares the arms of a sweep in MLflow. Retry is in test_press_retry.py.
"""

import re
from contextlib import suppress

import pytest
import yaml

from fp8rl.runs import Run
from tests.services import END_S, ROOT, SMALL, services_of

pytestmark = pytest.mark.ui

# Enough for a model that answers, sometimes right: curves with something to see.
LEARNS = [
    *(one for one in SMALL if not one.startswith(("iterations", "warm_start", "task"))),
    *("iterations=3", "warm_start.steps=150", "task.val_prompts=32", "evaluate.every=1"),
]
STEPS = ("rollout", "reward", "train", "requantize", "recalibrate_kv")


@pytest.fixture(scope="module")
def services(page, tmp_path_factory):  # the page first: where there is none, nothing is started
    with services_of(tmp_path_factory.mktemp("operate")) as found:
        yield found


@pytest.fixture
def prefect(services):
    return f"http://127.0.0.1:{services.ports['prefect_port']}"


@pytest.fixture
def mlflow(services):
    return services.mlflow


def field(page, name):
    """The field `name` of Prefect's form; where a section has one of that name too, the section's."""
    label = page.locator(".schema-form-property__label", has_text=re.compile(rf"^\s*{name}\s*\("))
    return page.locator(".schema-form-property").filter(has=label).last


def open_tab(page, name):
    page.get_by_role("tab", name=name).or_(page.get_by_text(name, exact=True)).first.click()


def picture(page, pictures, name, height=900):
    page.set_viewport_size({"width": 1400, "height": height})
    page.mouse.move(0, 0)
    page.wait_for_timeout(2500)  # graphs and charts are drawn a while after their data came
    page.screenshot(path=pictures / f"{name}.png")


def test_a_run_is_started_from_the_form_and_watched(page, services, prefect, pictures):
    from playwright.sync_api import expect

    page.goto(f"{prefect}/deployments")
    page.get_by_role("link").filter(has_text=re.compile(r"^\s*train\s*$")).first.click()
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_text("Custom run").click()

    page.get_by_text("The recipe to train.").wait_for()
    choices = field(page, "recipe_file").locator(".p-select-button__control")
    choices.press("ArrowDown")
    page.get_by_text("configs/tiny/bf16.yaml", exact=True).click()
    expect(choices).to_have_text("configs/tiny/bf16.yaml")
    overrides, words = field(page, "overrides"), [*LEARNS, "name=first"]
    for number, word in enumerate(words):
        overrides.get_by_role("button", name="Add item").click()
        overrides.locator("textarea").nth(number).fill(word)
    expect(overrides.locator("textarea")).to_have_count(len(words))
    picture(page, pictures, "form", height=860)

    # What is out of bounds the server refuses, and the form says so.
    iterations = field(page, "iterations").locator("input")
    before = iterations.input_value()
    iterations.fill("0")
    page.get_by_role("button", name="Submit").click()
    expect(page.get_by_text("Validation failed for field 'recipe.iterations'").first).to_be_visible()
    assert services.call("POST", "/flow_runs/count", {}) == 0
    iterations.fill(before)
    page.get_by_role("button", name="Submit").click()

    # Back on the deployment's page, where the run has its own name once it has begun.
    page.get_by_role("link", name="first", exact=True).first.click(timeout=1000 * END_S)
    expect(page.locator(".state-badge").first).to_have_text("Completed", timeout=1000 * END_S)
    assert Run(services.runs / "first").state().state == "finished"
    run_page = page.url
    page.reload()
    page.locator("canvas").first.wait_for()
    open_tab(page, "Task Runs")
    for task in ("prepare_data", "warm_start", "open_engines"):
        expect(page.locator(".task-run-list-item", has_text=task)).to_contain_text("Completed")
    open_tab(page, "Subflow Runs")
    for number in range(4):
        one = page.locator(".flow-run-list-item").filter(has_text=f"first/{number}")
        expect(one).to_contain_text("Completed")
    picture(page, pictures, "run")
    page.get_by_role("link", name="first/1", exact=True).first.click()
    open_tab(page, "Task Runs")
    for step in STEPS:
        expect(page.locator(".task-run-list-item", has_text=f"{step}-1")).to_contain_text("Completed")

    page.goto(run_page)
    page.set_viewport_size({"width": 1400, "height": 2400})  # only lines in view are drawn
    open_tab(page, "Logs")
    expect(page.get_by_text("effective precision: rollout").first).to_be_visible()
    open_tab(page, "Artifacts")
    page.get_by_text("first-live", exact=True).last.click()
    expect(page.get_by_text("Iteration 3 of 3")).to_be_visible()
    for trend in ("accuracy", "reward", "mismatch"):
        line = page.get_by_role("listitem").filter(has_text=re.compile(rf"^\s*{trend} [▁-█]+ .+ → .+"))
        expect(line).to_have_count(1)
    results, times = page.get_by_role("table").all()
    for table, heading in ((results, "mismatch"), (times, "recalibrate_kv s")):
        expect(table.get_by_role("columnheader", name=heading, exact=True)).to_be_visible()
        expect(table.get_by_role("row")).to_have_count(5)
    picture(page, pictures, "live")


def test_cancel_pressed_on_the_page_of_a_run_at_work(page, services, prefect, pictures):
    from playwright.sync_api import expect

    flow_run = services.train("second", "iterations=1000")
    run = Run(services.runs / "second")
    services.until("its first iteration", lambda: run.journal.is_committed(1, "iteration"))
    page.goto(f"{prefect}/runs/flow-run/{flow_run}")
    state = page.locator(".state-badge").first
    expect(state).to_have_text("Running")
    assert services.at_work(flow_run) == {"flow run", "EngineActor", "LearnerActor"}
    open_tab(page, "Artifacts")
    page.get_by_text("second-live", exact=True).last.click()
    shown = page.get_by_text(re.compile(r"^Iteration \d+ of 1000$"))
    before = shown.inner_text()
    services.until(  # the artifact of a run at work is brought up to date in its place
        "a later iteration in the artifact", lambda: page.reload() and shown.inner_text() != before
    )

    page.goto(f"{prefect}/runs/flow-run/{flow_run}")
    page.get_by_role("button", name="Cancel", exact=True).click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("Cancelling")
    picture(page, pictures, "cancel")
    dialog.get_by_role("button", name="Confirm", exact=True).click()
    expect(state).to_have_text("Cancelled", timeout=1000 * END_S)
    services.until("the end of its processes", lambda: not services.at_work(flow_run))
    assert run.state().state == "cancelled"


@pytest.fixture(scope="module")
def compared(services, tmp_path_factory):
    """A sweep of two arms in the experiment `pair`, trained by the deployment `sweep`, and their
    comparison, by the deployment `compare`.
    """
    overrides = dict(text.split("=") for text in LEARNS)
    tiny = ROOT / "configs" / "tiny"
    values = {
        "name": "pair",
        "arms": [str(tiny / "bf16.yaml"), str(tiny / "fp8-e2e-kv.yaml")],
        "seeds": [0],
        "overrides": {key: yaml.safe_load(value) for key, value in overrides.items()}
        | {"tracking.experiment": "pair"},
    }
    file = tmp_path_factory.mktemp("sweep") / "pair.yaml"
    file.write_text(yaml.safe_dump(values))
    services.completes(services.run("sweep/sweep", file=str(file)))
    services.completes(services.run("compare/compare", experiment="pair"))
    return ("pair-bf16-s0", "pair-fp8-e2e-kv-s0")


def test_the_arms_of_a_sweep_are_compared_in_mlflow(page, services, mlflow, compared, pictures):
    from playwright.sync_api import expect

    page.set_viewport_size({"width": 1400, "height": 900})
    page.goto(f"{mlflow}/#/experiments")
    page.get_by_text("Model training", exact=True).click()
    page.get_by_role("link", name="pair", exact=True).click()
    rows = page.locator(".ag-pinned-left-cols-container .ag-row")

    def row(name):
        return rows.filter(has=page.get_by_role("link", name=name, exact=True))

    # The children stand under the sweep's own run.
    expect(row("pair")).to_be_visible()
    expect(row(compared[0])).to_have_count(0)
    with suppress(Exception):  # of MLflow's assistant, where it is open
        page.get_by_role("button", name="Close").click(timeout=3000)
    row("pair").get_by_role("button").first.click()
    for name in compared:
        row(name).get_by_role("checkbox").check()
    picture(page, pictures, "mlflow-runs", height=600)

    page.get_by_role("button", name="Compare", exact=True).click()
    expect(page.get_by_text("Comparing 2 Runs from 1 Experiment")).to_be_visible()
    page.locator(".js-plotly-plot").first.wait_for()
    for name in compared:
        expect(
            page.get_by_role("cell", name=name, exact=True).or_(page.get_by_text(name)).first
        ).to_be_visible()
    page.go_back()

    # Their curves side by side, a chart for each metric, in groups by the metrics' names.
    page.locator("label:has(input[value=CHART])").click()
    page.get_by_placeholder("Search metric charts").fill("val/accuracy|token_mult_prob_error$|perf/tok")
    for group in ("mismatch", "perf", "val"):
        heading = page.get_by_role("button", expanded=True)
        expect(heading.filter(has_text=re.compile(rf"{group}\s*\(\d+\)")).first).to_be_visible()
    charts = page.locator(".js-plotly-plot")
    expect(charts.first.locator(".scatterlayer .trace").first).to_be_visible()
    picture(page, pictures, "mlflow-charts")

    page.locator("label:has(input[value=TABLE])").click()
    row("comparison").get_by_role("link", name="comparison").click()
    expect(page.get_by_text("The arms side by side")).to_be_visible()
    page.get_by_role("tab", name="Artifacts").click()
    page.get_by_text("comparison.html").first.click()
    shown = page.frame_locator("iframe")
    expect(shown.get_by_role("heading", name="Verdict")).to_be_visible()
    expect(shown.get_by_role("cell", name="fp8-e2e-kv").first).to_be_visible()
    picture(page, pictures, "mlflow-comparison")
