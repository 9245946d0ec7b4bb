"""What of a completion is scored: a talkative model's answer stands inside a sentence."""

import re

from fp8rl.recipe.schema import Extract

# Digits, or groups of three with commas; then decimals and an exponent; or decimals alone. A full stop
# after it is not part of it. Fractions and digits in groups with spaces are several numbers.
_NUMBER = re.compile(
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
)
_MINUS_SIGNS = ("-", "\u2212")
# After these a minus subtracts: "9-4" ends in 4.
_OPERAND_ENDS = re.compile(r"[\w)\]}]")


def extract(how: Extract, completion: str) -> str | None:
    """The part of `completion` that is scored; None where there is none.

    last_number: without thousands commas, with its minus sign if it has one ("-" for any), decimals
    as written.
    """
    if how is Extract.WHOLE:
        return completion if completion.strip() else None
    last = None
    for match in _NUMBER.finditer(completion):
        last = match
    if last is None:
        return None
    before = completion[: last.start()]
    negative = before.endswith(_MINUS_SIGNS) and not _OPERAND_ENDS.match(before[-2:-1])
    return ("-" if negative else "") + last.group().replace(",", "")
