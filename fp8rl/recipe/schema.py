"""The recipe: everything that a run needs, typed, frozen and free of torch.

Every field has a default, so that a recipe file is a minimal diff. Bounds that concern one field
stand here; rules that concern several stand in `rules.py`.
"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from fp8rl.files import values_digest
from fp8rl.numerics.formats import Scaling
from fp8rl.recipe.base import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    said,
)
from fp8rl.recipe.data import Source, TooLong, Val
from fp8rl.recipe.durability import Checkpoint, Retry, Stop
from fp8rl.recipe.guard import Guard
from fp8rl.recipe.objective import Correction, Objective
from fp8rl.recipe.reward import DEFAULT_REWARDS, AnyVerifier, RewardLimits
from fp8rl.recipe.tracking import Tracking

_NOT_NUMBERS = {
    *("name", "arm", "runs_dir", "tracking", "step_timeout_s"),
    *("checkpoint", "retry", "stop", "sync"),
}
# A run may be made longer or shorter: no number of an iteration depends on how many there are.
_LENGTH = {"iterations"}
# Raise it when a change of code changes what the same warm start trains.
WARM_START_CODE = 1

Beta = Annotated[float, Field(ge=0, lt=1)]


class Device(StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Linear(StrEnum):
    BF16 = "bf16"
    FP8 = "fp8"


class ElementFormat(StrEnum):
    E4M3 = "e4m3"
    HYBRID = "hybrid"  # E4M3 forward, E5M2 gradients


class ScaleKind(StrEnum):
    FP32 = "fp32"
    POW2 = "pow2"  # rounded down to powers of two, so that descales are rounded up


class Fp8Backend(StrEnum):
    AUTO = "auto"
    REFERENCE = "reference"
    AMX = "amx"
    TORCH = "torch"
    TRANSFORMER_ENGINE = "transformer_engine"


class KvStatistic(StrEnum):
    AMAX = "amax"
    PERCENTILE = "percentile"


class KvCalibration(StrEnum):
    LEARNER = "learner"
    ENGINE = "engine"


class Extract(StrEnum):
    WHOLE = "whole"
    LAST_NUMBER = "last_number"


class TinyModel(Section):
    """Dimensions of the tiny Llama model that the demo trains from nothing."""

    hidden_size: PositiveInt = 256
    intermediate_size: PositiveInt = 512
    layers: PositiveInt = 4
    heads: PositiveInt = 4
    kv_heads: PositiveInt = 2
    max_positions: PositiveInt = 256
    tied_embeddings: bool = True


class Model(Section):
    path: str | None = None
    """Folder of a Hugging Face model of the Llama, Qwen2 or Qwen3 family. Without path, hub and gguf:
    the tiny model, warm-started."""
    hub: str | None = None
    """Name of such a model on the Hugging Face hub, "owner/name" or "owner/name@revision". It is
    downloaded once into the hub's own cache; a run keeps to the commit that it began with."""
    gguf: str | None = None
    """GGUF file of a Llama model: its path, or package:<module>/<file> for one that an installed
    package ships. Converted to a Hugging Face folder in BF16, once, under the runs folder."""
    tiny: TinyModel = TinyModel()

    @property
    def is_tiny(self) -> bool:
        return not self.named

    @property
    def title(self) -> str:
        """What to call it: the name that the recipe gives it, without folders, or "tiny"."""
        given = self.hub or self.gguf or self.path
        return "tiny" if given is None else (self.hub or Path(given).name)

    @property
    def named(self) -> tuple[str, ...]:
        """The keys that name a model of one's own."""
        return tuple(key for key in ("path", "hub", "gguf") if getattr(self, key) is not None)


class WarmStart(Section):
    """Supervised phase that gives the tiny model something for RL to sharpen.

    Its corpus is of mixed quality, as pretraining data are: only `correct` of the answers are right.
    It always trains in BF16, so that all arms start from the same weights. Cached by content.
    """

    steps: NonNegativeInt = 220
    batch_size: PositiveInt = 128
    lr: PositiveFloat = 1e-3
    warmup_steps: NonNegativeInt = 20
    correct: Annotated[float, Field(ge=0, le=1)] = 0.4


class Task(Section):
    name: str | None = None
    """A reasoning-gym dataset by name, or a generator of ours behind the same interface. Empty without
    sources: reverse_digits."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the generator, as its config class names them."""
    sources: tuple[Source, ...] = ()
    """Instead of name and options: generators, files and hub data sets, mixed by weight."""
    val: Val = Val()
    chat: bool = False
    """Ask each question as a user's turn in the tokenizer's chat template. False: as it stands."""
    system: str | None = None
    """System turn before it. Empty: what the template puts there by itself."""
    extract: Extract = Extract.WHOLE
    """What of a completion is scored. last_number: "The answer is -1,234.5." counts as -1234.5, and a
    completion without a number as unparsable."""
    train_prompts: PositiveInt | None = 4096
    """null: all that the sources have."""
    val_prompts: PositiveInt | None = 128
    """null: all that task.val holds."""
    too_long: TooLong = TooLong.ERROR
    """Prompts longer than rollout.max_prompt_tokens."""

    rewards: Annotated[tuple[AnyVerifier, ...], Field(min_length=1)] = DEFAULT_REWARDS
    """What a completion is worth: the weighted sum of these verifiers' rewards. The first one says
    whether it is right. For example [{kind: numeric}, {kind: length, max_chars: 900, weight: 0.1}]."""
    reward_path: tuple[str, ...] = ()
    """Folders of the modules that rewards of kind function may name."""
    reward_limits: RewardLimits = RewardLimits()
    """For rewards that run in worker processes: math_verify, format, function, often task."""

    @model_validator(mode="before")
    @classmethod
    def _has_a_task(cls, values: Any) -> Any:
        if isinstance(values, dict) and not values.get("sources") and values.get("name") is None:
            return values | {"name": "reverse_digits"}
        return values


class Scales(Section):
    """Scales of one side. MXFP8 has UE8M0 scales whatever stands here."""

    weights: ScaleKind = ScaleKind.FP32
    activations: ScaleKind = ScaleKind.FP32
    """Activations; in the learner output gradients too."""


class Precision(Section):
    rollout: Linear = Linear.BF16
    """Linears of the rollout engine. fp8: W8A8."""
    learner: Linear = Linear.BF16
    """Linears of the learner. fp8: forward, dgrad and wgrad."""
    kv_cache: Linear = Linear.BF16
    """KV cache of the rollout engine. fp8: E4M3, one descale per layer, recalibrated each step."""
    kv_margin: Annotated[float, Field(ge=1, le=2)] = 1.05
    """KV descale = amax * margin / 448, or the percentile instead of the amax."""
    kv_calibration: KvCalibration = KvCalibration.LEARNER
    """Where q, k and v are looked at for the KV scales. engine: in vLLM itself, in its own precision,
    by a pass that computes attention in BF16."""
    kv_statistic: KvStatistic = KvStatistic.AMAX
    """What of their magnitudes: the greatest, or a percentile of all elements (more saturate)."""
    kv_percentile: Annotated[float, Field(gt=50, le=100)] = 99.99
    """With kv_statistic=percentile."""
    kv_tokens: PositiveInt | None = None
    """Tokens to look at for one calibration, in whole sequences, at least one of each prompt.
    Empty: all of the iteration."""
    allow_fp8_kv_without_qk_norm: bool = False
    """Say yes to an FP8 KV cache of a model that does not normalise queries and keys."""
    scaling: Scaling = Scaling.BLOCK
    """Which elements of an FP8 linear share a scale, on both sides. block: 128x128 weights, 1x128
    activations. tensor, channel (one a row), mxfp8 (1x32, UE8M0)."""
    learner_format: ElementFormat = ElementFormat.E4M3
    """hybrid: the learner's output gradients in E5M2, all else in E4M3."""
    rollout_scales: Scales = Scales()
    """Scales of the rollout engine, and so of the published weights."""
    learner_scales: Scales = Scales()
    """Scales of the learner's own products."""
    backend: Fp8Backend = Fp8Backend.AUTO
    """What computes the products of FP8 linears. reference: FP32 products of dequantised operands.
    amx: the same products exactly, on the CPU's matrix unit. auto: amx where the CPU has it and a C++
    compiler is there, else reference; what was taken is reported. torch (scaled_mm) and
    transformer_engine are for a GPU, which the learner does not run on yet."""
    first_layers_bf16: NonNegativeInt = 0
    last_layers_bf16: NonNegativeInt = 0
    include: tuple[str, ...] = ()
    """Linears in FP8: names, patterns with `*` and `?`, or `re:` and a regular expression, each for a
    whole name. Empty: all."""
    exclude: tuple[str, ...] = ()
    """Parameters kept in BF16, named as in include; exclude wins."""


class Rollout(Section):
    prompts: PositiveInt = 32
    """Prompts of one iteration; with dynamic sampling of one draw, and the groups it wants to keep."""
    max_draws: PositiveInt = 1
    """Batches of `prompts` prompts that one iteration may draw until it has `prompts` groups whose
    rewards differ (dynamic sampling, DAPO). 1: it trains on what it drew."""
    samples: PositiveInt = 8
    """Samples of each prompt: the group of GRPO."""
    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    """-1: off."""
    max_prompt_tokens: PositiveInt = 64
    """Longer prompts are refused when the data are prepared."""
    max_new_tokens: PositiveInt = 16
    chunk_size: PositiveInt = 256
    """Sequences generated at a time, in fixed order from a clean prefix cache."""
    kv_cache_mib: PositiveInt = 256

    @property
    def chunks(self) -> int:
        """Chunks of one batch of prompts."""
        return -(-self.prompts * self.samples // self.chunk_size)


class Sync(Section):
    """Weights from learner to rollout engine, and the proof that they arrived. Changes no number."""

    bucket_mib: PositiveInt = 32
    """Weights travel in buckets of this size."""

    @property
    def bucket_bytes(self) -> int:
        return self.bucket_mib * 2**20

    timeout_s: PositiveFloat = 600.0
    """A sync that takes longer fails, and is tried again."""
    read_back: NonNegativeInt | None = 16
    """Tensors that are read back from the live engine after each sync, others each time, and whose
    products are compared. null: all of them."""
    probe_every: NonNegativeInt = 1
    """Every so many weight versions the engine's log-probs of fixed prompts are compared with the
    learner's. 0: never."""
    probe_prompts: PositiveInt = 8
    """Validation prompts with their reference answers that the probe takes."""
    probe_limit: PositiveFloat | None = None
    """Largest mean |difference| of log-probs in nats; more stops the run. Empty: by the arm's
    precision."""


class Learner(Objective):
    lr: PositiveFloat = 1e-4
    warmup_iterations: NonNegativeInt = 3
    weight_decay: NonNegativeFloat = 0.0
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    grad_clip: PositiveFloat = 1.0
    updates: PositiveInt = 1
    """Optimiser steps on the samples of one iteration."""
    micro_batch: PositiveInt = 128
    """Sequences in one forward and backward pass. The loss does not depend on it; FP8 gradients do
    a little: wgrad scales groups of 128 tokens, and other micro-batches make other groups."""


class Evaluate(Section):
    every: PositiveInt = 10
    """Before training, after every so many iterations, and after the last."""
    greedy: bool = True
    """Answer each validation prompt greedily, once."""
    samples: NonNegativeInt = 4
    """Samples of each prompt, for accuracy (mean@k) and pass@k. 0: the greedy answer only."""
    temperature: PositiveFloat = 1.0
    """Of those samples."""
    bf16: bool = False
    """Answer in BF16 too, by a second engine with the same weights (the same one where the rollout is
    in BF16)."""


class Recipe(Section):
    name: str | None = None
    """Name of the run. Empty: made of date and recipe."""
    arm: str | None = None
    """Name of the precision arm in comparisons. Empty: the recipe file's name."""
    seed: NonNegativeInt = 0
    iterations: PositiveInt = 50
    device: Device = Device.AUTO
    threads: NonNegativeInt = 0
    """CPU threads of the engine and of the learner. 0: all cores."""
    runs_dir: str = "runs"
    step_timeout_s: PositiveFloat = 3600.0
    """A step that takes longer fails."""
    model: Model = Model()
    warm_start: WarmStart = WarmStart()
    task: Task = Task()
    precision: Precision = Precision()
    rollout: Rollout = Rollout()
    sync: Sync = Sync()
    learner: Learner = Learner()
    correction: Correction = Correction()
    guard: Guard = Guard()
    evaluate: Evaluate = Evaluate()
    checkpoint: Checkpoint = Checkpoint()
    retry: Retry = Retry()
    stop: Stop = Stop()
    tracking: Tracking = Tracking()

    def digest(self) -> str:
        """sha256 over what can change numbers: all but names, places and tracking."""
        return values_digest(said(self, _NOT_NUMBERS))

    def step_digest(self) -> str:
        """sha256 over what a step's numbers can depend on: as `digest`, without the run's length."""
        return values_digest(said(self, _NOT_NUMBERS | _LENGTH))

    def warm_start_digest(self) -> str:
        """Digest of all that decides the warm-started weights; the arm's precision is not among it."""
        parts = {"seed", "threads", "model", "warm_start", "task"}
        values = {key: value for key, value in said(self).items() if key in parts}
        rewards = ("rewards", "reward_path", "reward_limits")
        values["task"] = said(self.task, rewards)
        optimiser = ("weight_decay", "betas", "eps", "grad_clip")
        values["optimiser"] = {key: getattr(self.learner, key) for key in optimiser}
        values["code"] = WARM_START_CODE
        return values_digest(values)[:16]


def changes_numbers(key: str) -> bool:
    """Whether a run's numbers can depend on the dotted recipe `key`."""
    return key.partition(".")[0] not in _NOT_NUMBERS | _LENGTH
