"""The guard over the updates of one iteration: what it masks beforehand, and whether a step is made."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8rl.guard import Verdict, judge
from fp8rl.learner.batch import Batch
from fp8rl.learner.objective import Plan, PolicyObjective
from fp8rl.recipe.guard import METRIC_OF, Action, Guard, Watched


class UpdateGuard:
    """Judges the updates of an iteration by the recipe's `guard`; history: see `judge`."""

    def __init__(self, guard: Guard, history: Sequence[Sequence[str]]) -> None:
        self._guard = guard
        self._history = history
        self._verdict = Verdict()
        self._masked = 0

    def mask(self, objective: PolicyObjective, batch: Batch, plan: Plan, old: Tensor | None) -> Plan:
        """The plan without the sequences that the action mask takes out. old: p [B, T], given where
        `PolicyObjective.needs_old_logprobs`.

        A sequence that cannot be compared, since a log-prob of the learner's is not finite, goes too.
        """
        for rule in self._guard.rules:
            if Action.MASK not in rule.actions:
                continue
            assert old is not None
            assert rule.above is not None
            compared, errors = objective.sequence_errors(batch, old)
            worst = errors[compared].max() if bool(compared.any()) else torch.tensor(torch.nan)
            alone = self._guard.model_copy(update={"rules": (rule,)})
            seen = {METRIC_OF[Watched.SEQUENCE_MISMATCH]: float(worst)}
            if judge(alone, seen, self._history).firings:
                out = compared & ~(errors <= rule.above)
                self._masked += int(out.sum())
                plan = plan.without(out)
        return plan

    def allows(self, metrics: Mapping[str, float]) -> bool:
        """Whether the step whose gradients are there may be made. metrics: of the iteration so far."""
        self._verdict = self._verdict.joined(judge(self._guard, metrics, self._history))
        return not self._verdict.skips_update

    def to_dict(self) -> dict[str, Any]:
        """The decision, for the step's record: the verdict, "masked" sequences, "skipped"."""
        skipped = self._verdict.skips_update
        return self._verdict.to_dict() | {"masked": self._masked, "skipped": skipped}

    def metrics(self) -> dict[str, float]:
        """guard/*; empty without rules."""
        if not self._guard.rules:
            return {}
        return {
            "guard/breached": float(len(self._verdict.breached)),
            "guard/fired": float(len(self._verdict.firings)),
            "guard/masked_sequences": float(self._masked),
            "guard/skipped_update": float(self._verdict.skips_update),
        }
