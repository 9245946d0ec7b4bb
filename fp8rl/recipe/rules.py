"""The combination rules: one pure function, every violation at once, before any engine starts."""

from collections.abc import Iterator
from dataclasses import dataclass

from fp8rl.model.dims import ModelDims
from fp8rl.model.precision import Format, PlanRules, PrecisionPlanError, make_plan
from fp8rl.recipe.schema import CorrectionMode, Device, Linear, Precision, Recipe

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
        linear=Format.FP8_BLOCK if linear is Linear.FP8 else Format.BF16,
        first_layers_bf16=precision.first_layers_bf16,
        last_layers_bf16=precision.last_layers_bf16,
        keep_bf16=precision.keep_bf16,
    )


def check(recipe: Recipe, dims: ModelDims) -> list[Violation]:
    """All combinations in `recipe` that are refused for a model of `dims`; empty if it can run."""
    device = [Violation(("device",), CUDA_NOT_BUILT)] if recipe.device is Device.CUDA else []
    return [*device, *_sampling(recipe), *_precision(recipe, dims), *_sizes(recipe, dims)]


def require_valid(recipe: Recipe, dims: ModelDims) -> None:
    """Raises RecipeError listing every violation of `check`."""
    violations = check(recipe, dims)
    if violations:
        lines = "\n".join(f"  - {violation}" for violation in violations)
        raise RecipeError(f"the recipe cannot run:\n{lines}")


def _sampling(recipe: Recipe) -> Iterator[Violation]:
    rollout, precision = recipe.rollout, recipe.precision
    low_precision = Linear.FP8 in (precision.rollout, precision.kv_cache)
    corrected = recipe.correction.mode is not CorrectionMode.OFF
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
    if rollout.prompts > recipe.task.train_prompts:
        yield Violation(
            ("rollout.prompts", "task.train_prompts"),
            f"an iteration needs {rollout.prompts} different prompts; the task has "
            f"{recipe.task.train_prompts}",
        )


def _precision(recipe: Recipe, dims: ModelDims) -> Iterator[Violation]:
    precision = recipe.precision
    if precision.learner is Linear.FP8 and precision.rollout is not Linear.FP8:
        yield Violation(
            ("precision.learner", "precision.rollout"),
            "an FP8 learner publishes FP8 weights, which a BF16 rollout would not run. Set "
            "precision.rollout=fp8 or precision.learner=bf16",
        )
    if precision.first_layers_bf16 + precision.last_layers_bf16 > dims.layers:
        yield Violation(
            ("precision.first_layers_bf16", "precision.last_layers_bf16"),
            f"together more than the model's {dims.layers} layers",
        )
    try:
        make_plan(plan_rules(precision, precision.rollout), dims)
    except PrecisionPlanError as error:
        yield Violation(("precision.keep_bf16",), str(error))


def _sizes(recipe: Recipe, dims: ModelDims) -> Iterator[Violation]:
    tiny = recipe.model.tiny
    if recipe.model.path is None and tiny.hidden_size % tiny.heads:
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
    if recipe.model.path is not None and recipe.warm_start.steps:
        yield Violation(
            ("model.path", "warm_start.steps"),
            "the warm start builds the tiny model; with a model of your own set warm_start.steps=0",
        )
