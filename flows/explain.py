"""`fp8rl explain`: what a recipe amounts to, before anything runs."""

from rich.console import Console
from rich.table import Table

from fp8rl.device import resolve
from fp8rl.model.names import name_table
from fp8rl.model.precision import make_plan
from fp8rl.model.source import describe_model, model_dims
from fp8rl.recipe.load import LoadedRecipe, flatten
from fp8rl.recipe.rules import plan_rules, warnings
from fp8rl.reward.isolation import places


def explain(loaded: LoadedRecipe, console: Console) -> None:
    """Prints every value and its origin, the backend of each part, where each reward runs, and the
    precision plan."""
    recipe = loaded.recipe
    values = Table(title=f"Recipe {loaded.path} (digest {recipe.digest()[:12]})", title_justify="left")
    for heading in ("key", "value", "from"):
        values.add_column(heading, overflow="fold")
    for key, value in flatten(recipe).items():
        values.add_row(key, value, loaded.origin(key))
    console.print(values)

    parts = Table(title="What runs each part", title_justify="left")
    parts.add_column("part")
    parts.add_column("effective", overflow="fold")
    for name, backend in vars(resolve(recipe)).items():
        parts.add_row(name.replace("_", " "), str(backend))
    for name, value in describe_model(recipe).items():
        parts.add_row(f"model: {name}", str(value))
    console.print(parts)

    rewards = Table(title="Rewards", title_justify="left")
    for heading in ("reward", "kind", "weight", "runs"):
        rewards.add_column(heading, overflow="fold")
    for verifier, place in zip(recipe.task.rewards, places(recipe.task).values(), strict=True):
        rewards.add_row(verifier.title, verifier.kind, f"{verifier.weight:g}", place)
    console.print(rewards)

    dims = model_dims(recipe)
    precision = recipe.precision
    rollout = make_plan(plan_rules(precision, precision.rollout), dims)
    learner = make_plan(plan_rules(precision, precision.learner), dims)
    plan = Table(title="Precision plan", title_justify="left")
    for heading in ("parameter", "shape", "rollout", "learner", "rule"):
        plan.add_column(heading, overflow="fold")
    for slot in name_table(dims):
        for name, rows in zip(slot.hf, slot.rows, strict=True):
            shape = f"{rows} x {slot.columns}" if slot.columns else str(rows)
            decision = rollout[name]
            plan.add_row(name, shape, decision.format, learner[name].format, decision.rule)
    console.print(plan)
    for warning in warnings(recipe):
        console.print(f"warning: {warning}", style="yellow", soft_wrap=True, highlight=False)
