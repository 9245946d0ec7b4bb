"""Every model family: the learner against transformers, and the real engine against both.

Relied on in vLLM: the names and order of q, k, v biases in qkv_proj.bias, and of q_norm and k_norm.
"""

import pytest
import torch

from fp8rl.learner.batch import make_batch
from fp8rl.learner.learner import Learner
from fp8rl.mismatch import mismatch_panel
from fp8rl.model.dims import read_dims
from fp8rl.model.megatron import PolicyModel, read_hf_weights
from fp8rl.model.precision import Format, PlanRules, make_plan
from fp8rl.rollout.engine import Engine
from fp8rl.rollout.requests import requests_for
from tests.contract.pairs import ARMS, some_tokens
from tests.contract.test_parity import EXACT
from tests.families import FAMILIES, hf_family, write_family
from tests.models import recipe_with

# What tells a family apart, and a change of it that must show.
TELLS = {
    "llama": "model.layers.1.self_attn.k_proj.weight",
    "llama3": "model.layers.1.self_attn.q_proj.weight",
    "qwen2": "model.layers.1.self_attn.k_proj.bias",
    "qwen3": "model.layers.1.self_attn.k_norm.weight",
}


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request, tmp_path_factory):
    name = request.param
    return name, write_family(name, tmp_path_factory.mktemp(name))


def tokens() -> torch.Tensor:
    return torch.randint(4, 90, (3, 60), generator=torch.Generator().manual_seed(0))


def policy(folder) -> PolicyModel:
    dims = read_dims(folder)
    plan = make_plan(PlanRules(Format.BF16), dims)
    return PolicyModel(dims, plan, compute_dtype=torch.float32)


def test_logits_agree_with_transformers_in_fp32(family):
    name, folder = family
    model, weights = policy(folder), read_hf_weights(folder, read_dims(folder))
    model.load(weights)
    with torch.no_grad():
        got, want = model(tokens()), hf_family(name)(tokens()).logits
    assert (got - want).abs().max() < 1e-4
    assert want.std() > 0.1
    tell = TELLS[name]
    changed = weights[tell].roll(1, 0) if name != "qwen3" else weights[tell] * 1.5
    model.load(weights | {tell: changed})
    with torch.no_grad():
        assert (model(tokens()) - want).abs().max() > 1e-2


def test_weights_and_gradients_go_in_and_out(family):
    name, folder = family
    model, weights = policy(folder), read_hf_weights(folder, read_dims(folder))
    model.load(weights)
    exported = model.export()
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[key], weights[key].float()) for key in weights)
    reference = hf_family(name)
    for one in (model, reference):
        out = one(tokens())
        logits = out if isinstance(out, torch.Tensor) else out.logits
        torch.log_softmax(logits, -1)[..., 5].mean().backward()
    want = dict(reference.named_parameters())
    for slot in model.table:
        grad = model._parameters_by_name[slot.megatron].grad
        for key, part in zip(slot.hf, model._projections(slot).split(grad), strict=True):
            # A bias of k moves all scores of a query alike: its gradient is 0 but for the rotation.
            assert (part - want[key].grad).abs().max() < 1e-5, key


# The other tests of the engine have a Llama model.
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "llama"], indirect=True)
def test_the_engine_samples_what_the_learner_scores(family):
    """To the same log-probs; and those of transformers in FP32 within what the precision costs."""
    name, folder = family
    for arm in ("bf16", "fp8-e2e-kv"):
        fp8_kv = arm == "fp8-e2e-kv"
        recipe = recipe_with(
            model={"path": str(folder)},
            warm_start={"steps": 0},
            precision=ARMS[arm] | ({"learner_kv": "fp8"} if fp8_kv else {}),
            rollout={"max_new_tokens": 12, "chunk_size": 16, "kv_cache_mib": 64},
        )
        learner = Learner(folder, recipe)
        learner.load(folder, 0)
        engine = Engine(folder, recipe, max_len=64)
        learner.publish(folder / arm, version=0)
        engine.load_weights(folder / arm, 0)
        if fp8_kv:
            scales = learner.calibrate_kv(some_tokens(), version=0, source="test")
            engine.apply_kv_scales(scales)
            learner.use_kv_scales(0, scales)
        prompts = tokens()[:, :8].tolist()
        done = engine.generate(requests_for(prompts, [0, 1, 2], 4, run_seed=0, iteration=1), version=0)
        batch = make_batch(
            [p for p in prompts for _ in range(4)], [c.tokens for c in done], [c.logprobs for c in done]
        )
        p = learner.logprobs(batch, version=0)
        error = mismatch_panel(batch.g, p, batch.mask, truncate=2.0)["token_mult_prob_error"]
        assert error <= (1 + 1e-5 if EXACT else 1.01)
        formats = {row["effective"] for row in engine.precision_report()["parameters"]}
        assert formats == ({"bf16"} if arm == "bf16" else {"bf16", "fp8_block"})
        scored = engine.score(tokens().tolist(), version=0)
        with torch.no_grad():
            logits = hf_family(name)(tokens()).logits[:, :-1].log_softmax(-1)
        exact = logits.gather(-1, tokens()[:, 1:, None])[..., 0]
        assert (torch.tensor(scored) - exact).abs().mean() < (0.02 if arm == "bf16" else 0.1)
