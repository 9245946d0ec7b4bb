"""What scores the entries of each source of prompts, where a recipe says nothing else (kind task)."""

from dataclasses import dataclass
from typing import Any

from fp8rl.data.tasks import make_generator
from fp8rl.recipe.data import all_sources
from fp8rl.recipe.schema import Extract, Task
from fp8rl.reward.extract import extract


class OwnScorers:
    """The generators' own scorers, and for entries of files whether the same is extracted from the
    completion as from the reference answer. Raises RecipeError as `make_generator`."""

    def __init__(self, task: Task) -> None:
        self._scorers: dict[str | None, Any] = {
            one.label: make_generator(one.source, seed=0, size=1, key=one.key)
            if one.source.is_generator
            else _Extracted(task.extract)
            for one in all_sources(task)
        }

    def score_answer(self, text: str, entry: dict[str, Any]) -> float:
        """The reward of `text`, what task.extract takes of a completion. Raises KeyError for an entry
        of another source, and what a scorer raises."""
        return float(self._scorers[entry.get("source")].score_answer(text, entry))


@dataclass(frozen=True)
class _Extracted:
    how: Extract

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        return float(answer.strip() == (extract(self.how, entry["answer"]) or "").strip())
