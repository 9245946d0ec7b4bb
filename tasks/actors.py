"""The Ray actors: a learner and a rollout engine, each thin around its class in fp8rl.

They read step outputs from the run folder themselves, so the flow process never holds tensors and
never imports torch. Every import of an engine is inside a method for the same reason.
"""

import gc
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8rl.context import RunContext

if TYPE_CHECKING:
    from fp8rl.learner.learner import Learner
    from fp8rl.learner.warm_start import WarmStart
    from fp8rl.rollout.engine import Engine
    from fp8rl.sync.buckets import Bucket
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
        if checkpoint is None:
            learner.load(context.model_dir, 0)
        else:
            state = learner.restore(checkpoint)
            if state["run_id"] == context.journal.run_id:  # else a fork's, with a recipe of its own
                _require_same_run(context, checkpoint, state)
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

        weights: digest of the new master weights.
        """
        from fp8rl.learner.batch import make_batch
        from fp8rl.learner.signal import learning_signal
        from fp8rl.tables import from_parquet

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
        signal = learning_signal(rollouts, rewards, recipe)
        result = self.learner.train(
            batch,
            signal.advantages,
            iteration=iteration,
            version=version,
            trained=signal.trained,
            micro_batch=micro_batch,
        )
        return {
            "version": result.version,
            "weights": self.learner.weights_digest(),
            "metrics": signal.metrics | result.metrics,
            "tokens": int(batch.lengths.sum()),
        }

    def publish(self, folder: Path, version: int) -> dict[str, Any]:
        """Requantises weight `version` into `folder`; returns the manifest's digest and size."""
        manifest = self.learner.publish(folder, version=version)
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

    def score_probe(self, context: RunContext, version: int) -> list[list[float]]:
        """Log-probs of the probe's tokens; see `Learner.score`."""
        return self.learner.score(_probe_sequences(context), version=version)

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


def _probe_sequences(context: RunContext) -> list[list[int]]:
    """The tokens that learner and engine both score."""
    from fp8rl.data.prepare import read_prompts
    from fp8rl.sync.probe import probe_sequences

    return probe_sequences(read_prompts(context.data_dir, "val"), context.recipe)


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


class EngineActor:
    """Holds a rollout engine and the tokenizer that turns its tokens into text for the verifiers."""

    def __init__(self, context: RunContext) -> None:
        from transformers import AutoTokenizer

        from fp8rl.device import resolve

        rollout = context.recipe.rollout
        self.context = context
        self.engine: Engine = resolve(context.recipe).load("engine")(
            context.model_dir,
            context.recipe,
            max_len=rollout.max_prompt_tokens + rollout.max_new_tokens,
        )
        self._has_run = False
        self._transport: Any = None
        self._buckets: list[Bucket] = []
        self.tokenizer = AutoTokenizer.from_pretrained(context.model_dir, local_files_only=True)

    def status(self) -> dict[str, int | None]:
        """The weight and KV scale versions held."""
        return {"version": self.engine.version, "kv_version": self.engine.kv_version}

    def load_weights(self, folder: Path, version: int) -> dict[str, str]:
        """Loads a published version: its manifest's "digest", or the "fault" of what is there."""
        from fp8rl.model.manifest import PublishedWeightsError
        from fp8rl.sync.errors import SyncError

        try:
            return {"digest": self.engine.load_weights(folder, version)}
        except (PublishedWeightsError, SyncError) as error:
            return {"fault": str(error)}

    def begin_sync(self, manifest: str) -> int:
        """Makes ready for the buckets of the version that `manifest` (JSON) describes; how many."""
        from fp8rl.device import resolve
        from fp8rl.model.manifest import Manifest

        recipe = self.context.recipe
        self._transport = resolve(recipe).load("transport")()
        described = Manifest.from_json(manifest)
        self._buckets = self.engine.begin_sync(described, recipe.sync.bucket_bytes)
        return len(self._buckets)

    def receive(self, bucket: int, ticket: Any) -> None:
        """Takes a bucket by its transport's ticket."""
        size = self._buckets[bucket].size
        self.engine.receive(bucket, self._transport.receive(ticket, size))

    def finish_sync(self) -> str:
        """See `Engine.finish_sync`."""
        return self.engine.finish_sync()

    def score_probe(self, version: int) -> list[list[float]]:
        """Log-probs of the probe's tokens; see `Engine.score`."""
        return self.engine.score(_probe_sequences(self.context), version=version)

    def apply_kv_scales(self, scales: str) -> list[dict[str, float]]:
        """Applies KV scales (JSON); returns those read back."""
        from dataclasses import asdict

        from fp8rl.model.kv_scales import KvScales

        return [asdict(layer) for layer in self.engine.apply_kv_scales(KvScales.from_json(scales))]

    def calibrate_kv(self, iteration: int) -> str:
        """KV scales (JSON) of weight version `iteration`, over its `calibration_set`."""
        from fp8rl.data.calibration import calibration_set

        chosen = calibration_set(self.context, iteration)
        return self.engine.calibrate_kv(
            [p + r for p, r in zip(chosen.prompts, chosen.responses, strict=True)],
            version=iteration,
            source=chosen.source,
            # Of each sequence the last token is left out, here too.
            tokens_available=chosen.all_tokens - chosen.all_sequences,
        ).to_json()

    def precision_report(self) -> dict[str, Any]:
        """What the engine really runs; empty before its first forward."""
        return self.engine.precision_report() if self._has_run else {}

    def rollout(
        self, iteration: int, version: int, batch: int, chunk: int
    ) -> tuple[bytes, float, dict[str, Any]]:
        """One chunk of the samples of a batch of prompts: (Parquet, seconds of generation, counts).

        batch: in the stream of prompts, see `batch_prompts`. chunk: counted over all that the iteration
        draws. counts: "pressure" on the KV cache, and with an FP8 one "kv" (see
        `Engine.take_kv_counts`).
        """
        import time

        from fp8rl import faults
        from fp8rl.data.prepare import batch_prompts
        from fp8rl.rollout.requests import requests_for
        from fp8rl.tables import to_parquet

        recipe = self.context.recipe
        prompts = batch_prompts(self.context.data_dir, recipe, batch)
        samples, size = recipe.rollout.samples, recipe.rollout.chunk_size
        start = chunk % recipe.rollout.chunks * size
        part = slice(start, start + size)
        # All samples of a prompt stand together, as in the requests.
        rows = [(prompt, n) for prompt in range(len(prompts["id"])) for n in range(samples)][part]
        requests = requests_for(
            prompts["prompt_tokens"], prompts["id"], samples, run_seed=recipe.seed, iteration=iteration
        )[part]
        if self.engine.fp8_kv:
            self.engine.take_kv_counts()  # of an evaluation, or of a chunk that failed
        started = time.perf_counter()
        done = self.engine.generate(requests, version=version)
        seconds = time.perf_counter() - started
        counted = {"pressure": self.engine.pressure.to_dict()}
        if self.engine.fp8_kv:
            counted["kv"] = self.engine.take_kv_counts()
        self._has_run = True
        faults.point(f"engine:rollout:{iteration}:{chunk}:generated")
        self.engine.precision_report()  # raises where a linear did not run the planned format
        table = {
            "prompt_id": [prompts["id"][prompt] for prompt, _ in rows],
            "sample": [sample for _, sample in rows],
            "seed": [request.seed for request in requests],
            "weight_version": [version] * len(done),
            "prompt_tokens": [request.prompt for request in requests],
            "tokens": [completion.tokens for completion in done],
            "logprobs": [completion.logprobs for completion in done],
            "finish_reason": [completion.finish for completion in done],
            "text": [self._text(completion.tokens) for completion in done],
            "entry": [prompts["entry"][prompt] for prompt, _ in rows],
        }
        return to_parquet(table), seconds, counted

    def evaluate(self, version: int) -> dict[str, list[Any]]:
        """Greedy and sampled answers to the validation prompts, as columns."""
        from fp8rl import faults
        from fp8rl.data.prepare import read_prompts
        from fp8rl.rollout.requests import requests_for

        val = read_prompts(self.context.data_dir, "val")
        recipe = self.context.recipe
        columns: dict[str, list[Any]] = {"prompt_id": [], "kind": [], "text": [], "entry": []}
        for kind, samples, temperature in (
            ("greedy", 1, 0.0),
            ("sampled", recipe.evaluate.samples, 1.0),
        ):
            requests = requests_for(
                val["prompt_tokens"], val["id"], samples, run_seed=recipe.seed, iteration=-version - 1
            )
            done = self.engine.generate(requests, version=version, temperature=temperature)
            self._has_run = True
            faults.point(f"engine:evaluate:{version}:{kind}")
            columns["prompt_id"] += [i for i in val["id"] for _ in range(samples)]
            columns["kind"] += [kind] * len(done)
            columns["text"] += [self._text(completion.tokens) for completion in done]
            columns["entry"] += [entry for entry in val["entry"] for _ in range(samples)]
        return columns

    def _text(self, tokens: list[int]) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text
