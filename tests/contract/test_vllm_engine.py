"""The real vLLM engine: what it holds, what it computes, and what it refuses.

Each test names the vLLM behaviour it relies on, so that an upgrade fails here and says where.
"""

import numpy as np
import pytest
import torch

from fp8rl.learner.batch import make_batch
from fp8rl.mismatch import mismatch_panel
from fp8rl.model.kv_scales import KvScales, KvScalesError, LayerScales
from fp8rl.model.precision import Format
from fp8rl.rollout.engine import Engine, EngineStateError
from tests import oracle
from tests.contract.pairs import ARMS
from tests.models import RAGGED, random_weights

pytestmark = pytest.mark.engine


@pytest.fixture
def fp8(pairs):
    pair = pairs("fp8-e2e-kv")
    pair.sync(pair.new_learner(), 0)
    return pair


@pytest.fixture
def bf16(pairs):
    pair = pairs("bf16")
    pair.sync(pair.new_learner(), 0)
    return pair


def batch_of(requests, completions):
    return make_batch(
        [r.prompt for r in requests],
        [c.tokens for c in completions],
        [c.logprobs for c in completions],
    )


def mismatch(learner, batch, version):
    p = learner.logprobs(batch, version=version)
    return mismatch_panel(batch.g, p, batch.mask, truncate=2.0)["token_mult_prob_error"]


# --- the engine really runs FP8


def test_codes_and_scales_inside_vllm_equal_the_oracle(fp8):
    held = fp8.engine.weights.read()
    for name, weight in random_weights(RAGGED).items():
        if "_proj" in name:
            codes, scales = oracle.quantise_weight(weight.numpy())
            np.testing.assert_array_equal(held[name].view(torch.uint8).numpy(), codes)
            np.testing.assert_array_equal(held[name + "_scale_inv"].numpy(), scales)
        else:
            rows = len(weight)
            assert torch.equal(held[name][:rows], weight.bfloat16())


@pytest.mark.parametrize("module", ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj"])
def test_output_of_a_linear_inside_vllm_equals_the_oracle(fp8, module):
    """Relies on: vLLM calls our method's apply with the unpadded, unquantised input."""
    slot = next(s for s in fp8.engine.weights.table if s.vllm == f"model.layers.1.{module}.weight")
    layer = fp8.engine.inside(lambda model: model.get_submodule(f"model.layers.1.{module}"))
    x = torch.randn(7, slot.columns).bfloat16()
    with torch.inference_mode():
        got = layer.quant_method.apply(layer, x.float())
    weights = random_weights(RAGGED)
    rows = [oracle.dequantise_weight(*oracle.quantise_weight(weights[n].numpy())) for n in slot.hf]
    want = oracle.round_trip_rows(x.float().numpy()) @ np.concatenate(rows).T
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-5, atol=1e-5)
    unquantised = x.float().numpy() @ np.concatenate([weights[n].numpy() for n in slot.hf]).T
    assert np.abs(want - unquantised).max() > 1e-3  # FP8 is not BF16: the comparison can fail


def test_effective_formats_and_kv_cache_type(fp8, bf16):
    """Relies on: Attention.kv_cache and kv_cache_dtype; an FP8 cache is stored as bytes."""
    for pair in (fp8, bf16):
        pair.engine.generate(pair.requests(), version=0)
    report = fp8.engine.precision_report()
    assert report["kv_cache"] == {"dtype": "fp8", "storage": "uint8"}
    effective = fp8.engine.weights.effective_formats()
    assert sum(f is Format.FP8_BLOCK for f in effective.values()) == 7 * RAGGED.layers
    assert bf16.engine.precision_report()["kv_cache"]["storage"] == "bfloat16"
    assert set(bf16.engine.weights.effective_formats().values()) == {Format.BF16}


def test_engine_that_does_not_run_the_plan_is_caught(fp8):
    fp8.engine.generate(fp8.requests(), version=0)
    layer = fp8.engine.inside(lambda model: model.get_submodule("model.layers.0.mlp.down_proj"))
    layer.fp8rl_effective = Format.BF16
    with pytest.raises(ValueError, match=r"down_proj\.weight: requested fp8_block, effective bf16"):
        fp8.engine.precision_report()
    layer.fp8rl_effective = Format.FP8_BLOCK


# --- KV scales


def test_kv_scales_sent_are_those_used(fp8):
    """Relies on: the CPU backend reads Attention._k_scale_float and _v_scale_float."""
    scales = fp8.scales(fp8.new_learner(), 0)
    assert fp8.engine.apply_kv_scales(scales) == list(scales.layers)
    layers = fp8.engine.weights.attention()
    for layer, sent in zip(layers, scales.layers, strict=True):
        assert (layer._k_scale_float, layer._v_scale_float, layer._q_scale_float) == (
            sent.k,
            sent.v,
            sent.q,
        )
        assert float(layer._k_scale) == pytest.approx(sent.k, rel=1e-7)


def first_layer_cache(engine: Engine) -> torch.Tensor:
    """Relies on: Attention.kv_cache, a tensor or a list of one per virtual engine."""
    cache = engine.weights.attention()[0].kv_cache
    return cache if isinstance(cache, torch.Tensor) else cache[0]


def test_cache_holds_values_divided_by_the_scales_sent(fp8):
    """Bytes in vLLM's cache stay within E4M3 with the scales sent, and saturate with 1/64 of them."""
    learner = fp8.new_learner()
    scales = fp8.scales(learner, 0)
    request = fp8.requests(prompts=1)[:1]

    def largest_code() -> float:
        cache = first_layer_cache(fp8.engine)
        cache.zero_()
        fp8.engine.generate(request, version=0)
        written = cache.view(torch.uint8).ravel()
        return float(np.abs(oracle.decode(written[written != 0].numpy())).max())

    assert 448 / 16 < largest_code() < 448
    small = tuple(LayerScales(s.q / 64, s.k / 64, s.v / 64) for s in scales.layers)
    fp8.engine.apply_kv_scales(KvScales(0, small, 1, "test"))
    assert largest_code() == 448


def test_wrong_kv_scales_change_the_log_probs(fp8):
    """The scales are used, not only stored: ruinous ones are seen in what the engine computes."""
    learner = fp8.new_learner()
    good = fp8.scales(learner, 0)
    requests = fp8.requests()
    near = mismatch(learner, batch_of(requests, fp8.engine.generate(requests, version=0)), 0)
    bad = tuple(LayerScales(s.q, s.k * 1e-3, s.v * 1e-3) for s in good.layers)
    fp8.engine.apply_kv_scales(KvScales(0, bad, 1, "test"))
    far = mismatch(learner, batch_of(requests, fp8.engine.generate(requests, version=0)), 0)
    assert near < 1.15
    assert far > near + 0.1


def test_unusable_scales_are_refused_and_the_engine_does_not_generate(fp8):
    good = fp8.scales(fp8.new_learner(), 0)
    for bad in (
        KvScales(5, good.layers, 1, "stale"),
        KvScales(0, good.layers[:1], 1, "short"),
        KvScales(0, (good.layers[0], LayerScales(1.0, 1.0, 1.0)), 1, "default"),
    ):
        with pytest.raises(KvScalesError):
            fp8.engine.apply_kv_scales(bad)
    fp8.engine.load_weights(fp8.folder / "v0", 0)  # new weights: the old scales no longer count
    with pytest.raises(EngineStateError, match="no KV scales for weight version 0"):
        fp8.engine.generate(fp8.requests(), version=0)


def test_two_copies_of_a_scale_that_differ_are_seen(fp8):
    layer = fp8.engine.weights.attention()[1]
    layer._v_scale.fill_(0.5)
    with pytest.raises(KvScalesError, match=r"layer 1: v_scale is 0\.5 on the device"):
        fp8.engine.weights.read_kv_scales()


def test_bf16_cache_takes_no_scales(bf16):
    with pytest.raises(EngineStateError, match="takes no scales"):
        bf16.engine.apply_kv_scales(KvScales(0, (LayerScales(0.1, 0.1, 0.1),) * 2, 1, ""))


# --- weights


@pytest.mark.parametrize("arm", ARMS)
def test_new_weights_reach_the_engine(pairs, arm):
    """After an update, rollout log-probs match the learner's for the new weights, not for the old."""
    pair = pairs(arm)
    learner, old = pair.new_learner(), pair.new_learner()
    pair.sync(learner, 0)
    first = pair.requests(1)
    batch = batch_of(first, pair.engine.generate(first, version=0))
    assert mismatch(learner, batch, 0) < 1.15
    for version in range(3):  # a few large steps, so that old and new are far apart
        advantages = torch.tensor([1.0, -1.0] * (len(first) // 2))
        learner.train(batch, advantages, iteration=9, version=version)
    pair.sync(learner, 3)
    requests = pair.requests(2)
    batch = batch_of(requests, pair.engine.generate(requests, version=3))
    new_error, old_error = mismatch(learner, batch, 3), mismatch(old, batch, 0)
    assert new_error < 1.15
    assert old_error > 1 + 4 * (new_error - 1) + 0.05


@pytest.mark.parametrize("arm", ARMS)
def test_weights_loaded_twice_equal_a_first_load(pairs, arm):
    """Relies on: repacking a BF16 weight after a change (vLLM packs it for its CPU kernels)."""
    pair = pairs(arm)
    learner = pair.new_learner()
    pair.sync(learner, 0)
    first = pair.engine.generate(pair.requests(), version=0)
    other = random_weights(RAGGED, seed=5)
    learner.model.load(other)
    pair.sync(learner, 0)
    changed = pair.engine.generate(pair.requests(), version=0)
    assert changed != first
    pair.sync(pair.new_learner(), 0)
    assert pair.engine.generate(pair.requests(), version=0) == first


def test_another_version_is_refused(fp8):
    with pytest.raises(EngineStateError, match="holds weight version 0; version 7 was expected"):
        fp8.engine.generate(fp8.requests(), version=7)


# --- generation


@pytest.mark.parametrize("arm", ARMS)
def test_a_repeated_chunk_is_the_same_chunk(pairs, arm):
    """Relies on: per-request seeds, and the same batch from a clean prefix cache being the same."""
    pair = pairs(arm)
    pair.sync(pair.new_learner(), 0)
    requests = pair.requests(prompts=12)  # 24 sequences: two chunks of 16
    first = pair.engine.generate(requests, version=0)
    assert pair.engine.generate(requests, version=0) == first
    assert pair.engine.generate(pair.requests(3, 12), version=0) != first


def test_samples_of_a_prompt_differ_and_greedy_answers_do_not(bf16):
    requests = bf16.requests()
    sampled = bf16.engine.generate(requests, version=0)
    assert sampled[0].tokens != sampled[1].tokens
    greedy = bf16.engine.generate(requests, version=0, temperature=0.0)
    assert greedy[0].tokens == greedy[1].tokens
    assert greedy[0].logprobs == []
    for completion in sampled:
        assert len(completion.logprobs) == len(completion.tokens) <= 12
        assert completion.finish in ("stop", "length")
        assert (completion.tokens[-1] == 2) == (completion.finish == "stop")


@pytest.mark.parametrize("temperature", [0.6, 1.4])
def test_log_probs_are_of_the_distribution_sampled_from(bf16, temperature):
    """Relies on: logprobs_mode=processed_logprobs divides by the temperature before the softmax."""
    requests = bf16.requests()
    completions = bf16.engine.generate(requests, version=0, temperature=temperature)
    batch = batch_of(requests, completions)
    learner = bf16.new_learner()
    options = learner.recipe.rollout.model_copy(update={"temperature": temperature})
    learner.recipe = learner.recipe.model_copy(update={"rollout": options})
    assert mismatch(learner, batch, 0) < 1.03
    learner.recipe = bf16.recipe
    assert mismatch(learner, batch, 0) > 1.05


def test_tied_output_follows_the_embedding(bf16):
    """Relies on: vLLM's tied lm_head sharing the embedding's parameter, repacked after a change."""
    learner = bf16.new_learner()
    weights = random_weights(RAGGED)
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].flip(0)
    learner.model.load(weights)
    bf16.sync(learner, 0)
    requests = bf16.requests()
    batch = batch_of(requests, bf16.engine.generate(requests, version=0))
    assert mismatch(learner, batch, 0) < 1.03
