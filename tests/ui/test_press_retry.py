"""Retry, pressed in a browser."""

import re

import pytest

from tests.ui.conftest import END_S, Trained

pytestmark = pytest.mark.ui

# By class, not by text: a state may have a name of its own.
ENDED = re.compile("state--(completed|failed|crashed|cancelled)")


def test_retry_pressed_on_the_page_of_a_failed_run(page, prefect, runs_dir, pictures):
    from playwright.sync_api import expect

    trained = Trained(prefect, runs_dir, "fp8-retry")
    trained.start({"fails": ("raise", "step:train:2")})
    failed = trained.ended()

    page.goto(f"{prefect.ui}/runs/flow-run/{trained.id}")
    state = page.locator(".state-badge").first  # the one in the page's heading
    expect(state).to_have_text("Failed")
    expect(page.locator("body")).to_contain_text("planted fault at step:train:2")
    page.get_by_role("button", name="Retry", exact=True).click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Retry", exact=True).click()
    expect(dialog).to_have_count(0)
    expect(state).not_to_have_class(ENDED)
    expect(state).to_have_class(ENDED, timeout=1000 * END_S)
    expect(state).to_have_text("Completed")

    completed = trained.ended()
    assert (completed.run.state, completed.mlflow) == ("finished", "FINISHED")
    assert {name: completed.files.get(name) for name in failed.files} == failed.files
    page.reload()
    page.get_by_text("Subflow Runs", exact=True).click()
    iterations = page.locator(".flow-run-list-item")
    for name, badges in (("/0", ["Cached"]), ("/1", ["Cached"]), ("/2", ["Completed", "Failed"])):
        expect(iterations.filter(has_text=f"fp8-retry{name}")).to_contain_text(badges)
    page.locator("canvas").first.wait_for()
    page.wait_for_timeout(4000)  # the graph is drawn a while after its data came
    page.screenshot(path=pictures / "retry.png")

    iteration = prefect.iterations(trained.id)[-2]
    assert iteration["name"] == "fp8-retry/2"
    page.goto(f"{prefect.ui}/runs/flow-run/{iteration['id']}")
    page.get_by_text("Task Runs", exact=True).click()
    shown = {"rollout-2": "Cached", "reward-2": "Cached", "train-2": "Completed"}
    for name, badge in shown.items():
        expect(page.locator(".task-run-list-item", has_text=name)).to_contain_text(badge)
    page.screenshot(path=pictures / "retry-tasks.png")
