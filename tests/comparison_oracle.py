"""The figures of a comparison once more, from the raw files of run folders and NumPy alone."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from scipy import stats

RESAMPLES = 2000
STEPS = ("rollout", "reward", "train", "requantize", "recalibrate_kv")


class RawRun:
    """A run folder, read without any code of ours."""

    def __init__(self, folder: Path) -> None:
        recipe = json.loads((folder / "run.json").read_text())["recipe"]
        self.arm, self.seed, self.iterations = recipe["arm"], recipe["seed"], recipe["iterations"]
        self.metrics: dict[int, dict[str, float]] = {}
        self.answers: dict[int, dict[str, dict[str, float]]] = {}
        for path in sorted((folder / "iterations").glob("*/steps/iteration.json")):
            number = int(path.parents[1].name)
            self.metrics[number] = json.loads(path.read_text())["metrics"]
            table = path.parents[1] / "evaluation.parquet"
            if table.exists():
                self.answers[number] = _answers(table)
        self.accuracy = {
            n: float(np.mean(list(a["sampled"].values()))) for n, a in self.answers.items()
        }

    @property
    def last(self) -> int:
        return max(self.answers)

    @property
    def best(self) -> int:
        highest = max(self.accuracy.values())
        return min(n for n, value in self.accuracy.items() if value == highest)

    def over(self, key: str, *, steady: bool = False) -> list[float]:
        """Of the trained iterations; steady: without the first of them."""
        return [self.metrics[n][key] for n in sorted(self.metrics) if n > (1 if steady else 0)]

    def median(self, key: str) -> float:
        return float(np.median(self.over(key, steady=True)))

    def shares(self) -> dict[str, float]:
        whole = sum(self.over("timing/iteration_s", steady=True))
        found = {step: sum(self.over(f"timing/{step}_s", steady=True)) / whole for step in STEPS}
        return found | {"other": 1 - sum(found.values())}


def _answers(path: Path) -> dict[str, dict[str, float]]:
    """{kind: {question: share of right answers}}"""
    rows = pq.read_table(path).to_pylist()
    found: dict[str, dict[str, list[bool]]] = {"sampled": {}, "greedy": {}}
    for row in rows:
        question = json.loads(row["entry"])["question"]
        found[row["kind"]].setdefault(question, []).append(row["status"] == "ok")
    return {kind: {q: float(np.mean(a)) for q, a in of.items()} for kind, of in found.items()}


def interval(seeds: list[dict[str, float]], low: float, high: float) -> tuple[float, float, float]:
    """(mean, low, high) of {prompt: value} by seed: the bootstrap of docs/compare.md, drawn in the same
    order but computed draw by draw."""
    names = list(dict.fromkeys(name for seed in seeds for name in seed))
    means = [float(np.mean(list(seed.values()))) for seed in seeds]
    count = len(seeds)
    generator = np.random.default_rng(0)
    prompts = generator.integers(0, len(names), (RESAMPLES, len(names)))
    chosen = (
        generator.integers(0, count, (RESAMPLES, count)) if count > 1 else np.zeros((RESAMPLES, 1), int)
    )
    wide = 1.0
    if count > 1:
        wide = np.sqrt(count / (count - 1)) * stats.t.ppf(0.975, count - 1) / stats.norm.ppf(0.975)
    totals = []
    for prompt_row, seed_row in zip(prompts, chosen, strict=True):
        drawn = [names[i] for i in prompt_row]
        total = 0.0
        for s in seed_row:
            values = [seeds[s][name] for name in drawn if name in seeds[s]]
            moved = float(np.mean(values)) - means[s] if values else 0.0
            total += wide * (means[s] - np.mean(means)) + moved
        totals.append(np.mean(means) + total / count)
    edges = np.clip(np.percentile(totals, [2.5, 97.5]), low, high)
    return float(np.mean(means)), float(edges[0]), float(edges[1])


def accuracy(runs: list[RawRun], *, best: bool = False, kind: str = "sampled") -> tuple[float, ...]:
    return interval([run.answers[run.best if best else run.last][kind] for run in runs], 0.0, 1.0)


def difference(
    arm: list[RawRun], reference: list[RawRun], kind: str = "sampled"
) -> tuple[float, float, float]:
    """Of the seeds that both have."""
    pairs = [(a, b) for a in arm for b in reference if a.seed == b.seed]
    seeds = []
    for mine, its in pairs:
        number = max(set(mine.answers) & set(its.answers))
        one, other = mine.answers[number][kind], its.answers[number][kind]
        seeds.append({question: one[question] - other[question] for question in one})
    return interval(seeds, -1.0, 1.0)


class PageReader(HTMLParser):
    """tables: {section title: [rows of cells]} of an HTML page. tags: those there are. attributes: all.
    text: what is shown."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tables: dict[str, list[list[list[str]]]] = {}
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str, str | None]] = []
        self.text = ""
        self._title, self._cell = "", None
        self._in: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        self.attributes += [(tag, key, value) for key, value in attrs]
        if tag not in ("meta", "img"):
            self._in.append(tag)
        if tag == "h2":
            self._title = ""
        elif tag == "table":
            self.tables.setdefault(self._title, []).append([])
        elif tag == "tr":
            self.tables[self._title][-1].append([])
        elif tag in ("td", "th"):
            self.tables[self._title][-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._in.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if "style" in self._in:
            return
        self.text += data
        if "h2" in self._in:
            self._title += data
        elif {"td", "th"} & set(self._in):
            self.tables[self._title][-1][-1][-1] += data
