"""The warm start's corpus: prompts with answers of mixed quality, as pretraining data are.

A model trained on it answers right some of the time, which leaves RL something to sharpen.
"""

from random import Random

from fp8rl.data.tasks import make_generator
from fp8rl.recipe.schema import Task


def corpus(
    task: Task, *, steps: int, batch_size: int, correct: float, seed: int, exclude: set[str]
) -> list[list[tuple[str, str]]]:
    """`steps` batches of (question, answer), a share `correct` of the answers right.

    Questions in `exclude` (the validation set) are left out.
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
    return [pairs[i : i + batch_size] for i in range(0, len(pairs), batch_size)]


def spoil(answer: str, rng: Random) -> str:
    """A wrong answer that looks like a right one: sorted, backwards, or one character exchanged."""
    kind = rng.randrange(3)
    if kind == 0:
        return "".join(sorted(answer))
    if kind == 1:
        return answer[::-1]
    place = rng.randrange(len(answer)) if answer else 0
    alphabet = "0123456789" if answer.isdigit() else "".join(sorted(set(answer)))
    return answer[:place] + rng.choice(alphabet) + answer[place + 1 :]
