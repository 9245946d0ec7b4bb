"""Where an iteration is in the stream of prompts: read from the journal. Imports without torch.

The stream is made of batches of rollout.prompts prompts, numbered from 0 (`prompts_of_batch`). Without
dynamic sampling iteration n draws batch n - 1. With it an iteration may draw several, and the next one
goes on after the last of them, as the record of its rollout says: a run that is killed, taken back to a
step or forked neither skips a prompt nor sees one twice.
"""

from typing import Any

from fp8rl.context import RunContext
from fp8rl.recipe.schema import Recipe


def first_batch(context: RunContext, iteration: int) -> int:
    """The first batch that `iteration` draws; it is above the version that the run starts from.

    Raises JournalError where the record that says so is missing or damaged.
    """
    before, origin = iteration - 1, context.origin
    if context.recipe.rollout.max_draws > 1 and before > origin:
        return int(context.journal.record(before, "rollout").output["next_batch"])
    drawn = 0
    if origin > 0:
        # Of the run that it was forked from. Where that says nothing, each iteration drew once.
        drawn = int(context.journal.record(origin, "warm_start").output.get("next_batch", origin))
    return drawn + before - origin


def cursor_inputs(context: RunContext, iteration: int) -> dict[str, Any]:
    """The first batch as an input of the rollout; nothing where it follows from the iteration alone."""
    first = first_batch(context, iteration)
    if context.recipe.rollout.max_draws == 1 and first == iteration - 1:
        return {}
    return {"first_batch": first}


def train_prompts(context: RunContext) -> int:
    """How many train prompts the run has; raises JournalError where only a record that is missing or
    damaged would say so."""
    asked = context.recipe.task.train_prompts
    if asked is not None:
        return asked
    return int(context.journal.record(context.origin, "prepare_data").output["train"]["prompts"])


def draws_allowed(recipe: Recipe, first: int, total: int) -> int:
    """How many batches an iteration may draw that begins with batch `first`, of `total` prompts.

    It ends with the epoch: the next one has every prompt again, and one that is drawn twice in an
    iteration would be sampled with the same seeds.
    """
    per_epoch = total // recipe.rollout.prompts
    return min(recipe.rollout.max_draws, per_epoch - first % per_epoch)
