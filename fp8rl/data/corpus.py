"""The warm start's corpus: prompts with answers of mixed quality, as pretraining data are.

A model trained on it answers right some of the time, which leaves RL something to sharpen.
"""

from random import Random

from fp8rl.data.tasks import make_generator
from fp8rl.recipe.rules import RecipeError
from fp8rl.recipe.schema import Task


def corpus(
    task: Task, *, steps: int, batch_size: int, correct: float, seed: int, exclude: set[str]
) -> list[list[tuple[str, str]]]:
    """`steps` batches of (question, answer), a share `correct` of the answers right.

    Questions in `exclude` (the validation set) are left out. Raises RecipeError where the task does
    not give enough others.
    """
    rng = Random(f"corpus/{seed}")
    wanted = steps * batch_size
    if wanted == 0:
        return []
    generator = make_generator(task, seed=seed + 7_919, size=4 * wanted)
    pairs: list[tuple[str, str]] = []
    for index in range(4 * wanted):
        if len(pairs) == wanted:
            break
        entry = generator[index]
        question, answer = entry["question"], str(entry["answer"])
        if question not in exclude:
            pairs.append((question, answer if rng.random() < correct else spoil(answer, rng)))
    if len(pairs) < wanted:
        raise RecipeError(
            f"warm_start: {task.name} gave {len(pairs)} questions outside the validation set; "
            f"{wanted} are needed. Ask for fewer steps, or set task.options that make more questions"
        )
    return [pairs[i : i + batch_size] for i in range(0, len(pairs), batch_size)]


def spoil(answer: str, rng: Random) -> str:
    """An answer that looks like a right one, and seldom is: sorted, backwards, or one character drawn
    anew."""
    if not answer:
        return answer
    kind = rng.randrange(3)
    if kind == 0:
        return "".join(sorted(answer))
    if kind == 1:
        return answer[::-1]
    place = rng.randrange(len(answer))
    alphabet = "0123456789" if answer.isdigit() else "".join(sorted(set(answer)))
    return answer[:place] + rng.choice(alphabet) + answer[place + 1 :]
