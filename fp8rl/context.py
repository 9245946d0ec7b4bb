"""What every step of a run is told: small, and serialisable as JSON."""

import hashlib
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from fp8rl.journal import Journal
from fp8rl.model.source import model_folder
from fp8rl.recipe.schema import Recipe


class RunContext(BaseModel):
    """run: its name. folder: of the run, absolute."""

    model_config = ConfigDict(frozen=True)

    run: str
    folder: Path
    recipe: Recipe

    @property
    def journal(self) -> Journal:
        return Journal(self.folder)

    @property
    def data_dir(self) -> Path:
        """The run's prompts."""
        return self.folder / "data"

    @property
    def model_dir(self) -> Path:
        """Hugging Face folder of the model: the recipe's own, or the tiny one, built in the run."""
        return model_folder(self.recipe) or self.folder / "model"

    def actor_name(self, kind: str) -> str:
        """A name that no other run has, on a cluster that several folders and users share."""
        return f"{kind}:{self.run}:{hashlib.sha256(str(self.folder).encode()).hexdigest()[:12]}"
