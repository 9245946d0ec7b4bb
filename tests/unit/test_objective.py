"""Log-probs of sampled tokens, padded batches, and samples whose rollout log-probs are missing."""

import math

import numpy as np
import pytest
import torch

from fp8rl.learner.batch import make_batch
from fp8rl.learner.logprobs import token_logprobs
from fp8rl.learner.validity import LogprobError, judge
from fp8rl.recipe.objective import InvalidLogprobs


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.4])
def test_logprob_is_of_the_next_token_after_temperature(temperature):
    torch.manual_seed(0)
    logits, tokens = torch.randn(2, 4, 5), torch.tensor([[0, 1, 2, 3], [4, 3, 2, 1]])
    logp, entropy = token_logprobs(logits, tokens, temperature)
    for b in range(2):
        for j in range(3):
            z = logits[b, j].double().numpy() / temperature
            p = np.exp(z) / np.exp(z).sum()
            assert logp[b, j].item() == pytest.approx(math.log(p[tokens[b, j + 1]]), abs=1e-5)
            assert entropy[b, j].item() == pytest.approx(-(p * np.log(p)).sum(), abs=1e-5)


def test_mask_marks_the_positions_that_predict_response_tokens():
    batch = make_batch([[5, 6], [5]], [[7, 8], [9]], [[-1.0, -2.0], [-3.0]])
    assert batch.tokens.tolist() == [[5, 6, 7, 8], [5, 9, 0, 0]]
    assert batch.mask.tolist() == [[False, True, True], [True, False, False]]
    assert batch.g.tolist() == [[0.0, -1.0, -2.0], [-3.0, 0.0, 0.0]]
    predicted = batch.tokens[:, 1:][batch.mask]
    assert predicted.tolist() == [7, 8, 9]
    assert batch.valid.sum(1).tolist() == [4, 2]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_rollout_logprob_is_an_error_never_zero(bad):
    with pytest.raises(LogprobError, match=r"samples \[1\]"):
        make_batch([[1], [1]], [[2], [3]], [[-1.0], [bad]])
    with pytest.raises(LogprobError, match="1 log-probs for 2 tokens"):
        make_batch([[1]], [[2, 3]], [[-1.0]])
    with pytest.raises(ValueError, match="empty response"):
        make_batch([[1]], [[]], [[]])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None])
def test_invalid_samples_are_kept_as_such_where_the_recipe_has_a_rule(bad):
    """Sample 1 has one bad token of two, sample 2 one log-prob too few."""
    prompts, answers = [[1]] * 4, [[2, 3]] * 4
    logprobs = [[-1.0, -2.0], [bad, -2.0], [-1.0], [-1.0, -1.0]]
    with pytest.raises(LogprobError):
        make_batch(prompts, answers, logprobs)
    for rule in (InvalidLogprobs.DROP, InvalidLogprobs.NEUTRAL):
        batch = make_batch(prompts, answers, logprobs, rule)
        assert not (batch.g[1:3] == 0).any()
        found = judge(batch.g, batch.mask, rule)
        assert (found.tokens, found.samples) == (3, 2)
        dropped = rule is InvalidLogprobs.DROP
        assert found.kept.tolist() == [True, not dropped, not dropped, True]
        assert found.neutral.tolist() == [False, not dropped, not dropped, False]


def test_padding_is_not_judged_and_good_samples_have_nothing_to_count():
    g = torch.tensor([[-1.0, math.nan], [-2.0, -3.0]])
    mask = torch.tensor([[True, False], [True, True]])
    for rule in InvalidLogprobs:
        found = judge(g, mask, rule)
        assert (found.tokens, found.samples) == (0, 0)
        assert found.kept.all()
        assert not found.neutral.any()


def test_entropy_carries_a_gradient_only_where_it_is_asked_for():
    logits = torch.randn(1, 3, 5, dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor([[0, 1, 2]])
    assert not token_logprobs(logits, tokens, 1.0)[1].requires_grad
    _, entropy = token_logprobs(logits, tokens, 1.0, entropy_gradient=True)
    entropy.sum().backward()
    p = logits.detach()[0, 0].softmax(-1)
    want = -p * (p.log() - (p * p.log()).sum())
    torch.testing.assert_close(logits.grad[0, 0], want, rtol=1e-5, atol=1e-7)


def test_log_prob_of_the_wrong_token_is_seen():
    """A planted defect: the token at the position instead of the next one."""
    torch.manual_seed(0)
    logits = torch.randn(1, 5, 7)
    tokens = torch.tensor([[0, 1, 2, 3, 4]])
    logp, _ = token_logprobs(logits, tokens, 1.0)
    shifted, _ = token_logprobs(logits, tokens.roll(1, 1), 1.0)
    want = logits.log_softmax(-1)
    assert logp[0].tolist() == [want[0, j, j + 1].item() for j in range(4)]
    assert not torch.isclose(shifted, logp, atol=1e-3).any()
