"""The warm start: a short supervised phase, cached by what it is made of."""

from pathlib import Path
from typing import Any

from fp8rl.data.chat import question_tokens
from fp8rl.data.corpus import corpus
from fp8rl.learner.batch import Batch, make_batch
from fp8rl.learner.learner import Learner
from fp8rl.recipe.precision import Linear
from fp8rl.recipe.schema import Recipe


class WarmStart:
    """Trains the tiny model in `model_dir` (config and tokenizer) from random weights, in BF16.

    exclude: questions that must not be trained on (the validation set).
    """

    def __init__(self, recipe: Recipe, model_dir: Path, *, exclude: set[str]) -> None:
        from transformers import AutoTokenizer

        self.options, self.task = recipe.warm_start, recipe.task
        self.tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
        self.learner = Learner(model_dir, recipe, linear=Linear.BF16)
        self.learner.model.reset(recipe.seed)
        self.batches = corpus(
            recipe.task,
            steps=self.options.steps,
            batch_size=self.options.batch_size,
            correct=self.options.correct,
            seed=recipe.seed,
            exclude=exclude,
        )
        self.done = 0

    def advance(self, steps: int) -> dict[str, Any]:
        """Up to `steps` optimiser steps; returns {"done", "total", "loss" of the last}."""
        loss = float("nan")
        for pairs in self.batches[self.done : self.done + steps]:
            warmup = min(1.0, (self.done + 1) / max(1, self.options.warmup_steps))
            loss = self.learner.supervised_step(self._batch(pairs), self.options.lr * warmup)
            self.done += 1
        return {"done": self.done, "total": len(self.batches), "loss": loss}

    def _batch(self, pairs: list[tuple[str, str]]) -> Batch:
        end = self.tokenizer.eos_token_id
        prompts = [question_tokens(self.tokenizer, self.task, question) for question, _ in pairs]
        answers = [self.tokenizer(a, add_special_tokens=False).input_ids for _, a in pairs]
        return make_batch(prompts, [[*answer, end] for answer in answers])
