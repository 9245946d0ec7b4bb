"""A run whose first weights arrive with a wrong scale, which the engine cannot know: the guard sees it
in the first iteration, by the real stack, and does what the recipe says.
"""

import asyncio
import json

import pytest
from prefect.exceptions import CancelledRun

from fp8rl import guard
from fp8rl.faults import VARIABLE
from fp8rl.model.manifest import read_manifest
from fp8rl.recipe.load import load_recipe
from fp8rl.runs import Run
from fp8rl.tables import from_parquet
from fp8rl.tracking import RUN_ID_TAG, tracking_uri
from fp8rl.worst_samples import read_worst, worst_table
from tests.arms import SHORT, TINY
from tests.compare import point_faults

pytestmark = pytest.mark.pipeline

LIMIT = 1.2
EMBEDDINGS = "model.embed_tokens.weight"
WRONG = "learner:scale:0:model.layers.1.mlp.down_proj.weight_scale_inv"
# The probe after each sync would find the wrong scale before the guard does.
UNSEEN = ("sync.probe_every=0", "evaluate.every=3")


@pytest.fixture
def wrong_scale(tmp_path, monkeypatch):
    fault = {"at": WRONG, "do": "times 16", "once": str(tmp_path / "wrong")}
    monkeypatch.setenv(VARIABLE, json.dumps([fault]))
    yield
    assert (tmp_path / "wrong").exists()


def begin(runs_dir, name, *actions, iterations=3):
    from flows.training import train

    rule = f"guard.rules=[{{watch: mismatch, above: {LIMIT}, actions: [{', '.join(actions)}]}}]"
    overrides = [*SHORT, *UNSEEN, rule, f"iterations={iterations}", f"runs_dir={runs_dir}"]
    recipe = load_recipe(TINY / "fp8-rollout-kv.yaml", [*overrides, f"name={name}"]).recipe
    asyncio.run(train(recipe=recipe))


def mismatches(run):
    return [record.metrics["mismatch/token_mult_prob_error"] for record in run.journal.iterations()[1:]]


def mlflow_run(run):
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri(run.recipe))
    experiment = client.get_experiment_by_name(run.recipe.tracking.experiment).experiment_id
    (found,) = client.search_runs([experiment], f"tags.`{RUN_ID_TAG}` = '{run.id}'")
    return client, found


def test_it_falls_back_to_bf16_for_one_rollout_and_comes_back(runs_dir, wrong_scale):
    begin(runs_dir, "guard-bf16", "rollout_bf16", "skip_update")
    run = Run(runs_dir / "guard-bf16")
    journal = run.journal
    records = journal.iterations()
    wrong, in_bf16, back = mismatches(run)
    assert wrong > LIMIT
    assert in_bf16 < 1.05
    assert back < LIMIT

    # What was decided, and what came of it.
    assert guard.decision(journal, 1)["firings"][0]["value"] == wrong
    assert [r.metrics["guard/fired"] for r in records[1:]] == [1, 0, 0]
    assert [r.metrics["guard/rollout_bf16"] for r in records[1:]] == [0, 1, 0]
    assert [journal.record(n, "train").output["guard"]["skipped"] for n in (1, 2, 3)] == [1, 0, 0]
    first = [read_manifest(journal.weights_folder(n)).tensors[EMBEDDINGS].sha256 for n in (0, 1, 2, 3)]
    assert first[0] == first[1]  # in BF16 in both, and the update was skipped
    assert len(set(first)) == 3

    # The version in between is in BF16, weights and KV cache, and took no KV scales.
    assert journal.record(1, "requantize").inputs["in_bf16"]
    assert journal.record(1, "recalibrate_kv").output == {"needed": False}
    for version in (0, 2):
        assert journal.record(version, "recalibrate_kv").output["needed"]
    assert "kv" not in journal.record(2, "rollout").output
    size = {n: journal.record(n, "requantize").metrics["sync/bytes"] for n in (0, 1, 2)}
    assert size[0] == size[2] < size[1]

    # Nothing is lost: every sample is there, MLflow has each point once, and the run finished.
    sampled = run.recipe.rollout.prompts * run.recipe.rollout.samples
    for n in (1, 2, 3):
        assert len(from_parquet(journal.read_file(n, "rollout", "rollouts.parquet"))["seed"]) == sampled
    assert run.state().state == "finished"
    assert point_faults(run) == ([], [])

    # To be looked at.
    client, found = mlflow_run(run)
    paths = {f.path for f in client.list_artifacts(found.info.run_id)}
    assert {"guard.json", "worst_samples"} <= paths
    pictures = {f.path for f in client.list_artifacts(found.info.run_id, "worst_samples")}
    expected = {f"worst_samples/{n:05d}.{kind}" for n in (1, 3) for kind in ("json", "png")}
    assert pictures == expected


def test_the_worst_samples_are_those_that_differ_most(runs_dir, run_arm):
    journal = run_arm("fp8-e2e-kv").journal
    worst = read_worst(journal, 2)
    panel = journal.record(2, "train").metrics
    assert worst["error"][0] == panel["mismatch/sequence_mult_prob_error_max"]
    assert worst["error"] == sorted(worst["error"], reverse=True)
    rollouts = from_parquet(journal.read_file(2, "rollout", "rollouts.parquet"))
    by_sample = {
        key: i for i, key in enumerate(zip(rollouts["prompt_id"], rollouts["sample"], strict=True))
    }
    for row, key in enumerate(zip(worst["prompt_id"], worst["sample"], strict=True)):
        assert rollouts["tokens"][by_sample[key]] == worst["tokens"][row]
        assert rollouts["logprobs"][by_sample[key]] == worst["rollout"][row]
        lengths = {len(worst[name][row]) for name in ("tokens", "rollout", "learner")}
        assert len(lengths) == 1
    table = worst_table(worst)
    assert len({len(column) for column in table.values()}) == 1


@pytest.mark.parametrize("action", ["stop", pytest.param("pause", marks=pytest.mark.slow)])
def test_it_stops_and_goes_on_when_a_person_says_so(runs_dir, wrong_scale, action):
    """The embedded Prefect has no page on which to press Resume: there a pause ends the run too."""
    from flows.training import train

    name = f"guard-{action}"
    with pytest.raises(CancelledRun, match=f"fp8rl resume {name}") as stopped:
        begin(runs_dir, name, action, iterations=2)
    said = "paused" if action == "pause" else "stopped"
    assert f"{said} by the guard, after iteration 1: mismatch > {LIMIT}" in str(stopped.value)
    run = Run(runs_dir / name)
    assert run.state().state == "stopped"
    assert "the guard" in run.state().reason
    assert mlflow_run(run)[1].info.status == "KILLED"
    assert run.journal.record(1, "train").output["guard"]["skipped"]
    assert run.resume_command() == f"fp8rl resume {name}"

    asyncio.run(train(recipe=run.recipe, resume=name))
    assert run.state().state == "finished"
    assert run.journal.record(1, "guard_answer").output == {"answer": "the run was resumed"}
    assert mismatches(run)[1] < LIMIT  # the next version was published with right scales
    assert point_faults(run) == ([], [])
    assert mlflow_run(run)[1].info.status == "FINISHED"
