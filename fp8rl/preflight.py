"""Everything about a recipe that can be known before an engine starts."""

from fp8rl.data.tasks import make_generator
from fp8rl.device import resolve
from fp8rl.model.tiny import model_dims
from fp8rl.recipe.rules import require_valid
from fp8rl.recipe.schema import Recipe


def require_runnable(recipe: Recipe) -> None:
    """Raises RecipeError (or UnsupportedModelError) where `recipe` cannot run on this machine."""
    require_valid(recipe, model_dims(recipe.model))
    resolve(recipe)
    make_generator(recipe.task, seed=recipe.seed, size=1)
