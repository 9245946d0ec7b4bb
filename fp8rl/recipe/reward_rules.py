"""Which rewards go together; `rules.py` asks."""

from collections import Counter
from collections.abc import Iterator

from fp8rl.recipe.reward import FunctionVerifier, LengthVerifier, RewardLimits
from fp8rl.recipe.schema import Task

Problem = tuple[tuple[str, ...], str]


def reward_problems(task: Task) -> Iterator[Problem]:
    """Recipe keys at fault, and why, and what to do."""
    rewards = task.rewards
    names = Counter(verifier.title for verifier in rewards)
    twice = sorted(name for name, count in names.items() if count > 1)
    if twice:
        yield (
            ("task.rewards",),
            f"{', '.join(twice)} stands there more than once, and metrics tell rewards apart by name. "
            "Give each a name of its own: {kind: ..., name: ...}",
        )
    if not any(verifier.weight for verifier in rewards):
        yield (
            ("task.rewards",),
            "every weight is 0, so that all rewards would be 0. Give one a weight above 0",
        )
    for index, verifier in enumerate(rewards):
        key = f"task.rewards.{index}"
        if isinstance(verifier, LengthVerifier) and verifier.buffer_chars > verifier.max_chars:
            yield (
                (f"{key}.buffer_chars", f"{key}.max_chars"),
                f"the penalty would begin before the first character: {verifier.buffer_chars} is more "
                f"than {verifier.max_chars}. Lower buffer_chars",
            )
        if isinstance(verifier, FunctionVerifier) and not task.reward_path:
            yield (
                (f"{key}.function", "task.reward_path"),
                f"{verifier.function} is looked for nowhere. Name the folder of its module: "
                "task.reward_path=[folder]",
            )
    if isinstance(rewards[0], LengthVerifier):
        yield (
            ("task.rewards.0.kind",),
            "the first reward says whether an answer is right, which its length does not. Put another "
            "one first",
        )


def reward_warnings(task: Task) -> list[str]:
    """What is allowed and better known before a run is read."""
    found = []
    if task.reward_path and not any(isinstance(v, FunctionVerifier) for v in task.rewards):
        found.append("task.reward_path has no effect: no reward is of kind function")
    if task.reward_limits != RewardLimits() and not any(v.isolation is not False for v in task.rewards):
        found.append("task.reward_limits has no effect: no reward runs in a worker process")
    return found
