"""Every scaling mode from the learner's weights to the products inside vLLM's linear.

The linear method of the vLLM plugin is driven as vLLM drives it, on a bare module: starting an engine
for each mode would take minutes. tests/contract/test_vllm_engine.py has the block mode in an engine;
here one engine runs a mode with other shapes of descales, to show that vLLM takes them.
"""

import numpy as np
import pytest
import torch

from fp8rl.learner.learner import Learner
from fp8rl.model.layers import PlannedLinear
from fp8rl.model.manifest import SCALE_SUFFIX
from fp8rl.model.precision import Format, PrecisionPlanError
from fp8rl.numerics import amx
from fp8rl.numerics.backends import Projections, backend
from fp8rl.numerics.formats import ScaleRule, Scaling, fp8_recipe
from fp8rl.recipe.rules import rollout_fp8
from fp8rl.rollout.engine import Engine
from fp8rl.rollout.requests import requests_for
from tests import oracle
from tests.models import RAGGED, random_weights, recipe_with, write_model

BACKENDS = ["reference"] + ([] if amx.unavailable() else ["amx"])
MODES = ["block", "tensor", "channel", "mxfp8"]


def recipe_of(scaling: str, rule: str = "fp32", fmt: str = "e4m3", name: str = "reference"):
    return recipe_with(
        model={"tiny": RAGGED.model_dump()},
        precision={
            **{"rollout": "fp8", "learner": "fp8", "scaling": scaling, "learner_format": fmt},
            "rollout_scales": {"weights": rule, "activations": rule},
            "backend": name,
        },
        rollout={"max_new_tokens": 8, "chunk_size": 8, "kv_cache_mib": 64},
        learner={"lr": 1e-3, "warmup_iterations": 0},
    )


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_model(RAGGED, tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("rule", ["fp32", "pow2"])
@pytest.mark.parametrize("scaling", MODES)
def test_published_weights_compute_in_vllms_linear_as_the_oracle_says(model_dir, scaling, rule, name):
    """Relies on: vLLM calls create_weights, process_weights_after_loading and apply in this way."""
    from fp8rl.rollout.vllm_plugin import Fp8Linear

    recipe = recipe_of(scaling, rule, name=name)
    learner = Learner(model_dir, recipe)
    learner.load(model_dir, 0)
    tensors = dict(learner.published_tensors())
    slot = next(s for s in learner.model.table if s.vllm == "model.layers.1.self_attn.qkv_proj.weight")
    method = Fp8Linear("qkv", rollout_fp8(recipe.precision), backend(name))
    layer = torch.nn.Module()
    n = sum(slot.rows)
    method.create_weights(layer, slot.columns, list(slot.rows), slot.columns, n, torch.bfloat16)
    layer.weight.data.copy_(torch.cat([tensors[k] for k in slot.hf]))
    layer.weight_scale_inv.data.copy_(torch.cat([tensors[k + SCALE_SUFFIX] for k in slot.hf]))
    method.process_weights_after_loading(layer)
    x = torch.randn(7, slot.columns, generator=torch.Generator().manual_seed(1))
    got = method.apply(layer, x)

    weights = random_weights(RAGGED)
    want, exact = [], []
    for key in slot.hf:
        w = weights[key].numpy()
        x_q = oracle.quantise(x.numpy(), scaling, "activation", pow2=rule == "pow2").exact()
        want.append(x_q @ oracle.quantise(w, scaling, "weight", pow2=rule == "pow2").exact().T)
        exact.append(x.numpy() @ w.T)
    want, exact = np.concatenate(want, 1), np.concatenate(exact, 1)
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-4, atol=2e-5)
    assert np.abs(want - exact).max() > 1e-3  # FP8 is another thing: the comparison can fail
    assert layer.fp8rl_effective.value == f"fp8_{scaling}"


@pytest.mark.parametrize("scaling", MODES)
@pytest.mark.parametrize("fmt", ["e4m3", "hybrid"])
def test_learner_trains_in_every_mode(model_dir, scaling, fmt):
    from fp8rl.learner.batch import make_batch

    learner = Learner(model_dir, recipe_of(scaling, fmt=fmt, name=BACKENDS[-1]))
    learner.load(model_dir, 0)
    assert {row["effective"] for row in learner.precision_table()} == {"bf16", f"fp8_{scaling}"}
    rows = [[5, 6, 7, 8, 9], [10, 11, 12, 13]]
    batch = make_batch(
        [r[:2] for r in rows], [r[2:] for r in rows], [[-1.0] * (len(r) - 2) for r in rows]
    )
    before = dict(learner.published_tensors())
    metrics = learner.train(batch, torch.tensor([1.0, -1.0]), iteration=1, version=0).metrics
    assert 0 < metrics["train/grad_norm"] < 100
    after = dict(learner.published_tensors())
    changed = [
        k for k in before if not torch.equal(before[k].view(torch.uint8), after[k].view(torch.uint8))
    ]
    assert any("_proj" in name for name in changed)


@pytest.mark.engine
@pytest.mark.parametrize("scaling", ["channel", "mxfp8"])
def test_engine_runs_a_mode_with_other_descales(model_dir, tmp_path, scaling):
    recipe = recipe_of(scaling, name=BACKENDS[-1])
    learner = Learner(model_dir, recipe)
    learner.load(model_dir, 0)
    learner.publish(tmp_path, version=0)
    engine = Engine(model_dir, recipe, max_len=32)
    engine.load_weights(tmp_path, 0)
    held, sent = engine.weights.read(), dict(learner.published_tensors())
    for name, tensor in sent.items():
        assert torch.equal(held[name].view(torch.uint8), tensor.view(torch.uint8)), name
    done = engine.generate(requests_for([[5, 6, 7]], [0], 2, run_seed=0, iteration=1), version=0)
    assert all(len(c.logprobs) == len(c.tokens) > 0 for c in done)
    report = engine.precision_report()["parameters"]
    assert {row["effective"] for row in report} == {"bf16", f"fp8_{scaling}"}


def test_a_layer_that_rounds_in_another_mode_than_planned_is_caught(model_dir):
    """The effective format comes from the tiles that are used, not from what was asked for."""
    module = type("Layer", (PlannedLinear,), {})()
    tensorwise = fp8_recipe(Scaling.TENSOR, weights=ScaleRule.FP32)
    module.plan(Projections(("w",), (8,)), Format.FP8_BLOCK, tensorwise, backend("reference"))
    module._product(torch.ones(2, 4), torch.ones(8, 4))
    assert (module.requested, module.effective) == (Format.FP8_BLOCK, Format.FP8_TENSOR)
    learner = Learner(model_dir, recipe_of("block"))
    learner.load(model_dir, 0)
    slot, layer = learner.model.linears["decoder.layers.0.mlp.linear_fc2.weight"]
    layer.plan(learner.model._projections(slot), Format.FP8_BLOCK, tensorwise, backend("reference"))
    with pytest.raises(
        PrecisionPlanError, match=r"down_proj\.weight: requested fp8_block, effective fp8_tensor"
    ):
        learner.precision_table()
