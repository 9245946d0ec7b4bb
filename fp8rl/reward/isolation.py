"""Which rewards run in a worker process, where a recipe leaves it open (`isolate` of kind task)."""

from fp8rl.data.tasks import compares_text
from fp8rl.recipe.data import all_sources
from fp8rl.recipe.reward import TaskVerifier
from fp8rl.recipe.schema import Task


def settled(task: Task) -> Task:
    """`task` with each `isolate` true or false. Raises RecipeError for an unknown generator."""
    rewards = tuple(
        v.model_copy(update={"isolate": bool(_any_time(task))}) if v.isolation is None else v
        for v in task.rewards
    )
    return task if rewards == task.rewards else task.model_copy(update={"rewards": rewards})


def places(task: Task) -> dict[str, str]:
    """{name of each reward: where it runs and, where the recipe left that open, why}, in words. Raises
    as `settled`."""
    told = {}
    for given, verifier in zip(task.rewards, settled(task).rewards, strict=True):
        told[verifier.title] = (
            "in a worker process" if verifier.isolation else "in the step's own process"
        )
        if isinstance(given, TaskVerifier) and given.isolate is None:
            names = ", ".join(_any_time(task))
            told[verifier.title] += (
                f" (the scorer of {names} may take any time)" if names else " (it only compares text)"
            )
        elif isinstance(given, TaskVerifier):
            told[verifier.title] += f" (isolate={str(given.isolate).lower()})"
    return told


def _any_time(task: Task) -> list[str]:
    """Titles of the sources whose own scorers may take any time."""
    return [
        one.title
        for one in all_sources(task)
        if one.source.is_generator and not compares_text(one.source.name, one.key)
    ]
