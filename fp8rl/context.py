"""What every step of a run is told: small, and serialisable as JSON."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from fp8rl.journal import Journal
from fp8rl.recipe.schema import Recipe


class RunContext(BaseModel):
    """run: its name. folder: of the run. model_dir: Hugging Face folder of the initial weights."""

    model_config = ConfigDict(frozen=True)

    run: str
    folder: Path
    model_dir: Path
    recipe: Recipe

    @property
    def journal(self) -> Journal:
        return Journal(self.folder)

    @property
    def data_dir(self) -> Path:
        return self.folder / "data"
