"""The history of KV scales, from a run's journal."""

import io
import math

import pytest

from fp8rl.journal import ITERATION, JournalError
from fp8rl.kv_history import kv_history, plot_kv_history
from fp8rl.recipe.precision import Linear
from tests.folders import flipped, make_run, replace_file


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path, until=(2, ITERATION))


def test_each_version_has_its_scales_and_what_the_next_rollout_could_not_hold(run):
    columns = kv_history(run.journal)
    assert columns["version"] == [0, 1, 2]
    assert columns["layer"] == [0, 0, 0]
    assert columns["k_scale"] == [0.2] * 3
    assert columns["v_scale"] == [0.3, 0.3 + 1 / 9, 0.3 + 2 / 9]
    assert columns["side"] == ["learner"] * 3
    assert columns["k_saturated"][:2] == [0.5, 0.5]
    assert columns["v_underflow"][:2] == [0.2, 0.2]
    assert math.isnan(columns["k_saturated"][2])  # no rollout has used it yet


def test_damaged_scales_are_named(run):
    path = run.journal.step_folder(1) / "kv_scales.json"
    replace_file(path, flipped(path.read_bytes()))
    with pytest.raises(JournalError, match=r"kv_scales\.json"):
        kv_history(run.journal)


def test_history_of_a_run_without_fp8_kv_has_no_rows(tmp_path):
    run = make_run(tmp_path, until=(0, "requantize"), overrides=("precision.kv_cache=bf16",))
    assert run.recipe.precision.kv_cache is not Linear.FP8
    assert not any(kv_history(run.journal).values())


def test_plot_is_a_picture_that_shows_the_scales(run):
    from matplotlib.image import imread

    columns = kv_history(run.journal)
    plain = plot_kv_history(columns)
    assert imread(io.BytesIO(plain)).shape[0] > 300
    assert plot_kv_history(columns) == plain  # the same bytes: MLflow is not sent it again
    columns["k_scale"][1] *= 3
    assert plot_kv_history(columns) != plain
