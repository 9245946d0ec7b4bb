"""A real run, looked at from all sides: files, MLflow, Prefect, precision, mismatch."""

import asyncio
import json
import math
from pathlib import Path

import pytest
import torch

from fp8rl.context import RunContext
from fp8rl.device import settled
from fp8rl.learner.batch import make_batch
from fp8rl.learner.logprobs import token_logprobs
from fp8rl.mismatch import mismatch_panel
from fp8rl.model.manifest import read_manifest
from fp8rl.model.published import read_published
from fp8rl.report import STEPS
from fp8rl.runs import Run, State
from fp8rl.tables import from_parquet
from fp8rl.tracking import tracking_uri

pytestmark = pytest.mark.pipeline

ARMS = ("bf16", "fp8-e2e-kv")
LOGGED_EACH_ITERATION = {
    "train/reward_mean",
    "mismatch/token_mult_prob_error",
    "mismatch/kl_k3",
    "perf/tokens_per_sec_per_gpu",
    "perf/rollout_tokens_per_sec",
    "perf/learner_tokens_per_sec",
    "rollout/response_length_mean",
    "rollout/entropy",
    *("kv/capacity_tokens", "kv/peak_use", "kv/preemptions", "kv/running_max", "kv/waiting_max"),
    *(f"timing/{step}_s" for step in STEPS),
}


@pytest.fixture(params=ARMS)
def run(request, run_arm):
    return run_arm(request.param)


def context_of(run):
    folder = run.journal.folder
    return RunContext(
        run=run.summary["run"], folder=folder, model_dir=folder / "model", recipe=run.recipe
    )


def named_actors(context):
    """Actors of the run that Ray knows."""
    import ray

    names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    return [
        n for n in names if n.startswith((context.actor_name("engine"), context.actor_name("learner")))
    ]


def mlflow_client(run):
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri(run.recipe))


def test_each_step_of_each_iteration_is_a_committed_file(run):
    for n in range(1, run.recipe.iterations + 1):
        for step in (*STEPS, "iteration"):
            assert run.journal.record(n, step).iteration == n
        rollouts = from_parquet(run.journal.read_file(n, "rollout", "rollouts.parquet"))
        rewards = from_parquet(run.journal.read_file(n, "reward", "rewards.parquet"))
        count = run.recipe.rollout.prompts * run.recipe.rollout.samples
        assert len(rollouts["tokens"]) == len(rewards["reward"]) == count
        assert set(rollouts["weight_version"]) == {n - 1}
        assert len(set(rollouts["seed"])) == count
        assert run.journal.record(n, "train").output["weight_version"] == n
        assert run.journal.record(n, "requantize").output["weight_version"] == n
    evaluated = [n for n in range(4) if (run.journal.step_folder(n) / "evaluation.parquet").exists()]
    assert evaluated == [0, 2, 3]
    assert Run(run.journal.folder).state() == State("finished")


def test_manifests_of_all_weights_are_kept_and_tensors_of_the_last_two(run):
    last = run.recipe.iterations
    digests = [read_manifest(run.journal.weights_folder(v)).digest for v in range(last + 1)]
    assert len(set(digests)) == last + 1
    for version, digest in enumerate(digests):
        assert run.journal.record(version, "requantize").output["digest"] == digest
        kept = (run.journal.weights_folder(version) / "weights.safetensors").exists()
        assert kept == (version >= last - 1)
    read_published(run.journal.weights_folder(last), last)


def test_mlflow_has_one_run_with_one_point_per_metric_and_iteration(run):
    client = mlflow_client(run)
    experiment = client.get_experiment_by_name("fp8rl").experiment_id
    found = client.search_runs([experiment], f"tags.`fp8rl.run` = '{run.summary['run']}'")
    assert [r.info.run_id for r in found] == [run.summary["mlflow_run"]]
    assert found[0].info.status == "FINISHED"
    for name in LOGGED_EACH_ITERATION:
        points = client.get_metric_history(found[0].info.run_id, name)
        assert sorted(p.step for p in points if p.step > 0) == [1, 2, 3], name
        assert all(math.isfinite(p.value) for p in points), name
    accuracy = client.get_metric_history(found[0].info.run_id, "val/accuracy")
    assert sorted(p.step for p in accuracy) == [0, 2, 3]
    for n in range(1, 4):
        record = run.journal.record(n, "iteration")
        logged = client.get_metric_history(found[0].info.run_id, "mismatch/kl_k3")
        point = next(p for p in logged if p.step == n)
        assert (point.value, point.timestamp) == (record.metrics["mismatch/kl_k3"], record.t_ms)


def test_mlflow_has_recipe_artifacts_and_links(run):
    client = mlflow_client(run)
    data = client.get_run(run.summary["mlflow_run"]).data
    assert data.params["precision.rollout"] == run.recipe.precision.rollout.value
    assert data.params["learner.lr"] == str(run.recipe.learner.lr)
    assert data.tags["fp8rl.arm"] == run.recipe.arm
    assert data.tags["prefect.flow_run_id"]
    names = {f.path for f in client.list_artifacts(run.summary["mlflow_run"])}
    assert {"recipe.yaml", "precision.json", "backends.json", "data.json", "summary.json"} <= names


def test_prefect_has_the_run_its_iterations_and_their_steps(run):
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, TaskRunFilter
    from prefect.client.schemas.filters import FlowRunFilterParentFlowRunId as Parent

    tags = mlflow_client(run).get_run(run.summary["mlflow_run"]).data.tags

    async def read():
        async with get_client() as client:
            parent = await client.read_flow_run(tags["prefect.flow_run_id"])
            mine = FlowRunFilter(parent_flow_run_id=Parent(any_=[parent.id]))
            children = await client.read_flow_runs(flow_run_filter=mine)
            tasks = {}
            for child in children:
                of_child = FlowRunFilter(id=FlowRunFilterId(any_=[child.id]))
                runs = await client.read_task_runs(
                    flow_run_filter=of_child, task_run_filter=TaskRunFilter()
                )
                tasks[child.name] = sorted(t.name for t in runs if t.state.is_completed())
            return parent, children, tasks

    parent, children, tasks = asyncio.run(read())
    assert parent.state.is_completed()
    name = run.summary["run"]
    assert sorted(c.name for c in children) == [f"{name}/{n}" for n in range(4)]
    assert all(c.state.is_completed() for c in children)
    assert tasks[f"{name}/1"] == sorted(f"{step}-1" for step in STEPS)
    assert tasks[f"{name}/2"] == sorted([*(f"{step}-2" for step in STEPS), "evaluate-2"])


def test_effective_precision_is_the_requested_one_on_both_sides(run):
    path = mlflow_client(run).download_artifacts(run.summary["mlflow_run"], "precision.json")
    table = json.loads(Path(path).read_text())
    columns = dict(zip(table["columns"], zip(*table["data"], strict=True), strict=True))
    fp8 = run.recipe.arm == "fp8-e2e-kv"
    want = 7 * run.recipe.model.tiny.layers if fp8 else 0
    for side in ("rollout", "learner"):
        assert columns[f"{side}_requested"] == columns[f"{side}_effective"]
        assert columns[f"{side}_effective"].count("fp8_block") == want
    path = mlflow_client(run).download_artifacts(run.summary["mlflow_run"], "kv_cache.json")
    kv_cache = json.loads(Path(path).read_text())
    assert kv_cache["storage"] == ("uint8" if fp8 else "bfloat16")


def test_kv_scales_are_recalibrated_each_iteration_and_those_sent_are_used(run):
    for n in range(run.recipe.iterations + 1):
        output = run.journal.record(n, "recalibrate_kv").output
        assert output["probe"]["tokens"] > 50
        if run.recipe.arm == "bf16":
            assert output.keys() == {"needed", "probe"}
            assert not output["needed"]
            continue
        scales = json.loads(run.journal.read_file(n, "recalibrate_kv", "kv_scales.json"))
        assert scales["version"] == n
        assert scales["layers"] == output["used"]
        assert len(scales["layers"]) == run.recipe.model.tiny.layers
        assert ("rollouts" in scales["source"]) == (n > 0)
        assert scales["tokens"] == scales["tokens_available"]


def test_elements_that_the_kv_cache_could_not_hold_are_counted(run):
    for n in range(1, run.recipe.iterations + 1):
        record = run.journal.record(n, "rollout")
        if run.recipe.arm == "bf16":
            assert "kv" not in record.output
            continue
        counts, tiny = record.output["kv"], run.recipe.model.tiny
        # Prompts are shared by their samples where the cache's blocks are: at least what was sampled.
        head = tiny.hidden_size // tiny.heads * tiny.kv_heads
        assert min(counts["elements"]) >= (record.output["generated_tokens"] - 256) * head
        assert len(counts["k_saturated"]) == tiny.layers
        assert record.metrics["kv/saturated_share"] < 1e-4
        assert 0 < record.metrics["kv/underflow_share"] < 0.05


def test_history_of_kv_scales_is_shown_and_saved(run):
    client = mlflow_client(run)
    names = {f.path for f in client.list_artifacts(run.summary["mlflow_run"])}
    shown = {"kv_history.json", "kv_history.png"}
    path = run.journal.folder / "checkpoints" / f"{run.recipe.iterations:05d}" / "state.json"
    state = json.loads(path.read_text())
    if run.recipe.arm == "bf16":
        assert not shown & names
        assert state["kv_scales"] is None
        return
    assert shown <= names
    table = json.loads(
        Path(client.download_artifacts(run.summary["mlflow_run"], "kv_history.json")).read_text()
    )
    assert len(table["data"]) == (run.recipe.iterations + 1) * run.recipe.model.tiny.layers
    last = run.journal.read_file(run.recipe.iterations, "recalibrate_kv", "kv_scales.json")
    assert state["kv_scales"] == last.decode()
    # The state is written when the last iteration's record is there.
    assert set(state["kv_history"]) == {str(n) for n in range(run.recipe.iterations + 1)}


def test_scales_of_the_engine_side(runs_dir, run_arm):
    """One iteration whose KV scales vLLM itself observed: all steps, with a token budget."""
    from flows.training import train
    from fp8rl.recipe.load import load_recipe
    from tests.arms import SHORT, TINY

    run_arm("bf16")  # for the warm start
    options = ["iterations=1", "precision.kv_calibration=engine", "precision.kv_tokens=1000"]
    recipe = load_recipe(
        TINY / "fp8-e2e-kv.yaml", [*SHORT, *options, f"runs_dir={runs_dir}", "name=test-engine-kv"]
    ).recipe
    asyncio.run(train(recipe=recipe))
    journal = Run(runs_dir / "test-engine-kv").journal
    for n in (0, 1):
        record = journal.record(n, "recalibrate_kv")
        scales = json.loads(journal.read_file(n, "recalibrate_kv", "kv_scales.json"))
        assert scales["side"] == record.output["side"] == "engine"
        assert scales["layers"] == record.output["used"]
        assert scales["tokens"] <= 1000
    # After the first rollout there were 256 sequences to choose from.
    assert scales["tokens_available"] > 2 * scales["tokens"]
    assert journal.record(1, "rollout").metrics["kv/saturated_share"] < 1e-3


def test_there_is_no_mismatch_and_transformers_has_little(run):
    """The learner agrees with what was sampled; so does, but for its rounding, transformers' own model
    in FP32 on the published weights, on the tokens of the last rollout.
    """
    from fp8rl.model.engine_attention import instructions
    from fp8rl.model.source import model_dims
    from fp8rl.numerics.formats import Scaling, weight_scheme
    from fp8rl.numerics.quantise import Quantised
    from tests.models import hf_model

    limit = 1.01 if run.recipe.arm == "bf16" else 1.1
    logged = [
        run.journal.record(n, "train").metrics["mismatch/token_mult_prob_error"]
        for n in range(1, run.recipe.iterations + 1)
    ]
    assert max(logged) < (1 + 1e-4 if instructions() == "vec" else 1.01)
    version = run.recipe.iterations - 1
    _, tensors = read_published(run.journal.weights_folder(version), version)
    weights = {}
    for name, tensor in tensors.items():
        if name.endswith("_scale_inv"):
            continue
        scale = tensors.get(name + "_scale_inv")
        if scale is None:
            weights[name] = tensor.float()
        else:
            codes = tensor.view(torch.uint8)
            weights[name] = Quantised(codes, scale, weight_scheme(Scaling.BLOCK)).dequantise()
    assert model_dims(run.recipe).vocab == len(weights["model.embed_tokens.weight"])
    reference = hf_model(run.recipe.model.tiny, weights)
    rollouts = from_parquet(run.journal.read_file(run.recipe.iterations, "rollout", "rollouts.parquet"))
    batch = make_batch(rollouts["prompt_tokens"], rollouts["tokens"], rollouts["logprobs"])
    with torch.no_grad():
        p, _ = token_logprobs(reference(batch.tokens).logits, batch.tokens, 1.0)
    independent = mismatch_panel(batch.g, p, batch.mask, truncate=2.0)["token_mult_prob_error"]
    assert max(logged) < independent < limit
    shifted = mismatch_panel(batch.g.roll(1, 1), p, batch.mask, truncate=2.0)
    assert shifted["token_mult_prob_error"] > 1.2  # the comparison can fail


def test_arms_start_from_the_same_weights(run_arm):
    """The warm start is shared: the masters of both arms are the same file."""
    folders = {settled(run_arm(arm).recipe).warm_start_digest() for arm in ARMS}
    assert len(folders) == 1
    cache = run_arm("bf16").journal.folder.parent / ".cache" / "warm_start"
    assert [p.stem for p in cache.iterdir()] == list(folders)
    models = [
        (run_arm(arm).journal.folder / "model" / "model.safetensors").read_bytes() for arm in ARMS
    ]
    assert models[0] == models[1]


def test_actors_are_gone_after_a_run(run):
    assert named_actors(context_of(run)) == []


def test_a_failing_run_says_so_everywhere_and_leaves_nothing_running(runs_dir, run_arm):
    """An engine without room for one sequence: vLLM itself refuses to start."""
    from flows.training import train
    from fp8rl.recipe.load import load_recipe
    from tests.arms import SHORT, TINY

    first = run_arm("bf16")  # for the warm start
    recipe = load_recipe(
        TINY / "bf16.yaml",
        [
            *SHORT,
            f"runs_dir={runs_dir}",
            "name=test-failing",
            "rollout.kv_cache_mib=1",
            "rollout.max_prompt_tokens=240",
            "model.tiny.max_positions=8192",
            "rollout.max_new_tokens=7000",
            "warm_start.steps=0",
        ],
    ).recipe
    with pytest.raises(Exception, match="KV cache"):
        asyncio.run(train(recipe=recipe))
    state = Run(runs_dir / "test-failing").state()
    assert state.state == "failed"
    assert "KV cache" in state.reason
    client = mlflow_client(first)
    experiment = client.get_experiment_by_name("fp8rl").experiment_id
    found = client.search_runs([experiment], "tags.`fp8rl.run` = 'test-failing'")
    assert [r.info.status for r in found] == ["FAILED"]
    folder = runs_dir / "test-failing"
    failed = RunContext(run="test-failing", folder=folder, model_dir=folder / "model", recipe=recipe)
    assert named_actors(failed) == []
