"""The answers of an evaluation, to look at: as a table, and the best and the worst of them."""

import json
from typing import Any

from fp8rl.journal import Journal, JournalError
from fp8rl.tables import from_parquet

FILE, BF16_FILE = "evaluation.parquet", "evaluation_bf16.parquet"


def evaluated(journal: Journal) -> list[int]:
    """The iterations that were evaluated, in order."""
    return sorted(number for number, step in journal.steps() if step == "evaluate")


def evaluation_table(journal: Journal, iteration: int, file: str = FILE) -> dict[str, list[Any]]:
    """Columns, a row for each answer: prompt_id, kind ("greedy" or "sampled"), prompt, answer (the
    reference's), completion, reward, status, detail. file: FILE, or the BF16 engine's BF16_FILE.

    Raises JournalError where the iteration was not evaluated, or its file is damaged.
    """
    if not journal.is_committed(iteration, "evaluate"):
        there = ", ".join(map(str, evaluated(journal))) or "none"
        raise JournalError(f"iteration {iteration} was not evaluated (evaluated: {there})")
    columns = from_parquet(journal.read_file(iteration, "evaluate", file))
    entries = [json.loads(entry) for entry in columns["entry"]]
    return {
        "prompt_id": columns["prompt_id"],
        "kind": columns["kind"],
        "prompt": [str(entry.get("question", "")) for entry in entries],
        "answer": [str(entry.get("answer", "")) for entry in entries],
        "completion": columns["text"],
        "reward": columns["reward"],
        "status": columns["status"],
        "detail": columns["detail"],
    }


def best_and_worst(table: dict[str, list[Any]], count: int) -> tuple[list[int], list[int]]:
    """Rows with the greatest and with the smallest rewards, at most `count` of each, one of a prompt:
    samples of a prompt are alike. A row is in one of the two at most."""
    rewards, prompts = table["reward"], table["prompt_id"]
    order = sorted(range(len(rewards)), key=lambda row: -rewards[row])
    best = _different(order, prompts, count)
    taken = set(best)
    worst = _different([row for row in reversed(order) if row not in taken], prompts, count)
    return best, worst


def _different(order: list[int], prompts: list[int], count: int) -> list[int]:
    chosen: list[int] = []
    seen: set[int] = set()
    for row in order:
        if prompts[row] not in seen and len(chosen) < count:
            seen.add(prompts[row])
            chosen.append(row)
    return chosen
