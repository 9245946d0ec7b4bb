"""Prepares a run's prompts: drawn from their sources, tokenised, checked, and kept with the run."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

from fp8rl.data.chat import question_tokens
from fp8rl.data.draw import Length, Row, columns_of, draw_prompts
from fp8rl.data.tasks import prompts_of_batch
from fp8rl.files import sha256, write_atomic
from fp8rl.recipe.rules import RecipeError
from fp8rl.recipe.schema import Recipe
from fp8rl.tables import from_parquet, to_parquet

SPLITS = ("train", "val")
_SCRATCH = ".sources"


def prepare_data(recipe: Recipe, model_dir: Path, folder: Path) -> dict[str, Any]:
    """Writes `folder`/train.parquet and val.parquet; returns what docs/data.md calls data.json: sizes
    and fingerprints of both, and for each source its digests and counts.

    Columns: id, question, answer, entry (JSON, for the scorer), prompt_tokens, answer_tokens (the
    reference answer and the end token). Raises RecipeError where a prompt is longer than
    rollout.max_prompt_tokens and task.too_long does not drop it, where there are fewer prompts than
    one rollout draws, and as `draw_prompts` and `question_tokens`.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    limit = recipe.rollout.max_prompt_tokens
    scratch = folder / _SCRATCH
    shutil.rmtree(scratch, ignore_errors=True)  # of a process that was killed
    scratch.mkdir(parents=True)
    try:
        length = Length(partial(question_tokens, tokenizer, recipe.task), limit)
        drawn = draw_prompts(recipe.task, recipe.seed, length, scratch)
    finally:
        shutil.rmtree(scratch)
    about: dict[str, Any] = {}
    for split, rows in zip(SPLITS, (drawn.train, drawn.val), strict=True):
        _require_short(rows, split, limit)
        columns = columns_of(rows)
        columns["answer_tokens"] = [
            [*tokenizer(a, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
            for a in columns["answer"]
        ]
        content = to_parquet(columns)
        write_atomic(folder / f"{split}.parquet", content)
        about[split] = {"prompts": len(rows), "fingerprint": sha256(content)}
    if len(drawn.train) < recipe.rollout.prompts:
        raise RecipeError(
            f"task.train_prompts, rollout.prompts: an iteration needs {recipe.rollout.prompts} "
            f"different prompts; the sources have {len(drawn.train)}. Lower rollout.prompts, or name "
            "more data"
        )
    return about | {"sources": drawn.sources}


def _require_short(rows: list[Row], split: str, limit: int) -> None:
    longest = max(len(row["prompt_tokens"]) for row in rows)
    if longest > limit:
        over = sum(len(row["prompt_tokens"]) > limit for row in rows)
        raise RecipeError(
            f"rollout.max_prompt_tokens: {over} of {len(rows)} {split} prompts are longer than "
            f"{limit} tokens (the longest: {longest}); raise it, or make the task's shorter, or leave "
            "them out with task.too_long=drop"
        )


def read_prompts(folder: Path, split: str) -> dict[str, list[Any]]:
    """The columns of a split that `prepare_data` wrote."""
    return from_parquet((folder / f"{split}.parquet").read_bytes())


def batch_prompts(folder: Path, recipe: Recipe, batch: int) -> dict[str, list[Any]]:
    """The columns of the train prompts of `batch` (from 0) of the stream; see `prompts_of_batch`."""
    train = read_prompts(folder, "train")
    rows = prompts_of_batch(len(train["id"]), recipe.rollout.prompts, batch, recipe.seed)
    return {name: [values[row] for row in rows] for name, values in train.items()}
