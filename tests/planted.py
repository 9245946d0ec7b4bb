"""A small model of which one linear cannot bear FP8, and nothing else is the matter with it."""

from pathlib import Path

from safetensors.torch import save_file

from fp8rl.model.tiny import write_tiny_model
from tests.models import RAGGED, random_weights

MODEL = RAGGED.model_copy(update={"layers": 3})
LAYER, KIND = 1, "down"


def write_planted(folder: Path) -> Path:
    """A folder that learner and vLLM load. In each block of columns of layer 1's down projection one
    is huge and meets an input that is always zero: BF16 does not see it; FP8 makes the others zeros."""
    weights = random_weights(MODEL)
    mlp = f"model.layers.{LAYER}.mlp"
    for column in range(5, MODEL.intermediate_size, 128):
        weights[f"{mlp}.up_proj.weight"][column] = 0
        weights[f"{mlp}.down_proj.weight"][:, column] = 1e5
    write_tiny_model(MODEL, folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
