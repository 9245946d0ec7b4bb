"""Reversing strings of digits: a task that a model of two million parameters learns in a minute.

A generator behind reasoning-gym's dataset interface, so that any task of that package can stand in
its place by name.
"""

from dataclasses import dataclass
from random import Random
from typing import Any

from reasoning_gym.dataset import ProceduralDataset

DATASET_NAME = "reverse_digits"


@dataclass
class ReverseDigitsConfig:
    """digits: length of the string. seed, size: as for every reasoning-gym dataset."""

    digits: int = 5
    seed: int | None = None
    size: int = 500

    def validate(self) -> None:
        """Raises ValueError where a value is out of range."""
        if not 2 <= self.digits <= 32:
            raise ValueError(f"digits must be 2 to 32, not {self.digits}")
        if self.size < 1:
            raise ValueError(f"size must be positive, not {self.size}")


class ReverseDigitsDataset(ProceduralDataset):
    """Items such as question "48213>", answer "31284"; exact match scores 1, all else 0."""

    def __init__(self, config: ReverseDigitsConfig) -> None:
        super().__init__(config=config, seed=config.seed, size=config.size)

    def __getitem__(self, idx: int) -> dict[str, Any]:
        rng = Random(f"{self.seed}/{idx}")
        digits = "".join(rng.choice("0123456789") for _ in range(self.config.digits))
        return {
            "question": f"{digits}>",
            "answer": digits[::-1],
            "metadata": {"source_dataset": DATASET_NAME, "source_index": idx, "digits": digits},
        }

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        return float(answer is not None and answer.strip() == entry["answer"])
