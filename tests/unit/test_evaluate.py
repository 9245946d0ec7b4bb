"""evaluate: which engine answers in BF16. The real one is in tests/pipeline/test_evaluate.py."""

import asyncio

import pytest

from fp8rl.context import RunContext
from fp8rl.recipe.load import load_recipe
from fp8rl.tables import from_parquet
from tasks import evaluate
from tests.arms import TINY


def answers(engine):
    text = [f"by the {engine}"] * 2
    status = {"run's engine": "wrong", "BF16 engine": "ok"}[engine]
    table = {"prompt_id": [0, 0], "kind": ["greedy", "sampled"], "entry": ["{}"] * 2, "text": text}
    return table | {"status": [status] * 2, "reward": [0.0] * 2, "detail": [""] * 2}


@pytest.fixture
def evaluated(monkeypatch, tmp_path):
    """{arm}, guarded: whether the guard took the rollout out of FP8 -> (tables by file, metrics)."""

    def run(arm, *overrides, guarded=False):
        recipe = load_recipe(TINY / f"{arm}.yaml", list(overrides)).recipe
        context = RunContext(run="r", folder=tmp_path, model_dir=tmp_path, recipe=recipe)

        def engine(name):
            async def make(context, version):
                return name

            return make

        async def answer(context, engine, version):
            return answers(engine)

        monkeypatch.setattr(evaluate, "ensure_engine", engine("run's engine"))
        monkeypatch.setattr(evaluate, "_bf16_engine", engine("BF16 engine"))
        monkeypatch.setattr(evaluate, "_answers", answer)
        monkeypatch.setattr(evaluate, "in_bf16", lambda context, version: guarded)
        files, fields = asyncio.run(evaluate.evaluation(context, 3))
        texts = {name: set(from_parquet(content)["text"]) for name, content in files.items()}
        return texts, fields["metrics"]

    return run


@pytest.mark.parametrize("arm", ["fp8-rollout", "bf16-kv", "fp8-e2e-kv"])
def test_an_arm_with_any_fp8_in_its_rollout_has_a_second_engine(evaluated, arm):
    texts, metrics = evaluated(arm, "evaluate.bf16=true")
    assert texts["evaluation.parquet"] == {"by the run's engine"}
    assert texts["evaluation_bf16.parquet"] == {"by the BF16 engine"}
    assert (metrics["val/accuracy"], metrics["val_bf16/accuracy"]) == (0.0, 1.0)
    assert metrics["val_bf16/greedy_accuracy"] == metrics["val_bf16/ok"] == 1.0


@pytest.mark.parametrize(("arm", "guarded"), [("bf16", False), ("fp8-e2e-kv", True)])
def test_a_rollout_that_is_in_bf16_is_its_own_measure(evaluated, arm, guarded):
    texts, metrics = evaluated(arm, "evaluate.bf16=true", guarded=guarded)
    assert texts["evaluation.parquet"] == texts["evaluation_bf16.parquet"] == {"by the run's engine"}
    assert metrics["val/accuracy"] == metrics["val_bf16/accuracy"] == 0.0


def test_unasked_there_is_none(evaluated):
    texts, metrics = evaluated("fp8-e2e-kv")
    assert set(texts) == {"evaluation.parquet"}
    assert not [name for name in metrics if name.startswith("val_bf16")]
