"""The rollout engine: vLLM in this process, fed by published weights only.

vLLM is started with dummy weights. Everything it computes with comes through `load_weights` and
`apply_kv_scales`, each with a version; until both are in, it refuses to generate. Tokens go in and
tokens come out: text is the caller's business.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from fp8rl import faults
from fp8rl.device import resolve
from fp8rl.model.dims import read_dims
from fp8rl.model.kv_observer import KvObserver
from fp8rl.model.kv_scales import KvScales, LayerScales
from fp8rl.model.manifest import Manifest
from fp8rl.model.names import name_table
from fp8rl.model.precision import Decision, effective_rows, make_plan
from fp8rl.recipe.precision import Linear
from fp8rl.recipe.rules import kv_percentile, plan_rules
from fp8rl.recipe.schema import Recipe
from fp8rl.rollout import options
from fp8rl.rollout.pressure import Pressure, PressureGauge
from fp8rl.rollout.requests import Completion, Request
from fp8rl.sync.buckets import Bucket
from fp8rl.sync.errors import SyncError
from fp8rl.sync.receiver import Receiver
from fp8rl.sync.sender import Sender

# No dynamo: on a CPU it would spend 15 seconds compiling one helper of the sampler.
_ENVIRONMENT = options.ENVIRONMENT | {"TORCHDYNAMO_DISABLE": "1"}


@contextmanager
def _llvmlite_out_of_sight() -> Iterator[None]:
    """Hides one llvmlite module while vLLM starts.

    vLLM 0.32 looks at the attributes of everything in every loaded module. llvmlite's library object
    answers any attribute name with a foreign function, which that scan does not survive.
    """
    name = "llvmlite.binding.ffi"
    hidden = sys.modules.pop(name, None)
    try:
        yield
    finally:
        if hidden is not None:
            sys.modules[name] = hidden


class EngineStateError(RuntimeError):
    """The engine does not hold what its caller expects, or is not whole."""


class Engine:
    """vLLM for the Hugging Face folder `model_dir`, in the precision of `recipe`'s rollout."""

    environment = _ENVIRONMENT

    def __init__(self, model_dir: Path, recipe: Recipe, *, max_len: int) -> None:
        os.environ.update(self.environment)
        from fp8rl.rollout import vllm_plugin

        vllm_plugin.register()
        self.recipe = recipe
        self.dims = read_dims(model_dir)
        self.eos = _eos_tokens(model_dir)
        self.plan: dict[str, Decision] = make_plan(
            plan_rules(recipe.precision, recipe.precision.rollout), self.dims
        )
        self.fp8_kv = recipe.precision.kv_cache is Linear.FP8
        with _llvmlite_out_of_sight():
            self.llm = self._start(model_dir, max_len)
        self._gauge = PressureGauge(self.llm)
        self.weights = self.inside(self._weights_view)
        self.version: int | None = None
        self.kv_version: int | None = None
        self.linears_bf16 = False
        self._receiver: Receiver | None = None
        self._manifest = Manifest(-1, {})
        self._kv_writes = self._hook_kv_writes() if self.fp8_kv else None

    def _start(self, model_dir: Path, max_len: int) -> Any:
        from vllm import LLM

        return LLM(**self._options(model_dir, max_len))

    def _options(self, model_dir: Path, max_len: int) -> dict[str, Any]:
        from fp8rl.rollout.vllm_plugin import METHOD, quantization_config

        quantization = quantization_config(
            {slot.vllm: self.plan[slot.hf[0]].format for slot in name_table(self.dims)},
            self.recipe.precision,
            resolve(self.recipe).fp8_backend,
        )
        return options.engine_options(self.recipe, model_dir, max_len=max_len) | {
            "quantization": METHOD,
            "hf_overrides": {"quantization_config": quantization},
            "enforce_eager": True,
        }

    def inside(self, function: Any) -> Any:
        """Runs `function` on the live vLLM model and returns its result."""
        return self.llm.apply_model(function)[0]

    def _weights_view(self, model: Any) -> Any:
        from fp8rl.rollout.engine_weights import EngineWeights

        return EngineWeights(model, self.dims)

    def _hook_kv_writes(self) -> Any:
        from fp8rl.rollout.kv_writes import KvWrites

        return KvWrites(self.weights.attention())

    def take_kv_counts(self) -> dict[str, list[int]]:
        """What was written to the KV cache since the last call, by layer (`KvWrites.take`).

        Raises EngineStateError for a BF16 cache, which holds every element, and on CUDA.
        """
        if self._kv_writes is None:
            raise EngineStateError("this engine counts nothing: its KV cache is BF16, or on CUDA")
        counts: dict[str, list[int]] = self._kv_writes.take()
        return counts

    def begin_sync(self, manifest: Manifest, bucket_bytes: int, *, bf16: bool = False) -> list[Bucket]:
        """Makes ready for the buckets of a weight version, which it returns: from here on nothing is
        generated.

        bf16: the version is in BF16 whatever the plan says, and so are the linears from here on; they
        are in the plan's formats again with the next version without it. KV scales of another version
        no longer count. Raises PublishedWeightsError naming what does not fit, EngineStateError where
        sequences are being generated.
        """
        if self.llm.llm_engine.has_unfinished_requests():
            raise EngineStateError("weights came while sequences are being generated")
        self.version = self.kv_version = self._receiver = None
        if bf16 != self.linears_bf16:
            self._switch_linears(bf16)
        self._receiver = Receiver(self.weights.views(), manifest, bucket_bytes)
        self._manifest = manifest
        return self._receiver.buckets

    def receive(self, index: int, payload: Tensor) -> None:
        """Takes a bucket of the version begun. Raises SyncError; then begin again."""
        if self._receiver is None:
            raise SyncError(f"bucket {index} came, and no sync was begun")
        try:
            self._receiver.take(index, payload)
        except SyncError:
            self._receiver = None
            raise
        faults.point(f"engine:load:{self._manifest.version}:{index}")

    def finish_sync(self) -> str:
        """Checks that all is in, reads some of it back, and lets the engine generate with it again.

        Returns the manifest's digest. Raises SyncError naming what is missing, ReadBackError naming
        what the engine holds or computes otherwise; it stays dirty then.
        """
        if self._receiver is None:
            raise SyncError("no sync was begun, or it failed")
        receiver, self._receiver = self._receiver, None
        receiver.finish()
        self.weights.repack()
        self.prove(self.recipe.sync.read_back)
        self._drop_prefix_cache()
        self.version = self._manifest.version
        return self._manifest.digest

    def _switch_linears(self, bf16: bool) -> None:
        from fp8rl.rollout.vllm_plugin import switch_linears

        self.inside(lambda model: switch_linears(model, bf16=bf16))
        self.weights = self.inside(self._weights_view)
        linear = Linear.BF16 if bf16 else self.recipe.precision.rollout
        self.plan = make_plan(plan_rules(self.recipe.precision, linear), self.dims)
        self.linears_bf16 = bf16

    def load_weights(self, folder: Path, version: int, *, bf16: bool = False) -> str:
        """A sync of weight `version` from its published folder; returns the manifest's digest.

        bf16: see `begin_sync`. Raises PublishedWeightsError as `PublishedFile` and `begin_sync`,
        SyncError where its bytes are not the manifest's, and what `finish_sync` raises.
        """
        self.version = self.kv_version = None
        limit = self.recipe.sync.bucket_bytes
        sender = Sender(folder, version, limit)
        try:
            for bucket in self.begin_sync(sender.manifest, limit, bf16=bf16):
                self.receive(bucket.index, sender.payload(bucket.index))
        finally:
            sender.close()
        return self.finish_sync()

    def prove(self, count: int | None) -> None:
        """Reads `count` tensors (all where None) back from the live engine and compares the products of
        the linears among them; see `proof`. Raises ReadBackError.
        """
        from fp8rl.rollout import proof

        names = proof.sample_names(self._manifest, count)
        proof.read_back(self.weights, self._manifest, names)
        proof.check_products(self.weights, names, self._manifest.version)

    def apply_kv_scales(self, scales: KvScales) -> list[LayerScales]:
        """Sets the KV scales of the weights held and returns those read back from the engine."""
        self._require_fp8_kv()
        if self.version is None:
            raise EngineStateError("KV scales were sent before any weights")
        scales.require_usable(layers=self.dims.layers, version=self.version)
        self.kv_version = None
        faults.point(f"engine:scales:{scales.version}:middle")
        used: list[LayerScales] = self.weights.apply_kv_scales(scales)
        self._drop_prefix_cache()
        self.kv_version = scales.version
        return used

    def calibrate_kv(
        self,
        sequences: list[list[int]],
        *,
        version: int,
        source: str,
        tokens_available: int | None = None,
    ) -> KvScales:
        """KV scales of weight `version`, from q, k and v inside vLLM over `sequences` (tokens of prompt
        and response). They are not applied: the engine refuses to generate until some are.

        The last token of each sequence is left out: a rollout never computes its K and V. source,
        tokens_available: which tokens those are, of how many (None: all); kept with the scales.
        Raises EngineStateError for a BF16 cache and for other weights; KvScalesError as
        `KvObserver.scales`, and where a sequence does not fit into one forward pass.
        """
        from fp8rl.rollout.kv_observation import observe

        self._require_fp8_kv()
        if self.version != version:
            raise EngineStateError(f"the engine holds weights {self.version}, not version {version}")
        self.kv_version = None
        precision = self.recipe.precision
        observer = KvObserver(self.dims.layers, kv_percentile(precision))
        self._drop_prefix_cache()
        try:
            observe(self.llm, self.weights.attention(), [s[:-1] for s in sequences], observer)
        finally:
            self._drop_prefix_cache()  # its blocks were never written
        return observer.scales(
            margin=precision.kv_margin,
            version=version,
            source=source,
            side="engine",
            tokens_available=tokens_available,
        )

    def _require_fp8_kv(self) -> None:
        if not self.fp8_kv:
            raise EngineStateError("the KV cache of this engine is BF16: it takes no scales")

    def require_version(self, expected: int) -> None:
        """Raises EngineStateError unless weights and KV scales are those of version `expected`."""
        if self.version != expected:
            held = "no whole weights" if self.version is None else f"weight version {self.version}"
            raise EngineStateError(f"the engine holds {held}; version {expected} was expected")
        if self.fp8_kv and self.kv_version != expected:
            raise EngineStateError(
                f"the engine has no KV scales for weight version {expected} "
                f"(held: {self.kv_version}); recalibrate before generating"
            )

    def _drop_prefix_cache(self) -> None:
        if not self.llm.reset_prefix_cache():
            raise EngineStateError("vLLM did not drop its prefix cache: blocks are still in use")

    def generate(
        self,
        requests: list[Request],
        *,
        version: int,
        temperature: float | None = None,
        ignore_end: bool = False,
    ) -> list[Completion]:
        """Generates under weight `version`, in chunks of fixed size and order.

        Each chunk starts from a clean prefix cache, so that the same chunk gives the same tokens
        (vLLM on a CPU is not invariant to how requests are batched). temperature: the recipe's where
        None; 0 is greedy. ignore_end: every answer gets its full length (for timings).
        Raises EngineStateError as `require_version`, and where vLLM leaves out a log-prob.
        """
        self.require_version(version)
        rollout = self.recipe.rollout
        temperature = rollout.temperature if temperature is None else temperature
        completions: list[Completion] = []
        self._gauge.start()
        for start in range(0, len(requests), rollout.chunk_size):
            self._drop_prefix_cache()
            chunk = requests[start : start + rollout.chunk_size]
            completions += self._generate_chunk(chunk, temperature, ignore_end)
        return completions

    def score(self, sequences: list[list[int]], *, version: int) -> list[list[float]]:
        """Log-probs (nats, temperature 1) of every token but the first of each sequence.

        From a clean prefix cache, in one chunk after another. Raises EngineStateError as
        `require_version`, and where vLLM leaves out a log-prob.
        """
        from vllm import SamplingParams

        self.require_version(version)
        parameters = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        scores: list[list[float]] = []
        size = self.recipe.rollout.chunk_size
        for start in range(0, len(sequences), size):
            self._drop_prefix_cache()
            prompts = [{"prompt_token_ids": tokens} for tokens in sequences[start : start + size]]
            outputs = self.llm.generate(prompts, parameters, use_tqdm=False)
            scores += [_prompt_logprobs(output) for output in outputs]
        return scores

    @property
    def pressure(self) -> Pressure:
        """How full the KV cache was in the last call of `generate`."""
        return self._gauge.pressure

    def _generate_chunk(
        self, chunk: list[Request], temperature: float, ignore_end: bool
    ) -> list[Completion]:
        from vllm import SamplingParams

        rollout = self.recipe.rollout
        sampled = temperature > 0
        parameters = [
            SamplingParams(
                temperature=temperature,
                top_p=rollout.top_p if sampled else 1.0,
                top_k=rollout.top_k if sampled else -1,
                seed=request.seed if sampled else None,
                max_tokens=rollout.max_new_tokens,
                stop_token_ids=[] if ignore_end else self.eos,
                ignore_eos=ignore_end,
                logprobs=0 if sampled else None,
                detokenize=False,
            )
            for request in chunk
        ]
        prompts = [{"prompt_token_ids": request.prompt} for request in chunk]
        outputs = self.llm.generate(prompts, parameters, use_tqdm=False)
        return [_completion(output.outputs[0], sampled) for output in outputs]

    def precision_report(self) -> dict[str, Any]:
        """Requested and effective formats, the KV cache's types and the output projection's, after a
        forward pass.

        Raises PrecisionPlanError or EngineStateError where they differ.
        """
        rows = effective_rows(self.plan, self.weights.effective_formats(), where="the rollout engine")
        kv = self.weights.kv_cache_types()
        if kv["dtype"].startswith("fp8") != self.fp8_kv:
            raise EngineStateError(f"KV cache requested fp8={self.fp8_kv}, effective {kv}")
        head = self.weights.head_type()
        if head != self.recipe.precision.head:
            raise EngineStateError(
                f"output projection requested {self.recipe.precision.head}, ran {head}"
            )
        return {"kv_cache": kv, "head": head, "parameters": rows}


def _completion(output: Any, sampled: bool) -> Completion:
    tokens = list(output.token_ids)
    logprobs: list[float] = []
    if sampled:
        for token, entries in zip(tokens, output.logprobs, strict=True):
            if token not in entries:
                raise EngineStateError(f"vLLM gave no log-prob for the sampled token {token}")
            logprobs.append(entries[token].logprob)
    return Completion(tokens, logprobs, str(output.finish_reason))


def _prompt_logprobs(output: Any) -> list[float]:
    tokens, entries = output.prompt_token_ids[1:], output.prompt_logprobs[1:]
    if any(token not in found for token, found in zip(tokens, entries, strict=True)):
        raise EngineStateError("vLLM gave no log-prob for a token of a prompt")
    return [found[token].logprob for token, found in zip(tokens, entries, strict=True)]


def _eos_tokens(model_dir: Path) -> list[int]:
    import json

    for name in ("generation_config.json", "config.json"):
        path = model_dir / name
        if path.is_file():
            eos = json.loads(path.read_text()).get("eos_token_id")
            if eos is not None:
                return eos if isinstance(eos, list) else [eos]
    raise EngineStateError(f"{model_dir}: no eos_token_id in generation_config.json or config.json")
