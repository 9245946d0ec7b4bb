"""The recipe that an attribution is measured with. Imports without torch."""

from pathlib import Path

from fp8rl.device import settled
from fp8rl.model.dims import read_dims
from fp8rl.preflight import require_runnable
from fp8rl.recipe.precision import ElementFormat, Linear
from fp8rl.recipe.rules import RecipeError, require_valid
from fp8rl.recipe.schema import Recipe


def measured_recipe(recipe: Recipe, *, weights: Path | None) -> Recipe:
    """`recipe`, settled for this machine, with a learner in BF16 that can round to FP8 as its rollout
    engine does, and with a BF16 KV cache: what is attributed is the linears'.

    weights: the folder that is to be taken instead of the recipe's model. Raises RecipeError where the
    recipe cannot run, does not roll out in FP8, or its learner would not stand in for the engine.
    """
    require_runnable(recipe)
    precision = recipe.precision
    if precision.rollout is not Linear.FP8:
        raise RecipeError(
            "precision.rollout: the recipe rolls out in BF16, so there is no FP8 to attribute mismatch "
            "to: take another arm, or set precision.rollout=fp8"
        )
    if not precision.parity:
        raise RecipeError(
            "precision.parity: attribution has a learner stand in for the engine, which it does only "
            "where both round alike. Set precision.parity=true"
        )
    of_linears = {
        "learner": Linear.BF16,
        "learner_format": ElementFormat.E4M3,
        "learner_scales": precision.rollout_scales,
        "kv_cache": Linear.BF16,
        "learner_kv": Linear.BF16,
    }
    changed = recipe.model_copy(update={"precision": precision.model_copy(update=of_linears)})
    if weights is not None:
        require_valid(changed, read_dims(weights))
    return settled(changed)
