"""Prepares a run's prompts: generated, tokenised, checked, and kept with the run."""

from pathlib import Path
from typing import Any

from fp8rl.data.chat import question_tokens
from fp8rl.data.tasks import build_prompts, prompts_of_batch
from fp8rl.files import write_atomic
from fp8rl.recipe.rules import RecipeError
from fp8rl.recipe.schema import Recipe
from fp8rl.tables import from_parquet, to_parquet

SPLITS = ("train", "val")


def prepare_data(recipe: Recipe, model_dir: Path, folder: Path) -> dict[str, Any]:
    """Writes `folder`/train.parquet and val.parquet; returns sizes and fingerprints.

    Columns: those of `build_prompts`, and prompt_tokens, answer_tokens (the reference answer and the
    end token). Raises RecipeError where a prompt is longer than rollout.max_prompt_tokens, and as
    `question_tokens`.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    about: dict[str, Any] = {}
    splits = zip(SPLITS, build_prompts(recipe.task, recipe.seed), strict=True)
    for split, dataset in splits:
        columns = dataset.to_dict()
        columns["prompt_tokens"] = [
            question_tokens(tokenizer, recipe.task, question) for question in columns["question"]
        ]
        columns["answer_tokens"] = [
            [*tokenizer(a, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
            for a in columns["answer"]
        ]
        limit = recipe.rollout.max_prompt_tokens
        longest = max(len(tokens) for tokens in columns["prompt_tokens"])
        if longest > limit:
            over = sum(len(tokens) > limit for tokens in columns["prompt_tokens"])
            raise RecipeError(
                f"rollout.max_prompt_tokens: {over} of {len(dataset)} {split} prompts are longer than "
                f"{limit} tokens (the longest: {longest}); raise it, or make the task's shorter"
            )
        write_atomic(folder / f"{split}.parquet", to_parquet(columns))
        about[split] = {"prompts": len(dataset), "fingerprint": dataset._fingerprint}
    return about


def read_prompts(folder: Path, split: str) -> dict[str, list[Any]]:
    """The columns of a split that `prepare_data` wrote."""
    return from_parquet((folder / f"{split}.parquet").read_bytes())


def batch_prompts(folder: Path, recipe: Recipe, batch: int) -> dict[str, list[Any]]:
    """The columns of the train prompts of `batch` (from 0) of the stream; see `prompts_of_batch`."""
    train = read_prompts(folder, "train")
    rows = prompts_of_batch(len(train["id"]), recipe.rollout.prompts, batch, recipe.seed)
    return {name: [values[row] for row in rows] for name, values in train.items()}
