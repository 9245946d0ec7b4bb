"""The recipe's rewards: which verifiers score a completion, and how much each of them counts.

What each one does, formulas and statuses: docs/rewards.md. The default is the task's own scorer.
"""

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator

from fp8rl.recipe.base import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section

# Names stand in metrics and columns: reward/<name>_mean, reward_<name>.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_]{1,40}$")]


class Verifier(Section):
    """Base of the verifiers."""

    kind: str
    weight: NonNegativeFloat = 1.0
    """Of its reward in the sum. 0: it is logged only."""
    name: Name | None = None
    """In metrics and tables. Empty: its kind."""

    @property
    def title(self) -> str:
        """`name`, settled."""
        return self.name or self.kind

    @property
    def isolation(self) -> bool | None:
        """Whether it runs in a worker process, under task.reward_limits. None: as the task is, which
        fp8rl/reward/isolation.py says."""
        return False

    @property
    def sees_extract(self) -> bool:
        """Whether it scores what task.extract takes of a completion. Else the whole of it."""
        return False


class TaskVerifier(Verifier):
    """The scorer that comes with the task."""

    kind: Literal["task"] = "task"
    """The task's own scorer."""
    isolate: bool | None = None
    """Run it in a worker process. Empty: if it may take any time, as those of countdown and others do,
    which compute what the completion says (`9**9**9`); not if it only compares text. false: never, so
    that one completion can hang the step."""

    @property
    def isolation(self) -> bool | None:
        return self.isolate

    @property
    def sees_extract(self) -> bool:
        return True


class ExactVerifier(Verifier):
    """1 where the text is the reference answer, white space at the ends and its amount aside."""

    kind: Literal["exact"] = "exact"
    """Equal to the answer."""

    @property
    def sees_extract(self) -> bool:
        return True


class NumericVerifier(Verifier):
    """1 where |text - answer| <= max(absolute, relative * |answer|), both read as exact fractions."""

    kind: Literal["numeric"] = "numeric"
    """Equal to the answer as a number."""
    absolute: NonNegativeFloat = 0.0
    """Largest absolute difference."""
    relative: NonNegativeFloat = 0.0
    """Largest difference relative to the answer."""

    @property
    def sees_extract(self) -> bool:
        return True


class MathVerifier(Verifier):
    """1 where the library math-verify finds the text equal to the reference answer."""

    kind: Literal["math_verify"] = "math_verify"
    """Equal to the answer in the sense of math-verify."""

    @property
    def isolation(self) -> bool | None:
        return True

    @property
    def sees_extract(self) -> bool:
        return True


class FormatVerifier(Verifier):
    """1 where the whole completion matches a regular expression."""

    kind: Literal["format"] = "format"
    """Of a given form."""
    pattern: str
    """Python's syntax; it must match from the first to the last character, and `.` is any character,
    line ends too."""

    @property
    def isolation(self) -> bool | None:
        return True

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern, re.DOTALL)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"not a regular expression: {error}") from None
        return pattern


class LengthVerifier(Verifier):
    """A penalty for long completions, in characters: 0 up to max_chars - buffer_chars, then falling
    linearly to -1 at max_chars, and -1 beyond. For tokens: learner.overlong_buffer."""

    kind: Literal["length"] = "length"
    """A penalty for length."""
    max_chars: PositiveInt
    """Characters from which the penalty is whole."""
    buffer_chars: NonNegativeInt = 0
    """Characters before max_chars over which it grows."""


class FunctionVerifier(Verifier):
    """A function of the user's: score(question, completion, answer, entry) -> float."""

    kind: Literal["function"] = "function"
    """A function of the user's."""
    function: Annotated[str, Field(pattern=r"^[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*$")]
    """module:function, for example my_rewards:score. The module is a file below task.reward_path."""

    @property
    def isolation(self) -> bool | None:
        return True


AnyVerifier = Annotated[
    TaskVerifier
    | ExactVerifier
    | NumericVerifier
    | MathVerifier
    | FormatVerifier
    | LengthVerifier
    | FunctionVerifier,
    Field(discriminator="kind"),
]


class RewardLimits(Section):
    """What a verifier in a worker process may take for one completion."""

    timeout_s: PositiveFloat = 5.0
    """Wall time. The worker is killed after it, and the completion has status timeout."""
    memory_mib: PositiveInt = 2048
    """Address space beyond what the worker takes to start."""


DEFAULT_REWARDS = (TaskVerifier(),)


def are_default(rewards: tuple[Verifier, ...]) -> bool:
    """Whether they are the task's own scorer alone, wherever it runs: tables and metrics then name no
    reward."""
    return rewards in [(TaskVerifier(isolate=isolate),) for isolate in (None, True, False)]
