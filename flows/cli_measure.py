"""The parts of the `fp8rl` command that measure what FP8 does to a model. Who registers them tells the
user of errors.
"""

from pathlib import Path
from typing import Annotated

import typer

from flows.terminal import Overrides, RecipePath, console, say
from fp8rl import progress
from fp8rl.recipe.load import load_recipe

Weights = Annotated[
    Path | None, typer.Option(help="Hugging Face folder to take instead of the recipe's model")
]


def numerics(
    recipe: RecipePath,
    overrides: Overrides = None,
    weights: Weights = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the results; runs/numerics/<arm> by default")
    ] = None,
) -> None:
    """Compare our FP8 scales and codes with other engines' on a model, and show what FP8 loses."""
    from flows.numerics import numerics as report

    with progress.listening(lambda event: say(event.text)):
        report(load_recipe(recipe, overrides), console, weights=weights, out=out)


def attribute(
    recipe: RecipePath,
    overrides: Overrides = None,
    weights: Weights = None,
    keep: Annotated[int, typer.Option(min=1, help="Suggest so many layers or kinds at most")] = 3,
    budget: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Suggest so much of the FP8 elements at most")
    ] = 0.25,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the results; runs/attribute/<arm> by default")
    ] = None,
) -> None:
    """Show which layers and kinds of linears FP8 makes the mismatch, and what BF16 there would buy."""
    from flows.attribute import attribute as report

    report(load_recipe(recipe, overrides), console, weights=weights, keep=keep, budget=budget, out=out)


def parity(
    recipe: RecipePath,
    overrides: Overrides = None,
    weights: Weights = None,
    sequences: Annotated[
        int, typer.Option(min=1, help="Compare so many sequences inside at most")
    ] = 12,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the results; runs/parity/<arm> by default")
    ] = None,
) -> None:
    """Compare engine and learner on the same tokens, at every point of every layer."""
    from flows.parity import parity as report

    report(load_recipe(recipe, overrides), console, weights=weights, sequences=sequences, out=out)


COMMANDS = (numerics, parity, attribute)
