"""Everything about a recipe that can be known before an engine starts."""

from fp8rl.data.chat import require_chat_template
from fp8rl.data.tasks import make_generator
from fp8rl.device import resolve
from fp8rl.model.source import model_dims, model_folder
from fp8rl.recipe.rules import require_one_model, require_valid
from fp8rl.recipe.schema import Recipe


def require_runnable(recipe: Recipe) -> None:
    """Raises RecipeError (or UnsupportedModelError) where `recipe` cannot run on this machine."""
    require_one_model(recipe)
    require_valid(recipe, model_dims(recipe))
    resolve(recipe)
    make_generator(recipe.task, seed=recipe.seed, size=1)
    folder = model_folder(recipe)
    if folder is not None:
        require_chat_template(recipe.task, folder)
