"""A run's policy as a logged model of its MLflow run: `mlflow.transformers` loads it back."""

import logging
from pathlib import Path
from tempfile import TemporaryDirectory

from fp8rl.export import Exported, ExportError, ExportFormat
from fp8rl.machine import describe
from fp8rl.runs import Run
from fp8rl.tracking_queue import Queue
from fp8rl.tracking_server import Server, TrackingError, tracking_uri

NAME = "policy"
_NEEDED = ("torch", "transformers")


def require_loggable(run: Run, fmt: ExportFormat) -> str:
    """The id of the run's MLflow run. Raises TrackingError where it has none, ExportError for a format
    that MLflow's loader does not read."""
    if fmt is not ExportFormat.BF16:
        raise ExportError(f"--log-model and --format {fmt}: a logged model is in BF16")
    mlflow_run = Queue(run.folder / "tracking").state.mlflow_run
    if mlflow_run is None:
        raise TrackingError(f"run {run.name} has no MLflow run yet: `fp8rl reap` makes it whole")
    return mlflow_run


def log_model(run: Run, exported: Exported) -> str:
    """Logs the BF16 export `exported` of `run` as a model of the run's MLflow run, with the weights of
    its iteration as the step; returns its URI (models:/...).

    Copies the folder to where MLflow keeps artifacts. Raises as `require_loggable`, and AwayError where
    the server is away.
    """
    mlflow_run = require_loggable(run, ExportFormat.BF16)
    with Server(tracking_uri(run.recipe)).reached() as client, TemporaryDirectory() as temporary:
        from mlflow.entities import LoggedModelOutput, LoggedModelStatus

        experiment = client.get_run(mlflow_run).info.experiment_id
        model = client.create_logged_model(experiment, name=NAME, source_run_id=mlflow_run)
        try:
            _write(exported, mlflow_run, model.model_id, Path(temporary) / "model")
            client.log_model_artifacts(model.model_id, str(Path(temporary) / "model"))
        except BaseException:
            client.finalize_logged_model(model.model_id, LoggedModelStatus.FAILED)
            raise
        client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)
        client.log_outputs(mlflow_run, [LoggedModelOutput(model.model_id, exported.version)])
        return str(model.model_uri)


def _write(exported: Exported, mlflow_run: str, model_id: str, folder: Path) -> None:
    """The folder as MLflow's transformers flavour keeps it."""
    import mlflow
    from mlflow.models import Model

    # It looks for a model card on the hub, and says that there is none.
    logging.getLogger("mlflow.transformers").setLevel(logging.ERROR)
    packages = describe()["packages"]
    mlflow.transformers.save_model(
        str(exported.folder),
        str(folder),
        task="text-generation",
        mlflow_model=Model(run_id=mlflow_run, model_id=model_id),
        # What it was made with; MLflow would load the model in another process to find out.
        pip_requirements=[f"{name}=={packages[name].partition('+')[0]}" for name in _NEEDED],
    )
