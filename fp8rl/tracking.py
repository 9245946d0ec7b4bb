"""MLflow: one run for one training run, each iteration's metrics once.

`MlflowClient` with an explicit run id throughout: the fluent API's active run is per thread and
marks a run finished whenever its block is left. Points are logged from committed records with the
record's own time stamp, so logging one again is the same point. MLflow is imported on first use.
"""

import json
import logging
import math
import os
from pathlib import Path
from typing import Any

from fp8rl.recipe.load import flatten, to_yaml
from fp8rl.recipe.schema import Recipe

RUN_TAG = "fp8rl.run"
_PARAM_LIMIT = 6000


def tracking_uri(recipe: Recipe) -> str:
    """The recipe's URI, else MLFLOW_TRACKING_URI, else SQLite in the runs folder."""
    configured = recipe.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI")
    return configured or f"sqlite:///{Path(recipe.runs_dir).resolve() / 'mlflow.db'}"


class Tracker:
    """The MLflow run of the training run `run`, whose folder is new: so is this."""

    def __init__(self, recipe: Recipe, run: str, tags: dict[str, str]) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient

        for noisy in ("mlflow", "alembic"):  # they report the making of a database line by line
            logging.getLogger(noisy).setLevel(logging.WARNING)
        self.uri = tracking_uri(recipe)
        self._client = MlflowClient(self.uri)
        experiment = self._experiment(recipe)
        created = self._client.create_run(
            experiment,
            run_name=run,
            tags={RUN_TAG: run, **tags},
        )
        self.run_id: str = created.info.run_id
        try:
            self._log_recipe(recipe)
        except BaseException:
            self.end("FAILED")
            raise

    def _experiment(self, recipe: Recipe) -> str:
        name = recipe.tracking.experiment
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        local = self.uri.startswith("sqlite:")
        place = (Path(recipe.runs_dir).resolve() / "mlartifacts").as_uri() if local else None
        return str(self._client.create_experiment(name, artifact_location=place))

    def _log_recipe(self, recipe: Recipe) -> None:
        from mlflow.entities import Param

        params = [Param(key, value[:_PARAM_LIMIT]) for key, value in flatten(recipe).items()]
        self._client.log_batch(self.run_id, params=params)
        self._client.log_text(self.run_id, to_yaml(recipe), "recipe.yaml")

    def log_metrics(self, step: int, metrics: dict[str, float], t_ms: int) -> None:
        """Logs `metrics` at `step` with time stamp `t_ms`, in one synchronous call.

        Infinite values are refused by name: MLflow would store them as a huge finite number.
        """
        from mlflow.entities import Metric

        infinite = [name for name, value in metrics.items() if math.isinf(value)]
        if infinite:
            raise ValueError(f"infinite metrics at step {step}: {', '.join(infinite)}")
        points = [Metric(name, value, t_ms, step) for name, value in metrics.items()]
        self._client.log_batch(self.run_id, metrics=points)

    def log_json(self, name: str, content: Any) -> None:
        """Stores `content` as the artifact `name`, replacing an older one."""
        self._client.log_text(self.run_id, json.dumps(content, indent=1), name)

    def log_table(self, name: str, columns: dict[str, list[str]]) -> None:
        """Stores `columns` as the artifact `name`, which MLflow's page shows as a table."""
        self._client.log_table(self.run_id, columns, name)

    def end(self, status: str) -> None:
        """Ends the run: FINISHED, FAILED or KILLED."""
        self._client.set_terminated(self.run_id, status)
