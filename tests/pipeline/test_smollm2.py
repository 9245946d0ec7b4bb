"""A real run of SmolLM2-135M in FP8 on both sides, and its mismatch computed a second time."""

import asyncio
import re
from pathlib import Path

import pytest
import torch

from fp8rl.journal import Journal
from fp8rl.learner.batch import make_batch
from fp8rl.mismatch import mismatch_panel
from fp8rl.model.published import read_published
from fp8rl.model.source import model_folder
from fp8rl.recipe.load import load_recipe
from fp8rl.tables import from_parquet

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]

RECIPE = Path(__file__).parents[2] / "configs" / "smollm2" / "fp8-e2e-kv.yaml"
BLOCK = 128


@pytest.fixture(scope="module")
def finished(runs_dir):
    from flows.training import train

    overrides = ["iterations=2", f"runs_dir={runs_dir}", "name=smollm2", "task.val_prompts=8"]
    overrides += ["evaluate.bf16=false", "evaluate.samples=1"]
    # With parity there is no mismatch to compute a second time.
    overrides += ["precision.parity=false", "precision.learner_kv=bf16"]
    recipe = load_recipe(RECIPE, overrides).recipe
    return recipe, asyncio.run(train(recipe=recipe)), Journal(runs_dir / "smollm2")


def rounded(x: torch.Tensor) -> torch.Tensor:
    """1x128 groups to E4M3 and back by PyTorch's own cast: no code of fp8rl."""
    size = x.shape[-1]
    groups = torch.nn.functional.pad(x.float(), (0, -size % BLOCK)).unflatten(-1, (-1, BLOCK))
    amax = groups.abs().amax(-1, keepdim=True)
    scale = torch.where(amax == 0, torch.ones_like(amax), torch.full_like(amax, 448.0) / amax)
    values = (groups * scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    return (values * (torch.ones_like(scale) / scale)).flatten(-2)[..., :size]


class Fp8Linear(torch.nn.Module):
    """W8A8 from published codes and descales."""

    def __init__(self, codes: torch.Tensor, descales: torch.Tensor) -> None:
        super().__init__()
        spread = descales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        self.weight = codes.float() * spread[: codes.shape[0], : codes.shape[1]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (rounded(x) @ self.weight.t()).to(x.dtype)


def transformers_model(folder: Path, tensors: dict[str, torch.Tensor]):
    """transformers' Llama in BF16 with the published weights and FP8 linears."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    parameters = dict(model.named_parameters())
    for name, tensor in tensors.items():
        descales = tensors.get(f"{name}_scale_inv")
        if descales is not None:
            parent, _, child = name.removesuffix(".weight").rpartition(".")
            setattr(model.get_submodule(parent), child, Fp8Linear(tensor, descales))
        elif not name.endswith("_scale_inv"):
            parameters[name].data.copy_(tensor)
    return model


def test_run_ends_and_reports(finished):
    recipe, summary, journal = finished
    assert summary["iterations"] == 2
    for n in (1, 2):
        texts = from_parquet(journal.read_file(n, "rollout", "rollouts.parquet"))["text"]
        assert len(texts) == recipe.rollout.prompts * recipe.rollout.samples
        # It talks in words and answers with numbers: noise would do neither.
        assert sum(bool(re.search(r"[0-9]", text)) for text in texts) > len(texts) // 2
        assert sum(bool(re.search(r"[a-z]{3}", text)) for text in texts) > 0


def test_mismatch_agrees_with_transformers_on_the_same_tokens(finished):
    """The rollouts' log-probs against transformers' own, with FP8 linears by PyTorch's own casts.

    transformers rounds to BF16 in other places than Megatron-core, which in FP8 moves every log-prob,
    so the panels agree in size and not in digits. The mean of exponentials hangs on the one or two
    worst tokens, hence its wide margin; the median and the divergences are what is held.
    """
    recipe, _, journal = finished
    _, tensors = read_published(journal.weights_folder(1), 1)
    rollouts = from_parquet(journal.read_file(2, "rollout", "rollouts.parquet"))
    batch = make_batch(rollouts["prompt_tokens"], rollouts["tokens"], rollouts["logprobs"])
    model = transformers_model(model_folder(recipe), tensors)
    with torch.no_grad():
        logits = model(batch.tokens, attention_mask=batch.valid).logits[:, :-1].float()
    p = torch.log_softmax(logits, -1).gather(-1, batch.tokens[:, 1:, None]).squeeze(-1)
    independent = mismatch_panel(batch.g, p, batch.mask, truncate=2.0)
    logged = journal.record(2, "train").metrics
    margins = {
        "token_mult_prob_error_p50": 0.2,
        "js_divergence": 0.35,
        "kl_k3": 0.4,
        "token_mult_prob_error": 0.6,
    }
    for name, margin in margins.items():
        base = 1.0 if name.startswith("token") else 0.0
        want = logged[f"mismatch/{name}"] - base
        assert independent[name] - base == pytest.approx(want, rel=margin), name
    # One token's shift is far outside: the comparison can fail.
    shifted = mismatch_panel(batch.g.roll(1, 1), p, batch.mask, truncate=2.0)
    assert shifted["token_mult_prob_error_p50"] - 1 > 2 * (independent["token_mult_prob_error_p50"] - 1)
