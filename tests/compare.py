"""Two runs of one recipe, compared by what is in them: bit by bit, but for times and names."""

from pathlib import Path
from typing import Any

from fp8rl.journal import ITERATION, WEIGHTS_FILE
from fp8rl.model.published import read_manifest, read_published
from fp8rl.report import STEPS
from fp8rl.runs import Run
from fp8rl.tables import from_parquet
from fp8rl.tracking import RUN_ID_TAG, tracking_uri

# What a record says of the run itself, or of the clock.
_OWN = ("t_ms", "seconds", "run_id")
_TIMES = ("timing/", "perf/")


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
    return [key for key in keys if key not in one or key not in other or not _same(one[key], other[key])]


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


def last_trained(run: Run) -> int:
    return max((n for n, step in run.journal.steps() if step == "train"), default=run.origin)


def steps_of(run: Run, iteration: int) -> list[str]:
    return [step for step in (*STEPS, "evaluate", ITERATION) if run.journal.is_committed(iteration, step)]


def runs_in(folder: Path, *names: str) -> list[Run]:
    return [Run(folder / name) for name in names]
