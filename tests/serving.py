"""Sweeps under `fp8rl up`: their files, what MLflow has of them, whether their runs took turns."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from fp8rl.runs import Run
from fp8rl.sweep.plan import SWEEP_TAG, read_plan, sweep_folder
from fp8rl.tracking import RUN_ID_TAG
from tests.arms import TINY
from tests.services import Services


def write_sweep(
    path: Path,
    name: str,
    arms: Sequence[str],
    seeds: Sequence[int],
    overrides: Iterable[str],
    experiment: str = "fp8rl",
) -> Path:
    """A sweep file over tiny arms; where its runs go is left to who runs it."""
    values = {
        "name": name,
        "arms": [str(TINY / f"{arm}.yaml") for arm in arms],
        "seeds": list(seeds),
        "overrides": {
            "tracking.experiment": experiment,
            **{key: yaml.safe_load(value) for key, value in (one.split("=") for one in overrides)},
        },
    }
    path.write_text(yaml.safe_dump(values))
    return path


def mlflow_sweep(services: Services, name: str) -> tuple[Any, list[dict[str, Any]]]:
    """The sweep's one MLflow run, and its children as its table shows them."""
    from mlflow import MlflowClient

    plan = read_plan(sweep_folder(services.runs, name))
    assert plan is not None
    client = MlflowClient(services.mlflow)
    experiments = [one.experiment_id for one in client.search_experiments()]
    found = client.search_runs(experiments, f"tags.`{SWEEP_TAG}` = '{name}'")
    (parent,) = [one for one in found if one.data.tags[RUN_ID_TAG] == plan["id"]]
    table = json.loads(Path(client.download_artifacts(parent.info.run_id, "children.json")).read_text())
    return parent, [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]


def overlaps(runs: Sequence[Run]) -> list[str]:
    """Pairs of runs, as "one / other", that worked at the same time, by their attempts and the steps
    that they committed. Of an attempt that was killed it is not known when it ended; its steps tell."""
    spans = [span for run in runs for span in _spans(run)]
    return [
        f"{name} / {other}"
        for begin, end, name in spans
        for began, _, other in spans
        if name != other and begin < began < end
    ]


def _spans(run: Run) -> list[tuple[float, float, str]]:
    attempts = [
        (one["started"], one["ended"], run.name) for one in run.attempts() if one["state"] != "killed"
    ]
    records = [run.journal.record(iteration, step) for iteration, step in run.journal.steps()]
    steps = [
        (one.t_ms / 1000 - one.seconds, one.t_ms / 1000, run.name)
        for one in records
        if one.step != "iteration"
    ]
    return attempts + steps
