"""An engine and a learner on the same small weights."""

from pathlib import Path

import torch

from fp8rl.learner.batch import make_batch
from fp8rl.learner.learner import Learner
from fp8rl.model.kv_scales import KvScales
from fp8rl.rollout.engine import Engine
from fp8rl.rollout.requests import Request, requests_for
from tests.models import RAGGED, recipe_with, write_model

ARMS = {
    "bf16": {"rollout": "bf16", "learner": "bf16", "kv_cache": "bf16"},
    "fp8-e2e-kv": {"rollout": "fp8", "learner": "fp8", "kv_cache": "fp8"},
}


class Pair:
    """An engine and a learner on the same weights."""

    def __init__(self, arm: str | dict[str, str], folder: Path) -> None:
        """arm: one of ARMS, or the precision section itself."""
        self.recipe = recipe_with(
            model={"tiny": RAGGED.model_dump()},
            precision=ARMS[arm] if isinstance(arm, str) else arm,
            learner={"lr": 3e-3, "warmup_iterations": 0},
            rollout={"max_new_tokens": 12, "chunk_size": 16, "kv_cache_mib": 64},
        )
        self.folder = folder
        self.model_dir = write_model(RAGGED, folder / "model")
        self.engine = Engine(self.model_dir, self.recipe, max_len=64)
        self.sync(self.new_learner(), 0)

    def new_learner(self) -> Learner:
        learner = Learner(self.model_dir, self.recipe)
        learner.load(self.model_dir, 0)
        return learner

    def sync(self, learner: Learner, version: int) -> None:
        """Publishes and loads `version`, and calibrates where the KV cache is FP8."""
        folder = self.folder / f"v{version}"
        learner.publish(folder, version=version)
        self.engine.load_weights(folder, version)
        if self.engine.fp8_kv:
            self.engine.apply_kv_scales(self.scales(learner, version))

    def scales(self, learner: Learner, version: int) -> KvScales:
        return learner.calibrate_kv(some_tokens(), version=version, source="test")

    def requests(self, iteration: int = 1, prompts: int = 8) -> list[Request]:
        generator = torch.Generator().manual_seed(iteration)
        ids = [torch.randint(4, 90, (5 + n % 3,), generator=generator).tolist() for n in range(prompts)]
        return requests_for(ids, list(range(prompts)), 2, run_seed=0, iteration=iteration)


def some_tokens():
    generator = torch.Generator().manual_seed(9)
    rows = [torch.randint(4, 90, (20,), generator=generator).tolist() for _ in range(32)]
    return make_batch([r[:6] for r in rows], [r[6:] for r in rows])
