"""How a recipe's policy model is built: for the learner, and for the reference policy beside it."""

from collections.abc import Callable, Mapping
from functools import partial

from fp8rl.device import resolve
from fp8rl.model.dims import ModelDims
from fp8rl.model.megatron import PolicyModel
from fp8rl.model.precision import Decision
from fp8rl.model.rounding import ENGINE, MEGATRON
from fp8rl.recipe.rules import learner_fp8
from fp8rl.recipe.schema import Recipe


def builder(
    recipe: Recipe, dims: ModelDims, plan: Mapping[str, Decision], *, as_engine: bool
) -> Callable[[], PolicyModel]:
    """Makes models without weights, each as the other.

    as_engine: whether they round as the rollout engine does where the recipe asks for parity.
    """
    backends, precision = resolve(recipe), recipe.precision
    return partial(
        backends.load("policy_model"),
        dims,
        plan,
        fp8=learner_fp8(precision),
        fp8_backend=backends.fp8_backend,
        rounding=ENGINE if precision.parity and as_engine else MEGATRON,
        head=precision.head,
    )
