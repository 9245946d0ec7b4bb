"""The combination rules: one pure function, every violation at once, before any engine starts."""

from collections.abc import Iterator
from dataclasses import dataclass

from fp8rl.model import transformer_engine
from fp8rl.model.dims import ModelDims
from fp8rl.model.precision import Format, PlanRules, PrecisionPlanError, make_plan
from fp8rl.numerics.formats import Fp8Recipe, ScaleRule, Scaling, fp8_recipe
from fp8rl.recipe.data_rules import data_problems
from fp8rl.recipe.guard import guard_problems
from fp8rl.recipe.objective_rules import compares_logprobs, objective_problems, objective_warnings
from fp8rl.recipe.precision import ElementFormat, Fp8Backend, KvStatistic, Linear, Precision, Scales
from fp8rl.recipe.reward_rules import reward_problems, reward_warnings
from fp8rl.recipe.schema import Device, Recipe

CUDA_NOT_BUILT = (
    "cuda is not built yet. What comes: vLLM's own block-wise FP8 linears, Megatron-core with "
    "Transformer Engine, weights by CUDA IPC or NCCL. Set device=cpu"
)


@dataclass(frozen=True)
class Violation:
    """A combination that is refused. keys: the recipe keys at fault. message: why, and what to do."""

    keys: tuple[str, ...]
    message: str

    def __str__(self) -> str:
        return f"{', '.join(self.keys)}: {self.message}"


class RecipeError(ValueError):
    """A recipe that cannot run. The text lists every reason."""


def plan_rules(precision: Precision, linear: Linear) -> PlanRules:
    """The precision plan's rules for the side whose linears are `linear`."""
    return PlanRules(
        linear=Format(f"fp8_{precision.scaling}") if linear is Linear.FP8 else Format.BF16,
        first_layers_bf16=precision.first_layers_bf16,
        last_layers_bf16=precision.last_layers_bf16,
        include=precision.include,
        exclude=precision.exclude,
    )


def fp8_recipe_of(precision: Precision, scales: Scales, *, hybrid: bool = False) -> Fp8Recipe:
    """How the side with `scales` (precision.rollout_scales or .learner_scales) rounds to FP8."""
    return fp8_recipe(
        precision.scaling,
        weights=ScaleRule(scales.weights.value),
        activations=ScaleRule(scales.activations.value),
        hybrid=hybrid,
    )


def learner_fp8(precision: Precision) -> Fp8Recipe:
    """How the learner rounds to FP8."""
    hybrid = precision.learner_format is ElementFormat.HYBRID
    return fp8_recipe_of(precision, precision.learner_scales, hybrid=hybrid)


def rollout_fp8(precision: Precision) -> Fp8Recipe:
    """How the rollout engine rounds to FP8, and with it the published weights."""
    return fp8_recipe_of(precision, precision.rollout_scales)


def kv_percentile(precision: Precision) -> float | None:
    """The percentile that KV scales are made of; None: the amax."""
    return precision.kv_percentile if precision.kv_statistic is KvStatistic.PERCENTILE else None


_ONLY_FP8 = ("scaling", "rollout_scales", "learner_scales", "backend")


def warnings(recipe: Recipe) -> list[str]:
    """What is allowed and better known before a run is read."""
    precision = recipe.precision
    found = []
    both = precision.learner is precision.rollout is Linear.FP8
    if both and precision.scaling is not Scaling.MXFP8:
        for kind in ("weights", "activations"):
            learner = getattr(precision.learner_scales, kind)
            rollout = getattr(precision.rollout_scales, kind)
            if learner is not rollout:
                found.append(
                    f"precision.learner_scales.{kind}={learner}, precision.rollout_scales.{kind}="
                    f"{rollout}: learner and rollout round differently, which adds to their mismatch"
                )
    if precision.learner is not Linear.FP8 and precision.learner_format is ElementFormat.HYBRID:
        found.append("precision.learner_format=hybrid has no effect: the learner's linears are in BF16")
    if Linear.FP8 not in (precision.learner, precision.rollout):
        found += [
            f"precision.{key} has no effect: no linear is in FP8"
            for key in _ONLY_FP8
            if getattr(precision, key) != getattr(Precision(), key)
        ]
    elif precision.scaling is Scaling.MXFP8:
        found += [
            f"precision.{key} has no effect: MXFP8 has UE8M0 scales"
            for key in ("rollout_scales", "learner_scales")
            if getattr(precision, key) != Scales()
        ]
    found += _kv_keys_without_effect(precision)
    if precision.rollout is Linear.FP8 and precision.scaling is Scaling.TENSOR:
        found.append(
            "precision.scaling=tensor: one activation scale for all tokens of a forward pass, so a "
            "sample's log-probs depend on what it was batched with, on both sides"
        )
    return found + objective_warnings(recipe) + reward_warnings(recipe.task)


_ONLY_FP8_KV = ("kv_margin", "kv_calibration", "kv_statistic", "kv_percentile", "kv_tokens")


def _kv_keys_without_effect(precision: Precision) -> list[str]:
    changed = [key for key in _ONLY_FP8_KV if getattr(precision, key) != getattr(Precision(), key)]
    if precision.kv_cache is not Linear.FP8:
        return [f"precision.{key} has no effect: the KV cache is in BF16" for key in changed]
    if "kv_percentile" in changed and precision.kv_statistic is not KvStatistic.PERCENTILE:
        return ["precision.kv_percentile has no effect: set precision.kv_statistic=percentile"]
    return []


def check(recipe: Recipe, dims: ModelDims) -> list[Violation]:
    """All combinations in `recipe` that are refused for a model of `dims`; empty if it can run."""
    device = [Violation(("device",), CUDA_NOT_BUILT)] if recipe.device is Device.CUDA else []
    return [
        *device,
        *_model(recipe),
        *(Violation(keys, message) for keys, message in data_problems(recipe)),
        *_sampling(recipe),
        *_evaluation(recipe),
        *(Violation(keys, message) for keys, message in objective_problems(recipe)),
        *(Violation(keys, message) for keys, message in _guard(recipe)),
        *(Violation(keys, message) for keys, message in reward_problems(recipe.task)),
        *_precision(recipe, dims),
        *_sizes(recipe, dims),
    ]


def _guard(recipe: Recipe) -> Iterator[tuple[tuple[str, ...], str]]:
    return guard_problems(recipe.guard, has_reference=recipe.learner.kl.is_on)


def require_valid(recipe: Recipe, dims: ModelDims) -> None:
    """Raises RecipeError listing every violation of `check`."""
    _refuse(check(recipe, dims))


def require_one_model(recipe: Recipe) -> None:
    """Raises RecipeError where the recipe does not say which model it means, or means it otherwise.

    The part of `check` to ask before the model is looked for: finding it may take a conversion.
    """
    _refuse(list(_model(recipe)))


def _refuse(violations: list[Violation]) -> None:
    if violations:
        lines = "\n".join(f"  - {violation}" for violation in violations)
        raise RecipeError(f"the recipe cannot run:\n{lines}")


def _model(recipe: Recipe) -> Iterator[Violation]:
    model, task = recipe.model, recipe.task
    given = tuple(f"model.{key}" for key in model.named)
    if len(given) > 1:
        yield Violation(given, f"they name {len(given)} models. Leave one in")
    if not model.is_tiny and recipe.warm_start.steps:
        yield Violation(
            (*given, "warm_start.steps"),
            "the warm start builds the tiny model; with a model of your own set warm_start.steps=0",
        )
    if model.is_tiny and task.chat:
        yield Violation(
            ("task.chat", "model.path", "model.hub", "model.gguf"),
            "the tiny model's tokenizer has no chat template. Set task.chat=false, or name a model",
        )
    if task.system is not None and not task.chat:
        yield Violation(
            ("task.system", "task.chat"), "without a chat there is no system turn. Set task.chat=true"
        )


def _sampling(recipe: Recipe) -> Iterator[Violation]:
    rollout, precision = recipe.rollout, recipe.precision
    low_precision = Linear.FP8 in (precision.rollout, precision.kv_cache)
    corrected = compares_logprobs(recipe)
    if low_precision and not corrected and not recipe.correction.allow_off_with_fp8:
        yield Violation(
            ("correction.mode", "precision"),
            "an FP8 rollout is off-policy; without correction training can drift. Set "
            "correction.mode=token, or say correction.allow_off_with_fp8=true",
        )
    if corrected and (rollout.top_p != 1.0 or rollout.top_k != -1):
        yield Violation(
            ("rollout.top_p", "rollout.top_k", "correction.mode"),
            "the engine renormalises log-probs over the tokens that survive top-p and top-k, the "
            "learner does not, so the importance weights would be wrong. Set top_p=1 and top_k=-1",
        )
    if rollout.top_k == 0:
        yield Violation(("rollout.top_k",), "0 would keep no token; -1 switches it off")
    if rollout.samples < 2:
        yield Violation(
            ("rollout.samples",), "GRPO compares the samples of a prompt: at least 2 are needed"
        )
    batch = rollout.prompts * rollout.samples
    if batch % recipe.learner.updates:
        yield Violation(
            ("learner.updates", "rollout.prompts", "rollout.samples"),
            f"{batch} samples do not divide into {recipe.learner.updates} updates",
        )
    # With null only the data say how many there are, when they are prepared.
    if recipe.task.train_prompts is not None and rollout.prompts > recipe.task.train_prompts:
        yield Violation(
            ("rollout.prompts", "task.train_prompts"),
            f"an iteration needs {rollout.prompts} different prompts; the task has "
            f"{recipe.task.train_prompts}",
        )


def _evaluation(recipe: Recipe) -> Iterator[Violation]:
    asked, metric = recipe.evaluate, recipe.checkpoint.metric
    if not asked.greedy and not asked.samples:
        yield Violation(("evaluate.greedy", "evaluate.samples"), "nothing would be answered. Set one")
        return
    group, _, name = metric.partition("/")
    if group == "val_bf16" and not asked.bf16:
        yield Violation(("checkpoint.metric", "evaluate.bf16"), f"{metric} needs evaluate.bf16=true")
    if group in ("val", "val_bf16"):
        kind = "greedy" if name.startswith("greedy") else "samples"
        sampled = name.startswith(("accuracy", "pass_at_"))
        if (kind == "greedy" and not asked.greedy) or (sampled and not asked.samples):
            yield Violation(("checkpoint.metric", f"evaluate.{kind}"), f"{metric} is not measured then")


def _precision(recipe: Recipe, dims: ModelDims) -> Iterator[Violation]:
    precision = recipe.precision
    if precision.learner is Linear.FP8 and precision.rollout is not Linear.FP8:
        yield Violation(
            ("precision.learner", "precision.rollout"),
            "an FP8 learner publishes FP8 weights, which a BF16 rollout would not run. Set "
            "precision.rollout=fp8 or precision.learner=bf16",
        )
    fp8_kv = precision.kv_cache is Linear.FP8
    if precision.learner_kv is Linear.FP8 and not fp8_kv:
        yield Violation(
            ("precision.learner_kv", "precision.kv_cache"),
            "the learner would round K and V that the rollout engine keeps in BF16. Set "
            "precision.kv_cache=fp8 or precision.learner_kv=bf16",
        )
    if fp8_kv and not dims.qk_norm and not precision.allow_fp8_kv_without_qk_norm:
        yield Violation(
            ("precision.kv_cache", "precision.allow_fp8_kv_without_qk_norm"),
            "the model does not normalise queries and keys (QK-norm), so single keys can be far larger "
            "than the rest, too far for one scale; Qwen2.5-Math-7B's accuracy fell to nothing. Set "
            "precision.kv_cache=bf16, or say precision.allow_fp8_kv_without_qk_norm=true and watch "
            "mismatch/token_mult_prob_error and kv/saturated_share",
        )
    if precision.first_layers_bf16 + precision.last_layers_bf16 > dims.layers:
        yield Violation(
            ("precision.first_layers_bf16", "precision.last_layers_bf16"),
            f"together more than the model's {dims.layers} layers",
        )
    try:
        for side, linear in (("rollout", precision.rollout), ("learner", precision.learner)):
            plan = make_plan(plan_rules(precision, linear), dims)
            if linear is Linear.FP8 and not any(d.format.is_fp8 for d in plan.values()):
                yield Violation(
                    (f"precision.{side}", "precision.include", "precision.exclude"),
                    "fp8 is asked for, and the rules leave no layer to it. Set it to bf16, or keep "
                    "fewer layers in BF16",
                )
    except PrecisionPlanError as error:
        yield Violation(("precision.include", "precision.exclude"), str(error))
    if precision.backend is Fp8Backend.TRANSFORMER_ENGINE and precision.learner is Linear.FP8:
        for key, why in transformer_engine.problems(precision):
            yield Violation((key, "precision.backend"), why)
    on_gpu = (Fp8Backend.TORCH, Fp8Backend.TRANSFORMER_ENGINE)
    if precision.backend in on_gpu and recipe.device is not Device.CUDA:
        yield Violation(
            ("precision.backend", "device"),
            f"{precision.backend} runs on a GPU; here the choice is reference, amx or auto",
        )


def _sizes(recipe: Recipe, dims: ModelDims) -> Iterator[Violation]:
    tiny = recipe.model.tiny
    if recipe.model.is_tiny and tiny.hidden_size % tiny.heads:
        yield Violation(
            ("model.tiny.hidden_size", "model.tiny.heads"),
            f"{tiny.hidden_size} does not divide among {tiny.heads} heads",
        )
    elif dims.head_dim % 32:
        yield Violation(
            ("model",),
            f"vLLM's attention needs a head size that is a multiple of 32; it is {dims.head_dim}",
        )
    if dims.heads % dims.kv_heads:
        yield Violation(
            ("model",), f"{dims.heads} attention heads do not divide among {dims.kv_heads} KV heads"
        )
    longest = recipe.rollout.max_prompt_tokens + recipe.rollout.max_new_tokens
    if longest > dims.max_positions:
        yield Violation(
            ("rollout.max_prompt_tokens", "rollout.max_new_tokens"),
            f"together {longest} tokens; the model has {dims.max_positions} positions",
        )
