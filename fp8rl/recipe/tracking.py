"""The recipe's tracking: where MLflow is, and what it is told besides the metrics."""

from pydantic import Field

from fp8rl.recipe.base import Section


class Tracking(Section):
    uri: str | None = None
    """MLflow tracking URI. Empty: MLFLOW_TRACKING_URI, else SQLite in the runs folder."""
    experiment: str = "fp8rl"
    """Name of the MLflow experiment."""
    system_metrics: bool = True
    """Log CPU, memory, disk, network and GPUs of the flow's machine to MLflow, every 10 s."""
    log_model: bool = False
    """Log the final policy to MLflow as a model that `mlflow.transformers` loads, in BF16."""
    tags: dict[str, str] = Field(default_factory=dict)
    """More tags for the MLflow run. A sweep names itself and its MLflow run to its children here."""
