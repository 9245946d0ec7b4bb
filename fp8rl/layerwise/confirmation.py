"""What an attribution predicts, measured in the rollout engine itself: kl_k3, bytes and speed."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fp8rl import progress
from fp8rl.layerwise.attribution import Effect, Fall, Measure
from fp8rl.layerwise.setup import Setup, batch_of, engine_logprobs
from fp8rl.layerwise.units import Unit, Units, exclude_override
from fp8rl.learner.batch import Batch
from fp8rl.learner.publishing import published_specs, published_tensors
from fp8rl.model.precision import Decision, make_plan
from fp8rl.model.published import write_published
from fp8rl.recipe.load import with_overrides
from fp8rl.recipe.precision import Linear
from fp8rl.recipe.rules import plan_rules, rollout_fp8
from fp8rl.recipe.schema import Recipe
from fp8rl.rollout.engine import Engine

_ROUNDS = 5


@dataclass(frozen=True)
class Agreement:
    """Of the tokens of the answers, how many log-probs of engine and stand-in differ, and by how much
    (nats) at most."""

    tokens: int
    differ: int
    largest: float

    @staticmethod
    def of(engine: Tensor, learner: Tensor, batch: Batch) -> "Agreement":
        """engine, learner: log-probs [B, T]."""
        difference = (engine - learner).abs()[batch.mask]
        tokens, differ = len(difference), int((difference != 0).sum())
        return Agreement(tokens, differ, float(difference.max()))


@dataclass(frozen=True)
class OnTokens:
    """Mismatch of the BF16 learner with the engine, all FP8 and with the units kept, and its fall."""

    all_fp8: Effect
    kept: Effect
    fall: Fall

    @staticmethod
    def of(all_fp8: Effect, kept: Effect) -> "OnTokens":
        return OnTokens(all_fp8, kept, Fall.between(all_fp8, kept))


@dataclass(frozen=True)
class Confirmation:
    """chosen_on: on the tokens that the choice was made on; held_out: on others. agreement: of the
    engine with the stand-in, with the units kept. bytes: of all published weights, before and after.
    speed: tokens/s with the units kept over all FP8, the median of rounds in turns; speeds: of each.
    """

    chosen_on: OnTokens
    held_out: OnTokens
    agreement: Agreement
    bytes: tuple[int, int]
    speed: float
    speeds: list[float]


def recipe_with_kept(recipe: Recipe, units: Units, kept: Sequence[Unit], setup: Setup) -> Recipe:
    """`recipe` with `kept` in BF16, by the override that a user gives.

    Raises RuntimeError where its plan is not that: the unit's pattern is wrong then.
    """
    changed = with_overrides(recipe, [exclude_override(recipe.precision.exclude, kept)])
    plan = _plan(setup, changed)
    wanted = units.kept(kept)
    wrong = [name for name in wanted if plan[name].format is not wanted[name].format]
    if wrong:
        raise RuntimeError(f"precision.exclude does not keep what was measured: {', '.join(wrong)}")
    return changed


def confirm(
    setup: Setup, units: Units, kept: Sequence[Unit], measure: Measure, chosen_all_fp8: Effect
) -> Confirmation:
    """Builds a second engine with `kept` in BF16 and compares it with the first on the tokens of
    `measure` and on those of the recipe's second iteration. chosen_all_fp8: of the first on the former.
    """
    recipe = recipe_with_kept(setup.recipe, units, kept, setup)
    _tell("engine with the suggestion", 0, 4)
    engine = setup.new_engine(recipe)
    engine.load_weights(_publish(setup, recipe), 0)

    _tell("the same tokens in the engine", 1, 4)
    seen = engine_logprobs(engine, measure.batch)
    predicted = measure.logprobs(units.kept(kept))
    chosen_on = OnTokens.of(chosen_all_fp8, measure.effect(seen))

    _tell("other tokens", 2, 4)
    requests = setup.requests_of(2)
    other = batch_of(requests, setup.engine.generate(requests, version=0))
    held = Measure(setup.learner, other)
    held_out = OnTokens.of(*(held.effect(engine_logprobs(e, other)) for e in (setup.engine, engine)))

    _tell("speed, in turns", 3, 4)
    speeds = speed_in_turns(setup, engine)
    return Confirmation(
        chosen_on,
        held_out,
        Agreement.of(seen, predicted, measure.batch),
        (_bytes(setup, setup.recipe), _bytes(setup, recipe)),
        statistics.median(speeds),
        speeds,
    )


def speed_in_turns(setup: Setup, engine: Engine) -> list[float]:
    """tokens/s of `engine` over the setup's, in each of some rounds after one that warms up."""
    requests = setup.requests_of(1)

    def seconds(one: Engine) -> float:
        started = time.perf_counter()
        one.generate(requests, version=0, ignore_end=True)  # as many tokens in both
        return time.perf_counter() - started

    rounds = [(seconds(setup.engine), seconds(engine)) for _ in range(_ROUNDS + 1)]
    return [all_fp8 / kept for all_fp8, kept in rounds[1:]]


def _publish(setup: Setup, recipe: Recipe) -> Path:
    """The folder with the weights as `recipe` publishes them."""
    precision, model = recipe.precision, setup.learner.model
    plan, scheme = _plan(setup, recipe), rollout_fp8(precision).weight
    folder = setup.folder / "kept"
    specs = published_specs(model, plan, scheme)
    write_published(folder, 0, specs, published_tensors(model, plan, scheme, 0))
    return folder


def _bytes(setup: Setup, recipe: Recipe) -> int:
    """Of all weights that `recipe` publishes."""
    scheme = rollout_fp8(recipe.precision).weight
    return sum(s.size for s in published_specs(setup.learner.model, _plan(setup, recipe), scheme))


def _plan(setup: Setup, recipe: Recipe) -> Mapping[str, Decision]:
    return make_plan(plan_rules(recipe.precision, Linear.FP8), setup.learner.dims)


def _tell(text: str, done: int, total: int) -> None:
    progress.emit(progress.Event("phase", text, done=done, total=total))
