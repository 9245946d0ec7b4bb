"""An engine and a learner on a recipe's model, in one process, with what one iteration asks of them."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fp8rl.data.prepare import batch_prompts, prepare_data
from fp8rl.journal import MODEL_FILE
from fp8rl.learner.batch import Batch, make_batch
from fp8rl.learner.learner import Learner
from fp8rl.model.megatron import WeightsError
from fp8rl.model.source import model_folder, warm_start_file
from fp8rl.model.tiny import write_tiny_model
from fp8rl.recipe.rules import RecipeError
from fp8rl.recipe.schema import Recipe
from fp8rl.rollout.engine import Engine
from fp8rl.rollout.requests import Completion, Request, requests_for


def trained_model(recipe: Recipe, folder: Path, *, weights: Path | None = None) -> Path:
    """The Hugging Face folder of the recipe's model: `weights` where it is given, the tiny model's in
    `folder` with the warm-started weights that a run has made.

    Raises RecipeError as `model_folder`, and where there are no such weights.
    """
    given = weights.resolve() if weights is not None else model_folder(recipe)
    if given is not None:
        return given
    warm = warm_start_file(recipe, Path(recipe.runs_dir).resolve())
    if not warm.is_file():
        raise RecipeError(
            f"the tiny model has no weights to look at yet ({warm} is not there): run the recipe first "
            "(iterations=1 is enough), or name a folder with --weights (`fp8rl export` writes one)"
        )
    write_tiny_model(recipe.model.tiny, folder)
    shutil.copyfile(warm, folder / MODEL_FILE)
    return folder


class Setup:
    """A learner and an engine that hold the weights in `model_dir` as version 0, and the recipe's
    prompts. folder: for what is written meanwhile. Raises RecipeError where the weights do not fit."""

    def __init__(self, recipe: Recipe, model_dir: Path, folder: Path) -> None:
        self.recipe, self.model_dir, self.folder = recipe, model_dir, folder
        prepare_data(recipe, model_dir, folder / "data")
        self.learner = Learner(model_dir, recipe)
        try:
            self.learner.load(model_dir, 0)
        except WeightsError as error:
            raise RecipeError(str(error)) from None
        self.learner.publish(folder / "w0", version=0)
        self.engine = self.new_engine(recipe)
        self.engine.load_weights(folder / "w0", 0)
        if self.engine.fp8_kv:
            prompts = batch_prompts(folder / "data", recipe, 0)
            answers = make_batch(prompts["prompt_tokens"], prompts["answer_tokens"])
            self.scales = self.learner.calibrate_kv(answers, version=0, source="answers of the prompts")
            self.engine.apply_kv_scales(self.scales)
            self.learner.use_kv_scales(0, self.scales)

    def new_engine(self, recipe: Recipe) -> Engine:
        """An engine for the model in the precision of `recipe`, without weights."""
        rollout = recipe.rollout
        longest = rollout.max_prompt_tokens + rollout.max_new_tokens
        return Engine(self.model_dir, recipe, max_len=longest)

    def requests_of(self, iteration: int) -> list[Request]:
        """What `iteration` (from 1) of a run of the recipe asks first."""
        prompts = batch_prompts(self.folder / "data", self.recipe, iteration - 1)
        return requests_for(
            prompts["prompt_tokens"],
            prompts["id"],
            self.recipe.rollout.samples,
            run_seed=self.recipe.seed,
            iteration=iteration,
        )


def batch_of(requests: Sequence[Request], completions: Sequence[Completion]) -> Batch:
    """Prompts and answers, with the log-probs that the engine gave."""
    return make_batch(
        [request.prompt for request in requests],
        [completion.tokens for completion in completions],
        [completion.logprobs for completion in completions],
    )


def engine_logprobs(engine: Engine, batch: Batch) -> Tensor:
    """[B, T]: what the engine's `score` says of the batch's answers; 0 outside."""
    sequences = [row[:length].tolist() for row, length in zip(batch.tokens, batch.lengths, strict=True)]
    result = torch.zeros_like(batch.g)
    for row, scores in zip(result, engine.score(sequences, version=0), strict=True):
        row[: len(scores)] = torch.tensor(scores)
    return torch.where(batch.mask, result, 0.0)
