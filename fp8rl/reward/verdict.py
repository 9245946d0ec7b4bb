"""What a verifier says of a completion."""

from dataclasses import dataclass
from enum import StrEnum

# Of a detail, in characters: what a completion makes a library say can be as long as itself.
_LONGEST_DETAIL = 400


class Status(StrEnum):
    """ok: full score. wrong: less. unparsable: nothing to score. error: the verifier failed.
    timeout: it took longer than task.reward_limits.timeout_s."""

    OK = "ok"
    WRONG = "wrong"
    UNPARSABLE = "unparsable"
    ERROR = "error"
    TIMEOUT = "timeout"

    @property
    def is_failure(self) -> bool:
        """Whether it tells of the verifier and not of the completion."""
        return self in (Status.ERROR, Status.TIMEOUT)


@dataclass(frozen=True)
class Verdict:
    """reward: within 1e6 of 0. detail: why, where status is not ok or wrong; text that fits a table."""

    reward: float
    status: Status
    detail: str = ""

    @classmethod
    def graded(cls, reward: float) -> "Verdict":
        """ok from 1 on, wrong below."""
        return cls(reward, Status.OK if reward >= 1.0 else Status.WRONG)

    @classmethod
    def right_if(cls, right: bool) -> "Verdict":
        return cls.graded(float(right))

    @classmethod
    def without_score(cls, status: Status, detail: str) -> "Verdict":
        """Reward 0. detail: of any length and content."""
        return cls(0.0, status, tidy(detail))

    @classmethod
    def of_failure(cls, error: BaseException) -> "Verdict":
        """Status error, with what was raised."""
        try:
            text = str(error)
        except Exception:  # of a class with a __str__ of its own
            text = "(its text cannot be had)"
        return cls.without_score(Status.ERROR, f"{type(error).__name__}: {text}")


def tidy(text: str) -> str:
    """`text` cut to what a table and a log can hold: bounded, no NULs, no lone surrogates."""
    if len(text) > _LONGEST_DETAIL:
        text = text[:_LONGEST_DETAIL] + "..."
    return text.replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()
