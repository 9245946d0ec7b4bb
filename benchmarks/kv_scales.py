"""`make bench-kv`, scales: what the FP8 KV cache costs by how it is scaled, as results/kv_scales.json.

SmolLM2-135M with BF16 linears, so that the cache alone differs, and the same model with K and V of even
layers times 2^8 and of odd layers times 2^-12: the same function, and K and V that E4M3 cannot hold
without a scale. For each way of scaling, token_mult_prob_error against an FP32 model with the same
weights, on the same sampled tokens (so that ways compare in pairs) and on a rollout of its own; with
the shares of K and V elements that saturate or underflow in that rollout.

Scales are calibrated on one iteration's rollouts (16 sequences) and used on the next one's prompts, as
in training. Warm-up with token 0 is what an engine sees that calibrates on its own dummy run.
Left out on purpose: FP8 linears, training, and timings (`make bench-kv` has them elsewhere).
"""

import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks import record
from benchmarks.measure import model_with_weights
from benchmarks.rescaled import rescaled
from fp8rl.data.calibration import choose
from fp8rl.data.prepare import batch_prompts, prepare_data
from fp8rl.device import compute_environment
from fp8rl.learner.batch import Batch, make_batch
from fp8rl.learner.learner import Learner
from fp8rl.learner.logprobs import token_logprobs
from fp8rl.model.kv_scales import KvScales, LayerScales
from fp8rl.model.megatron import PolicyModel
from fp8rl.model.precision import Format, PlanRules, make_plan
from fp8rl.recipe.load import load_recipe, with_overrides
from fp8rl.recipe.schema import Recipe
from fp8rl.rollout import kv_writes
from fp8rl.rollout.engine import Engine
from fp8rl.rollout.kv_shares import kv_metrics
from fp8rl.rollout.kv_writes import nearest
from fp8rl.rollout.requests import Completion, Request, requests_for

SMOLLM2 = Path(__file__).parents[1] / "configs" / "smollm2"
SIZES = ("rollout.samples=4", "rollout.max_new_tokens=24")  # 16 sequences, about 350 response tokens
GROW, SHRINK = 8, -12  # exponents of two, of even and of odd layers
PERCENTILE, BUDGET = 99.99, 400
CUT_OFF = "learner, amax, vLLM's own rounding"
_RESAMPLES = 2000


@dataclass
class Tokens:
    """Sequences that were sampled: prompts, responses, and the group (prompt) of each."""

    prompts: list[list[int]]
    responses: list[list[int]]
    groups: list[int]

    def rows(self, chosen: list[int]) -> "Tokens":
        return Tokens(
            [self.prompts[i] for i in chosen],
            [self.responses[i] for i in chosen],
            [self.groups[i] for i in chosen],
        )

    @property
    def sequences(self) -> list[list[int]]:
        return [p + r for p, r in zip(self.prompts, self.responses, strict=True)]

    def replaced(self, token: Any) -> "Tokens":
        """The same lengths, each token `token(n)` of n tokens."""
        return Tokens(
            [token(len(p)) for p in self.prompts],
            [token(len(r)) for r in self.responses],
            self.groups,
        )

    def batch(self, logprobs: list[list[float]] | None = None) -> Batch:
        return make_batch(self.prompts, self.responses, logprobs)


class Bench:
    """A learner, engines with a BF16 and an FP8 cache, and an FP32 model as the reference."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self.recipe, self.folder = recipe, folder
        self.model_dir = model_with_weights(recipe, folder / "model")
        prepare_data(recipe, self.model_dir, folder / "data")
        self.learner = Learner(self.model_dir, recipe)
        self.learner.load(self.model_dir, 0)
        self.dims = self.learner.dims
        self.plain = {k: v.bfloat16().float() for k, v in self.learner.model.export().items()}
        plan = make_plan(PlanRules(Format.BF16), self.dims)
        self.reference = PolicyModel(self.dims, plan, compute_dtype=torch.float32)
        self.reference.load(self.plain)
        # One more than a sequence has: its log-probs are asked for as a prompt's.
        longest = recipe.rollout.max_prompt_tokens + recipe.rollout.max_new_tokens + 1
        bf16 = with_overrides(recipe, ["precision.kv_cache=bf16"])
        self.bf16 = Engine(self.model_dir, bf16, max_len=longest)
        self.fp8 = Engine(self.model_dir, recipe, max_len=longest)

    def load(self, name: str, weights: dict[str, Tensor]) -> None:
        """Gives `weights` to the learner and both engines."""
        self.learner.model.load(weights)
        folder = self.folder / name
        self.learner.publish(folder, version=0)
        for engine in (self.bf16, self.fp8):
            engine.load_weights(folder, 0)

    def rescaled(self) -> dict[str, Tensor]:
        exponents = [
            [SHRINK if layer % 2 else GROW] * self.dims.kv_heads for layer in range(self.dims.layers)
        ]
        return rescaled(self.plain, self.dims, exponents, exponents)

    def requests(self, iteration: int) -> tuple[list[Request], list[int]]:
        prompts = batch_prompts(self.folder / "data", self.recipe, iteration - 1)
        samples = self.recipe.rollout.samples
        asked = requests_for(
            prompts["prompt_tokens"],
            prompts["id"],
            samples,
            run_seed=self.recipe.seed,
            iteration=iteration,
        )
        return asked, [group for group in prompts["id"] for _ in range(samples)]

    def sample(self, engine: Engine, iteration: int) -> tuple[Tokens, list[Completion]]:
        asked, groups = self.requests(iteration)
        done = engine.generate(asked, version=0)
        return Tokens([r.prompt for r in asked], [c.tokens for c in done], groups), done

    @torch.no_grad()
    def reference_logprobs(self, batch: Batch) -> Tensor:
        """FP32 [B, S-1]."""
        parts = []
        for start in range(0, len(batch.lengths), self.recipe.learner.micro_batch):
            part = batch.rows(slice(start, start + self.recipe.learner.micro_batch))
            logp, _ = token_logprobs(self.reference(part.tokens), part.tokens, 1.0)
            pad = batch.g.shape[1] - logp.shape[1]
            parts.append(torch.nn.functional.pad(logp, (0, pad)))
        return torch.cat(parts)

    def scales(self) -> dict[str, KvScales]:
        """Each way of scaling, of the weights that are loaded."""
        found, _ = self.sample(self.bf16, 1)
        lengths = [len(s) for s in found.sequences]
        generator = torch.Generator().manual_seed(0)

        def random(n: int) -> list[int]:
            return torch.randint(0, self.dims.vocab, (n,), generator=generator).tolist()

        def learner(tokens: Tokens, *overrides: str) -> KvScales:
            kept = self.learner.recipe
            self.learner.recipe = with_overrides(kept, list(overrides))
            try:
                return self.learner.calibrate_kv(tokens.batch(), version=0, source="benchmark")
            finally:
                self.learner.recipe = kept

        one = (LayerScales(1.0, 1.0, 1.0),) * self.dims.layers
        by_percentile = (
            "precision.kv_statistic=percentile",
            f"precision.kv_percentile={PERCENTILE}",
        )
        return {
            "scale 1.0": KvScales(0, one, 1, "benchmark"),
            "warm-up, token 0": learner(found.replaced(lambda n: [0] * n)),
            "warm-up, random tokens": learner(found.replaced(random)),
            "learner, amax": learner(found),
            f"learner, amax, {BUDGET} tokens": learner(
                found.rows(choose(found.groups, lengths, BUDGET))
            ),
            f"learner, percentile {PERCENTILE}": learner(found, *by_percentile),
            CUT_OFF: learner(found),
            "engine, amax": self.fp8.calibrate_kv(found.sequences, version=0, source="benchmark"),
        }

    def apply(self, scales: KvScales) -> None:
        """As the product does; scale 1.0, which the product refuses, by the engine's own insides."""
        if all(layer == LayerScales(1.0, 1.0, 1.0) for layer in scales.layers):
            self.fp8.weights.apply_kv_scales(scales)
            self.fp8.kv_version = 0
        else:
            self.fp8.apply_kv_scales(scales)


def given_logprobs(engine: Engine, tokens: Tokens) -> list[list[float]]:
    """The engine's log-probs of the responses, fed to it: its K and V go through the cache."""
    rows = engine.score(tokens.sequences, version=0)
    return [row[len(prompt) - 1 :] for row, prompt in zip(rows, tokens.prompts, strict=True)]


def errors(batch: Batch, p: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """exp|g - p| summed over the response tokens of each sequence, and their number."""
    error = torch.where(batch.mask, (batch.g - p).abs().double().exp(), 0.0)
    return error.sum(1).numpy(), batch.mask.sum(1).numpy()


def resampled(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """token_mult_prob_error of resamples of the sequences: the same ones at each call."""
    rows = np.random.default_rng(0).integers(0, len(sums), (_RESAMPLES, len(sums)))
    means: np.ndarray = sums[rows].sum(1) / counts[rows].sum(1)
    return means


def interval(values: np.ndarray) -> list[float]:
    """Of 95%."""
    return [float(x) for x in np.percentile(values, [2.5, 97.5])]


def _as_it_is(kv: Tensor, _bounds: Any) -> Tensor:
    return kv


def measured(bench: Bench) -> dict[str, dict[str, Any]]:
    """Each way of scaling on the weights that are loaded, by name; the BF16 cache first."""
    results: dict[str, dict[str, Any]] = {}
    tokens, _ = bench.sample(bench.bf16, 2)
    p = bench.reference_logprobs(tokens.batch())
    spread: dict[str, np.ndarray] = {}
    for name, scales in {"BF16 cache": None, **bench.scales()}.items():
        engine = bench.bf16
        # vLLM's CPU kernel cuts off where the product has it round to nearest.
        kv_writes.nearest = _as_it_is if name == CUT_OFF else nearest
        if scales is not None:
            engine = bench.fp8
            bench.apply(scales)
        sums, counts = errors(tokens.batch(given_logprobs(engine, tokens)), p)
        spread[name] = resampled(sums, counts)
        result: dict[str, Any] = {
            "same_tokens": float(sums.sum() / counts.sum()),
            "same_tokens_interval": interval(spread[name]),
            "response_tokens": int(counts.sum()),
        }
        if scales is not None:
            bench.fp8.take_kv_counts()
            result["calibration_tokens"] = scales.tokens
        own, done = bench.sample(engine, 2)
        if scales is not None:
            result |= {k.removeprefix("kv/"): v for k, v in kv_metrics(engine.take_kv_counts()).items()}
        batch = own.batch([c.logprobs for c in done])
        sums, counts = errors(batch, bench.reference_logprobs(batch))
        result["rollout"] = float(sums.sum() / counts.sum())
        result["rollout_interval"] = interval(resampled(sums, counts))
        results[name] = result
    for name, result in results.items():
        for other in ("scale 1.0", "warm-up, token 0", "warm-up, random tokens"):
            if name not in (other, "BF16 cache"):
                result[f"minus {other}"] = interval(spread[name] - spread[other])
    return results


def show(title: str, results: dict[str, dict[str, Any]]) -> None:
    """A table for people."""
    table = Table(title=title)
    for heading in ("scales", "same tokens", "own rollout", "saturated", "underflow"):
        table.add_column(heading, justify="right")
    for name, result in results.items():
        cells = [
            f"{result[key]:.4f} [{result[key + '_interval'][0]:.4f}, "
            f"{result[key + '_interval'][1]:.4f}]"
            for key in ("same_tokens", "rollout")
        ]
        shares = [
            f"{result[key]:.2e}" if key in result else ""
            for key in ("saturated_share", "underflow_share")
        ]
        table.add_row(name, *cells, *shares)
    Console(width=140).print(table)


def main(overrides: list[str]) -> None:
    """Measures, prints and writes. overrides: of the recipe, for a smaller try that writes nothing."""
    recipe = load_recipe(SMOLLM2 / "bf16-kv.yaml", [*SIZES, *overrides]).recipe
    wanted = compute_environment(recipe)
    if any(os.environ.get(name) != value for name, value in wanted.items()):  # read at a start
        command = [sys.executable, "-m", "benchmarks.kv_scales", *overrides]
        os.execve(sys.executable, command, os.environ | wanted)
    with tempfile.TemporaryDirectory() as temporary:
        bench = Bench(recipe, Path(temporary))
        values = {}
        for name, weights in (("plain", bench.plain), ("rescaled", bench.rescaled())):
            bench.load(name, weights)
            values[name] = measured(bench)
            show(f"token_mult_prob_error against FP32, {name} model", values[name])
    if not overrides:
        about = {"model": "SmolLM2-135M-Instruct", "rescaled_exponents": [GROW, SHRINK]}
        print(record.write("kv_scales", {**about, **values}))


if __name__ == "__main__":
    main(sys.argv[1:])
