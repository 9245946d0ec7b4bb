"""Two runs of one recipe, compared by what is in them: bit by bit, but for times and names."""

from pathlib import Path
from typing import Any

from fp8rl.journal import WEIGHTS_FILE
from fp8rl.model.manifest import read_manifest
from fp8rl.model.published import read_published
from fp8rl.runs import Run
from fp8rl.tables import from_parquet
from fp8rl.tracking import RUN_ID_TAG, tracking_uri

# What a record says of the run itself, or of the clock.
_OWN = ("t_ms", "seconds", "run_id")
_TIMES = ("timing/", "perf/", "system/")


def metrics_of(values: dict[str, float]) -> dict[str, float]:
    """Metrics without times and speeds."""
    return {name: value for name, value in values.items() if not name.startswith(_TIMES)}


def contents(run: Run, up_to: int | None = None) -> dict[str, Any]:
    """What each committed step of `run` holds, by (iteration, step, what), without times."""
    found: dict[str, Any] = {}
    for iteration, step in run.journal.steps():
        if (up_to is not None and iteration > up_to) or "." in step:  # a chunk of a running rollout
            continue
        record = run.journal.whole(iteration, step)
        key = f"{iteration}/{step}"
        found[f"{key}/metrics"] = metrics_of(record.metrics)
        found[f"{key}/output"] = record.output
        found[f"{key}/inputs"] = record.inputs
        for name in record.files:
            path = run.folder / name
            content: Any = path.read_bytes()
            if path.suffix == ".parquet":
                content = from_parquet(content)
            found[f"{key}/{path.name}"] = content
    return found


def weights(run: Run) -> dict[str, Any]:
    """Digests of every published version, and the tensors' bytes of those that are kept."""
    found: dict[str, Any] = {}
    for folder in sorted(run.folder.glob("weights/v*")):
        version = int(folder.name[1:])
        found[folder.name] = read_manifest(folder).tensors
        if (folder / WEIGHTS_FILE).is_file():
            read_published(folder, version)  # raises where the bytes are not those of the manifest
    return found


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Keys that only one of them has, or whose values differ (NaN equals NaN)."""
    keys = sorted({*one, *other})
    return [
        key for key in keys if key not in one or key not in other or not _same(one[key], other[key])
    ]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b or (a != a and b != b))


def run_differences(reference: Run, run: Run, *, whole: bool = True) -> list[str]:
    """How `run` differs from `reference`; with `whole` false only as far as `run` has come."""
    one, other = contents(reference), contents(run)
    if not whole:
        one = {key: value for key, value in one.items() if key in other}
    found = differences(one, other)
    if whole:
        found += [f"weights {name}" for name in differences(weights(reference), weights(run))]
    return found


def mlflow_points(run: Run) -> dict[str, list[int]]:
    """{metric: the steps of all its points, in order} of the run's MLflow run, of which it has one."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri(run.recipe))
    experiment = client.get_experiment_by_name(run.recipe.tracking.experiment).experiment_id
    found = client.search_runs([experiment], f"tags.`{RUN_ID_TAG}` = '{run.id}'")
    assert len(found) == 1, [one.info.run_id for one in found]
    names = found[0].data.metrics
    return {
        name: sorted(p.step for p in client.get_metric_history(found[0].info.run_id, name))
        for name in names
        if not name.startswith("system/")  # of the machine, not of the run
    }


def wanted_points(run: Run) -> dict[str, list[int]]:
    """The points that MLflow should have: one for each metric of each committed iteration."""
    wanted: dict[str, list[int]] = {}
    for record in run.journal.iterations():
        for name in record.metrics:
            wanted.setdefault(name, []).append(record.iteration)
    return wanted


def point_faults(run: Run) -> tuple[list[str], list[str]]:
    """(duplicate, missing) points of the run in MLflow, as "metric@step"."""
    have, want = mlflow_points(run), wanted_points(run)
    duplicate, missing = [], []
    for name in sorted({*have, *want}):
        steps, expected = have.get(name, []), want.get(name, [])
        duplicate += [f"{name}@{s}" for s in set(steps) if steps.count(s) > expected.count(s)]
        missing += [f"{name}@{s}" for s in expected if s not in steps]
    return duplicate, missing


def prompts_of(run: Run) -> dict[int, list[str]]:
    """The prompt ids of each iteration's rollout, in order."""
    found = {}
    for iteration, step in run.journal.steps():
        if step == "rollout":
            content = run.journal.read_file(iteration, step, "rollouts.parquet")
            found[iteration] = from_parquet(content)["prompt_id"]
    return found


# What a checkpoint's state says of the run and the machine themselves; and the global random
# generators, which nobody seeds and nothing draws from (weights and samples have their own seeds), so
# that they differ between any two processes.
_OWN_STATE = ("run", "run_id", "mlflow_run", "machine", "rng")


def checkpoint_differences(reference: Run, run: Run) -> list[str]:
    """How the newest checkpoints of both differ: tensors bit by bit, and their state."""
    import torch

    from fp8rl import checkpoints
    from fp8rl.learner.checkpoint import load

    held = []
    for one in (reference, run):
        newest, damaged = checkpoints.newest_whole(one.folder, at_most=10**6, run_id=one.id)
        if newest is None or damaged:
            return [f"checkpoint of {one.name}: {damaged or 'none'}"]
        tensors, state = load(newest.folder)
        bits = {
            n: t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            for n, t in tensors.items()
        }
        held.append((bits, {k: v for k, v in state.items() if k not in _OWN_STATE}))
    (tensors_a, state_a), (tensors_b, state_b) = held
    found = [f"checkpoint tensor {name}" for name in differences(tensors_a, tensors_b)]
    return found + [f"checkpoint state {name}" for name in differences(state_a, state_b)]


def _mlflow_runs(run: Run) -> tuple[Any, list[Any]]:
    """MLflow's client, and the MLflow runs of `run`."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri(run.recipe))
    experiment = client.get_experiment_by_name(run.recipe.tracking.experiment)
    if experiment is None:
        return client, []
    where = f"tags.`{RUN_ID_TAG}` = '{run.id}'"
    return client, list(client.search_runs([experiment.experiment_id], where))


def mlflow_status(run: Run) -> str:
    """The status of the run's one MLflow run, or how many it has."""
    _, found = _mlflow_runs(run)
    return str(found[0].info.status) if len(found) == 1 else f"{len(found)} MLflow runs"


def mlflow_values(run: Run) -> dict[str, list[tuple[int, float]]]:
    """{metric: (step, value) of all its points}, without times and speeds."""
    client, (found,) = _mlflow_runs(run)
    names = metrics_of(found.data.metrics)
    histories = {name: client.get_metric_history(found.info.run_id, name) for name in names}
    return {n: sorted((p.step, p.value) for p in points) for n, points in histories.items()}


def mlflow_differences(reference: Run, run: Run) -> list[str]:
    """Metrics whose points in MLflow differ."""
    one, other = mlflow_values(reference), mlflow_values(run)
    return [f"MLflow points of {name}" for name in differences(one, other)]


def early_points(run: Run) -> list[str]:
    """Points in MLflow, as "metric@step", that no committed iteration accounts for, or once too often;
    for a run that is not over."""
    path = tracking_uri(run.recipe).removeprefix("sqlite:///")
    if not path.startswith("http") and not Path(path).exists():
        return []
    _, found = _mlflow_runs(run)
    if not found:
        return []
    have, want = mlflow_points(run), wanted_points(run)
    return [
        f"{name}@{step}"
        for name, steps in have.items()
        for step in set(steps)
        if steps.count(step) > want.get(name, []).count(step)
    ]
