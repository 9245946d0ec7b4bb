"""The reference policy of `learner.kl`: the policy that the run starts from, frozen.

It is a function of the run's files (the model's folder, in which a fork has its first parent's initial
weights), so no checkpoint holds it, and a resumed run has the same one. It has the learner's own
precision plan: as long as the learner has the initial weights their log-probs are the same bit for bit,
and the KL is exactly 0.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from fp8rl.checkpoints import CheckpointError
from fp8rl.learner.batch import Batch
from fp8rl.learner.checkpoint import weights_digest
from fp8rl.learner.logprobs import batch_logprobs
from fp8rl.model.megatron import PolicyModel, read_hf_weights
from fp8rl.model.precision import Decision, assert_effective


class ReferenceMismatchError(CheckpointError):
    """The folder of the initial weights holds others than those that the KL was measured from."""


class ReferencePolicy:
    """A model without gradient or optimiser state.

    model: makes logits [b, s, V] of tokens [b, s], in the formats of `plan`. digest: hexadecimal
    sha256 of the weights as they are in the files.
    """

    def __init__(self, model: PolicyModel, plan: Mapping[str, Decision], digest: str) -> None:
        self.model = model.requires_grad_(False)
        self.plan = plan
        self.digest = digest

    @classmethod
    def load(
        cls,
        build: Callable[[], PolicyModel],
        folder: Path,
        plan: Mapping[str, Decision],
        digest: str | None = None,
    ) -> "ReferencePolicy":
        """The model that `build` makes, with the safetensors in `folder`; torch's random state is left
        as it was.

        digest: what it has to be; None: any. Raises ReferenceMismatchError, and WeightsError as
        `read_hf_weights` and `PolicyModel.load` do.
        """
        with torch.random.fork_rng(devices=[]):
            model = build()
        weights = read_hf_weights(folder, model.dims)
        found = weights_digest(weights)
        if digest is not None and found != digest:
            raise ReferenceMismatchError(
                f"{folder} holds weights {found[:12]}, and learner.kl of this run was measured from "
                f"{digest[:12]}. Put the run's initial weights back, or start a new run"
            )
        model.load(weights)
        return cls(model, plan, found)

    def logprobs(self, batch: Batch, temperature: float, micro_batch: int) -> Tensor:
        """FP32 [B, S-1], 0 outside the response; see `batch_logprobs`.

        Raises PrecisionPlanError where a linear did not run the planned format.
        """
        result = batch_logprobs(self.model, batch, temperature, micro_batch)
        assert_effective(self.plan, self.model.effective_formats(), where="the reference policy")
        return result
