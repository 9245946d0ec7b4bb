"""Everything about a recipe that can be known before an engine starts."""

from fp8rl.data.chat import require_chat_template
from fp8rl.data.pool import require_readable
from fp8rl.data.tasks import make_generator, require_scorable
from fp8rl.device import resolve
from fp8rl.model.source import model_dims, model_folder
from fp8rl.recipe.data import all_sources
from fp8rl.recipe.precision import Linear
from fp8rl.recipe.rules import learner_fp8, require_one_model, require_valid, rollout_fp8
from fp8rl.recipe.schema import Recipe
from fp8rl.reward.score import require_rewards


def require_runnable(recipe: Recipe, *, is_prepared: bool = False) -> None:
    """Raises RecipeError (or UnsupportedModelError) where `recipe` cannot run on this machine.

    is_prepared: its prompts are there already, so that their sources need not be. Without it the first
    row of each local file is read; hub data sets are not looked for.
    """
    require_one_model(recipe)
    require_valid(recipe, model_dims(recipe))
    resolve(recipe)
    items = {}
    for one in all_sources(recipe.task):
        if one.source.is_generator:
            generator = make_generator(one.source, seed=recipe.seed, size=1, key=one.key)
            require_scorable(recipe.task, generator, one.source.name, one.key)
            label = {} if one.label is None else {"source": one.label}
            items[one.title] = {**generator[0], **label}
        elif not is_prepared:
            require_readable(one.source, one.key)
    require_rewards(recipe.task, items)
    folder = model_folder(recipe)
    if folder is not None:
        require_chat_template(recipe.task, folder)


def require_backend(recipe: Recipe) -> None:
    """Raises BackendError where what is to compute FP8 products cannot run on this machine, and
    EngineKernelError where the engine's attention cannot that parity asks for.

    It imports torch, and may compile: for a process that does so anyway, before long work.
    """
    from fp8rl.model.engine_attention import kernels
    from fp8rl.numerics.backends import backend

    if recipe.precision.parity:
        kernels()
    precision = recipe.precision
    products = backend(resolve(recipe).fp8_backend)
    if precision.learner is Linear.FP8:
        products.check(learner_fp8(precision))
    if precision.rollout is Linear.FP8:
        products.check(rollout_fp8(precision))
