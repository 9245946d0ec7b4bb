"""Two arms over two seeds, trained by the real stack and compared; each number of the page once more
from the raw run folders."""

import asyncio
import csv
import io
from pathlib import Path

import numpy as np
import pytest

from flows.compare import compare
from flows.showing import artifact_key
from flows.training import train
from fp8rl.comparison.publish import TAG
from fp8rl.recipe.load import load_recipe
from fp8rl.tracking import tracking_uri
from tests.arms import SHORT, TINY
from tests.comparison_oracle import PageReader, RawRun, accuracy, difference
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


def spread(values, fmt):
    low, high = fmt.format(min(values)), fmt.format(max(values))
    mean = fmt.format(np.mean(values))
    return mean if low == high else f"{mean} ({low} to {high})"


def test_each_number_of_the_page_is_in_the_run_folders(made, raw):
    page = PageReader(Path(made["files"][0]).read_text())
    share = "{:.1%} ({:.1%} to {:.1%})".format
    bf16, fp8 = (raw[arm] for arm in ARMS)

    def points(values):
        return "{} ({} to {})".format(*(f"{100 * value:+.1f}" for value in values))

    rows = page.tables["Accuracy"][0][1:]
    prompts = str(len({q for run in bf16 for q in run.answers[run.last]["sampled"]}))
    for arm, row in zip(ARMS, rows, strict=True):
        runs = raw[arm]
        assert row[:3] == [arm, "2", prompts]
        assert row[3] == share(*accuracy(runs))
        assert row[4] == share(*accuracy(runs, best=True))
        assert row[5] == share(*accuracy(runs, kind="greedy"))
    assert rows[1][6] == points(difference(fp8, bf16, "greedy"))
    assert page.tables["Verdict"][0][2][2] == points(difference(fp8, bf16))
    # 64 prompts cannot show that a difference is below two points.
    assert [row[1] for row in page.tables["Verdict"][0][1:]] == ["reference", "not enough data"]

    figures = {row[0]: row[1:] for row in page.tables["Figures"][0][1:]}
    medians = {
        "mismatch (token_mult_prob_error)": ("mismatch/token_mult_prob_error", "{:.4f}"),
        "KL rollout || learner (k3)": ("mismatch/kl_k3", "{:.2e}"),
        "effective sample size": ("mismatch/ess", "{:.4f}"),
        "entropy of what was sampled (nats)": ("rollout/entropy", "{:.3f}"),
        "response length (tokens)": ("rollout/response_length_mean", "{:.1f}"),
        "tokens/s/GPU": ("perf/tokens_per_sec_per_gpu", "{:,.0f}"),
        "rollout tokens/s": ("perf/rollout_tokens_per_sec", "{:,.0f}"),
        "learner tokens/s": ("perf/learner_tokens_per_sec", "{:,.0f}"),
        "time of an iteration (s)": ("timing/iteration_s", "{:.2f}"),
    }
    totals = {
        "mismatch, worst iteration": ("mismatch/token_mult_prob_error", max, "{:.4f}"),
        "effective sample size, worst iteration": ("mismatch/ess", min, "{:.4f}"),
        "KV cache, peak use": ("kv/peak_use", max, "{:.0%}"),
        "KV cache, preemptions": ("kv/preemptions", sum, "{:.0f}"),
        "iterations in which the guard fired": (
            "guard/fired",
            lambda values: sum(value > 0 for value in values),
            "{:.0f}",
        ),
    }
    before = {
        "sampled accuracy before": "val/accuracy",
        "greedy accuracy before": "val/greedy_accuracy",
    }
    for place, runs in enumerate((bf16, fp8)):
        for label, (key, fmt) in medians.items():
            assert figures[label][place] == spread([run.median(key) for run in runs], fmt), label
        for label, (key, reduce, fmt) in totals.items():
            assert figures[label][place] == spread([reduce(run.over(key)) for run in runs], fmt), label
        for label, key in before.items():
            assert figures[label][place] == spread([run.metrics[0][key] for run in runs], "{:.1%}")
    speeds = [np.mean([run.median("perf/tokens_per_sec_per_gpu") for run in of]) for of in (bf16, fp8)]
    ratio = "tokens/s/GPU / that of bf16, same machine"
    assert figures[ratio] == ["1.00", f"{speeds[1] / speeds[0]:.2f}"]
    assert set(figures) == {*medians, *totals, *before, ratio}
    assert "FP8 products are emulated" in page.text

    heads, *shares = page.tables["Where the time goes"][0]
    for row, runs in zip(shares, (bf16, fp8), strict=True):
        wanted = [np.mean([run.shares()[step] for run in runs]) for step in heads[1:]]
        assert row[1:] == [f"{value:.1%}" for value in wanted]
        assert 0.98 < sum(wanted) < 1.02

    for row in page.tables["Runs"][0][1:]:
        run = next(r for r in raw[row[1]] if r.seed == int(row[2]))
        assert row[3:5] == ["finished", "3 of 3"]
        assert row[5:9] == [
            *(f"{run.accuracy[run.last]:.1%}", str(run.last)),
            *(f"{run.accuracy[run.best]:.1%}", str(run.best)),
        ]
    precision = {row[0]: row[1:] for row in page.tables["What differs"][0][1:]}
    assert precision["precision.learner"] == ["bf16", "fp8"]
    assert all(key.startswith("precision.") for key in precision)


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
