"""The benchmark's model whose K and V are out of range: its function is that of the plain one."""

import torch

from benchmarks.rescaled import rescaled
from fp8rl.model.tiny import tiny_dims
from tests.models import RAGGED, hf_model, random_weights


def test_rescaling_leaves_the_function_alone_to_the_bit():
    weights = random_weights(RAGGED)
    changed = rescaled(weights, tiny_dims(RAGGED), [[3, 10], [5, 1]], [[10, 2], [1, 7]])
    x = torch.randint(0, 90, (2, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want = hf_model(RAGGED, weights)(x).logits
        assert torch.equal(hf_model(RAGGED, changed)(x).logits, want)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):  # any of the four left out is seen
            full = f"model.layers.1.self_attn.{name}.weight"
            part = changed | {full: weights[full]}
            assert not torch.allclose(hf_model(RAGGED, part)(x).logits, want)


def test_keys_and_values_grow_by_what_was_asked():
    weights = random_weights(RAGGED)
    changed = rescaled(weights, tiny_dims(RAGGED), [[3, 10], [5, 1]], [[10, 2], [1, 7]])
    x = torch.randint(0, 90, (1, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = hf_model(RAGGED, weights)(x, use_cache=True).past_key_values.layers
        grown = hf_model(RAGGED, changed)(x, use_cache=True).past_key_values.layers
    for number, (keys, values) in enumerate((([3, 10], [10, 2]), ([5, 1], [1, 7]))):
        for head in range(2):
            a, b = plain[number], grown[number]
            assert torch.equal(b.keys[:, head], a.keys[:, head] * 2.0 ** keys[head])
            assert torch.equal(b.values[:, head], a.values[:, head] * 2.0 ** values[head])
