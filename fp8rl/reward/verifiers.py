"""Verifiers: pure functions of a completion, or of what task.extract takes of it, and the answer.

exact, numeric and length take time linear in the text and run where they are called. math_verify and
matches_format can take any time, holding the interpreter: they are for a worker process (workers.py).
"""

import re
from fractions import Fraction

from fp8rl.reward.verdict import Status, Verdict

# Longer texts are no numbers anyone means, and their arithmetic could take for ever.
_LONGEST_NUMBER = 500
_LARGEST_EXPONENT = 500
# Weighted and summed it stays finite, and its square does in FP32.
_LARGEST_REWARD = 1e6
_DECIMAL = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+"
_NUMBER = re.compile(
    rf"(?P<sign>[-+\u2212]?)(?P<over>{_DECIMAL})"
    rf"(?:[eE](?P<exponent>[-+]?[0-9]{{1,4}})|\s*/\s*(?P<under>{_DECIMAL}))?\s*(?P<percent>%?)"
)


def exact(text: str, answer: str) -> Verdict:
    """1 where `text` is `answer`, runs of white space counting as one space, at the ends as none."""
    return Verdict.right_if(text.split() == answer.split())


def number(text: str) -> Fraction | None:
    """The number that the whole of `text` is, exactly; None where it is none.

    Integers, decimals, an exponent, or a fraction of two of them; commas between groups of three
    digits; "-", "+" or a minus sign (U+2212) before; a percent sign after divides by 100. At most 500
    characters and powers of ten up to 500. No units, currencies or mixed numbers ("1 1/2").
    """
    text = text.strip()
    found = _NUMBER.fullmatch(text) if len(text) <= _LONGEST_NUMBER else None
    if found is None:
        return None
    value = _decimal(found["over"])
    if found["under"] is not None:
        under = _decimal(found["under"])
        if not under:
            return None
        value /= under
    if found["exponent"] is not None:
        exponent = int(found["exponent"])
        if abs(exponent) > _LARGEST_EXPONENT:
            return None
        value *= Fraction(10) ** exponent
    if found["percent"]:
        value /= 100
    return -value if found["sign"] in ("-", "\u2212") else value


def _decimal(text: str) -> Fraction:
    return Fraction(text.replace(",", ""))


def numeric(text: str, answer: str, *, absolute: float = 0.0, relative: float = 0.0) -> Verdict:
    """1 where |text - answer| <= max(absolute, relative * |answer|), in exact arithmetic.

    unparsable: `text` is no number (`number`). error: `answer` is none.
    """
    want = number(answer)
    if want is None:
        return Verdict.without_score(Status.ERROR, f"the reference answer is no number: {answer}")
    given = number(text)
    if given is None:
        return Verdict.without_score(Status.UNPARSABLE, f"no number: {text}")
    allowed = max(Fraction(absolute), Fraction(relative) * abs(want))
    return Verdict.right_if(abs(given - want) <= allowed)


def length(completion: str, *, max_chars: int, buffer_chars: int = 0) -> Verdict:
    """0 up to max_chars - buffer_chars characters, falling linearly to -1 at max_chars, -1 beyond.

    The soft overlong punishment of DAPO (arXiv:2503.14476, eq. 13) in characters. Status ok where there
    is no penalty, else wrong.
    """
    over = len(completion) - (max_chars - buffer_chars)
    if over <= 0:
        return Verdict(0.0, Status.OK)
    return Verdict(-min(1.0, over / buffer_chars) if buffer_chars else -1.0, Status.WRONG)


def matches_format(completion: str, pattern: str) -> Verdict:
    """1 where `pattern` matches all of `completion`; `.` is any character. May hang: see above."""
    return Verdict.right_if(re.fullmatch(pattern, completion, re.DOTALL) is not None)


def math_verify(text: str, answer: str) -> Verdict:
    """1 where math-verify (its default settings) finds the expression in `text` equal to `answer`.

    Of several expressions in `text` math-verify takes a boxed one, else the last. `answer` without
    LaTeX's $, \\( \\), \\[ \\] or \\boxed counts as LaTeX inside $. unparsable: no expression in
    `text`. error: none in `answer`, or the comparison fails. May hang, and take any memory: see above.
    """
    import math_verify as library

    gold = library.parse(
        answer if _has_math(answer) else f"${answer}$", parsing_timeout=None, raise_on_error=True
    )
    if not gold:
        detail = f"math-verify finds no expression in the reference answer: {answer}"
        return Verdict.without_score(Status.ERROR, detail)
    given = library.parse(text, parsing_timeout=None, raise_on_error=True)
    if not given:
        return Verdict.without_score(Status.UNPARSABLE, "math-verify finds no expression")
    # Time limits of the library are signals, which C code does not heed.
    right = library.verify(gold, given, timeout_seconds=None, raise_on_error=True)
    return Verdict.right_if(bool(right))


def _has_math(answer: str) -> bool:
    return any(sign in answer for sign in ("$", "\\(", "\\[", "\\boxed"))


def as_reward(value: object) -> Verdict:
    """The verdict for what a function or a task's scorer returned: a number of at most 1e6 in
    magnitude, from 1 on ok.

    error: NaN or a greater one. What float(value) raises, this raises.
    """
    reward = float(value)  # type: ignore[arg-type]
    if not abs(reward) <= _LARGEST_REWARD:
        detail = f"the reward is {reward}, which is not within {_LARGEST_REWARD:g} of 0"
        return Verdict.without_score(Status.ERROR, detail)
    return Verdict.graded(reward)
