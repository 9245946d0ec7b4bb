"""The guard's decisions: which rules an iteration passes, which of them fire, and what follows.

A function of the iteration's figures and of what the iterations before it passed, so that a decision
that is made again comes out the same. Decisions are part of the train step's record, in the journal.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fp8rl.identity import read_identity
from fp8rl.journal import Journal
from fp8rl.recipe.guard import METRIC_OF, SKIPPING, Action, Guard, GuardRule


@dataclass(frozen=True)
class Firing:
    """rule: its name. metric: as tracking has it. value: a number, or in words what is not one.
    breaches: iterations of the last `of` that passed the threshold, this one included."""

    rule: str
    metric: str
    value: float | str
    breaches: int
    of: int
    actions: tuple[str, ...]


@dataclass(frozen=True)
class Verdict:
    """breached: names of the rules whose threshold was passed. firings: of those that act."""

    breached: tuple[str, ...] = ()
    firings: tuple[Firing, ...] = ()

    @property
    def actions(self) -> frozenset[str]:
        return frozenset(action for firing in self.firings for action in firing.actions)

    @property
    def skips_update(self) -> bool:
        return bool(self.actions & SKIPPING)

    def joined(self, other: "Verdict") -> "Verdict":
        """What either says; of a rule that both name, this one's firing."""
        known = {firing.rule for firing in self.firings}
        more = tuple(firing for firing in other.firings if firing.rule not in known)
        return Verdict(tuple(dict.fromkeys(self.breached + other.breached)), self.firings + more)

    def to_dict(self) -> dict[str, Any]:
        return {
            "breached": list(self.breached),
            "firings": [asdict(firing) | {"actions": list(firing.actions)} for firing in self.firings],
        }


def judge(guard: Guard, metrics: Mapping[str, float], history: Sequence[Sequence[str]] = ()) -> Verdict:
    """metrics: of the iteration, by the names of tracking. history: the rules that each iteration
    before it passed, by name, the latest last.

    A figure of a rule that is NaN, infinite or missing passes the thresholds of all rules, and all
    fire: what is not a number cannot be compared, and nothing that was made from it can be trusted.
    """
    values = {rule.name: metrics.get(METRIC_OF[rule.watch], math.nan) for rule in guard.rules}
    broken = not all(map(math.isfinite, values.values()))
    breached = tuple(rule.name for rule in guard.rules if broken or _passes(values[rule.name], rule))
    firings = []
    for rule in guard.rules:
        if rule.name not in breached:
            continue
        before = history[max(0, len(history) - rule.of + 1) :] if rule.of > 1 else ()
        count = 1 + sum(rule.name in names for names in before)
        if broken or count >= rule.breaches:
            firings.append(_firing(rule, values[rule.name], metrics, count))
    return Verdict(breached, tuple(firings))


def _passes(value: float, rule: GuardRule) -> bool:
    above = rule.above is not None and value > rule.above
    return above or (rule.below is not None and value < rule.below)


def _firing(rule: GuardRule, value: float, metrics: Mapping[str, float], count: int) -> Firing:
    metric = METRIC_OF[rule.watch]
    shown: float | str = value
    if not math.isfinite(value):
        shown = str(value) if metric in metrics else "missing"
    return Firing(rule.name, metric, shown, count, rule.of, tuple(rule.actions))


# What the journal says.


def describe(firing: Mapping[str, Any]) -> str:
    """A firing, as a record has it, in words."""
    value = firing["value"]
    value = value if isinstance(value, str) else f"{value:.4g}"
    times = f", {firing['breaches']} of {firing['of']} iterations" if firing["of"] > 1 else ""
    return f"{firing['rule']} (it is {value}{times}): {', '.join(firing['actions'])}"


def decision(journal: Journal, iteration: int) -> dict[str, Any]:
    """What the guard decided in `iteration`: see `Verdict.to_dict`; empty without a train record."""
    if not journal.is_committed(iteration, "train"):
        return {}
    found: dict[str, Any] = journal.record(iteration, "train").output.get("guard", {})
    return found


def actions_of(journal: Journal, iteration: int) -> set[str]:
    """The actions that fired in `iteration`."""
    firings = decision(journal, iteration).get("firings", [])
    return {action for firing in firings for action in firing["actions"]}


def history(journal: Journal, guard: Guard, iteration: int, origin: int) -> list[list[str]]:
    """What each of the iterations before `iteration` passed, as far as a rule looks back; the latest
    last. Of a fork the first of them are its parent's, kept in run.json."""
    inherited: dict[str, list[str]] = {}
    if iteration - guard.window <= origin > 0:
        inherited = read_identity(journal.folder)["parent"].get("guard", {})
    numbers = range(max(1, iteration - guard.window), iteration)
    return [
        decision(journal, n).get("breached", []) if n > origin else inherited.get(str(n), [])
        for n in numbers
    ]


def window(journal: Journal, guard: Guard, version: int, origin: int) -> dict[str, list[str]]:
    """{iteration: what it passed} of those up to `version` that a rule of the next one looks back on:
    the guard's state, which a fork takes over."""
    found = history(journal, guard, version + 1, origin)
    return {str(version - len(found) + 1 + i): names for i, names in enumerate(found)}


def events(journal: Journal) -> dict[str, list[Any]]:
    """Columns, a row for each firing in the run: iteration, rule, metric, value, breaches, of, actions,
    masked (sequences of the iteration), skipped (whether its update was)."""
    names = ("rule", "metric", "value", "breaches", "of", "actions")
    table: dict[str, list[Any]] = {name: [] for name in ("iteration", *names, "masked", "skipped")}
    for number in sorted(n for n, step in journal.steps() if step == "train"):
        found = decision(journal, number)
        for firing in found.get("firings", []):
            row = firing | {"value": str(firing["value"]), "actions": ", ".join(firing["actions"])}
            row |= {"iteration": number, "masked": found["masked"], "skipped": found["skipped"]}
            for name, column in table.items():
                column.append(row[name])
    return table


def rollout_is_bf16(journal: Journal, guard: Guard, version: int, origin: int) -> bool:
    """Whether the rollout under weight `version` is in BF16 since the guard says so."""
    if not guard.has(Action.ROLLOUT_BF16):
        return False
    last = range(max(origin + 1, version - guard.bf16_iterations + 1), version + 1)
    return any(Action.ROLLOUT_BF16 in actions_of(journal, n) for n in last)
