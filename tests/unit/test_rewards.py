"""What each reward gives, how they add up, what is refused, and what a run records of them."""

import asyncio
import json
import math
import pickle
import sys
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from fp8rl.files import sha256
from fp8rl.model.tiny import tiny_dims
from fp8rl.preflight import require_runnable
from fp8rl.recipe.load import load_recipe, to_yaml, with_overrides
from fp8rl.recipe.reward import DEFAULT_REWARDS, FormatVerifier, NumericVerifier, TaskVerifier
from fp8rl.recipe.rules import RecipeError, check, warnings
from fp8rl.recipe.schema import Recipe, Task
from fp8rl.reward.functions import function_digests, function_sources
from fp8rl.reward.score import count_statuses, require_rewards, score_all
from fp8rl.reward.verdict import Status, Verdict, tidy
from fp8rl.reward.verifiers import (
    as_reward,
    exact,
    length,
    matches_format,
    math_verify,
    number,
    numeric,
)
from fp8rl.tables import from_parquet, to_parquet
from tasks import evaluate, inputs, reward, rollout
from tasks import step as steps
from tests.folders import make_run

OK, WRONG, UNPARSABLE, ERROR = Status.OK, Status.WRONG, Status.UNPARSABLE, Status.ERROR
ENTRY = json.dumps({"question": "6+6?", "answer": "12"})


def scored(completion, rewards, entry=ENTRY, **task):
    return score_all(Task(rewards=rewards, **task), [completion], [entry])[0]


# --- verifiers


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        ("a b", " a \n b ", True),
        ("a\tb", "a b", True),
        ("ab", "a b", False),
        ("A", "a", False),
        ("1.0", "1", False),
    ],
)
def test_exact(text, answer, right):
    assert exact(text, answer) == Verdict(float(right), OK if right else WRONG)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 12),
        (" 12\n", 12),
        ("+12", 12),
        ("-12", -12),
        ("\u221212", -12),
        ("007", 7),
        ("12.", 12),
        (".5", Fraction(1, 2)),
        ("0.1", Fraction(1, 10)),
        ("1,234,567.25", Fraction(123456725, 100)),
        ("1e3", 1000),
        ("2.5E-1", Fraction(1, 4)),
        ("1/3", Fraction(1, 3)),
        ("-1 / 3", Fraction(-1, 3)),
        ("1,000/0.5", 2000),
        ("50%", Fraction(1, 2)),
        ("12.5 %", Fraction(1, 8)),
        ("1e500", 10**500),
    ],
)
def test_numbers(text, value):
    assert number(text) == value


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "-",
            ".",
            "%",
            "x",
            "12 apples",
            "$12",
            "1 1/2",
            "1/0",
            "1/0.0",
            "1,23",
            "12,34",
            "1 234",
        ),
        *("0x10", "1_000", "inf", "nan", "1e501", "1e99999", "9**9", "--1", "1/-2", "\u0661", "1\x002"),
        "9" * 501,
    ],
)
def test_what_is_no_number(text):
    assert number(text) is None
    assert numeric(text, "1").status is UNPARSABLE
    assert numeric("1", text).status is ERROR


@pytest.mark.parametrize(
    ("text", "answer", "limits", "right"),
    [
        ("0.5", "1/2", {}, True),
        ("0.333", "1/3", {}, False),
        ("0.333", "1/3", {"absolute": 0.001}, True),
        ("0.3", "0.1", {"absolute": 0.2}, True),  # the double 0.2 is a little above 1/5
        ("101", "100", {"relative": 0.0100001}, True),
        ("102", "100", {"relative": 0.01}, False),
        ("-101", "-100", {"relative": 0.02}, True),
        ("1234567891", "1234567890", {}, False),
        ("10000000000000000000001", "10000000000000000000000", {}, False),
        ("50", "50%", {}, False),
        ("1e-400", "0", {"absolute": 1e-300}, True),
        ("1e400", "1e400", {"relative": 1e-9}, True),
    ],
)
def test_numeric(text, answer, limits, right):
    assert numeric(text, answer, **limits) == Verdict(float(right), OK if right else WRONG)


@pytest.mark.parametrize(
    ("chars", "limits", "want"),
    [
        (80, {"max_chars": 100, "buffer_chars": 20}, 0.0),
        (81, {"max_chars": 100, "buffer_chars": 20}, -0.05),
        (90, {"max_chars": 100, "buffer_chars": 20}, -0.5),
        (100, {"max_chars": 100, "buffer_chars": 20}, -1.0),
        (10_000, {"max_chars": 100, "buffer_chars": 20}, -1.0),
        (100, {"max_chars": 100}, 0.0),
        (101, {"max_chars": 100}, -1.0),
        (0, {"max_chars": 1, "buffer_chars": 1}, 0.0),
    ],
)
def test_length(chars, limits, want):
    verdict = length("x" * chars, **limits)
    assert verdict.reward == pytest.approx(want)
    assert verdict.status is (WRONG if want else OK)


def test_format_is_of_all_of_the_completion():
    pattern = r"<think>.*</think>\s*<answer>[0-9]+</answer>"
    assert matches_format("<think>a\nb</think>\n<answer>12</answer>", pattern).status is OK
    assert matches_format(" <think></think><answer>12</answer>", pattern).status is WRONG
    assert matches_format("<think></think><answer>12</answer>\n", pattern).status is WRONG


@pytest.mark.parametrize(
    ("text", "answer", "status"),
    [
        ("The answer is $0.5$.", "\\frac{1}{2}", OK),
        ("so \\boxed{1234}", "1,234", OK),
        ("It is 1,234.", "$1234$", OK),
        ("$1+x$", "x+1", OK),
        ("first 11, then \\boxed{12}, not 13", "12", OK),
        ("13", "12", WRONG),
        ("$\\frac{1}{0}$", "12", WRONG),
        ("50", "50\\%", OK),  # math-verify takes both readings of a percentage
        ("no number", "12", UNPARSABLE),
        ("12", "$$", ERROR),
    ],
)
def test_math_verify(text, answer, status):
    assert math_verify(text, answer).status is status


def test_rewards_are_finite_numbers():
    assert as_reward(True) == as_reward(1) == Verdict(1.0, OK)
    assert as_reward(3) == Verdict(3.0, OK)
    assert as_reward(-0.5) == Verdict(-0.5, WRONG)
    for value in (math.nan, math.inf, -math.inf, -1.1e6):
        assert as_reward(value).status is ERROR
        assert as_reward(value).reward == 0.0


def test_details_are_bounded_text_that_a_table_can_hold():
    assert tidy("a\0b\ud800") == "a\\0b\\ud800"
    assert len(tidy("x" * 10**6)) == 403
    assert Verdict.of_failure(ValueError("\udc80")).detail == "ValueError: \\udc80"


# --- several


def test_rewards_add_up_by_weight_and_the_first_says_what_is_right():
    rewards = [
        {"kind": "numeric", "weight": 2.0},
        {"kind": "exact", "weight": 0.5},
        {"kind": "length", "max_chars": 4, "weight": 0.25},
        {"kind": "length", "max_chars": 1, "weight": 0.0, "name": "terse"},
    ]
    right = scored("12.0", rewards)
    assert right.reward == 2.0
    assert right.status is OK
    assert [part.status for part in right.parts] == [OK, WRONG, OK, WRONG]
    assert [part.reward for part in right.parts] == [1.0, 0.0, 0.0, -1.0]
    assert scored("12", rewards).reward == 2.5
    none = scored("twelve", rewards)
    assert (none.reward, none.status, none.detail) == (-0.25, UNPARSABLE, "no number: twelve")


def test_extract_says_what_is_scored_and_format_and_length_see_all(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def score(question, completion, answer, entry):\n"
        "    return len(completion) / 100 + (question == entry['question']) + (answer == '12')\n"
    )
    rewards = [
        {"kind": "exact"},
        {"kind": "numeric"},
        {"kind": "math_verify"},
        {"kind": "format", "pattern": "It is [0-9]+[.]"},
        {"kind": "length", "max_chars": 8},
        {"kind": "function", "function": "mine:score"},
    ]
    task = {"extract": "last_number", "reward_path": (str(tmp_path),)}
    found = scored("It is 12.", rewards, **task)
    assert [part.status for part in found.parts] == [OK, OK, OK, OK, WRONG, OK]
    assert found.parts[5].reward == pytest.approx(2.09)
    found = scored("none", rewards, **task)
    assert [part.status for part in found.parts] == [*[UNPARSABLE] * 3, WRONG, OK, OK]


def test_a_prompt_without_an_answer_is_an_error_where_one_is_needed():
    rewards = [{"kind": "exact"}, {"kind": "numeric"}, {"kind": "length", "max_chars": 8}]
    found = scored("12", rewards, entry="{}")
    assert [part.status for part in found.parts] == [ERROR, ERROR, OK]
    assert found.detail == "the prompt has no reference answer"


# --- recipes


def recipe(*overrides: str) -> Recipe:
    return with_overrides(Recipe(), [f"task.{override}" for override in overrides])


def problems(*overrides: str) -> str:
    given = recipe(*overrides)
    return "\n".join(map(str, check(given, tiny_dims(given.model.tiny))))


def test_a_recipe_that_says_nothing_is_the_recipe_it_was():
    plain = Recipe()
    assert plain.task.rewards == DEFAULT_REWARDS == (TaskVerifier(),)
    # What is as by default is not among what runs are told apart by: those of before can be resumed.
    same = recipe("rewards=[{kind: task, weight: 1}]", "reward_limits.timeout_s=5")
    assert same.step_digest() == plain.step_digest()
    other = recipe("rewards=[{kind: exact}]")
    assert other.step_digest() != plain.step_digest()
    assert other.warm_start_digest() == plain.warm_start_digest()
    assert recipe("rewards=[{kind: exact, weight: 2}]").step_digest() != other.step_digest()
    limits = recipe("rewards=[{kind: exact}]", "reward_limits.timeout_s=1")
    assert limits.step_digest() != other.step_digest()


def test_rewards_are_read_and_written(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text(
        "task:\n  rewards:\n    - {kind: numeric, relative: 1e-3}\n"
        "    - {kind: format, pattern: 'a|b', weight: 0.1}\n"
    )
    given = load_recipe(file).recipe
    assert given.task.rewards == (
        NumericVerifier(relative=1e-3),
        FormatVerifier(pattern="a|b", weight=0.1),
    )
    file.write_text(to_yaml(given))
    assert load_recipe(file).recipe == given


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ("[]", "at least 1 item"),
        ("[{kind: nothing}]", "'task', 'exact', 'numeric', 'math_verify', 'format', 'length', 'func"),
        ("[{weight: 1}]", "kind"),
        ("[{kind: exact, weight: -1}]", "task.rewards.0.exact.weight"),
        ("[{kind: exact, tolerance: 1}]", "task.rewards.0.exact.tolerance"),
        ("[{kind: exact, name: a/b}]", "task.rewards.0.exact.name"),
        ("[{kind: format}]", "task.rewards.0.format.pattern"),
        ("[{kind: format, pattern: '(a'}]", "not a regular expression: missing )"),
        ("[{kind: length}]", "task.rewards.0.length.max_chars"),
        ("[{kind: function, function: mine}]", "task.rewards.0.function.function"),
        ("[{kind: function, function: '../mine:score'}]", "task.rewards.0.function.function"),
        ("[{kind: function, function: '/etc/mine:score'}]", "task.rewards.0.function.function"),
        ("[{kind: function, function: 'mine:score()'}]", "task.rewards.0.function.function"),
        ("[{kind: function, function: 'mine:a.b'}]", "task.rewards.0.function.function"),
    ],
)
def test_bad_values_are_named(rewards, message):
    with pytest.raises((RecipeError, ValidationError)) as error:
        recipe(f"rewards={rewards}")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ("[{kind: exact}, {kind: exact}]", "task.rewards: exact stands there more than once"),
        ("[{kind: exact, name: task}, {kind: task}]", "task stands there more than once"),
        ("[{kind: exact, weight: 0}]", "task.rewards: every weight is 0"),
        (
            "[{kind: exact}, {kind: length, max_chars: 5, buffer_chars: 6}]",
            "task.rewards.1.buffer_chars, task.rewards.1.max_chars: the penalty would begin before",
        ),
        ("[{kind: length, max_chars: 5}]", "task.rewards.0.kind: the first reward says whether"),
        (
            "[{kind: function, function: 'mine:score'}]",
            "task.rewards.0.function, task.reward_path: mine:score is looked for nowhere",
        ),
    ],
)
def test_combinations_that_are_refused(rewards, message):
    assert message in problems(f"rewards={rewards}")


def test_combinations_that_are_not_refused():
    assert not problems("rewards=[{kind: exact}, {kind: exact, name: other, weight: 0}]")
    assert not problems("rewards=[{kind: exact}, {kind: length, max_chars: 5, buffer_chars: 5}]")


def test_keys_without_effect_are_warned_of():
    assert not any("reward" in text for text in warnings(Recipe()))
    limits = ("rewards=[{kind: exact}]", "reward_limits.timeout_s=1")
    found = warnings(recipe("reward_path=[a]", *limits))
    assert any(text.startswith("task.reward_path has no effect") for text in found)
    assert any(text.startswith("task.reward_limits has no effect") for text in found)
    # Only the task says whether its own scorer needs a worker process.
    assert not any("limits" in text for text in warnings(recipe("reward_limits.timeout_s=1")))
    found = warnings(recipe("rewards=[{kind: math_verify}]", "reward_limits.timeout_s=1"))
    assert not any("reward" in text for text in found)


# --- functions

GOOD = "def score(question, completion, answer, entry):\n    return 1.0\n"


def with_function(folder, name="mine:score"):
    return Task(
        rewards=[{"kind": "task"}, {"kind": "function", "function": name}], reward_path=[str(folder)]
    )


def test_functions_are_found_below_the_allowed_folders_only(tmp_path):
    allowed, outside = tmp_path / "allowed", tmp_path / "outside"
    (allowed / "package").mkdir(parents=True)
    outside.mkdir()
    (allowed / "mine.py").write_text(GOOD)
    (allowed / "package" / "mine.py").write_text(GOOD + "\n")
    (outside / "theirs.py").write_text(GOOD)
    (allowed / "link.py").symlink_to(outside / "theirs.py")
    (allowed / "folder_link").symlink_to(outside)
    digests = function_digests(with_function(allowed))
    assert digests == {"mine:score": sha256(GOOD.encode())}
    digests = function_digests(with_function(allowed, "package.mine:score"))
    assert digests == {"package.mine:score": sha256((GOOD + "\n").encode())}
    for name in ("theirs:score", "os:system", "os.path:join", "fp8rl.files:sha256"):
        with pytest.raises(RecipeError) as error:
            function_sources(with_function(allowed, name))
        assert f"task.rewards.1.function: no module {name.partition(':')[0]} in" in str(error.value)
        assert str(allowed) in str(error.value)
    for name in ("link:score", "folder_link.theirs:score"):
        with pytest.raises(RecipeError) as error:
            function_sources(with_function(allowed, name))
        assert "task.rewards.1.function" in str(error.value)
        assert f"{outside / 'theirs.py'}, which lies outside of {allowed}" in str(error.value)
    with pytest.raises(RecipeError, match=r"task\.reward_path: no folder .*nowhere"):
        function_sources(with_function(tmp_path / "nowhere"))


def test_looking_for_functions_runs_none_of_them(tmp_path):
    mark = tmp_path / "ran"
    (tmp_path / "mine.py").write_text(f"open({str(mark)!r}, 'w')\n{GOOD}")
    function_digests(with_function(tmp_path))
    assert not mark.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("def scor(): pass\ndef b(): pass\n", "mine.py has no function score; it has b, scor"),
        ("score = 3\n", "mine.py has no function score; it has none"),
        ("def score(completion, answer): pass\n", "mine:score does not take question, entry. Make it"),
        (
            "def score(question, completion, answer, entry, model): pass\n",
            "mine:score asks for model, which it is not given. Make it: def score(question: str",
        ),
        (
            "def score(text, /, question, completion, answer, entry): pass\n",
            "mine:score asks for text, which it is not given",
        ),
        ("async def score(question, completion, answer, entry): pass\n", "is an async function"),
        ("import no_such_module_of_anyone\n", "mine.py cannot be imported: ModuleNotFoundError"),
        ("raise SystemExit(3)\n", "mine.py cannot be imported: SystemExit: 3"),
        ("def score(:\n", "mine.py cannot be imported: SyntaxError"),
    ],
)
def test_functions_that_cannot_be_called_are_refused_before_the_run(tmp_path, content, message):
    (tmp_path / "mine.py").write_text(content)
    with pytest.raises(RecipeError) as error:
        require_rewards(with_function(tmp_path), {"t": {"question": "q", "answer": "12"}})
    assert str(error.value).startswith("task.rewards.1.function: ")
    assert message in str(error.value)


def test_the_function_of_the_documentation_can_be_called(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
    (tmp_path / "mine.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    task = with_function(tmp_path)
    require_rewards(task, {"t": {"question": "q", "answer": "12"}})
    found = score_all(task, ["I add.\n12", "I add.\n13", "12"], [ENTRY] * 3)
    assert [score.parts[1].reward for score in found] == [1.0, 0.2, 0.0]


def test_a_module_that_hides_another_is_refused(tmp_path):
    (tmp_path / "json.py").write_text(GOOD)
    with pytest.raises(
        RecipeError, match=r"rewards\.1\.function: a module named json is there already"
    ):
        require_rewards(with_function(tmp_path, "json:score"), {"t": {"question": "q", "answer": "12"}})


def test_functions_of_one_module_that_imports_its_neighbour(tmp_path):
    (tmp_path / "helpers.py").write_text("FULL = 1.0\n")
    (tmp_path / "mine.py").write_text(
        "from helpers import FULL\n"
        "def score(question, completion, answer, entry):\n    return FULL\n"
        "def other(*, completion, **rest):\n    return FULL / 4\n"
    )
    rewards = [
        {"kind": "function", "function": "mine:score"},
        {"kind": "function", "function": "mine:other", "name": "other"},
    ]
    task = Task(rewards=rewards, reward_path=[str(tmp_path)])
    require_rewards(task, {"t": {"question": "q", "answer": "12"}})
    assert score_all(task, ["x"], [ENTRY])[0].reward == 1.25


def test_answers_that_a_verifier_cannot_read_are_refused_before_the_run():
    entry = {"question": "q", "answer": "abc"}
    with pytest.raises(RecipeError) as error:
        require_rewards(
            Task(rewards=[{"kind": "task"}, {"kind": "numeric"}]), {"reverse_digits": entry}
        )
    want = (
        "task.rewards.1: numeric finds reverse_digits's own answer 'abc' error (the reference answer is"
    )
    assert want in str(error.value)
    require_rewards(Task(rewards=[{"kind": "exact"}]), {"t": entry})
    require_rewards(
        Task(rewards=[{"kind": "numeric"}, {"kind": "length", "max_chars": 1}]), {"t": {"answer": "1"}}
    )


def test_the_preflight_asks(tmp_path):
    require_runnable(with_overrides(Recipe(), ["task.rewards=[{kind: math_verify}]"]))
    overrides = ["task.rewards=[{kind: function, function: 'mine:score'}]"]
    with pytest.raises(RecipeError, match=r"no module mine in task\.reward_path"):
        require_runnable(with_overrides(Recipe(), [*overrides, f"task.reward_path=['{tmp_path}']"]))


# --- what a run records


def test_columns_and_metrics_of_the_default_are_those_they_always_were():
    rows = [((1.0, "ok", ""),) * 2, ((0.0, "error", "why"),) * 2]
    shares = {"ok": 0.5, "wrong": 0.0, "unparsable": 0.0, "error": 0.5}
    for task in (Task(), Task(rewards=(TaskVerifier(isolate=False),))):
        columns = reward.score_columns(task, rows)
        assert columns == {"reward": [1.0, 0.0], "status": ["ok", "error"], "detail": ["", "why"]}
        assert reward.reward_metrics(task, columns) == shares
    # One whose scorer runs in a worker process can time out.
    timeouts = shares | {"timeout": 0.0}
    assert reward.reward_metrics(Task(name="countdown"), columns) == timeouts
    assert list(count_statuses([])) == ["ok", "wrong", "unparsable", "error"]
    assert count_statuses(["timeout"], timeouts=True)["timeout"] == 1


def test_each_of_several_rewards_has_its_columns_and_metrics():
    task = Task(rewards=[{"kind": "math_verify"}, {"kind": "length", "max_chars": 3, "weight": 0.5}])
    rows = [
        ((1.0, "ok", ""), (1.0, "ok", ""), (0.0, "ok", "")),
        ((-0.5, "timeout", "late"), (0.0, "timeout", "late"), (-1.0, "wrong", "")),
    ]
    columns = reward.score_columns(task, rows)
    assert columns["reward"] == [1.0, -0.5]
    assert columns["status"] == columns["status_math_verify"] == ["ok", "timeout"]
    assert columns["detail_math_verify"] == ["", "late"]
    assert columns["reward_length"] == [0.0, -1.0]
    metrics = reward.reward_metrics(task, columns)
    assert metrics["ok"] == metrics["timeout"] == 0.5
    assert metrics["math_verify_mean"] == 0.5
    assert metrics["math_verify_timeout"] == 0.5
    assert metrics["length_mean"] == -0.5
    assert metrics["length_wrong"] == 0.5
    assert "length_timeout" not in metrics


def test_samples_are_spread_over_the_cpus_and_come_back_in_order(monkeypatch, tmp_path):
    sizes = []

    class Ray:
        @staticmethod
        def cluster_resources():
            return {"CPU": 2.0}

        @staticmethod
        def remote(function):
            def call(task, texts, entries, functions):
                sizes.append(len(texts))
                task, functions = pickle.loads(pickle.dumps((task, functions)))
                return function(task, texts, entries, functions)

            return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=call))

    async def wait(value):
        return value

    monkeypatch.setitem(sys.modules, "ray", Ray)
    monkeypatch.setattr(reward, "wait", wait)
    (tmp_path / "mine.py").write_text(
        "def score(question, completion, answer, entry):\n    return len(completion)\n"
    )
    rewards = [{"kind": "numeric"}, {"kind": "function", "function": "mine:score", "weight": 0.5}]
    task = Task(rewards=rewards, reward_path=[str(tmp_path)])
    columns = asyncio.run(reward.score(task, ["12", "x", "12.0", "", "13"], [ENTRY] * 5))
    assert sizes == [3, 2]
    assert columns["reward"] == [2.0, 0.5, 3.0, 0.0, 1.0]
    assert columns["status"] == ["ok", "unparsable", "ok", "unparsable", "wrong"]
    assert columns["reward_function"] == [2.0, 1.0, 4.0, 0.0, 2.0]
    assert from_parquet(to_parquet(columns)) == columns


def test_the_step_fails_where_the_first_verifier_fails_on_every_sample():
    ok, error, late = (1.0, "ok", ""), (0.0, "error", "why"), (0.0, "timeout", "late")
    task = Task(rewards=[{"kind": "math_verify"}, {"kind": "exact"}])
    for row in (error, late):
        with pytest.raises(RuntimeError, match=f"of math_verify failed on every .* first: {row[2]}"):
            reward.score_columns(task, [(row, row, ok), (error, error, ok)])
    with pytest.raises(RuntimeError, match="the verifier of reverse_digits failed on every sample"):
        reward.score_columns(Task(), [(error, error)])
    reward.score_columns(task, [(error, error, ok), (ok, ok, error)])
    reward.score_columns(task, [(ok, ok, error), (ok, ok, late)])


def test_a_changed_function_is_noticed_when_a_run_goes_on(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(GOOD)
    given = (
        "task.rewards=[{kind: function, function: 'mine:score'}]",
        f"task.reward_path=['{tmp_path}']",
    )
    run = make_run(tmp_path / "runs", overrides=given, until=(2, "iteration"))
    plain = make_run(tmp_path / "runs", "plain", until=(2, "iteration"))

    def context(run, **changes):
        recipe = run.recipe.model_copy(update=changes)
        return SimpleNamespace(recipe=recipe, journal=run.journal, origin=0, run=run.name)

    before = reward._inputs(context(run), 1)
    assert before["functions"] == {"mine:score": sha256(GOOD.encode())}
    assert "functions" in evaluate._inputs(context(run), 2)
    assert "functions" not in rollout._inputs(context(run), 1)
    draws = run.recipe.rollout.model_copy(update={"max_draws": 2})
    assert "functions" in rollout._inputs(context(run, rollout=draws), 1)
    assert "functions" not in rollout._chunk_inputs(context(run, rollout=draws), 1)
    assert inputs.functions_inputs(context(plain)) == {}
    assert reward._inputs(context(plain), 1).keys() == {"rollouts"}

    file.write_text(GOOD + "# changed\n")
    record = SimpleNamespace(inputs=before)
    journal = SimpleNamespace(whole=lambda iteration, name: record)
    now = SimpleNamespace(journal=journal, run="r")
    assert steps._committed(now, 1, "reward", before) is record
    with pytest.raises(Exception, match=r"\(functions\)"):
        steps._committed(now, 1, "reward", reward._inputs(context(run), 1))
    file.unlink()
    with pytest.raises(RecipeError, match=r"task\.rewards\.0\.function: no module mine"):
        reward._inputs(context(run), 1)
