"""The learner: the policy in Megatron-core, its optimiser, and what it publishes.

One process, one rank. It counts weight versions: `load` sets one, every `train` makes the next, and
each method that depends on the weights takes the version that its caller expects and refuses
another, so that a restarted or doubly called learner cannot pass unnoticed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from fp8rl import faults
from fp8rl.device import resolve
from fp8rl.journal import MODEL_FILE
from fp8rl.learner.batch import Batch, make_batch, split_evenly
from fp8rl.learner.checkpoint import (
    CheckpointWriter,
    capture,
    capture_rng,
    load,
    restore,
    restore_rng,
    weights_digest,
)
from fp8rl.learner.logprobs import token_logprobs
from fp8rl.learner.loss import Denominators
from fp8rl.learner.objective import PolicyObjective, Tally
from fp8rl.model.dims import read_dims
from fp8rl.model.kv_observer import KvObserver
from fp8rl.model.kv_scales import KvScales
from fp8rl.model.manifest import SCALE_FORMAT, SCALE_SUFFIX, Manifest, Spec
from fp8rl.model.megatron import PolicyModel, read_hf_weights
from fp8rl.model.precision import assert_effective, effective_rows, make_plan
from fp8rl.model.published import write_published
from fp8rl.recipe.rules import kv_percentile, learner_fp8, plan_rules, rollout_fp8
from fp8rl.recipe.schema import Linear, Recipe


class VersionError(RuntimeError):
    """A caller expected other weights than are held."""


@dataclass
class TrainResult:
    """version: of the new weights. metrics: by the name that tracking uses."""

    version: int
    metrics: dict[str, float] = field(default_factory=dict)


class Learner:
    """Trains the policy of `recipe` whose Hugging Face folder is `model_dir`.

    linear: format of the linears; the recipe's own where None (the warm start always asks for BF16).
    """

    def __init__(self, model_dir: Path, recipe: Recipe, *, linear: Linear | None = None) -> None:
        torch.set_num_threads(recipe.threads or torch.get_num_threads())
        torch.use_deterministic_algorithms(True)
        # Every tensor here is written before it is read; filling new memory first costs a tenth.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        self.recipe = recipe
        self.dims = read_dims(model_dir)
        precision = recipe.precision
        self.plan = make_plan(plan_rules(precision, linear or precision.learner), self.dims)
        self.rollout_plan = make_plan(plan_rules(precision, precision.rollout), self.dims)
        backends = resolve(recipe)
        self.model: PolicyModel = backends.load("policy_model")(
            self.dims,
            self.plan,
            fp8=learner_fp8(precision),
            fp8_backend=backends.fp8_backend,
        )
        self.version: int | None = None
        self.objective = PolicyObjective(recipe)
        self._writer = CheckpointWriter()
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        options = recipe.learner
        self.optimiser = torch.optim.AdamW(
            self._parameters,
            lr=options.lr,
            betas=options.betas,
            eps=options.eps,
            weight_decay=options.weight_decay,
            foreach=True,
        )

    def require_version(self, expected: int) -> None:
        """Raises VersionError unless the weights held are those of version `expected`."""
        if self.version != expected:
            held = "no weights" if self.version is None else f"version {self.version}"
            raise VersionError(f"the learner holds {held}; version {expected} was expected")

    def load(self, folder: Path, version: int) -> None:
        """Loads master weights from the safetensors in `folder` as weight `version`."""
        self.model.load(read_hf_weights(folder, self.dims))
        self.version = version

    def precision_table(self) -> list[dict[str, str]]:
        """Requested and effective format of every parameter.

        Effective is what a forward pass did run. Raises PrecisionPlanError where the two differ.
        """
        with torch.no_grad():
            self.model(torch.zeros(1, 2, dtype=torch.int64))
        return effective_rows(self.plan, self.model.effective_formats(), where="the learner")

    def _micro_batches(self, batch: Batch, size: int) -> list[Batch]:
        count = len(batch.lengths)
        return [batch.rows(slice(i, min(i + size, count))) for i in range(0, count, size)]

    def _logprobs(self, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
        return token_logprobs(
            self.model(batch.tokens),
            batch.tokens,
            temperature,
            entropy_gradient=self.objective.needs_entropy_gradient,
        )

    @torch.no_grad()
    def logprobs(
        self,
        batch: Batch,
        *,
        version: int,
        temperature: float | None = None,
        micro_batch: int | None = None,
    ) -> Tensor:
        """FP32 [B, S-1] log-probs of `batch` under weight `version`; 0 outside the response.

        temperature, micro_batch: the recipe's where None.
        """
        self.require_version(version)
        temperature = self.recipe.rollout.temperature if temperature is None else temperature
        result = torch.zeros_like(batch.g)
        start = 0
        for part in self._micro_batches(batch, micro_batch or self.recipe.learner.micro_batch):
            logp, _ = self._logprobs(part, temperature)
            rows = slice(start, start + len(part.lengths))
            result[rows, : logp.shape[1]] = torch.where(part.mask, logp, 0.0)
            start = rows.stop
        return result

    def score(self, sequences: list[list[int]], *, version: int) -> list[list[float]]:
        """Log-probs (nats, temperature 1) of every token but the first, as the engine's `score`."""
        batch = make_batch([s[:1] for s in sequences], [s[1:] for s in sequences])
        rows = self.logprobs(batch, version=version, temperature=1.0).tolist()
        return [row[: len(s) - 1] for row, s in zip(rows, sequences, strict=True)]

    def supervised_step(self, batch: Batch, lr: float) -> float:
        """One optimiser step on the cross-entropy of the response tokens; returns the loss.

        The recipe's lr, decay and betas are those of RL; the warm start passes its own lr.
        """
        self.optimiser.zero_grad(set_to_none=True)
        tokens = int(batch.mask.sum())
        logp, _ = self._logprobs(batch, 1.0)
        loss = -torch.where(batch.mask, logp, 0.0).sum() / tokens
        loss.backward()
        self._step(lr)
        self.version = None  # no published version has these weights
        return float(loss)

    def train(
        self,
        batch: Batch,
        advantages: Tensor,
        *,
        iteration: int,
        version: int,
        trained: Tensor | None = None,
        micro_batch: int | None = None,
    ) -> TrainResult:
        """Trains on one iteration's samples, which weight `version` drew; makes version + 1.

        advantages: FP32 [B]. trained: bool [B], false for samples to be left out; None: all.
        micro_batch: sequences at a time; the recipe's where None. Metrics compare rollout and learner
        before the first update. With one update the old log-probs are those of the training forward
        itself; with more, or where the objective needs the whole batch first, a pass of their own
        computes them. An update with nothing to train on is left out, and counted.
        """
        self.require_version(version)
        options, objective = self.recipe.learner, self.objective
        lr = options.lr * min(1.0, iteration / (options.warmup_iterations + 1))
        old = None
        if options.updates > 1 or objective.needs_old_logprobs:
            old = self.logprobs(batch, version=version, micro_batch=micro_batch)
        plan = objective.begin(batch, old, trained)
        self.version = None  # half-trained until the end
        p_parts, entropies, losses, norms = [], [], [], []
        tally = Tally()
        for rows in split_evenly(len(batch.lengths), options.updates):
            part = batch.rows(rows)
            denominators = Denominators.of(plan.mask[rows])
            tally.start(denominators)
            self.optimiser.zero_grad(set_to_none=True)
            total = 0.0
            start = rows.start
            for micro in self._micro_batches(part, micro_batch or options.micro_batch):
                span = slice(start, start + len(micro.lengths))
                start = span.stop
                c, entropy = self._logprobs(micro, self.recipe.rollout.temperature)
                columns = c.shape[1]
                p = c.detach() if old is None else old[span, :columns]
                out = objective.loss(
                    plan.part(span, columns), c, p, entropy, advantages[span], denominators
                )
                out.loss.backward()
                faults.point(f"learner:train:{iteration}:middle")
                total += float(out.loss.detach())
                tally.add(out)
                entropies.append(entropy.detach()[micro.mask])
                p_parts.append(torch.nn.functional.pad(p, (0, batch.g.shape[1] - columns)))
            norms.append(0.0 if denominators.empty else self._step(lr))
            losses.append(total)
        assert_effective(self.plan, self.model.effective_formats(), where="the learner")
        self.version = version + 1
        metrics = objective.metrics(batch, plan, torch.cat(p_parts)) | {
            "train/loss": sum(losses) / len(losses),
            "train/grad_norm": max(norms),
            "train/lr": lr,
            **tally.metrics(),
            "train/entropy": float(torch.cat(entropies).mean()),
        }
        return TrainResult(self.version, metrics)

    def _step(self, lr: float) -> float:
        norm = torch.nn.utils.clip_grad_norm_(
            self._parameters, self.recipe.learner.grad_clip, error_if_nonfinite=True
        )
        for group in self.optimiser.param_groups:
            group["lr"] = lr
        self.optimiser.step()
        return float(norm)

    def start_checkpoint(
        self, folder: Path, *, version: int, state: dict[str, Any], asynchronous: bool
    ) -> None:
        """Writes weight `version`, optimiser and random states into the checkpoint `folder`.

        From a copy, so that training can go on meanwhile where it is `asynchronous`. state: what else
        is kept with it, of which "run_id" and "recipe_digest" are also in the manifest.
        """
        self.require_version(version)
        self._writer.start(
            folder,
            tensors=capture(self.model, self.optimiser),
            state={"version": version, "rng": capture_rng(), **state},
            run_id=state["run_id"],
            version=version,
            weights_digest=self.weights_digest(),
            recipe_digest=state["recipe_digest"],
            asynchronous=asynchronous,
        )

    def finish_checkpoint(self, *, block: bool) -> int | None:
        """The version of the checkpoint that was begun last, once it is written.

        None where none was begun since the last call or, unless `block`, where it is being written.
        Raises what the writing raised.
        """
        if not block and self._writer.is_writing:
            return None
        done = self._writer.finish()
        return None if done is None else done.version

    def restore(self, checkpoint: Path) -> dict[str, Any]:
        """Takes up the state in a verified checkpoint; returns what it keeps besides tensors.

        Raises CheckpointError naming the tensor that does not fit.
        """
        tensors, state = load(checkpoint)
        restore(self.model, self.optimiser, tensors)
        restore_rng(state["rng"])
        self.version = state["version"]
        return state

    def published_specs(self) -> list[Spec]:
        """What the rollout engine is to hold, by Hugging Face name, in the order of the name table.

        FP8: float8_e4m3fn codes, and FP32 descales under `<name>_scale_inv`. The rest: BF16.
        """
        scheme = rollout_fp8(self.recipe.precision).weight
        specs = []
        for slot in self.model.table:
            fmt = self.rollout_plan[slot.hf[0]].format
            for name, rows in zip(slot.hf, slot.rows, strict=True):
                shape = (rows,) if slot.columns is None else (rows, slot.columns)
                if not fmt.is_fp8:
                    specs.append(Spec(name, shape, "bfloat16", fmt))
                    continue
                scale = name + SCALE_SUFFIX
                specs.append(Spec(name, shape, "float8_e4m3fn", fmt, scale))
                specs.append(Spec(scale, scheme.scale_shape(*shape), "float32", SCALE_FORMAT))
        return specs

    def published_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of `published_specs`, one after the other: all at once they would be a copy of
        the model."""
        scheme = rollout_fp8(self.recipe.precision).weight
        for slot in self.model.table:
            if self.rollout_plan[slot.hf[0]].format.is_fp8:
                for name, codes in self.model.quantised(slot, scheme).items():
                    yield name, codes.float8()
                    yield name + SCALE_SUFFIX, codes.scale_inv
            else:
                for name, master in self.model.export_slot(slot).items():
                    yield name, master.bfloat16()

    def publish(self, folder: Path, *, version: int) -> Manifest:
        """Requantises weight `version` and writes it into `folder` with its manifest."""
        self.require_version(version)
        return write_published(folder, version, self.published_specs(), self.published_tensors())

    def save(self, folder: Path) -> None:
        """Writes the FP32 master weights into `folder`, as Hugging Face does."""
        from safetensors.torch import save_file

        save_file(self.model.export(), folder / MODEL_FILE)

    def weights_digest(self) -> str:
        """Digest of the FP32 master weights, by Hugging Face name."""
        return weights_digest(self.model.export())

    @torch.no_grad()
    def calibrate_kv(
        self, batch: Batch, *, version: int, source: str, tokens_available: int | None = None
    ) -> KvScales:
        """KV scales of weight `version` over the prompt and response tokens of `batch`.

        source, tokens_available: which tokens those are, of how many (None: all); kept with the scales.
        Raises KvScalesError as `KvObserver.scales`.
        """
        self.require_version(version)
        precision = self.recipe.precision
        observer = KvObserver(self.dims.layers, kv_percentile(precision))
        self.model.set_observer(observer)
        try:
            for part in self._micro_batches(batch, self.recipe.learner.micro_batch):
                observer.start_batch(part.valid)
                self.model(part.tokens)
        finally:
            self.model.set_observer(None)
        observer.merge(data_parallel=parallel_state.get_data_parallel_group())
        return observer.scales(
            margin=precision.kv_margin,
            version=version,
            source=source,
            side="learner",
            tokens_available=observer.tokens if tokens_available is None else tokens_available,
        )
