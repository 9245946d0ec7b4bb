"""Times one arm's parts in a process of its own, warmed up: `python -m benchmarks.measure RECIPE`.

Prints JSON: rollout_tokens_per_sec, learner_step_s, requantize_s, load_s, calibrate_kv_s (medians).
On a CPU the FP8 linears are emulated: their times say what the emulation costs here, and nothing
about FP8 speed on a GPU.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fp8rl.data.prepare import iteration_prompts, prepare_data
from fp8rl.learner.batch import make_batch
from fp8rl.learner.learner import Learner
from fp8rl.model.tiny import write_tiny_model
from fp8rl.recipe.load import load_recipe
from fp8rl.recipe.schema import Recipe
from fp8rl.rollout.engine import Engine, requests_for

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


def model_folder(recipe: Recipe, folder: Path) -> Path:
    """The recipe's model, or the tiny one with random weights."""
    if recipe.model.path is not None:
        return Path(recipe.model.path)
    write_tiny_model(recipe.model.tiny, folder)
    learner = Learner(folder, recipe)
    learner.model.reset(recipe.seed)
    learner.save(folder)
    return folder


def measure(recipe: Recipe, folder: Path) -> dict[str, float]:
    """All timings of the arm."""
    model_dir = model_folder(recipe, folder / "model")
    prepare_data(recipe, model_dir, folder / "data")
    rollout = recipe.rollout
    prompts = iteration_prompts(folder / "data", recipe, 1)

    learner = Learner(model_dir, recipe)
    learner.load(model_dir, 0)
    requantize_s, _ = median_seconds(lambda n: learner.publish(folder / f"w{n}", version=0))
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    engine = Engine(model_dir, recipe, max_len=longest)
    load_s, _ = median_seconds(lambda n: engine.load_weights(folder / "w1", 0))
    results = {"requantize_s": requantize_s, "load_s": load_s}
    if engine.fp8_kv:
        answers = make_batch(prompts["prompt_tokens"], prompts["answer_tokens"])
        scales = learner.calibrate_kv(answers, version=0, source="benchmark")
        engine.apply_kv_scales(scales)
    requests = requests_for(
        prompts["prompt_tokens"], prompts["id"], rollout.samples, run_seed=recipe.seed, iteration=1
    )
    seconds, completions = median_seconds(lambda n: engine.generate(requests, version=0), 3)
    results["rollout_tokens_per_sec"] = sum(len(c.tokens) for c in completions) / seconds
    batch = make_batch(
        [r.prompt for r in requests],
        [c.tokens for c in completions],
        [c.logprobs for c in completions],
    )
    if engine.fp8_kv:
        results["calibrate_kv_s"], _ = median_seconds(
            lambda n: learner.calibrate_kv(batch, version=0, source="benchmark"), 3
        )
    advantages = torch.linspace(-1, 1, len(requests))
    results["learner_step_s"], _ = median_seconds(
        lambda n: learner.train(batch, advantages, iteration=1, version=n), 3
    )
    return results


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        measured = measure(load_recipe(sys.argv[1], sys.argv[2:]).recipe, Path(temporary))
    print(json.dumps(measured))
