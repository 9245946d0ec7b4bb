"""The recipe: everything that a run needs, typed, frozen and free of torch.

Every field has a default, so that a recipe file is a minimal diff. Bounds that concern one field
stand here; rules that concern several stand in `rules.py`.
"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from fp8rl.files import values_digest
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
from fp8rl.recipe.precision import Precision
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


class Extract(StrEnum):
    WHOLE = "whole"
    LAST_NUMBER = "last_number"


class TinyModel(Section):
    """Dimensions of the tiny Llama model that the demo trains from nothing."""

    hidden_size: PositiveInt = 256
    """Width of the model; a multiple of heads."""
    intermediate_size: PositiveInt = 512
    """Width of the MLPs."""
    layers: PositiveInt = 4
    """Transformer layers."""
    heads: PositiveInt = 4
    """Attention heads of the queries."""
    kv_heads: PositiveInt = 2
    """Heads of keys and values (grouped-query attention)."""
    max_positions: PositiveInt = 256
    """Longest sequence, in tokens."""
    tied_embeddings: bool = True
    """The output layer has the weights of the token embeddings."""


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
    """Dimensions of the tiny model, where no other is named."""

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
    """Optimiser steps. 0: none, the weights are random."""
    batch_size: PositiveInt = 128
    """Sequences of one step."""
    lr: PositiveFloat = 1e-3
    """Learning rate at the end of the warm-up."""
    warmup_steps: NonNegativeInt = 20
    """Steps over which the learning rate rises."""
    correct: Annotated[float, Field(ge=0, le=1)] = 0.4
    """Share of the answers in its corpus that are right."""


class Task(Section):
    name: str | None = None
    """A reasoning-gym dataset by name, or a generator of ours behind the same interface. Empty without
    sources: reverse_digits."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the generator, as its config class names them."""
    sources: tuple[Source, ...] = ()
    """Instead of name and options: generators, files and hub data sets, mixed by weight."""
    val: Val = Val()
    """Where validation prompts come from. Empty: the same sources."""
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


class Rollout(Section):
    prompts: PositiveInt = 32
    """Prompts of one iteration; with dynamic sampling of one draw, and the groups it wants to keep."""
    max_draws: PositiveInt = 1
    """Batches of `prompts` prompts that one iteration may draw until it has `prompts` groups whose
    rewards differ (dynamic sampling, DAPO). 1: it trains on what it drew."""
    samples: PositiveInt = 8
    """Samples of each prompt: the group of GRPO."""
    temperature: PositiveFloat = 1.0
    """Of the sampling."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: the least set of tokens with this probability. 1: off."""
    top_k: Annotated[int, Field(ge=-1)] = -1
    """-1: off."""
    max_prompt_tokens: PositiveInt = 64
    """Longer prompts are refused when the data are prepared."""
    max_new_tokens: PositiveInt = 16
    """Longer completions are cut off."""
    chunk_size: PositiveInt = 256
    """Sequences generated at a time, in fixed order from a clean prefix cache."""
    kv_cache_mib: PositiveInt = 256
    """Memory of the KV cache, in MiB."""

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
    """Learning rate of AdamW at the end of the warm-up."""
    warmup_iterations: NonNegativeInt = 3
    """Iterations over which the learning rate rises."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay (AdamW)."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay rates of the two moments."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    grad_clip: PositiveFloat = 1.0
    """Norm that gradients are clipped to."""
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
    """Of data, sampling and warm start."""
    iterations: PositiveInt = 50
    """GRPO iterations: rollout, reward, train, requantize, recalibrate_kv."""
    device: Device = Device.AUTO
    """auto: a GPU where there is one, else the CPU."""
    threads: NonNegativeInt = 0
    """CPU threads of the engine and of the learner. 0: all cores."""
    runs_dir: str = "runs"
    """Folder where the run's folder is made."""
    step_timeout_s: PositiveFloat = 3600.0
    """A step that takes longer fails."""
    model: Model = Model()
    """The model that is trained."""
    warm_start: WarmStart = WarmStart()
    """Supervised phase before, of the tiny model only."""
    task: Task = Task()
    """Prompts, and what a completion is worth."""
    precision: Precision = Precision()
    """What is in FP8, and how."""
    rollout: Rollout = Rollout()
    """How completions are sampled."""
    sync: Sync = Sync()
    """How weights get from the learner to the rollout engine."""
    learner: Learner = Learner()
    """Objective and optimiser."""
    correction: Correction = Correction()
    """What is done about rollout and learner not agreeing."""
    guard: Guard = Guard()
    """What is done where figures get out of hand."""
    evaluate: Evaluate = Evaluate()
    """How often the validation prompts are answered."""
    checkpoint: Checkpoint = Checkpoint()
    """When the learner is saved, and what is kept."""
    retry: Retry = Retry()
    """What is tried again."""
    stop: Stop = Stop()
    """Where to stop before the last iteration."""
    tracking: Tracking = Tracking()
    """Where metrics go."""

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
