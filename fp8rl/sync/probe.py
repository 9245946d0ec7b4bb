"""The log-prob probe: engine and learner score the same fixed tokens under the same weights.

It sees what no digest can: weights that arrived and are computed with otherwise, KV scales that do not
fit, an attention that reads a stale cache. Imports without torch.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

from fp8rl.files import sha256
from fp8rl.recipe.precision import Linear
from fp8rl.recipe.schema import Recipe
from fp8rl.sync.errors import ProofError

Scores = list[list[float]]

# Largest mean |difference| in nats that is taken for the arm's own rounding: twice what was measured
# and more (docs/sync.md).
_BF16_LIMIT = 0.15
_FP8_LIMIT = 0.50
_BOTH_LIMIT = 0.70


def probe_sequences(prompts: dict[str, list[Any]], recipe: Recipe) -> list[list[int]]:
    """The tokens that are scored: the first validation prompts with their reference answers."""
    longest = recipe.rollout.max_prompt_tokens + recipe.rollout.max_new_tokens - 1
    both = zip(prompts["prompt_tokens"], prompts["answer_tokens"], strict=True)
    return [[*prompt, *answer][:longest] for prompt, answer in both][: recipe.sync.probe_prompts]


def is_probed(recipe: Recipe, version: int, origin: int) -> bool:
    """Whether weight `version` is to be probed; that which a run starts from always is, if any is."""
    every = recipe.sync.probe_every
    return every > 0 and (version == origin or version % every == 0)


def limit_of(recipe: Recipe, *, rollout_bf16: bool = False) -> float:
    """Largest mean |difference| in nats that passes: the recipe's word, or by the arm's precision.

    rollout_bf16: whether the guard has taken this rollout out of FP8.
    """
    if recipe.sync.probe_limit is not None:
        return recipe.sync.probe_limit
    precision = recipe.precision
    alike = precision.learner is precision.rollout and precision.learner_kv is precision.kv_cache
    if precision.parity and alike and not rollout_bf16:
        return _BF16_LIMIT  # what FP8 rounds, both sides round
    fp8 = [Linear.FP8 in (precision.rollout, precision.learner), precision.kv_cache is Linear.FP8]
    return (_BF16_LIMIT, _FP8_LIMIT, _BOTH_LIMIT)[sum(fp8)]


def scores_digest(scores: Scores) -> str:
    """sha256 of the scores, every bit of them."""
    return sha256(json.dumps(scores).encode())


@dataclass(frozen=True)
class Probe:
    """Differences g - p over all scored tokens, g the engine's and p the learner's log-probs, in nats.

    mult_prob_error: mean exp(|g - p|), as in the mismatch panel. digest: of the engine's scores.
    """

    mean_abs: float
    max_abs: float
    mult_prob_error: float
    tokens: int
    digest: str

    @property
    def metrics(self) -> dict[str, float]:
        names = ("mean_abs", "max_abs", "mult_prob_error")
        return {f"probe/{name}": getattr(self, name) for name in names}


def compare(engine: Scores, learner: Scores, *, limit: float, version: int) -> Probe:
    """Raises ProofError where a score is not finite, lengths differ, or mean_abs is above `limit`."""
    if [len(row) for row in engine] != [len(row) for row in learner]:
        raise ProofError(f"probe of weight version {version}: engine and learner scored other tokens")
    pairs = [pair for rows in zip(engine, learner, strict=True) for pair in zip(*rows, strict=True)]
    bad = sum(not (math.isfinite(g) and math.isfinite(p)) for g, p in pairs)
    if bad or not pairs:
        raise ProofError(
            f"probe of weight version {version}: {bad} of {len(pairs)} log-probs are not finite"
        )
    differences = [abs(g - p) for g, p in pairs]
    count = len(differences)
    probe = Probe(
        mean_abs=math.fsum(differences) / count,
        max_abs=max(differences),
        mult_prob_error=math.fsum(math.exp(min(d, 20.0)) for d in differences) / count,
        tokens=count,
        digest=scores_digest(engine),
    )
    if probe.mean_abs > limit:
        raise ProofError(
            f"probe of weight version {version}: the log-probs of engine and learner differ by "
            f"{probe.mean_abs:.3f} nats on average over {count} fixed tokens (limit {limit:g}, largest "
            f"{probe.max_abs:.2f}). Weights and scales are what was sent, so this precision does not "
            "fit this model: try another arm (precision.kv_cache=bf16 first), or raise sync.probe_limit"
        )
    return probe
