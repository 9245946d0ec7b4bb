"""What every step of a run is told: small, and serialisable as JSON."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from fp8rl.files import sha256
from fp8rl.journal import Journal
from fp8rl.recipe.schema import Recipe


class RunContext(BaseModel):
    """run: its name. folder: of the run. model_dir: Hugging Face folder of the model, the recipe's own
    or the tiny one in the run. Folders are absolute: actors may have another working directory. origin:
    the weight version that the run starts from, above 0 for a fork. mlflow_run: id of its MLflow run.
    """

    model_config = ConfigDict(frozen=True)

    run: str
    folder: Path
    model_dir: Path
    recipe: Recipe
    origin: int = 0
    mlflow_run: str | None = None

    @property
    def journal(self) -> Journal:
        return Journal(self.folder)

    @property
    def data_dir(self) -> Path:
        """The run's prompts."""
        return self.folder / "data"

    def actor_name(self, kind: str) -> str:
        """A name that no other run has, on a cluster that several folders and users share."""
        return f"{kind}:{self.run}:{sha256(str(self.folder).encode())[:12]}"
