"""The learner: the policy in Megatron-core, its optimiser, and what it publishes.

One process, one rank. It counts weight versions: `load` sets one, every `train` makes the next, and
each method that depends on the weights takes the version that its caller expects and refuses
another, so that a restarted or doubly called learner cannot pass unnoticed.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8rl import faults
from fp8rl.journal import MODEL_FILE
from fp8rl.learner.batch import Batch, make_batch, split_evenly
from fp8rl.learner.building import builder
from fp8rl.learner.checkpoint import (
    CheckpointWriter,
    capture,
    capture_rng,
    load,
    restore,
    restore_rng,
    weights_digest,
)
from fp8rl.learner.kl import PriorLogprobs, ReferenceMissingError
from fp8rl.learner.kv_calibration import calibrate
from fp8rl.learner.logprobs import batch_logprobs, token_logprobs
from fp8rl.learner.loss import Denominators
from fp8rl.learner.objective import PolicyObjective, Tally
from fp8rl.learner.publishing import published_specs, published_tensors
from fp8rl.learner.reference import ReferencePolicy
from fp8rl.learner.update_guard import UpdateGuard
from fp8rl.model.dims import read_dims
from fp8rl.model.kv_scales import KvScales
from fp8rl.model.manifest import Manifest
from fp8rl.model.megatron import PolicyModel, read_hf_weights
from fp8rl.model.precision import Decision, assert_effective, effective_rows, make_plan
from fp8rl.model.published import write_published
from fp8rl.recipe.precision import Linear
from fp8rl.recipe.rules import plan_rules, rollout_fp8
from fp8rl.recipe.schema import Recipe


class VersionError(RuntimeError):
    """A caller expected other weights than are held."""


@dataclass
class TrainResult:
    """version: of the new weights. metrics: by the name that tracking uses. guard: what it decided.
    logprobs: p [B, T], the learner's before the first update."""

    version: int
    metrics: dict[str, float]
    guard: dict[str, Any]
    logprobs: Tensor


class Learner:
    """Trains the policy of `recipe` whose Hugging Face folder is `model_dir`.

    linear: format of the linears, and then nothing is as an engine has it; None: the recipe's own. The
    warm start always asks for BF16.
    Where `learner.kl` is on, training needs `load_reference` besides.
    """

    reference: ReferencePolicy | None = None
    kv_version: int | None = None
    """Of which weights `use_kv_scales` was given scales last."""
    _rounds_kv = False

    def __init__(self, model_dir: Path, recipe: Recipe, *, linear: Linear | None = None) -> None:
        torch.set_num_threads(recipe.threads or torch.get_num_threads())
        torch.use_deterministic_algorithms(True)
        # Every tensor here is written before it is read; filling new memory first costs a tenth.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        self.recipe = recipe
        self.dims = read_dims(model_dir)
        precision = recipe.precision
        self.plan = make_plan(plan_rules(precision, linear or precision.learner), self.dims)
        self._published_scheme = rollout_fp8(precision).weight
        self._build = builder(recipe, self.dims, self.plan, as_engine=linear is None)
        self.model: PolicyModel = self._build()
        self.version: int | None = None
        self._rounds_kv = precision.learner_kv is Linear.FP8 and linear is None
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

    def use_kv_scales(self, version: int, scales: KvScales | None) -> None:
        """Has attention see K and V as the engine's cache of weight `version` holds them; scales: None
        for a BF16 cache. Does nothing unless the recipe's `precision.learner_kv` is FP8; then
        log-probs and training need it for each version. Raises KvScalesError where they do not fit.
        """
        if not self._rounds_kv:
            return
        if scales is not None:
            scales.require_usable(layers=self.dims.layers, version=version)
        self.model.set_kv_scales(scales)
        if self.reference is not None:  # so that what they differ by is not the cache
            self.reference.model.set_kv_scales(scales)
        self.kv_version = version

    def _require_kv(self, version: int) -> None:
        if self._rounds_kv and self.kv_version != version:
            raise VersionError(
                f"precision.learner_kv=fp8: the learner has KV scales of version {self.kv_version}, "
                f"those of version {version} are needed (`use_kv_scales`)"
            )

    def load(self, folder: Path, version: int) -> None:
        """Loads master weights from the safetensors in `folder` as weight `version`."""
        self.model.load(read_hf_weights(folder, self.dims))
        self.version = version

    def load_reference(self, folder: Path, digest: str | None = None) -> None:
        """Loads the reference policy of `learner.kl`, frozen, from the run's initial weights in
        `folder`; does nothing where it is off.

        digest: of the reference that a checkpoint was trained against (its state's "reference"); None
        where there is none. Raises ReferenceMismatchError where it is another.
        """
        if self.objective.needs_reference:
            self.reference = None  # never two of them in memory
            self.reference = ReferencePolicy.load(self._build, folder, self.plan, digest)

    def precision_table(self) -> list[dict[str, str]]:
        """Requested and effective format of every parameter.

        Effective is what a forward pass did run. Raises PrecisionPlanError where the two differ.
        """
        with torch.no_grad():
            self.model(torch.zeros(1, 2, dtype=torch.int64))
        return effective_rows(self.plan, self.model.effective_formats(), where="the learner")

    def _logprobs(self, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
        return token_logprobs(
            self.model(batch.tokens),
            batch.tokens,
            temperature,
            entropy_gradient=self.objective.needs_entropy_gradient,
        )

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
        self._require_kv(version)
        temperature = self.recipe.rollout.temperature if temperature is None else temperature
        size = micro_batch or self.recipe.learner.micro_batch
        return batch_logprobs(self.model, batch, temperature, size)

    def prior_logprobs(
        self, batch: Batch, *, version: int, micro_batch: int | None = None
    ) -> PriorLogprobs:
        """What `train` needs of `batch` before its first update; version, micro_batch as there.

        Raises ReferenceMissingError where `learner.kl` is on and `load_reference` was not called.
        """
        self.require_version(version)
        self._require_kv(version)
        old = reference = None
        if self.recipe.learner.updates > 1 or self.objective.needs_old_logprobs:
            old = self.logprobs(batch, version=version, micro_batch=micro_batch)
        if self.objective.needs_reference:
            if self.reference is None:
                raise ReferenceMissingError(self.recipe.learner.kl.use)
            size = micro_batch or self.recipe.learner.micro_batch
            reference = self.reference.logprobs(batch, self.recipe.rollout.temperature, size)
        return PriorLogprobs(old, reference)

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
        self._step(lr, self._clip())
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
        prior: PriorLogprobs | None = None,
        history: Sequence[Sequence[str]] = (),
    ) -> TrainResult:
        """Trains on one iteration's samples, which weight `version` drew; makes version + 1.

        advantages: FP32 [B]. trained: bool [B], false for samples to be left out; None: all.
        micro_batch: sequences at a time; the recipe's where None. prior: `prior_logprobs` of the batch
        where they were taken already, as learner.kl.use=reward asks for (else ValueError). history: see
        `guard.judge`. Metrics compare rollout and learner before the first update. With one update the
        old log-probs are those of the training forward itself; with more, or where the objective needs
        the whole batch first, a pass of their own computes them. An update with nothing to train on is
        left out, and counted; so are all from the first that the recipe's guard does not allow. The
        version counts up whether or not a step was made. Raises FloatingPointError where the gradient's
        norm is not finite and no rule of the guard skips the update.
        """
        self.require_version(version)
        self._require_kv(version)
        options, objective = self.recipe.learner, self.objective
        lr = options.lr * min(1.0, iteration / (options.warmup_iterations + 1))
        if prior is None:
            objective.require_rewards_without_kl()
            prior = self.prior_logprobs(batch, version=version, micro_batch=micro_batch)
        old = prior.old
        guard = UpdateGuard(self.recipe.guard, history)
        plan = objective.begin(batch, old, trained, prior.reference)
        plan = guard.mask(objective, batch, plan, old)
        panel: dict[str, float] = {}
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
            for micro in part.split(micro_batch or options.micro_batch):
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
            norms.append(0.0 if denominators.empty else self._clip())
            losses.append(total)
            # With several updates p is known before the first; with one, it is whole by now.
            panel = panel or objective.metrics(batch, plan, torch.cat(p_parts) if old is None else old)
            panel["train/entropy"] = float(torch.cat(entropies).mean())
            if not guard.allows(panel | {"train/grad_norm": norms[-1]}):
                break
            if not denominators.empty:
                self._step(lr, norms[-1])
        self.optimiser.zero_grad(set_to_none=True)
        assert_effective(self.plan, self.model.effective_formats(), where="the learner")
        self.version = version + 1
        metrics = panel | {
            "train/loss": sum(losses) / len(losses),
            "train/grad_norm": max(norms),
            "train/lr": lr,
            **tally.metrics(),
            **guard.metrics(),
        }
        p = torch.cat(p_parts) if old is None else old
        return TrainResult(self.version, metrics, guard.to_dict(), p)

    def _clip(self) -> float:
        """Clips the gradients; their norm before that."""
        return float(torch.nn.utils.clip_grad_norm_(self._parameters, self.recipe.learner.grad_clip))

    def _step(self, lr: float, norm: float) -> None:
        """One step of the optimiser on the clipped gradients, whose norm was `norm`."""
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"the gradient's norm is {norm}: no step can be made of it. Look at mismatch/* and at "
                "the rewards; a rule of guard.rules with the action skip_update leaves such a batch out"
            )
        for group in self.optimiser.param_groups:
            group["lr"] = lr
        self.optimiser.step()

    def start_checkpoint(
        self, folder: Path, *, version: int, state: dict[str, Any], asynchronous: bool
    ) -> None:
        """Writes weight `version`, optimiser and random states into the checkpoint `folder`.

        From a copy, so that training can go on meanwhile where it is `asynchronous`. state: what else
        is kept with it, of which "run_id" and "recipe_digest" are also in the manifest. Of the
        reference policy, whose weights are the run's initial ones, its digest is kept.
        """
        self.require_version(version)
        reference = {} if self.reference is None else {"reference": self.reference.digest}
        self._writer.start(
            folder,
            tensors=capture(self.model, self.optimiser),
            state={"version": version, "rng": capture_rng(), **reference, **state},
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

    def published_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What `publish` writes, by Hugging Face name; see `publishing.published_tensors`."""
        plan = self._published_plan(bf16=False)
        return published_tensors(self.model, plan, self._published_scheme, self.version)

    def _published_plan(self, bf16: bool) -> Mapping[str, Decision]:
        precision = self.recipe.precision
        linear = Linear.BF16 if bf16 else precision.rollout
        return make_plan(plan_rules(precision, linear), self.dims)

    def publish(self, folder: Path, *, version: int, bf16: bool = False) -> Manifest:
        """Requantises weight `version` and writes it into `folder` with its manifest.

        bf16: all of it in BF16, for rollouts that the guard has taken out of FP8.
        """
        self.require_version(version)
        plan, scheme = self._published_plan(bf16), self._published_scheme
        specs = published_specs(self.model, plan, scheme)
        tensors = published_tensors(self.model, plan, scheme, version)
        return write_published(folder, version, specs, tensors)

    def save(self, folder: Path) -> None:
        """Writes the FP32 master weights into `folder`, as Hugging Face does."""
        from safetensors.torch import save_file

        save_file(self.model.export(), folder / MODEL_FILE)

    def weights_digest(self) -> str:
        """Digest of the FP32 master weights, by Hugging Face name."""
        return weights_digest(self.model.export())

    def calibrate_kv(
        self, batch: Batch, *, version: int, source: str, tokens_available: int | None = None
    ) -> KvScales:
        """KV scales of weight `version`, not yet in use; see `kv_calibration.calibrate`."""
        self.require_version(version)
        self.kv_version = None
        return calibrate(self.model, self.recipe, batch, version, source, tokens_available)
