"""Two arms over two seeds, trained by the real stack and compared; each number of the page once more
from the raw run folders."""

import asyncio
import csv
import io
from pathlib import Path

import pytest

from flows.compare import compare
from flows.showing import artifact_key
from flows.training import train
from fp8rl.comparison.publish import TAG
from fp8rl.recipe.load import load_recipe
from fp8rl.tracking import tracking_uri
from tests.arms import SHORT, TINY
from tests.comparison_oracle import PageReader, RawRun, difference
from tests.comparison_page import require_right
from tests.pipeline.test_cli import call

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]

EXPERIMENT = "two arms"
ARMS = ("bf16", "fp8-e2e-kv")
SEEDS = (0, 1)


@pytest.fixture(scope="module")
def recipes(runs_dir):
    """Of the runs, trained, by (arm, seed)."""
    done = {}
    for seed in SEEDS:
        for arm in ARMS:
            given = [f"runs_dir={runs_dir}", f"seed={seed}", f"name=compared-{arm}-{seed}"]
            given += [f"tracking.experiment={EXPERIMENT}"]
            recipe = load_recipe(TINY / f"{arm}.yaml", [*SHORT, *given]).recipe
            asyncio.run(train(recipe=recipe))
            done[arm, seed] = recipe
    yield done
    import ray

    ray.shutdown()


@pytest.fixture(scope="module")
def made(recipes, runs_dir):
    return asyncio.run(compare(experiment=EXPERIMENT, runs_dir=str(runs_dir)))


@pytest.fixture(scope="module")
def raw(recipes, runs_dir):
    """{arm: its runs, read again}"""
    return {arm: [RawRun(runs_dir / f"compared-{arm}-{seed}") for seed in SEEDS] for arm in ARMS}


def test_each_number_of_the_page_is_in_the_run_folders(made, raw):
    page = PageReader(Path(made["files"][0]).read_text())
    require_right(page, raw)
    # 64 prompts cannot show that a difference is below two points.
    assert [row[1] for row in page.tables["Verdict"][0][1:]] == ["reference", "not enough data"]


def test_csv_files_have_the_same_in_full(made, raw):
    texts = (Path(file).read_text() for file in made["files"][2:])
    runs, arms = (list(csv.DictReader(io.StringIO(text))) for text in texts)
    for row in runs:
        run = next(r for r in raw[row["arm"]] if r.seed == int(row["seed"]))
        assert float(row["val_accuracy_after"]) == pytest.approx(run.accuracy[run.last])
        assert float(row["entropy"]) == pytest.approx(run.median("rollout/entropy"))
    wanted = difference(raw["fp8-e2e-kv"], raw["bf16"])
    keys = ("difference", "difference_low", "difference_high")
    assert [float(arms[1][key]) for key in keys] == pytest.approx(wanted)


def test_mlflow_and_prefect_have_it(made, recipes):
    from mlflow import MlflowClient
    from prefect.client.orchestration import get_client

    client = MlflowClient(tracking_uri(recipes["bf16", 0]))
    experiment = client.get_experiment_by_name(EXPERIMENT).experiment_id
    found = client.search_runs([experiment])
    assert sorted(run.info.run_name for run in found) == sorted(
        [f"compared-{arm}-{seed}" for arm in ARMS for seed in SEEDS] + ["comparison"]
    )
    names = {file.path for file in client.list_artifacts(made["mlflow_run"])}
    assert names == {"comparison.html", "comparison.md", "runs.csv", "arms.csv"}
    assert [run.info.run_id for run in found if TAG in run.data.tags] == [made["mlflow_run"]]

    async def read():
        async with get_client() as prefect:
            return await prefect.read_artifacts()

    key = artifact_key("comparison", EXPERIMENT)
    shown = [artifact for artifact in asyncio.run(read()) if artifact.key == key]
    assert len(shown) == 1
    assert shown[0].type == "markdown"
    assert shown[0].data == Path(made["files"][1]).read_text()


def test_the_command_shows_the_verdict_and_where_the_page_is(made, runs_dir, tmp_path):
    out = tmp_path / "out"
    done = call("compare", EXPERIMENT, "--runs-dir", str(runs_dir), "--out", str(out), timeout=600)
    assert done.returncode == 0, done.stderr
    assert "not enough data" in done.stdout
    assert str(out / "comparison.html") in done.stdout
    assert (out / "arms.csv").read_text() == Path(made["files"][3]).read_text()
    refused = call("compare", EXPERIMENT, "--runs-dir", str(runs_dir), "--reference", "fp4")
    assert refused.returncode == 2
    assert "no arm 'fp4'; there are bf16, fp8-e2e-kv" in refused.stderr
    assert "Traceback" not in refused.stderr
