"""Parity of a recipe: what engine and learner make of the same tokens, point by point, and what each
rounding point is worth."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fp8rl import progress
from fp8rl.layerwise.compare import Difference, differences, plain, summary, verdict
from fp8rl.layerwise.engine_points import see_engine
from fp8rl.layerwise.learner_points import replay, see_learner
from fp8rl.layerwise.points import Seen
from fp8rl.layerwise.setup import Setup, batch_of, engine_logprobs, trained_model
from fp8rl.learner.batch import Batch
from fp8rl.mismatch import mismatch_panel
from fp8rl.model.rounding import ENGINE, MEGATRON, POINTS, Rounding
from fp8rl.recipe.schema import Recipe


@dataclass(frozen=True)
class Mismatch:
    """Of the sampled tokens. error: token_mult_prob_error. equal: share of tokens whose log-prob is
    the same to the last bit."""

    error: float
    kl_k3: float
    equal: float


@dataclass(frozen=True)
class Rounded:
    """The learner with one rounding. made, grown: see `compare.PointSummary`."""

    name: str
    mismatch: Mismatch
    made: list[Difference]
    grown: list[Difference]


@dataclass(frozen=True)
class Report:
    """weights: whose they are. sequences, tokens: compared inside. sampled: response tokens.

    prefill: the engine's decoding against its own prefill. sides: the learner as the recipe asks for
    it, then with other roundings. points: by rounding point, the mismatch with that one alone as the
    engine has it, and with all but that one.
    """

    weights: str
    sequences: int
    tokens: int
    sampled: int
    prefill: Mismatch
    sides: list[Rounded]
    points: dict[str, tuple[Mismatch, Mismatch]]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        sides = {
            side.name: {
                "mismatch": vars(side.mismatch),
                "verdict": verdict(side.made, side.grown),
                "points": [vars(row) for row in summary(side.made, side.grown)],
                "made": plain(side.made),
                "grown": plain(side.grown),
            }
            for side in self.sides
        }
        points = {
            name: {"alone": vars(alone), "all_but": vars(without)}
            for name, (alone, without) in self.points.items()
        }
        counts = {key: getattr(self, key) for key in ("weights", "sequences", "tokens", "sampled")}
        return {**counts, "prefill": vars(self.prefill), "learner": sides, "rounding_points": points}


ASKED = "as the recipe asks"
OTHERS = {
    "as Megatron-core rounds": MEGATRON,
    # The least difference there is, to see it grow.
    "as the engine, but attention": ENGINE.but(attention=False),
}


def report_of(recipe: Recipe, *, weights: Path | None, most: int) -> Report:
    """Samples one iteration, and compares at most `most` of its sequences inside.

    weights: a Hugging Face folder to take instead of the recipe's model. Raises RecipeError as
    `trained_model`, and ParityError where the sequences do not fit into one forward pass.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model_dir = trained_model(recipe, folder / "model", weights=weights)
        setup = Setup(recipe, model_dir, folder)
        return _Comparison(setup, most).report(str(model_dir))


class _Comparison:
    def __init__(self, setup: Setup, most: int) -> None:
        self.setup, self.learner = setup, setup.learner
        requests = setup.requests_of(1)
        self._total, self._done = 2 * len(POINTS) + len(OTHERS) + 3, 0
        self._step("the engine samples")
        done = setup.engine.generate(requests, version=0)
        self.batch: Batch = batch_of(requests, done)
        pairs = zip(requests, done, strict=True)
        sequences = [[*request.prompt, *completion.tokens] for request, completion in pairs]
        # Of every prompt some: samples of a prompt stand together.
        self.sequences = sequences[:: max(1, len(sequences) // most)][:most]

    def _step(self, text: str) -> None:
        progress.emit(progress.Event("phase", text, done=self._done, total=self._total))
        self._done += 1

    def report(self, weights: str) -> Report:
        self._step("the engine, point by point")
        engine = see_engine(self.setup.engine, self.sequences, version=0)
        asked = ENGINE if self.setup.recipe.precision.parity else MEGATRON
        roundings = {ASKED: asked, **OTHERS}
        sides = [self._rounded(name, rounding, engine) for name, rounding in roundings.items()]
        points = {name: self._point(name) for name in POINTS}
        self.learner.model.set_rounding(asked)
        self._step("done")
        return Report(
            weights=weights,
            sequences=len(self.sequences),
            tokens=sum(map(len, self.sequences)),
            sampled=int(self.batch.mask.sum()),
            prefill=self._prefill(),
            sides=sides,
            points=points,
        )

    def _rounded(self, name: str, rounding: Rounding, engine: Seen) -> Rounded:
        self._step(f"the learner, {name}")
        model, layers = self.learner.model, self.learner.dims.layers
        mismatch = self._with(rounding)
        made = differences(engine, replay(model, engine), layers)
        return Rounded(
            name, mismatch, made, differences(engine, see_learner(model, self.sequences), layers)
        )

    def _point(self, name: str) -> tuple[Mismatch, Mismatch]:
        found = []
        for rounding in (MEGATRON.but(**{name: True}), ENGINE.but(**{name: False})):
            self._step(f"rounding point: {name}")
            found.append(self._with(rounding))
        return found[0], found[1]

    def _with(self, rounding: Rounding) -> Mismatch:
        self.learner.model.set_rounding(rounding)
        return self._mismatch(self.batch.g, self.learner.logprobs(self.batch, version=0))

    def _prefill(self) -> Mismatch:
        return self._mismatch(self.batch.g, engine_logprobs(self.setup.engine, self.batch))

    def _mismatch(self, g: Tensor, p: Tensor) -> Mismatch:
        mask = self.batch.mask
        panel = mismatch_panel(g, p, mask, truncate=self.setup.recipe.correction.truncate)
        equal = float((g == p)[mask].double().mean())
        return Mismatch(panel["token_mult_prob_error"], panel["kl_k3"], equal)


_COLOURS = dict(zip((ASKED, *OTHERS), ("tab:blue", "tab:orange", "tab:green"), strict=True))


def plot(report: Report, path: Path, title: str) -> None:
    """How a difference of the residual stream grows by layer, and where the learner makes any. PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 5.6), width_ratios=(3, 2))
    figure.suptitle(title, fontsize=12)
    floor = 1e-8
    for side in report.sides:
        stream = [max(one.relative, floor) for one in side.grown if one.point == "residual"]
        label = f"{side.name}: mismatch {side.mismatch.error:.4f}"
        left.plot(stream, color=_COLOURS[side.name], label=label, marker=".")
    left.set_yscale("log")
    left.set_ylim(bottom=floor / 2)
    left.axhline(floor, color="black", linewidth=0.5)
    left.annotate("none at all", (0, floor), (3, 3), textcoords="offset points", fontsize=8)
    left.set_xlabel("layer")
    left.set_ylabel("relative difference of the residual stream")
    left.legend(fontsize=9)
    left.grid(alpha=0.3)
    rows = {side.name: summary(side.made, side.grown) for side in report.sides}
    names = [row.point for row in rows[ASKED]]
    for n, side in enumerate(report.sides):
        places = [place + 0.27 * (n - 1) for place in range(len(names))]
        shares = [100 * row.made_share for row in rows[side.name]]
        right.barh(places, shares, 0.25, color=_COLOURS[side.name])
        for place, value in zip(places, shares, strict=True):
            text = "0" if value == 0 else f"{value:.2g}"
            where = {"xytext": (3, 0), "textcoords": "offset points", "va": "center"}
            right.annotate(text, (value, place), fontsize=6, color=_COLOURS[side.name], **where)
    right.set_yticks(range(len(names)), names, fontsize=8)
    right.invert_yaxis()
    right.set_xlabel("elements that the learner's own operation makes differ, %")
    right.margins(x=0.15)
    right.grid(alpha=0.3, axis="x")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
