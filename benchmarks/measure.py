"""Measures one arm in a process of its own: `python -m benchmarks.measure RECIPE [--mismatch]`.

Prints JSON: rollout_tokens_per_sec (all answers of the greatest length), learner_step_s,
requantize_s, publish_s, load_s and calibrate_kv_s, medians of warmed-up repeats; mismatch, the panel of
one iteration before training. --mismatch: that alone. --turns: see benchmarks/turns.py.
On a CPU the FP8 linears are emulated: their times say what the emulation costs here, and nothing
about FP8 speed on a GPU.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fp8rl.layerwise.setup import Setup, batch_of
from fp8rl.learner.batch import Batch
from fp8rl.learner.learner import Learner
from fp8rl.mismatch import mismatch_panel
from fp8rl.model.source import model_folder
from fp8rl.model.tiny import write_tiny_model
from fp8rl.recipe.load import load_recipe
from fp8rl.recipe.schema import Recipe
from fp8rl.rollout.requests import Completion

REPEATS = 5


def median_seconds(work: Callable[[int], Any], repeats: int = REPEATS) -> tuple[float, Any]:
    """Median wall time of `work(n)`, n = 1..repeats, after n = 0 as a warm-up; and the last result."""
    result = work(0)
    times = []
    for n in range(1, repeats + 1):
        started = time.perf_counter()
        result = work(n)
        times.append(time.perf_counter() - started)
    return statistics.median(times), result


def model_with_weights(recipe: Recipe, folder: Path) -> Path:
    """The folder of the recipe's model, or `folder` with the tiny one and random weights."""
    given = model_folder(recipe)
    if given is not None:
        return given
    write_tiny_model(recipe.model.tiny, folder)
    learner = Learner(folder, recipe)
    learner.model.reset(recipe.seed)
    learner.save(folder)
    return folder


def touch(learner: Learner) -> None:
    """Makes every weight count as changed, so that nothing quantised before is used again."""
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter.add_(0)


class Bench(Setup):
    """A learner and an engine on the same weights, with one iteration's requests."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        super().__init__(recipe, model_with_weights(recipe, folder / "model"), folder)
        self.requests = self.requests_of(1)

    def batch(self, completions: list[Completion]) -> Batch:
        return batch_of(self.requests, completions)

    def mismatch(self, batch: Batch) -> dict[str, float]:
        """The panel of one iteration, before any update."""
        p = self.learner.logprobs(batch, version=0)
        panel = mismatch_panel(batch.g, p, batch.mask, truncate=self.recipe.correction.truncate)
        return panel | {"tokens": float(batch.mask.sum())}

    def train(self, batch: Batch) -> None:
        """A training step from the weights that the learner holds, with the KV scales of the first."""
        version = self.learner.version
        assert version is not None
        if self.engine.fp8_kv:
            self.learner.use_kv_scales(version, replace(self.scales, version=version))
        advantages = torch.linspace(-1, 1, len(self.requests))
        self.learner.train(batch, advantages, iteration=1, version=version)

    def sensitivity(self, batch: Batch) -> float:
        """token_mult_prob_error of the learner against itself, its embeddings moved by 2^-9 of their
        size at random: what a rounding to BF16 somewhere else does."""
        p = self.learner.logprobs(batch, version=0)
        generator = torch.Generator().manual_seed(0)

        def move(_module: Any, _inputs: Any, out: torch.Tensor) -> torch.Tensor:
            noise = torch.randn(out.shape, generator=generator) * 2.0**-9
            return (out.float() * (1 + noise)).to(out.dtype)

        hook = self.learner.model.gpt.embedding.register_forward_hook(move)
        try:
            moved = self.learner.logprobs(batch, version=0)
        finally:
            hook.remove()
        panel = mismatch_panel(p, moved, batch.mask, truncate=self.recipe.correction.truncate)
        return panel["token_mult_prob_error"]

    def timings(self) -> tuple[dict[str, float], Batch]:
        """All timings, each warmed up, and the batch that they were taken on."""
        learner, engine, results = self.learner, self.engine, {}

        def requantise(n: int) -> None:
            touch(learner)
            started = time.perf_counter()
            for _ in learner.published_tensors():
                pass
            seconds.append(time.perf_counter() - started)

        seconds: list[float] = []
        median_seconds(requantise)
        results["requantize_s"] = statistics.median(seconds[1:])
        results["publish_s"], _ = median_seconds(
            lambda n: learner.publish(self.folder / f"w{n}", version=0), 3
        )
        results["load_s"], _ = median_seconds(lambda n: engine.load_weights(self.folder / "w0", 0), 3)
        if engine.fp8_kv:
            engine.apply_kv_scales(self.scales)  # loading weights made them stale
        batch = self.batch(engine.generate(self.requests, version=0))
        # All arms generate the same number of tokens, whatever they sample.
        elapsed, completions = median_seconds(
            lambda n: engine.generate(self.requests, version=0, ignore_end=True)
        )
        results["rollout_tokens_per_sec"] = sum(len(c.tokens) for c in completions) / elapsed
        results["calibrate_kv_s"], _ = median_seconds(
            lambda n: learner.calibrate_kv(batch, version=0, source="benchmark"), 3
        )
        if engine.fp8_kv:
            learner.use_kv_scales(0, self.scales)
        return results, batch


def measure(recipe: Recipe, folder: Path, *, timed: bool) -> dict[str, Any]:
    """The mismatch panel of the arm and, where `timed`, its timings."""
    bench = Bench(recipe, folder)
    results: dict[str, Any] = {}
    if timed:
        results, batch = bench.timings()
    else:
        batch = bench.batch(bench.engine.generate(bench.requests, version=0))
    results["mismatch"] = bench.mismatch(batch)
    results["mismatch"]["learner_moved_by_2^-9"] = bench.sensitivity(batch)
    if timed:
        results["learner_step_s"], _ = median_seconds(lambda n: bench.train(batch), 3)
    return results


def take_turns(recipe: Recipe, folder: Path) -> None:
    """Says "ready", then generates once for each line that comes in and says the tokens/s."""
    bench = Bench(recipe, folder)
    print("ready", flush=True)
    for _ in sys.stdin:
        started = time.perf_counter()
        completions = bench.engine.generate(bench.requests, version=0, ignore_end=True)
        seconds = time.perf_counter() - started
        print(f"turn {sum(len(c.tokens) for c in completions) / seconds}", flush=True)


def main(arguments: list[str]) -> None:
    """RECIPE [--mismatch | --turns] [overrides]: prints JSON on the last line, or takes turns."""
    if "--turns" in arguments:
        path, *overrides = [argument for argument in arguments if argument != "--turns"]
        with tempfile.TemporaryDirectory() as temporary:
            take_turns(load_recipe(path, overrides).recipe, Path(temporary))
        return
    timed = "--mismatch" not in arguments
    path, *overrides = [argument for argument in arguments if argument != "--mismatch"]
    with tempfile.TemporaryDirectory() as temporary:
        measured = measure(load_recipe(path, overrides).recipe, Path(temporary), timed=timed)
    print(json.dumps(measured))


if __name__ == "__main__":
    main(sys.argv[1:])
