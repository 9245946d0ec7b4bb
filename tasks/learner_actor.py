"""The learner as a Ray actor, thin around `fp8rl.learner`.

It reads step outputs from the run folder itself, so the flow process never holds tensors and never
imports torch. Every import of an engine is inside a method for the same reason.
"""

import gc
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8rl.context import RunContext
from fp8rl.recipe.precision import Linear
from tasks.inputs import kv_scales_of, probe_sequences_of

if TYPE_CHECKING:
    from fp8rl.learner.learner import Learner
    from fp8rl.learner.warm_start import WarmStart
    from fp8rl.sync.sender import Sender


class LearnerActor:
    """Holds a learner; before that, for the tiny model, its warm start."""

    def __init__(self) -> None:
        self._learner: Learner | None = None
        self._warm_start: WarmStart | None = None
        self._sender: Sender | None = None
        self._transport: Any = None

    def start_warm_start(self, context: RunContext) -> None:
        from fp8rl.data.prepare import read_prompts
        from fp8rl.learner.warm_start import WarmStart

        held_out = set(read_prompts(context.data_dir, "val")["question"])
        self._warm_start = WarmStart(context.recipe, context.model_dir, exclude=held_out)

    def advance_warm_start(self, steps: int) -> dict[str, Any]:
        assert self._warm_start is not None
        return self._warm_start.advance(steps)

    def finish_warm_start(self, folder: Path) -> None:
        """Writes the weights into `folder`."""
        assert self._warm_start is not None
        self._warm_start.learner.save(folder)
        self._warm_start = None

    def status(self) -> dict[str, int | None]:
        """The weight version held; None before any, and in the middle of a training step."""
        return {"version": None if self._learner is None else self._learner.version}

    def restore(self, context: RunContext, checkpoint: Path | None) -> dict[str, Any]:
        """Takes up the state in a checkpoint's folder, or the run's initial weights as version 0 with a
        fresh optimiser; returns {"version", "weights": their digest}.

        A checkpoint that is being written is finished first. Raises what its writing raised.
        """
        from fp8rl.learner.learner import Learner

        if self._learner is not None:
            self._learner.finish_checkpoint(block=True)
            # Memory may be what ran out: two learners at once would need twice as much.
            self._learner = None
            gc.collect()
        learner = Learner(context.model_dir, context.recipe)
        state: dict[str, Any] = {}
        if checkpoint is None:
            learner.load(context.model_dir, 0)
        else:
            state = learner.restore(checkpoint)
            if state["run_id"] == context.journal.run_id:  # else a fork's, with a recipe of its own
                _require_same_run(context, checkpoint, state)
        learner.load_reference(context.model_dir, state.get("reference"))
        self._learner = learner
        return {"version": learner.version, "weights": learner.weights_digest()}

    def precision_table(self) -> list[dict[str, str]]:
        """Requested and effective precision of every parameter, after a forward pass."""
        return self.learner.precision_table()

    @property
    def learner(self) -> "Learner":
        if self._learner is None:
            raise RuntimeError("the learner actor was given no weights")
        return self._learner

    def train(self, context: RunContext, iteration: int, micro_batch: int) -> dict[str, Any]:
        """Trains on the committed rollouts and rewards of `iteration`; see `Learner.train`.

        weights: digest of the new master weights. guard: see `UpdateGuard.to_dict`. worst: Parquet, see
        `worst_samples`.
        """
        from fp8rl.guard import history
        from fp8rl.learner.batch import make_batch
        from fp8rl.learner.signal import learning_signal
        from fp8rl.learner.worst import worst_samples
        from fp8rl.tables import from_parquet, to_parquet

        journal, recipe = context.journal, self.learner.recipe
        rollouts = from_parquet(journal.read_file(iteration, "rollout", "rollouts.parquet"))
        rewards = from_parquet(journal.read_file(iteration, "reward", "rewards.parquet"))
        version = iteration - 1
        _require_match(rollouts, rewards, version)
        batch = make_batch(
            rollouts["prompt_tokens"],
            rollouts["tokens"],
            rollouts["logprobs"],
            recipe.correction.invalid,
        )
        if recipe.precision.learner_kv is Linear.FP8:
            self.use_kv_scales(version, kv_scales_of(context, version))
        prior = self.learner.prior_logprobs(batch, version=version, micro_batch=micro_batch)
        kl_reward = self.learner.objective.kl_reward(batch, prior)
        signal = learning_signal(rollouts, rewards, recipe, kl_reward)
        result = self.learner.train(
            batch,
            signal.advantages,
            iteration=iteration,
            version=version,
            trained=signal.trained,
            micro_batch=micro_batch,
            history=history(journal, recipe.guard, iteration, context.origin),
            prior=prior,
        )
        return {
            "version": result.version,
            "weights": self.learner.weights_digest(),
            "metrics": signal.metrics | result.metrics | {"mismatch/weight_version": float(version)},
            "tokens": int(batch.lengths.sum()),
            "guard": result.guard,
            "worst": to_parquet(worst_samples(rollouts, rewards, batch, result.logprobs)),
        }

    def publish(self, folder: Path, version: int, bf16: bool) -> dict[str, Any]:
        """Requantises weight `version` into `folder`; returns the manifest's digest and size.

        bf16: see `Learner.publish`.
        """
        manifest = self.learner.publish(folder, version=version, bf16=bf16)
        return {"digest": manifest.digest, "bytes": manifest.size}

    def begin_send(self, folder: Path, version: int) -> str:
        """Makes ready to send the published `version`; its manifest (JSON).

        Raises SyncError where what was published is damaged by now: publishing again can help.
        """
        from fp8rl.device import resolve
        from fp8rl.model.manifest import PublishedWeightsError
        from fp8rl.sync.errors import SyncError
        from fp8rl.sync.sender import Sender

        if self._sender is not None:
            self._sender.close()
            self._sender = None
        recipe = self.learner.recipe
        self._transport = resolve(recipe).load("transport")()
        if self._transport.meets:
            raise NotImplementedError("a transport where both sides must meet is not wired up yet")
        try:
            self._sender = Sender(folder, version, recipe.sync.bucket_bytes)
        except PublishedWeightsError as error:
            raise SyncError(str(error)) from error
        return self._sender.manifest.to_json()

    def send(self, version: int, bucket: int) -> Any:
        """The transport's ticket of a bucket."""
        from fp8rl import faults
        from fp8rl.sync.errors import SyncError

        if self._sender is None or self._sender.manifest.version != version:
            raise SyncError(f"the learner did not begin to send weight version {version}")
        faults.point(f"learner:send:{version}:{bucket}")
        return self._transport.send(self._sender.payload(bucket))

    def use_kv_scales(self, version: int, scales: str | None) -> None:
        """scales: JSON; None where the KV cache of weight `version` is BF16. See
        `Learner.use_kv_scales`."""
        from fp8rl.model.kv_scales import KvScales

        self.learner.use_kv_scales(version, None if scales is None else KvScales.from_json(scales))

    def score_probe(self, context: RunContext, version: int) -> list[list[float]]:
        """Log-probs of the probe's tokens; see `Learner.score`."""
        return self.learner.score(probe_sequences_of(context), version=version)

    def calibrate_kv(self, context: RunContext, iteration: int) -> str:
        """KV scales (JSON) of weight version `iteration`, over its `calibration_set`."""
        from fp8rl import faults
        from fp8rl.data.calibration import calibration_set
        from fp8rl.learner.batch import make_batch

        faults.point(f"learner:calibrate:{iteration}:middle")
        chosen = calibration_set(context, iteration)
        return self.learner.calibrate_kv(
            make_batch(chosen.prompts, chosen.responses),
            version=iteration,
            source=chosen.source,
            tokens_available=chosen.all_tokens,
        ).to_json()

    def start_checkpoint(
        self, folder: Path, version: int, state: dict[str, Any], asynchronous: bool
    ) -> None:
        """Takes a copy of the learner at weight `version` and writes it into `folder`; see
        `Learner.start_checkpoint`."""
        self.learner.start_checkpoint(folder, version=version, state=state, asynchronous=asynchronous)

    def finish_checkpoint(self, block: bool) -> int | None:
        """The version of the checkpoint written last; None where none was begun, or, unless `block`,
        where it is still being written. Raises what the writing raised."""
        return self.learner.finish_checkpoint(block=block)


def _require_same_run(context: RunContext, checkpoint: Path, state: dict[str, Any]) -> None:
    """Raises CheckpointError unless the checkpoint is of this recipe and these prompts."""
    from fp8rl.checkpoints import CheckpointError

    prompts = context.journal.record(context.origin, "prepare_data").files
    found = {"recipe": state["recipe_digest"], "prompts": state["data"]["files"]}
    wanted = {"recipe": context.recipe.step_digest(), "prompts": prompts}
    other = [what for what, value in wanted.items() if found[what] != value]
    if other:
        raise CheckpointError(f"{checkpoint} was written under another {' and other '.join(other)}")


def _require_match(rollouts: dict[str, list[Any]], rewards: dict[str, list[Any]], version: int) -> None:
    """Raises ValueError unless every sample is of weight `version` and has its own reward."""
    stale = set(rollouts["weight_version"]) - {version}
    if stale:
        raise ValueError(f"samples of weight version {sorted(stale)} in a batch of version {version}")
    if any(rollouts[key] != rewards[key] for key in ("prompt_id", "sample")):
        raise ValueError("rewards are not those of the rollouts: prompt ids or samples differ")
