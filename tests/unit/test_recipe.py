"""Loading recipes, naming mistakes, and the combination rules."""

from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from fp8rl.device import resolve, settled
from fp8rl.model.source import model_dims
from fp8rl.model.tiny import tiny_dims
from fp8rl.numerics.formats import ScaleRule
from fp8rl.preflight import require_runnable
from fp8rl.recipe.durability import BestMode
from fp8rl.recipe.load import (
    changes,
    dotted_keys,
    flatten,
    load_recipe,
    to_yaml,
    with_overrides,
)
from fp8rl.recipe.objective import CorrectionMode, Estimator, Kl
from fp8rl.recipe.precision import Fp8Backend, Linear
from fp8rl.recipe.rules import (
    RecipeError,
    check,
    learner_fp8,
    require_valid,
    rollout_fp8,
    warnings,
)
from fp8rl.recipe.schema import Device, Recipe, Rollout, changes_numbers

CONFIGS = Path(__file__).parents[2] / "configs"
TINY = CONFIGS / "tiny"
# (rollout, learner, kv_cache) of every arm
ARMS = {
    "bf16": ("bf16", "bf16", "bf16"),
    "bf16-kv": ("bf16", "bf16", "fp8"),
    "fp8-rollout": ("fp8", "bf16", "bf16"),
    "fp8-rollout-kv": ("fp8", "bf16", "fp8"),
    "fp8-e2e": ("fp8", "fp8", "bf16"),
    "fp8-e2e-kv": ("fp8", "fp8", "fp8"),
}


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "path",
    sorted(path for path in CONFIGS.rglob("*.yaml") if path.parent.name != "sweeps"),
    ids=lambda p: f"{p.parent.name}-{p.stem}",
)
def test_every_shipped_recipe_is_valid(path, runs_dir):
    recipe = load_recipe(path, [f"runs_dir={runs_dir}"]).recipe
    assert check(recipe, model_dims(recipe)) == []


@pytest.mark.parametrize("folder", ["tiny", "smollm2"])
def test_arms_differ_from_bf16_in_precision_and_nothing_else(folder):
    paths = {arm: CONFIGS / folder / f"{arm}.yaml" for arm in ARMS}
    values = {arm: load_recipe(path).recipe.model_dump() for arm, path in paths.items()}
    for arm, precision in ARMS.items():
        got = values[arm].pop("precision")
        assert tuple(got[k] for k in ("rollout", "learner", "kv_cache")) == precision
        assert values[arm].pop("arm") == arm
    assert all(rest == values["bf16"] for rest in values.values())


def test_extends_overrides_and_origins(tmp_path):
    write(tmp_path, "a.yaml", "iterations: 5\nlearner: {lr: 1.0e-4, grad_clip: 2}\n")
    child = write(tmp_path, "b.yaml", "extends: a.yaml\nlearner: {lr: 3e-4}\n")
    loaded = load_recipe(child, ["learner.grad_clip=0.5", "task.options={digits: 3}"])
    recipe = loaded.recipe
    assert (recipe.iterations, recipe.learner.lr, recipe.learner.grad_clip) == (5, 3e-4, 0.5)
    assert recipe.arm == "b"
    assert loaded.origin("iterations").endswith("a.yaml")
    assert loaded.origin("learner.lr").endswith("b.yaml")
    assert loaded.origin("learner.grad_clip") == "command line"
    assert loaded.origin("task.options.digits") == "command line"
    assert loaded.origin("seed") == "default"


def test_a_mapping_on_the_command_line_merges_as_in_a_file():
    loaded = load_recipe(TINY / "bf16.yaml", ["rollout={prompts: 4}"])
    assert (loaded.recipe.rollout.prompts, loaded.recipe.rollout.max_new_tokens) == (4, 8)
    assert loaded.origin("rollout.prompts") == "command line"
    assert loaded.origin("rollout.max_new_tokens").endswith("base.yaml")
    assert loaded.origin("rollout.temperature") == "default"


def test_task_options_replace_those_of_the_base(tmp_path):
    write(tmp_path, "a.yaml", "task: {name: x, options: {digits: 5}}\n")
    child = write(
        tmp_path, "b.yaml", "extends: a.yaml\ntask: {name: chain_sum, options: {min_terms: 2}}\n"
    )
    assert load_recipe(child).recipe.task.options == {"min_terms": 2}


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("lernr.lr=1", "unknown key 'lernr' (command line); did you mean 'learner'"),
        ("rollout.sample=2", "did you mean 'rollout.samples'"),
        ("grad_clip=1", "did you mean 'learner.grad_clip'"),
        ("precision.kv_cach=fp8", "did you mean 'precision.kv_cache'"),
    ],
)
def test_unknown_key_names_the_nearest(override, hint):
    with pytest.raises(RecipeError) as error:
        load_recipe(TINY / "bf16.yaml", [override])
    assert hint in str(error.value) or hint.replace(" (command line)", "") in str(error.value)


def test_all_unknown_keys_are_named_at_once(tmp_path):
    path = write(tmp_path, "a.yaml", "iteration: 3\nlearner: {rate: 1}\n")
    with pytest.raises(RecipeError) as error:
        load_recipe(path)
    assert "'iteration'" in str(error.value)
    assert "'learner.rate'" in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "a recipe is a mapping"),
        ("a: [", "not readable as YAML"),
        ("extends: [a]", "extends names one file"),
        ("extends: nowhere.yaml", "no recipe at"),
        ("extends: a.yaml", "extends goes in a circle"),
        ("iterations: 0", "iterations: Input should be greater than 0 (got 0"),
        ("iterations: many", "iterations: Input should be a valid integer"),
        ("learner: 3", "learner: Input should be a valid dictionary"),
        ("name: ../elsewhere", "cannot name a run"),
        ("name: demo", "kept for other things"),
        ("seed: 1\nlearner: {lr: 1}\nlearner: {lr: 2}", "the key 'learner' stands there twice"),
        ("rollout: {temperature: .inf}", "rollout.temperature: Input should be a finite number"),
        ("learner: {betas: [1.5, 2]}", "learner.betas.0: Input should be less than 1"),
        ("precision: {rollout: fp4}", "precision.rollout: Input should be 'bf16' or 'fp8'"),
    ],
)
def test_bad_files_say_what_is_wrong(tmp_path, text, message):
    path = write(tmp_path, "a.yaml", text)
    with pytest.raises(RecipeError) as error:
        load_recipe(path)
    assert message in str(error.value)


@pytest.mark.parametrize("text", ["iterations", "=3", "learner.lr=[1"])
def test_bad_overrides_say_how_to_write_them(text):
    with pytest.raises(RecipeError, match="override"):
        load_recipe(TINY / "bf16.yaml", [text])


def test_missing_file():
    with pytest.raises(RecipeError, match=r"no recipe at nothing\.yaml"):
        load_recipe("nothing.yaml")


def test_yaml_words_and_numbers(tmp_path):
    path = write(
        tmp_path, "a.yaml", "correction: {mode: off, allow_off_with_fp8: true}\nlearner: {lr: 1e-5}\n"
    )
    recipe = load_recipe(path).recipe
    assert recipe.correction.mode is CorrectionMode.OFF
    assert recipe.correction.allow_off_with_fp8 is True
    assert recipe.learner.lr == 1e-5


def test_resolved_recipe_reads_back_and_keeps_its_digest(tmp_path):
    recipe = load_recipe(
        TINY / "fp8-e2e-kv.yaml", ["name=x", "precision.exclude=['*.down_proj']"]
    ).recipe
    again = load_recipe(write(tmp_path, "r.yaml", to_yaml(recipe))).recipe
    assert again == recipe
    assert again.digest() == recipe.digest()


def test_digests_see_what_changes_numbers_and_nothing_else():
    def recipe(*overrides):
        return load_recipe(TINY / "bf16.yaml", list(overrides)).recipe

    base = recipe()
    assert base.digest() == recipe("name=x", "runs_dir=y", "tracking.experiment=z").digest()
    assert base.digest() != recipe("seed=1").digest()
    assert (
        base.warm_start_digest() == recipe("precision.rollout=fp8", "learner.lr=1").warm_start_digest()
    )
    assert base.warm_start_digest() != recipe("warm_start.steps=3").warm_start_digest()


def test_a_key_that_comes_later_leaves_the_digests_of_older_runs():
    class Later(Rollout):
        added: int = 3

    old = Recipe(rollout=Rollout(prompts=4))
    new = old.model_copy(update={"rollout": Later(prompts=4)})
    assert new.rollout.model_dump() != old.rollout.model_dump()
    assert new.step_digest() == old.step_digest()
    other = old.model_copy(update={"rollout": Later(prompts=4, added=4)})
    assert other.step_digest() != old.step_digest()


def test_what_is_said_of_lists_keeps_kinds_and_order():
    def digest(*overrides):
        return load_recipe(TINY / "bf16.yaml", list(overrides)).recipe.step_digest()

    lists = ("[{kind: exact}]", "[{kind: numeric}]", "[{kind: exact}, {kind: numeric}]")
    lists += ("[{kind: numeric}, {kind: exact}]", "[{kind: task}]", "[{kind: task, name: a}]")
    assert len({digest(f"task.rewards={one}") for one in lists}) == len(lists)
    assert digest("task.rewards=[{kind: task}]") == digest()


def test_recipe_is_frozen_and_flattens_to_every_key():
    recipe = load_recipe(TINY / "bf16.yaml").recipe
    with pytest.raises(ValidationError):
        recipe.seed = 3
    assert set(dotted_keys()) - {"task.options"} <= set(flatten(recipe))


def violated(*overrides: str) -> dict[tuple[str, ...], str]:
    recipe = load_recipe(TINY / "bf16.yaml", list(overrides)).recipe
    return {v.keys: v.message for v in check(recipe, tiny_dims(recipe.model.tiny))}


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["precision.rollout=fp8", "correction.mode=off"], "correction.mode"),
        (["precision.kv_cache=fp8", "correction.mode=off"], "correction.mode"),
        (["rollout.top_p=0.9"], "rollout.top_p"),
        (["rollout.top_k=5"], "rollout.top_k"),
        (["rollout.samples=1"], "rollout.samples"),
        (["evaluate.greedy=false", "evaluate.samples=0"], "evaluate.greedy"),
        (["evaluate.samples=0"], "checkpoint.metric"),
        (["evaluate.greedy=false", "checkpoint.metric=val/greedy_accuracy"], "checkpoint.metric"),
        (["checkpoint.metric=val_bf16/accuracy"], "evaluate.bf16"),
        (["learner.updates=3"], "learner.updates"),
        (["rollout.prompts=99", "task.train_prompts=50"], "task.train_prompts"),
        (["rollout.max_draws=4", "rollout.prompts=10", "task.train_prompts=39"], "rollout.max_draws"),
        (["rollout.max_draws=2", "rollout.samples=1"], "rollout.max_draws"),
        (["precision.learner=fp8"], "precision.learner"),
        (
            ["precision.first_layers_bf16=3", "precision.last_layers_bf16=2"],
            "precision.last_layers_bf16",
        ),
        (["model.tiny.heads=16", "model.tiny.kv_heads=8"], "model"),
        (["precision.exclude=[nothing]"], "precision.exclude"),
        (["precision.rollout=fp8", "precision.exclude=['*.q_proj']"], "precision.exclude"),
        (["model.tiny.kv_heads=3"], "model"),
        (["rollout.max_prompt_tokens=250"], "rollout.max_prompt_tokens"),
        (["model.tiny.heads=3", "model.tiny.kv_heads=3"], "model.tiny.heads"),
        (["rollout.top_k=0"], "rollout.top_k"),
        (["device=cuda"], "device"),
        (["model.path=/a", "model.gguf=/b"], "model.gguf"),
        (["model.path=/a", "model.hub=a/b", "warm_start.steps=0"], "model.hub"),
        (["model.hub=a/b"], "warm_start.steps"),
        (["model.path=/a"], "warm_start.steps"),
        (["model.gguf=/b"], "warm_start.steps"),
        (["task.chat=true"], "task.chat"),
        (["task.system=Be brief."], "task.system"),
        (["precision.backend=torch"], "precision.backend"),
        (["precision.rollout=fp8", "precision.exclude=['*']"], "precision.rollout"),
        (
            ["precision.rollout=fp8", "precision.first_layers_bf16=2", "precision.last_layers_bf16=2"],
            "precision.rollout",
        ),
        (
            [
                *("precision.rollout=fp8", "precision.learner=fp8"),
                *("precision.include=['*.1.*']", "precision.exclude=['*.1.*']"),
            ],
            "precision.learner",
        ),
        (["precision.backend=transformer_engine"], "precision.backend"),
        (["precision.kv_cache=fp8"], "precision.allow_fp8_kv_without_qk_norm"),
        (["learner.loss=gspo"], "learner.aggregation"),
        (["learner.loss=reinforce", "learner.updates=2"], "learner.updates"),
        (
            [
                *("learner.loss=reinforce", "learner.updates=2"),
                *("correction.bypass=true", "correction.mode=off"),
            ],
            "learner.updates",
        ),
        (["learner.overlong_buffer=9"], "learner.overlong_buffer"),
        (["correction.bypass=true"], "correction.mode"),
        (
            ["correction.bypass=true", "learner.loss=reinforce", "correction.normalise=true"],
            "correction.normalise",
        ),
        (["correction.normalise=true", "correction.mode=off"], "correction.normalise"),
        (["correction.icepop=[1.5, 3]"], "correction.icepop"),
        (["correction.icepop=[0.5, 0.9]"], "correction.icepop"),
        (["correction.reject=[{by: k3, level: token, high: 1, low: 0.1}]"], "correction.reject"),
        (["correction.reject=[{by: k1, level: sequence_max, high: 2}]"], "correction.reject"),
        (["correction.reject=[{by: k1, level: token, high: 0.9}]"], "correction.reject"),
        (["correction.reject=[{by: k1, level: token, high: 2, low: 1.1}]"], "correction.reject"),
        (
            [
                "correction.reject=[{by: k2, level: token, high: 2}, {by: k2, level: token, high: 1}]",
            ],
            "correction.reject",
        ),
        (
            [
                *("precision.rollout=fp8", "learner.loss=reinforce"),
                *("correction.bypass=true", "correction.mode=off"),
            ],
            "correction.mode",
        ),
        (
            [
                *("rollout.top_p=0.9", "correction.mode=off"),
                "correction.reject=[{by: k2, level: token, high: 2}]",
            ],
            "rollout.top_p",
        ),
        (["rollout.top_k=5", "correction.mode=off", "correction.bypass=true"], "rollout.top_k"),
        (["learner.kl.use=loss", "rollout.top_p=0.9", "correction.mode=off"], "learner.kl.use"),
        (["learner.kl.use=reward", "rollout.top_k=5", "correction.mode=off"], "rollout.top_k"),
    ],
)
def test_each_bad_combination_is_refused_by_its_keys(overrides, key):
    assert any(key in keys for keys in violated(*overrides))


@pytest.mark.parametrize(
    "overrides",
    [
        ["precision.rollout=fp8", "correction.mode=off", "correction.allow_off_with_fp8=true"],
        ["rollout.top_p=0.9", "correction.mode=off"],
        ["learner.loss=gspo", "learner.aggregation=sequence_mean_token_mean"],
        ["learner.loss=reinforce"],
        ["learner.loss=reinforce", "learner.updates=2", "correction.bypass=true"],
        ["learner.overlong_buffer=8"],
        ["learner.kl.use=loss", "learner.kl.beta=0.01"],
        ["learner.kl.use=reward", "learner.kl.beta=0.01", "learner.advantage=rloo"],
        ["precision.rollout=fp8", "correction.mode=off", "correction.bypass=true"],
        [
            "precision.rollout=fp8",
            "correction.mode=off",
            "correction.reject=[{by: k1, level: sequence_mean, high: 1.001, low: 0.999}]",
        ],
        ["correction.normalise=true", "correction.bound=icepop", "correction.mode=sequence"],
        ["precision.rollout=fp8", "precision.exclude=['*.down_proj', '*.2.*']"],
    ],
)
def test_the_neighbouring_good_combinations_pass(overrides):
    assert violated(*overrides) == {}


def test_fp8_kv_needs_a_word_only_where_the_model_has_no_qk_norm():
    recipe = load_recipe(TINY / "bf16.yaml", ["precision.kv_cache=fp8"]).recipe
    dims = tiny_dims(recipe.model.tiny)
    (violation,) = check(recipe, dims)
    assert "QK-norm" in violation.message
    assert "precision.kv_cache=bf16" in violation.message
    assert check(recipe, replace(dims, qk_norm=True)) == []
    allowed = with_overrides(recipe, ["precision.allow_fp8_kv_without_qk_norm=true"])
    assert check(allowed, dims) == []


KL_REWARD = ["learner.kl.use=reward", "learner.kl.beta=0.1"]


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["learner.dual_clip=3", "learner.loss=cispo"], "learner.dual_clip has no effect"),
        (["learner.aggregation_length=9"], "learner.aggregation_length has no effect"),
        (["correction.truncate_low=0.5", "correction.mode=off"], "correction.bound and its limits"),
        (["correction.truncate_low=0.5", "correction.bound=icepop"], "correction.truncate_low has no"),
        (["learner.loss=gspo", "learner.clip_low=0.0003"], "its paper clips at 3e-4"),
        (["learner.kl.beta=0.1"], "learner.kl.beta has no effect: set learner.kl.use=loss"),
        (["learner.kl.estimator=k1"], "learner.kl.estimator has no effect"),
        (["learner.kl.use=reward"], "learner.kl.beta=0: the KL to the reference is measured"),
        ([*KL_REWARD, "learner.kl.estimator=k3"], "only k1 has the policy gradient of the KL"),
        (KL_REWARD, "learner.advantage=grpo, learner.kl.use=reward"),
    ],
)
def test_choices_of_the_objective_without_effect_are_told(overrides, text):
    assert any(text in line for line in warnings(load_recipe(TINY / "bf16.yaml", overrides).recipe))
    assert warnings(load_recipe(TINY / "bf16.yaml").recipe) == []


@pytest.mark.parametrize(
    "more", [["learner.kl.use=loss"], ["learner.kl.use=reward", "learner.advantage=rloo"]]
)
def test_a_kl_that_is_used_as_it_is_meant_has_no_warning(more):
    assert warnings(load_recipe(TINY / "bf16.yaml", [*more, "learner.kl.beta=0.1"]).recipe) == []


def test_the_estimator_of_the_kl_is_that_of_its_use():
    assert load_recipe(TINY / "bf16.yaml", ["learner.kl.use=off"]).recipe.learner.kl == Kl()
    assert (Kl(use="loss").by, Kl(use="reward").by) == (Estimator.K3, Estimator.K1)
    assert Kl(use="loss", estimator="k2").by == Kl(use="reward", estimator="k2").by == Estimator.K2
    for bad in ({"beta": -0.1}, {"use": "both"}, {"estimator": "k4"}, {"beta": float("nan")}):
        with pytest.raises(ValidationError):
            Kl(**bad)


def test_rejection_rules_are_written_as_a_list_and_read_back(tmp_path):
    rules = (
        "correction.reject=[{by: k1, level: token, high: 2}, {by: k3, level: sequence_mean, high: 0.1}]"
    )
    recipe = load_recipe(TINY / "bf16.yaml", [rules]).recipe
    assert [(r.by, r.level, r.high, r.low) for r in recipe.correction.reject] == [
        ("k1", "token", 2.0, None),
        ("k3", "sequence_mean", 0.1, None),
    ]
    again = load_recipe(write(tmp_path, "r.yaml", to_yaml(recipe))).recipe
    assert again == recipe
    assert "sequence_mean" in flatten(recipe)["correction.reject"]
    with pytest.raises(RecipeError, match=r"correction\.reject\.0\.hihg"):
        load_recipe(TINY / "bf16.yaml", ["correction.reject=[{by: k1, level: token, hihg: 2}]"])


def test_two_models_are_refused_before_either_is_looked_for():
    overrides = ["model.path=/nowhere", "model.gguf=/nowhere.gguf", "warm_start.steps=0"]
    with pytest.raises(RecipeError, match=r"model\.path, model\.gguf: they name 2 models"):
        require_runnable(load_recipe(TINY / "bf16.yaml", overrides).recipe)


def test_every_violation_is_reported_at_once():
    recipe = load_recipe(
        TINY / "bf16.yaml", ["rollout.samples=1", "rollout.top_p=0.5", "device=cuda"]
    ).recipe
    with pytest.raises(RecipeError) as error:
        require_valid(recipe, model_dims(recipe))
    for key in ("rollout.samples", "rollout.top_p", "device"):
        assert key in str(error.value)


def test_resolver_says_what_runs_each_part():
    recipe = load_recipe(TINY / "fp8-e2e-kv.yaml").recipe
    backends = resolve(recipe)
    assert backends.device is Device.CPU
    for linears in (backends.rollout_linears, backends.learner_linears):
        assert "FP8 (block scaling" in linears
    assert backends.fp8_backend in ("amx", "reference")
    asked = load_recipe(TINY / "fp8-e2e-kv.yaml", ["precision.backend=reference"]).recipe
    assert "emulated in FP32" in resolve(asked).learner_linears
    assert "BF16" in resolve(load_recipe(TINY / "bf16.yaml").recipe).rollout_linears
    with pytest.raises(RecipeError, match="not built yet"):
        resolve(recipe.model_copy(update={"device": Device.CUDA}))


def test_auto_takes_amx_where_it_can_run_and_amx_is_refused_where_it_cannot(monkeypatch):
    from fp8rl import device

    auto = load_recipe(TINY / "fp8-e2e.yaml").recipe
    asked = load_recipe(TINY / "fp8-e2e.yaml", ["precision.backend=amx"]).recipe
    monkeypatch.setattr(device, "cpu_flags", lambda: set(device.AMX_FLAGS))
    monkeypatch.setattr(device.shutil, "which", lambda _: "/usr/bin/g++")
    assert resolve(auto).fp8_backend == resolve(asked).fp8_backend == "amx"
    assert settled(auto).precision.backend is Fp8Backend.AMX
    monkeypatch.setattr(device.shutil, "which", lambda _: None)
    assert resolve(auto).fp8_backend == "reference"
    with pytest.raises(RecipeError, match=r"no C\+\+ compiler .* precision.backend=reference"):
        resolve(asked)
    monkeypatch.setattr(device, "cpu_flags", lambda: {"avx512f"})
    assert settled(auto).precision.backend is Fp8Backend.REFERENCE
    with pytest.raises(RecipeError, match="this CPU has no amx_bf16"):
        resolve(asked)


def test_default_recipe_is_valid_and_bf16():
    recipe = Recipe()
    assert check(recipe, model_dims(recipe)) == []
    assert recipe.precision.rollout is Linear.BF16


def test_sides_with_different_scales_are_warned_of():
    fp8 = ["precision.rollout=fp8", "precision.learner=fp8"]
    assert warnings(load_recipe(TINY / "bf16.yaml", fp8).recipe) == []
    recipe = load_recipe(TINY / "bf16.yaml", [*fp8, "precision.learner_scales.weights=pow2"]).recipe
    (warning,) = warnings(recipe)
    assert "precision.learner_scales.weights=pow2, precision.rollout_scales.weights=fp32" in warning
    assert learner_fp8(recipe.precision).weight.rule is ScaleRule.POW2
    assert rollout_fp8(recipe.precision).weight.rule is ScaleRule.FP32
    one_side = ["precision.rollout=fp8", "precision.rollout_scales.weights=pow2"]
    assert warnings(load_recipe(TINY / "bf16.yaml", one_side).recipe) == []


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["precision.learner_format=hybrid"], "precision.learner_format=hybrid has no effect"),
        (["precision.scaling=tensor"], "precision.scaling has no effect: no linear is in FP8"),
        (["precision.backend=reference"], "precision.backend has no effect"),
        (
            [
                "precision.rollout=fp8",
                "precision.scaling=mxfp8",
                "precision.rollout_scales.weights=pow2",
            ],
            "precision.rollout_scales has no effect: MXFP8 has UE8M0 scales",
        ),
        (
            ["precision.rollout=fp8", "precision.scaling=tensor"],
            "depend on what it was batched with, on both",
        ),
        (["precision.kv_tokens=99"], "precision.kv_tokens has no effect: the KV cache is in BF16"),
        (
            ["precision.kv_cache=fp8", "precision.kv_percentile=99"],
            "precision.kv_percentile has no effect: set precision.kv_statistic=percentile",
        ),
    ],
)
def test_keys_without_effect_are_warned_of(overrides, says):
    assert any(says in text for text in warnings(load_recipe(TINY / "bf16.yaml", overrides).recipe))
    assert warnings(load_recipe(TINY / "fp8-e2e.yaml").recipe) == []
    used = ["precision.kv_statistic=percentile", "precision.kv_percentile=99", "precision.kv_tokens=9"]
    assert warnings(load_recipe(TINY / "fp8-e2e-kv.yaml", used).recipe) == []


def test_hybrid_and_scaling_reach_the_numerics():
    overrides = ["precision.learner_format=hybrid", "precision.scaling=tensor"]
    precision = load_recipe(TINY / "fp8-e2e.yaml", overrides).recipe.precision
    fp8 = learner_fp8(precision)
    assert (fp8.input.element.name, fp8.gradient.element.name) == ("e4m3", "e5m2")
    assert fp8.weight.tile == (None, None)
    assert rollout_fp8(precision).gradient.element.name == "e4m3"


# --- checkpoints, retries, stopping, and changes between recipes


def tiny(*overrides: str) -> Recipe:
    return load_recipe(TINY / "bf16.yaml", list(overrides)).recipe


def test_sections_about_failing_and_stopping_have_usable_defaults():
    recipe = Recipe()
    assert (recipe.checkpoint.every, recipe.checkpoint.keep_last, recipe.checkpoint.keep_best) == (
        5,
        2,
        1,
    )
    assert (recipe.checkpoint.metric, recipe.checkpoint.mode) == ("val/accuracy", BestMode.MAX)
    assert recipe.checkpoint.asynchronous
    assert (recipe.retry.attempts, recipe.retry.delay_s, recipe.retry.budget) == (2, 2.0, 20)
    assert (recipe.stop.after_iteration, recipe.stop.time_limit_s) == (None, None)
    assert recipe.step_timeout_s == 3600


def test_sections_about_failing_and_stopping_are_read():
    recipe = tiny("checkpoint={every: 3, mode: min, metric: train/loss}", "stop.time_limit_s=90")
    assert (recipe.checkpoint.every, recipe.checkpoint.keep_last) == (3, 2)
    assert recipe.checkpoint.mode is BestMode.MIN
    assert recipe.stop.time_limit_s == 90
    assert (
        tiny("retry.attempts=0", "checkpoint.keep_best=0", "checkpoint.grace_s=0").retry.attempts == 0
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("checkpoint.every=0", "checkpoint.every: Input should be greater than 0"),
        ("checkpoint.keep_last=0", "checkpoint.keep_last: Input should be greater than 0"),
        ("checkpoint.mode=best", "checkpoint.mode: Input should be 'max' or 'min'"),
        ("retry.attempts=-1", "retry.attempts: Input should be greater than or equal to 0"),
        ("retry.delay_s=-1", "retry.delay_s: Input should be greater than or equal to 0"),
        ("stop.after_iteration=0", "stop.after_iteration: Input should be greater than 0"),
        ("stop.time_limit_s=0", "stop.time_limit_s: Input should be greater than 0"),
        ("step_timeout_s=0", "step_timeout_s: Input should be greater than 0"),
        ("checkpoint.evry=2", "did you mean 'checkpoint.every'"),
        ("retries.budget=2", "did you mean 'retry'"),
        ("stop.after=2", "did you mean 'stop.after_iteration'"),
    ],
)
def test_bad_values_about_failing_and_stopping_are_refused(override, message):
    with pytest.raises(RecipeError) as error:
        tiny(override)
    assert message in str(error.value)


# A value other than the default, for every key that no number of an iteration depends on.
NOT_NUMBERS = {
    "name": "x",
    "arm": "x",
    "runs_dir": "x",
    "step_timeout_s": 5,
    "iterations": 7,
    "checkpoint.every": 9,
    "checkpoint.keep_last": 9,
    "checkpoint.keep_best": 9,
    "checkpoint.metric": "x",
    "checkpoint.mode": "min",
    "checkpoint.asynchronous": "false",
    "checkpoint.grace_s": 9,
    "retry.attempts": 9,
    "retry.delay_s": 9,
    "retry.budget": 9,
    "retry.smaller_micro_batch": "false",
    "stop.after_iteration": 9,
    "stop.time_limit_s": 9,
    "sync.bucket_mib": 9,
    "sync.timeout_s": 9,
    "sync.read_back": 9,
    "sync.probe_every": 9,
    "sync.probe_prompts": 9,
    "sync.probe_limit": 9,
    "tracking.uri": "x",
    "tracking.experiment": "x",
    "tracking.system_metrics": "false",
    "tracking.log_model": "true",
    "tracking.tags": {"a": "b"},
}


@pytest.mark.parametrize("key", NOT_NUMBERS)
def test_steps_are_of_the_same_recipe_whatever_no_number_depends_on(key):
    changed = tiny(f"{key}={NOT_NUMBERS[key]}")
    assert changed != tiny()
    assert changed.step_digest() == tiny().step_digest()
    assert (changed.digest() == tiny().digest()) == (key != "iterations")
    assert not changes_numbers(key)


def test_every_other_key_counts_as_a_change_of_numbers():
    """A key that is added later is among them unless it is put on the list above by somebody."""
    assert {key for key in dotted_keys() if not changes_numbers(key)} == set(NOT_NUMBERS)
    for override in (
        "seed=1",
        "learner.lr=1",
        "threads=1",
        "task.options={digits: 4}",
        "evaluate.every=3",
    ):
        assert tiny(override).step_digest() != tiny().step_digest()


def test_changes_are_told_by_key():
    assert changes(tiny(), tiny()) == {}
    assert changes(tiny(), tiny("learner.lr=0.5", "checkpoint.every=2", "name=x")) == {
        "learner.lr": ("0.0001", "0.5"),
        "checkpoint.every": ("5", "2"),
        "name": ("null", "x"),
    }
    # Options of another task are other keys.
    assert changes(tiny(), tiny("task.options={size: 3}")) == {
        "task.options.digits": ("5", "nothing"),
        "task.options.size": ("nothing", "3"),
    }


def test_overrides_of_a_recipe_that_is_there():
    recipe = tiny("name=x")
    assert with_overrides(recipe, []) == recipe
    changed = with_overrides(recipe, ["iterations=3", "retry={budget: 1}", "task.options={digits: 2}"])
    assert (changed.iterations, changed.retry.budget, changed.retry.attempts) == (3, 1, 2)
    assert changed.task.options == {"digits": 2}
    assert changed.arm == recipe.arm
    assert recipe.iterations == 40


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("iterations", "write it as key=value"),
        (
            "iterations=0",
            "recipe: iterations: Input should be greater than 0 (got 0, from command line)",
        ),
        ("iteration=3", "unknown key 'iteration' (command line); did you mean 'iterations'"),
        ("retry=3", "retry: Input should be a valid dictionary"),
        ("name=../x", "cannot name a run"),
        ("name=demo", "kept for other things"),
    ],
)
def test_bad_overrides_of_a_recipe_that_is_there(override, message):
    with pytest.raises(RecipeError) as error:
        with_overrides(tiny(), [override])
    assert message in str(error.value)


def test_what_is_left_to_the_machine_is_settled_once(monkeypatch):
    """Bits depend on both, so that a run takes them along to another machine."""
    recipe = tiny("precision.rollout=fp8")
    assert (recipe.threads, recipe.precision.backend) == (0, Fp8Backend.AUTO)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(6)))
    monkeypatch.setattr("fp8rl.device.cpu_flags", lambda: {"avx512f"})
    here = settled(recipe)
    assert (here.threads, here.precision.backend) == (6, Fp8Backend.REFERENCE)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(2)))
    assert settled(here) == here
    assert settled(tiny("threads=3")).threads == 3
    assert settled(recipe).step_digest() != here.step_digest()


def test_parity_is_asked_for_before_the_warm_start_and_what_rounds_is_told(monkeypatch):
    from fp8rl.model import engine_attention
    from fp8rl.preflight import require_backend

    def broken():
        raise engine_attention.EngineKernelError("no kernels here")

    recipe = Recipe.model_validate({"precision": {"kv_cache": "fp8", "learner_kv": "fp8"}})
    require_backend(recipe)
    monkeypatch.setattr(engine_attention, "kernels", broken)
    with pytest.raises(engine_attention.EngineKernelError, match="no kernels here"):
        require_backend(recipe)
    without = recipe.model_copy(
        update={"precision": recipe.precision.model_copy(update={"parity": False})}
    )
    require_backend(without)
    assert "as the FP8 cache holds them" in resolve(recipe).learner_rounding
    assert resolve(without).learner_rounding == "as Megatron-core and torch"
