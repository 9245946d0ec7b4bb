"""Accuracy with its interval, pass@k, and the samples that are shown."""

import itertools
import json
import math

import pytest

from fp8rl.samples import best_and_worst
from fp8rl.validation import accuracy_metrics, by_prompt, evaluation_metrics, interval, pass_at_k


def test_pass_at_k_is_the_share_of_subsets_with_a_right_one():
    counts = [(4, 0), (4, 1), (4, 3), (4, 4), (6, 2)]
    for k in (1, 2, 3, 4):
        shares = []
        for n, c in counts:
            subsets = list(itertools.combinations([i < c for i in range(n)], k))
            shares.append(sum(map(any, subsets)) / len(subsets))
        assert pass_at_k(counts, k) == pytest.approx(sum(shares) / len(shares))
    with pytest.raises(ValueError, match="pass@5 needs 5"):
        pass_at_k(counts, 5)


def test_samples_are_counted_by_prompt_in_any_order():
    assert by_prompt([7, 3, 7, 3], [True, False, False, False]) == [(2, 1), (2, 0)]
    found = accuracy_metrics([7, 3, 7, 3], [True, False, False, False])
    assert found["accuracy"] == 0.25
    assert found["pass_at_2"] == 0.5
    assert set(found) == {"accuracy", "accuracy_low", "accuracy_high", "pass_at_2"}
    assert "pass_at_2" not in accuracy_metrics([1, 2], [True, False])


def answers(kind, entry, *right):
    """Columns of one prompt's answers."""
    status = ["ok" if one else "wrong" for one in right]
    return {"kind": [kind] * len(right), "status": status, "entry": [json.dumps(entry)] * len(right)}


def table(*parts):
    columns = {key: [v for part in parts for v in part[key]] for key in ("kind", "status", "entry")}
    columns["prompt_id"] = [i // 2 for i, part in enumerate(parts) for _ in part["kind"]]
    return columns


def test_greedy_and_sampled_answers_are_measured_apart():
    first, second = {"question": "a"}, {"question": "b"}
    parts = [answers("greedy", first, True), answers("sampled", first, True, False)]
    parts += [answers("greedy", second, False), answers("sampled", second, False, False)]
    found = evaluation_metrics(table(*parts))
    assert (found["accuracy"], found["greedy_accuracy"], found["pass_at_2"]) == (0.25, 0.5, 0.5)
    assert (found["greedy_accuracy_low"], found["greedy_accuracy_high"]) == (0.0, 1.0)
    assert not [name for name in found if "/" in name]
    only = evaluation_metrics(table(parts[0], parts[0]))
    assert set(only) == {f"greedy_accuracy{end}" for end in ("", "_low", "_high")}


def test_each_source_of_several_is_measured_by_itself():
    first, second = {"source": "openai/gsm8k"}, {"source": "own.jsonl#2"}
    parts = [answers("greedy", first, True), answers("sampled", first, True, True)]
    parts += [answers("greedy", second, False), answers("sampled", second, True, False)]
    found = evaluation_metrics(table(*parts))
    assert found["accuracy"] == 0.75
    assert found["openai_gsm8k/accuracy"] == 1.0
    assert found["own.jsonl_2/accuracy"] == 0.5
    assert found["own.jsonl_2/greedy_accuracy"] == 0.0


def test_the_interval_is_over_prompts_not_over_samples():
    """Samples of a prompt that agree are worth one: sixteen times as many of them change nothing."""
    one = [(1, i % 2) for i in range(100)]
    low, high = interval(one)
    assert low < 0.5 < high
    # The normal approximation of a share of 0.5 over 100.
    assert high - low == pytest.approx(2 * 1.96 * math.sqrt(0.25 / 100), rel=0.1)
    assert interval([(16, 16 * good) for _, good in one]) == (low, high)
    assert interval(one) == (low, high)
    assert interval([(4, 4)] * 10) == (1.0, 1.0)
    wide = interval(one[:20])
    assert wide[1] - wide[0] > high - low


def test_best_and_worst_are_of_different_prompts_and_different_rows():
    table = {"prompt_id": [1, 1, 2, 2, 3], "reward": [1.0, 1.0, 0.5, 0.0, 0.0]}
    assert best_and_worst(table, 2) == ([0, 2], [4, 3])
    assert best_and_worst(table, 9) == ([0, 2, 4], [3, 1])
    same = {"prompt_id": [1], "reward": [1.0]}
    assert best_and_worst(same, 3) == ([0], [])
