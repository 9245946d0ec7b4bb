"""The comparison: of each arm accuracy, paired difference to the reference, verdict and speed."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fp8rl.comparison.gather import Evaluation, RunData, gather
from fp8rl.comparison.selection import (
    DEFAULT_MARGIN,
    PROMPTS,
    ComparisonError,
    Selection,
    arm_of,
    is_allowed,
    select,
)
from fp8rl.comparison.statistics import Estimate, Sample, estimate, paired
from fp8rl.comparison.verdict import Verdict, Word, verdict
from fp8rl.recipe.precision import Linear, Precision
from fp8rl.recipe.schema import Recipe


@dataclass(frozen=True)
class Request:
    """What is to be compared. experiment: None for the only one in the runs folder. runs: only these of
    it. reference: an arm; None for the one that is BF16 everywhere. margin: of accuracy. allowed: keys
    of recipes that may differ.
    """

    runs_dir: Path
    experiment: str | None = None
    runs: tuple[str, ...] = ()
    reference: str | None = None
    margin: float = DEFAULT_MARGIN
    allowed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Difference:
    """Arm minus reference, over the seeds that both have, each at the last evaluation that both have.
    iterations: {seed: which}. sampled, greedy: of the accuracies."""

    iterations: dict[int, int]
    sampled: Estimate
    greedy: Estimate


@dataclass(frozen=True)
class Arm:
    """runs: by seed. last, best, greedy: sampled accuracy at each run's last and best evaluation, and
    the greedy one at the last; None before the first evaluation. speed: tokens/s/GPU as a ratio to the
    reference's on the same machines; None where they share none. notes: what to mind, in words.
    """

    name: str
    runs: tuple[RunData, ...]
    last: Estimate | None
    best: Estimate | None
    greedy: Estimate | None
    difference: Difference | None
    verdict: Verdict | None
    speed: float | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """arms: the reference first, the others by name. reference: None where there is none."""

    experiment: str
    request: Request
    arms: tuple[Arm, ...]
    reference: str | None
    notes: tuple[str, ...] = ()

    @property
    def runs(self) -> list[RunData]:
        return [run for arm in self.arms for run in arm.runs]

    @property
    def emulated(self) -> bool:
        """Whether a run's times are of a CPU, where FP8 is emulated."""
        return any(run.device != "cuda" for run in self.runs)


def require_comparable(request: Request) -> tuple[Selection, str | None]:
    """The runs to compare and the reference arm, by their recipes; None where a lone arm has none.

    Raises ComparisonError, NoRunError or IdentityError where it cannot be done, naming run and key.
    """
    if not 0 < request.margin < 1:
        raise ComparisonError(f"--margin: {request.margin:g} is no share between 0 and 1, like 0.02")
    chosen = select(request.runs_dir, request.experiment, request.runs, request.allowed)
    arms: dict[str, list[Recipe]] = {}
    for run in chosen.runs:
        arms.setdefault(arm_of(run.recipe), []).append(run.recipe)
    return chosen, _reference(arms, request.reference)


def compare(request: Request) -> Comparison:
    """Raises as `require_comparable`, and JournalError for a damaged record or file of a run."""
    chosen, reference = require_comparable(request)
    runs = [gather(run) for run in chosen.runs]
    _require_same_prompts(runs, request.allowed)
    arms: dict[str, list[RunData]] = {}
    for run in sorted(runs, key=lambda run: (run.arm, run.seed)):
        arms.setdefault(run.arm, []).append(run)
    names = sorted(arms, key=lambda name: (name != reference, name))
    notes = list(chosen.notes)
    if reference is None:
        notes.append("There is no arm to compare with: no difference is shown and nothing is judged.")
    its_runs = None if reference is None else arms[reference]
    made = [_arm(name, arms[name], its_runs, request.margin) for name in names]
    return Comparison(chosen.experiment, request, tuple(made), reference, tuple(notes))


def _require_same_prompts(runs: list[RunData], allowed: tuple[str, ...]) -> None:
    """Runs of a seed are paired by prompt, so they must have been asked the same ones."""
    if is_allowed(PROMPTS, allowed):
        return
    by_seed: dict[int, dict[str, list[str]]] = {}
    for run in runs:
        if run.prompts_digest is not None:
            by_seed.setdefault(run.seed, {}).setdefault(run.prompts_digest, []).append(run.name)
    lines = [
        f"  seed {seed}: {' / '.join(', '.join(names) for names in groups.values())}"
        for seed, groups in sorted(by_seed.items())
        if len(groups) > 1
    ]
    if lines:
        raise ComparisonError(
            "runs of the same seed have different validation prompts (their sources have changed?):\n"
            + "\n".join(lines)
            + f"\nLeave runs out (--runs RUN,RUN,...), or pair only the prompts that both have with "
            f"--allow-different {PROMPTS}"
        )


def is_bf16(precision: Precision) -> bool:
    """Whether nothing is in FP8."""
    parts = (precision.rollout, precision.learner, precision.kv_cache)
    return all(part is Linear.BF16 for part in parts)


def _reference(arms: dict[str, list[Recipe]], asked: str | None) -> str | None:
    there = ", ".join(arms)
    if asked is not None:
        if asked not in arms:
            raise ComparisonError(f"--reference: no arm {asked!r}; there are {there}")
        return asked
    bf16 = [name for name, recipes in arms.items() if all(is_bf16(r.precision) for r in recipes)]
    if len(bf16) == 1:
        return bf16[0]
    if len(arms) == 1:
        return None
    what = f"{len(bf16)} arms are" if bf16 else "no arm is"
    raise ComparisonError(f"{what} BF16 everywhere: choose one with --reference, of {there}")


def _arm(name: str, runs: list[RunData], reference: list[RunData] | None, margin: float) -> Arm:
    last = [(run.seed, run.last) for run in runs]
    difference, judged, speed, notes = None, None, None, _notes(runs)
    if reference is runs:
        judged, speed = Verdict(Word.REFERENCE, "what the others are compared with"), 1.0
    elif reference is not None:
        difference, more = _difference(runs, reference)
        notes += more
        unfinished = [run.name for run in (*runs, *reference) if not run.is_complete]
        judged = verdict(difference.sampled if difference else None, margin, unfinished)
        speed = _speed(runs, reference)
    return Arm(
        name,
        tuple(runs),
        _estimate(last),
        _estimate([(run.seed, run.best) for run in runs]),
        _estimate(last, greedy=True),
        difference,
        judged,
        speed,
        tuple(notes),
    )


def _notes(runs: list[RunData]) -> list[str]:
    notes = []
    for run in runs:
        if run.last is None:
            notes.append(f"{run.name} ({run.state.state}) has no evaluation yet, and counts nowhere")
        elif run.last.iteration < run.recipe.iterations:
            notes.append(
                f"{run.name} ({run.state.state}) came to iteration {run.done} of "
                f"{run.recipe.iterations}; its last evaluation is that of {run.last.iteration}"
            )
    return notes


def _sample(seed: int, evaluation: Evaluation, greedy: bool = False) -> Sample:
    values = evaluation.greedy if greedy else evaluation.sampled
    return Sample(seed, evaluation.prompts, values)


def _estimate(
    evaluations: Iterable[tuple[int, Evaluation | None]], greedy: bool = False
) -> Estimate | None:
    samples = [_sample(seed, one, greedy) for seed, one in evaluations if one is not None]
    return estimate(samples) if samples else None


def _difference(runs: list[RunData], reference: list[RunData]) -> tuple[Difference | None, list[str]]:
    others = {run.seed: run for run in reference}
    iterations: dict[int, int] = {}
    sampled, greedy = [], []
    for run in runs:
        other = others.get(run.seed)
        common = set(run.evaluations) & set(other.evaluations) if other else set()
        if other is None or not common:
            continue
        number = max(common)
        mine, its = run.evaluations[number], other.evaluations[number]
        if set(mine.prompts) & set(its.prompts):
            iterations[run.seed] = number
            sampled.append(paired(_sample(run.seed, mine), _sample(run.seed, its)))
            greedy.append(paired(_sample(run.seed, mine, True), _sample(run.seed, its, True)))
    alone = sorted(({run.seed for run in runs} | set(others)) - set(iterations))
    notes = []
    if alone:
        seeds = ", ".join(map(str, alone))
        notes.append(f"in no pair, since arm or reference has no evaluation of them: seeds {seeds}")
    if not iterations:
        return None, notes
    bounds = (-1.0, 1.0)
    return Difference(iterations, estimate(sampled, bounds), estimate(greedy, bounds)), notes


def _speed(runs: list[RunData], reference: list[RunData]) -> float | None:
    """Geometric mean, over the machines that both ran on, of the ratio of mean tokens/s/GPU."""
    ratios = []
    for machine in {run.machine for run in runs if run.machine is not None}:
        mine, its = _speeds(runs, machine), _speeds(reference, machine)
        if mine and its:
            ratios.append(sum(mine) / len(mine) / (sum(its) / len(its)))
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None


def _speeds(runs: list[RunData], machine: tuple[str, str, int]) -> list[float]:
    found = [run.figures["tokens_per_sec_per_gpu"] for run in runs if run.machine == machine]
    return [value for value in found if not math.isnan(value)]
