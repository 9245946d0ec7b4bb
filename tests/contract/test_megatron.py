"""Megatron-core: the accommodations for CPU, agreement with transformers, and planned precision."""

import numpy as np
import pytest
import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention

from fp8rl.learner.batch import make_batch
from fp8rl.learner.learner import Learner, VersionError
from fp8rl.model.cpu_megatron import CPU_CONFIG, CoreAttention, init_single_rank
from fp8rl.model.layers import PlannedLinear
from fp8rl.model.megatron import (
    PolicyModel,
    WeightsError,
    layer_spec,
    read_hf_weights,
    transformer_config,
)
from fp8rl.model.precision import Format, PlanRules, PrecisionPlanError, make_plan
from fp8rl.model.tiny import tiny_dims
from fp8rl.recipe.precision import Linear
from fp8rl.recipe.schema import TinyModel
from tests import oracle
from tests.models import RAGGED, hf_model, random_weights, recipe_with, write_model

UNTIED = RAGGED.model_copy(update={"tied_embeddings": False})
ALL_HEADS = TinyModel(hidden_size=256, intermediate_size=384, layers=2, heads=4, kv_heads=4)
VARIANTS = {"tied-gqa": RAGGED, "untied-gqa": UNTIED, "mha": ALL_HEADS}


def policy(tiny: TinyModel, linear: Format = Format.BF16, **options) -> PolicyModel:
    dims = tiny_dims(tiny)
    return PolicyModel(dims, make_plan(PlanRules(linear), dims), **options)


def tokens(rows=3, columns=20, seed=0) -> torch.Tensor:
    return torch.randint(0, 100, (rows, columns), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tiny", VARIANTS.values(), ids=VARIANTS)
def test_logits_agree_with_transformers_in_fp32(tiny):
    weights = random_weights(tiny)
    model = policy(tiny, compute_dtype=torch.float32)
    model.load(weights)
    x = tokens()
    with torch.no_grad():
        got, want = model(x), hf_model(tiny, weights)(x).logits
    assert (got - want).abs().max() < 1e-4
    assert want.std() > 0.1
    # The comparison can fail: one head's rows exchanged is seen.
    name = "model.layers.0.self_attn.k_proj.weight"
    model.load(weights | {name: weights[name].roll(32, 0)})
    with torch.no_grad():
        assert (model(x) - want).abs().max() > 1e-2


@pytest.mark.parametrize("tiny", VARIANTS.values(), ids=VARIANTS)
def test_weights_go_in_and_out_unchanged(tiny):
    weights = random_weights(tiny)
    model = policy(tiny)
    model.load(weights)
    exported = model.export()
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[name], weights[name]) for name in weights)


def test_gradients_agree_with_transformers_in_fp32():
    weights = random_weights(RAGGED)
    model, reference = policy(RAGGED, compute_dtype=torch.float32), hf_model(RAGGED, weights)
    model.load(weights)
    x = tokens()
    for m in (model, reference):
        out = m(x)
        logits = out if isinstance(out, torch.Tensor) else out.logits
        torch.log_softmax(logits, -1)[..., 5].mean().backward()
    master = dict(model.gpt.named_parameters())
    ours = {}
    for slot in model.table:
        parts = model._projections(slot).split(master[slot.megatron].grad)
        ours.update(zip(slot.hf, parts, strict=True))
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-3, atol=1e-6)


def test_logits_of_real_tokens_do_not_depend_on_padding():
    model = policy(RAGGED, compute_dtype=torch.float32)
    model.load(random_weights(RAGGED))
    x = tokens(1, 12)
    padded = torch.cat([x, torch.zeros(1, 30, dtype=torch.int64)], 1)
    with torch.no_grad():
        torch.testing.assert_close(model(padded)[:, :12], model(x), rtol=1e-4, atol=1e-5)


def test_bad_weights_are_named_and_nothing_is_loaded():
    weights = random_weights(RAGGED)
    model = policy(RAGGED)
    model.load(weights)
    bad = {k: v * 2 for k, v in weights.items()}
    bad["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 3)
    bad["model.other.weight"] = bad.pop("model.norm.weight")
    with pytest.raises(WeightsError) as error:
        model.load(bad)
    for text in (
        "model.norm.weight: missing",
        "model.other.weight: not a parameter",
        "up_proj.weight: shape (3, 3)",
    ):
        assert text in str(error.value)
    assert torch.equal(
        model.export()["model.embed_tokens.weight"], weights["model.embed_tokens.weight"]
    )


def test_read_hf_weights(tmp_path):
    dims = tiny_dims(RAGGED)
    with pytest.raises(WeightsError, match=r"no \*\.safetensors"):
        read_hf_weights(tmp_path, dims)
    write_model(RAGGED, tmp_path)
    assert read_hf_weights(tmp_path, dims).keys() == random_weights(RAGGED).keys()
    from safetensors.torch import save_file

    save_file({"lm_head.weight": torch.zeros(dims.vocab, dims.hidden)}, tmp_path / "z.safetensors")
    with pytest.raises(WeightsError, match=r"lm_head\.weight differs"):
        read_hf_weights(tmp_path, dims)


# --- precision


def test_every_linear_runs_the_planned_format():
    for linear in (Format.BF16, Format.FP8_BLOCK):
        model = policy(RAGGED, linear)
        model.load(random_weights(RAGGED))
        with pytest.raises(RuntimeError, match="after a first forward"):
            model.effective_formats()
        model(tokens())
        linears = {f for n, f in model.effective_formats().items() if "_proj" in n}
        assert linears == {linear}


def test_a_linear_that_trains_in_bf16_while_fp8_is_asked_is_caught(tmp_path):
    recipe = recipe_with(
        model={"tiny": RAGGED.model_dump()}, precision={"rollout": "fp8", "learner": "fp8"}
    )
    learner = Learner(write_model(RAGGED, tmp_path), recipe)
    learner.load(tmp_path, 0)
    table = learner.precision_table()
    assert all(row["requested"] == row["effective"] for row in table)
    assert sum(row["effective"] == "fp8_block" for row in table) == 7 * RAGGED.layers
    _, module = next(iter(learner.model.linears.values()))
    module.fp8 = None  # what a silent fallback would do
    with pytest.raises(
        PrecisionPlanError, match=r"q_proj\.weight: requested fp8_block, effective bf16"
    ):
        learner.precision_table()


def test_unplanned_linear_refuses_to_run():
    module = policy(RAGGED).gpt.decoder.layers[0].mlp.linear_fc1
    assert isinstance(module, PlannedLinear)
    module.requested = None
    with pytest.raises(RuntimeError, match="before its precision was decided"):
        module(torch.zeros(1, 1, 192))


def test_published_codes_are_those_of_the_learners_forward_and_of_the_oracle(tmp_path):
    recipe = recipe_with(
        model={"tiny": RAGGED.model_dump()}, precision={"rollout": "fp8", "learner": "fp8"}
    )
    learner = Learner(write_model(RAGGED, tmp_path), recipe)
    learner.load(tmp_path, 0)
    weights, published = random_weights(RAGGED), dict(learner.published_tensors())
    for name, weight in weights.items():
        if "_proj" not in name:
            assert torch.equal(published[name], weight.bfloat16())
            continue
        codes, scales = oracle.quantise_weight(weight.numpy())
        np.testing.assert_array_equal(published[name].view(torch.uint8).numpy(), codes)
        np.testing.assert_array_equal(published[name + "_scale_inv"].numpy(), scales)
    slot, module = learner.model.linears["decoder.layers.0.self_attention.linear_qkv.weight"]
    used = module.fp8.quantised(learner.model._parameters_by_name[slot.megatron])
    assert all(torch.equal(used[n].codes, published[n].view(torch.uint8)) for n in slot.hf)


# --- the learner


def small_batch(rows=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(4, 90, (3 + r % 3,), generator=generator).tolist() for r in range(rows)]
    answers = [torch.randint(4, 90, (2 + r % 4,), generator=generator).tolist() for r in range(rows)]
    return make_batch(prompts, answers, [[-1.5] * len(a) for a in answers])


@pytest.fixture
def model_dir(tmp_path):
    return write_model(RAGGED, tmp_path / "model")


def learner_for(model_dir, **sections) -> Learner:
    learner = Learner(model_dir, recipe_with(model={"tiny": RAGGED.model_dump()}, **sections))
    learner.load(model_dir, 0)
    return learner


def test_versions_are_counted_and_wrong_ones_refused(model_dir):
    learner = learner_for(model_dir)
    batch, advantages = small_batch(), torch.randn(8)
    with pytest.raises(VersionError, match="holds version 0; version 3 was expected"):
        learner.train(batch, advantages, iteration=1, version=3)
    assert learner.train(batch, advantages, iteration=1, version=0).version == 1
    with pytest.raises(VersionError):
        learner.publish(model_dir, version=0)
    learner.supervised_step(batch, 1e-3)
    with pytest.raises(VersionError, match="no weights"):
        learner.publish(model_dir, version=1)


@pytest.mark.parametrize("linear", list(Linear))
def test_training_repeats_bit_for_bit(model_dir, linear):
    def trained():
        learner = learner_for(model_dir, precision={"rollout": linear, "learner": linear})
        for n in range(2):
            learner.train(small_batch(seed=n), torch.linspace(-1, 1, 8), iteration=n + 1, version=n)
        return learner.model.export()

    first, second = trained(), trained()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_micro_batches_do_not_change_the_step(model_dir):
    results = []
    for size in (2, 8):
        learner = learner_for(model_dir, learner={"micro_batch": size, "lr": 1e-3})
        result = learner.train(small_batch(), torch.linspace(-1, 1, 8), iteration=9, version=0)
        results.append((result.metrics, learner.model.export()))
    (a, weights_a), (b, weights_b) = results
    assert a["train/loss"] == pytest.approx(b["train/loss"], rel=1e-3)
    assert a["train/grad_norm"] == pytest.approx(b["train/grad_norm"], rel=2e-2)
    assert a["mismatch/token_mult_prob_error"] == pytest.approx(
        b["mismatch/token_mult_prob_error"], rel=1e-2
    )
    name = "model.layers.1.mlp.down_proj.weight"
    start = random_weights(RAGGED)[name]
    cosine = torch.cosine_similarity(
        (weights_a[name] - start).flatten(), (weights_b[name] - start).flatten(), dim=0
    )
    assert cosine > 0.9


def test_fp8_gradients_do_not_depend_on_what_padding_holds(model_dir):
    """A padded token has no gradient, but would share its group's scale in wgrad."""
    trained = []
    for pad in (0, 77):
        learner = learner_for(model_dir, precision={"rollout": "fp8", "learner": "fp8"})
        batch = small_batch()
        batch.tokens[~batch.valid] = pad
        learner.train(batch, torch.linspace(-1, 1, 8), iteration=9, version=0)
        trained.append(learner.model.export())
    assert all(torch.equal(trained[0][n], trained[1][n]) for n in trained[0])


def test_what_runs_in_fp32_is_not_called_bf16():
    model = policy(RAGGED, compute_dtype=torch.float32)
    model.load(random_weights(RAGGED))
    model(tokens())
    assert {f for n, f in model.effective_formats().items() if "_proj" in n} == {Format.FP32}


def test_several_updates_train_on_every_sample_once(model_dir):
    learner = learner_for(model_dir, learner={"updates": 2, "micro_batch": 3})
    result = learner.train(small_batch(), torch.linspace(-1, 1, 8), iteration=9, version=0)
    one = learner_for(model_dir, learner={"updates": 1, "micro_batch": 3})
    reference = one.train(small_batch(), torch.linspace(-1, 1, 8), iteration=9, version=0)
    # Mismatch is measured under the weights that drew the samples, however many updates follow.
    assert result.metrics["mismatch/kl_k3"] == pytest.approx(
        reference.metrics["mismatch/kl_k3"], rel=1e-3
    )
    assert result.metrics["train/entropy"] != reference.metrics["train/entropy"]


def test_policy_gradient_raises_what_was_rewarded(model_dir):
    learner = learner_for(model_dir, learner={"lr": 1e-3, "warmup_iterations": 0})
    batch = small_batch()
    advantages = torch.tensor([1.0, -1.0] * 4)
    before = learner.logprobs(batch, version=0).sum(1)
    learner.train(batch, advantages, iteration=1, version=0)
    change = learner.logprobs(batch, version=1).sum(1) - before
    assert change[advantages > 0].mean() > 0 > change[advantages < 0].mean()


def test_non_finite_gradient_stops_before_the_step(model_dir):
    learner = learner_for(model_dir)
    before = learner.model.export()
    with pytest.raises(FloatingPointError, match="norm is nan"):
        learner.train(small_batch(), torch.full((8,), float("nan")), iteration=1, version=0)
    after = learner.model.export()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert learner.version is None  # what it holds is no published version


def test_kv_calibration_equals_amax_of_transformers_keys_and_values(model_dir):
    """Against transformers' own cache of rotated keys and of values, padding excluded."""
    learner = learner_for(model_dir)
    learner.model.compute_dtype = torch.bfloat16
    batch = small_batch()
    scales = learner.calibrate_kv(batch, version=0, source="test")
    assert scales.tokens == int(batch.lengths.sum())
    reference = hf_model(RAGGED, random_weights(RAGGED))
    k_amax, v_amax = torch.zeros(2), torch.zeros(2)
    for row, length in enumerate(batch.lengths.tolist()):
        with torch.no_grad():
            cache = reference(batch.tokens[row : row + 1, :length], use_cache=True).past_key_values
        for i in range(2):
            k_amax[i] = max(k_amax[i], cache.layers[i].keys.abs().max())
            v_amax[i] = max(v_amax[i], cache.layers[i].values.abs().max())
    for i in range(2):
        assert scales.layers[i].k == pytest.approx(float(k_amax[i]) * 1.05 / 448, rel=0.02)
        assert scales.layers[i].v == pytest.approx(float(v_amax[i]) * 1.05 / 448, rel=0.02)


def test_kv_calibration_by_percentile_leaves_the_largest_elements_out(model_dir):
    batch = small_batch()
    amax = learner_for(model_dir).calibrate_kv(batch, version=0, source="test")
    precision = {"kv_statistic": "percentile", "kv_percentile": 99}
    cut = learner_for(model_dir, precision=precision).calibrate_kv(batch, version=0, source="test")
    assert (amax.statistic, cut.statistic) == ("amax", "percentile 99")
    assert amax.side == "learner"
    for whole, less in zip(amax.layers, cut.layers, strict=True):
        assert all(0.2 < getattr(less, name) / getattr(whole, name) < 0.95 for name in "qkv")


def test_layer_numbers_are_global_over_pipeline_stages(monkeypatch):
    """KV scales are by layer of the whole model. The second of two stages of a model of 4 layers."""
    from megatron.core.transformer import transformer_layer
    from megatron.core.transformer.spec_utils import build_module

    init_single_rank()
    dims = tiny_dims(RAGGED.model_copy(update={"layers": 4}))
    options = {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.bfloat16}
    config = transformer_config(dims, **options, **CPU_CONFIG)
    numbers = []
    for stage in range(2):
        monkeypatch.setattr(transformer_layer, "get_pg_rank", lambda _group, stage=stage: stage)
        for number in (1, 2):
            layer = build_module(layer_spec(), config=config, layer_number=number)
            numbers.append(layer.self_attention.core_attention.layer)
    assert numbers == [0, 1, 2, 3]


# --- what the accommodations answer: when Megatron changes, these say so


def test_megatron_core_attention_asks_for_the_cuda_rng_tracker():
    model = policy(RAGGED)
    config = model.gpt.config
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.enums import AttnMaskType

    attention = DotProductAttention(
        config,
        1,
        AttnMaskType.causal,
        "self",
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    q, k = torch.randn(4, 1, 6, 32), torch.randn(4, 1, 2, 32)
    with pytest.raises(Exception, match=r"CUDA|rng state"):
        attention(q, k, k, None, AttnMaskType.causal)
    assert CoreAttention(config, 1).attend(q, k, k).shape == (4, 1, 192)


@pytest.mark.parametrize("length", [40, 200])
def test_core_attention_equals_plain_attention(length):
    """Both kernels: the plain products for short sequences, flash for long ones."""
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(length, 2, 6, 32),
        torch.randn(length, 2, 2, 32),
        torch.randn(length, 2, 2, 32),
    )
    got = CoreAttention(None, 1).attend(q, k, v)
    scores = torch.einsum("sbhd,tbhd->bhst", q, k.repeat_interleave(3, 2)) / 32**0.5
    scores = scores.masked_fill(~torch.ones(length, length).tril().bool(), -torch.inf)
    want = torch.einsum("bhst,tbhd->sbhd", scores.softmax(-1), v.repeat_interleave(3, 2))
    torch.testing.assert_close(got, want.flatten(2), rtol=1e-4, atol=1e-5)
