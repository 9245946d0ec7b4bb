"""An attribution's predictions against the real engine."""

import pytest

from fp8rl.layerwise.attribution_recipe import measured_recipe
from fp8rl.layerwise.attribution_report import figures, plot, report_of
from tests.contract.test_parity import EXACT
from tests.models import recipe_with
from tests.planted import KIND, LAYER, MODEL, write_planted

pytestmark = pytest.mark.engine


def test_what_is_predicted_is_what_the_engine_computes(tmp_path):
    weights = write_planted(tmp_path / "model")
    recipe = recipe_with(
        model={"tiny": MODEL.model_dump()},
        task={"train_prompts": 64, "val_prompts": 16},
        precision={"rollout": "fp8", "learner": "bf16", "kv_cache": "bf16"},
        rollout={
            "prompts": 4,
            "samples": 2,
            "max_new_tokens": 16,
            "chunk_size": 8,
            "kv_cache_mib": 64,
        },
        runs_dir=str(tmp_path / "runs"),
    )
    measured = measured_recipe(recipe, weights=weights)
    report = report_of(measured, weights=weights, most=2, budget=0.6)
    found, done = report.attribution, report.confirmation
    assert done is not None
    assert report.stand_in.tokens == done.agreement.tokens == report.tokens
    assert found.suggestion[0].name in (f"layer {LAYER}", KIND)
    predicted = [step for step in found.steps if step.taken][-1]
    if EXACT:
        assert report.stand_in.differ == done.agreement.differ == 0
        assert done.chosen_on.kept.plain == predicted.effect.plain
        assert done.chosen_on.all_fp8.plain == found.all_fp8.plain
    assert done.held_out.kept.kl_k3 < done.held_out.all_fp8.kl_k3 / 5
    assert done.held_out.all_fp8.kl_k3 != done.chosen_on.all_fp8.kl_k3
    assert done.bytes[1] - done.bytes[0] == found.units.bytes_more(found.suggestion)

    plot(report, tmp_path / "attribution.png", "planted")
    assert (tmp_path / "attribution.png").stat().st_size > 20_000
    values = figures(report)
    assert [row["unit"] for row in values["units"]][:2] != []
    assert values["confirmation"]["tokens_per_sec_kept_over_all_fp8"]["median"] > 0
