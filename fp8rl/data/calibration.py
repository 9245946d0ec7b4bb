"""Which sequences the KV cache is calibrated on. Imports without torch."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from fp8rl.context import RunContext
from fp8rl.data.cursor import first_batch
from fp8rl.data.prepare import batch_prompts
from fp8rl.tables import from_parquet


@dataclass(frozen=True)
class CalibrationSet:
    """Sequences in tokens, prompt and response of each. source: in words what they are. all_tokens,
    all_sequences: how many there were to choose from.
    """

    prompts: list[list[int]]
    responses: list[list[int]]
    source: str
    all_tokens: int
    all_sequences: int


def calibration_set(context: RunContext, iteration: int) -> CalibrationSet:
    """What the KV scales of weight version `iteration` are calibrated on.

    Of that iteration's rollouts so many sequences as the recipe's budget allows; before the run's
    first, of its first prompts and their reference answers.
    """
    if iteration == context.origin:
        batch = first_batch(context, iteration + 1)
        columns = batch_prompts(context.data_dir, context.recipe, batch)
        source, groups, responses = (
            "prompts and reference answers",
            columns["id"],
            columns["answer_tokens"],
        )
    else:
        content = context.journal.read_file(iteration, "rollout", "rollouts.parquet")
        columns = from_parquet(content)
        source, groups, responses = (
            f"rollouts of iteration {iteration}",
            columns["prompt_id"],
            columns["tokens"],
        )
    prompts = columns["prompt_tokens"]
    lengths = [len(p) + len(r) for p, r in zip(prompts, responses, strict=True)]
    chosen = choose(groups, lengths, context.recipe.precision.kv_tokens)
    return CalibrationSet(
        [prompts[i] for i in chosen],
        [responses[i] for i in chosen],
        source,
        sum(lengths),
        len(lengths),
    )


def choose(groups: Sequence[Hashable], lengths: Sequence[int], budget: int | None) -> list[int]:
    """Which sequences to take, in order: whole ones, up to `budget` tokens (None: all).

    The first of each group is taken whatever the budget, then their second ones, and so on: every
    prompt is among them. The same sequences and budget give the same choice.
    """
    if budget is None:
        return list(range(len(lengths)))
    seen: dict[Hashable, int] = {}
    turns = []
    for group in groups:
        turns.append(seen.get(group, 0))
        seen[group] = turns[-1] + 1
    chosen, tokens = [], 0
    for i in sorted(range(len(lengths)), key=lambda i: (turns[i], i)):
        if turns[i] > 0 and tokens + lengths[i] > budget:
            break
        chosen.append(i)
        tokens += lengths[i]
    return sorted(chosen)
