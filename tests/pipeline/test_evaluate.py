"""The policy of an FP8 arm, answered for in BF16 beside it, by the real stack."""

import asyncio

import pytest

from fp8rl.journal import Journal
from fp8rl.recipe.load import load_recipe
from fp8rl.samples import BF16_FILE, FILE
from fp8rl.tables import from_parquet
from tests.arms import SHORT, TINY

pytestmark = pytest.mark.pipeline


def answered(journal, iteration, file=FILE):
    table = from_parquet(journal.read_file(iteration, "evaluate", file))
    return list(zip(table["kind"], table["prompt_id"], table["text"], strict=True))


def test_answers_in_bf16_are_those_of_a_bf16_engine_with_the_same_weights(run_arm, runs_dir):
    from flows.training import train

    places = [f"runs_dir={runs_dir}", "name=also-in-bf16"]
    overrides = [*SHORT, "iterations=1", "evaluate.bf16=true", *places]
    recipe = load_recipe(TINY / "fp8-e2e-kv.yaml", overrides).recipe
    summary = asyncio.run(train(recipe=recipe))
    assert 0 <= summary["val_bf16_accuracy_after"] <= 1
    fp8, bf16 = Journal(runs_dir / "also-in-bf16"), run_arm("bf16").journal
    # Both arms begin with the same weights: every answer is the same, to the last sampled token.
    assert answered(fp8, 0, BF16_FILE) == answered(bf16, 0)
    assert len(answered(fp8, 0)) == 32 * 5
    assert answered(fp8, 0) != answered(bf16, 0)
    table = from_parquet(fp8.read_file(1, "evaluate", BF16_FILE))
    rows = zip(table["kind"], table["status"], strict=True)
    right = [status == "ok" for kind, status in rows if kind == "sampled"]
    metrics = fp8.record(1, "evaluate").metrics
    assert metrics["val_bf16/accuracy"] == pytest.approx(sum(right) / len(right))
    assert not (fp8.folder / ".bf16").exists()
