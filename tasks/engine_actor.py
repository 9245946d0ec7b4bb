"""The rollout engine as a Ray actor, thin around `fp8rl.rollout`.

It reads step outputs from the run folder itself, so the flow process never holds tensors and never
imports torch. Every import of an engine is inside a method for the same reason.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8rl.context import RunContext
from tasks.inputs import probe_sequences_of

if TYPE_CHECKING:
    from fp8rl.rollout.engine import Engine
    from fp8rl.sync.buckets import Bucket


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

    def status(self) -> dict[str, Any]:
        """The weight and KV scale versions held, and whether the KV cache is FP8."""
        engine = self.engine
        return {
            "version": engine.version,
            "kv_version": engine.kv_version,
            "fp8_kv": engine.fp8_kv,
        }

    def load_weights(self, folder: Path, version: int, bf16: bool) -> dict[str, str]:
        """Loads a published version: its manifest's "digest", or the "fault" of what is there.

        bf16: see `Engine.begin_sync`.
        """
        from fp8rl.model.manifest import PublishedWeightsError
        from fp8rl.sync.errors import SyncError

        try:
            return {"digest": self.engine.load_weights(folder, version, bf16=bf16)}
        except (PublishedWeightsError, SyncError) as error:
            return {"fault": str(error)}

    def begin_sync(self, manifest: str, bf16: bool) -> int:
        """Makes ready for the buckets of the version that `manifest` (JSON) describes; how many.

        bf16: see `Engine.begin_sync`.
        """
        from fp8rl.device import resolve
        from fp8rl.model.manifest import Manifest

        recipe = self.context.recipe
        self._transport = resolve(recipe).load("transport")()
        described = Manifest.from_json(manifest)
        self._buckets = self.engine.begin_sync(described, recipe.sync.bucket_bytes, bf16=bf16)
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
        return self.engine.score(probe_sequences_of(self.context), version=version)

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
        asked = recipe.evaluate
        for kind, samples, temperature in (
            ("greedy", int(asked.greedy), 0.0),
            ("sampled", asked.samples, asked.temperature),
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
