"""Prompts from files, hub data sets and mixtures: look-alikes, hostile files, counts that add up."""

import hashlib
import json
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from flows.cli_runs import _other_files
from flows.opening import open_run
from fp8rl.context import RunContext
from fp8rl.data import records
from fp8rl.data.columns import SHIPPED
from fp8rl.data.cursor import draws_allowed, train_prompts
from fp8rl.data.draw import Length, draw_prompts, is_usable
from fp8rl.data.fingerprint import left_out, read_digests, require_unchanged, source_digests
from fp8rl.data.prepare import prepare_data, read_prompts
from fp8rl.device import settled
from fp8rl.files import file_sha256
from fp8rl.journal import StepRecord
from fp8rl.model.tiny import write_tiny_model
from fp8rl.preflight import require_runnable
from fp8rl.recipe.data import Columns, Source, TooLong, shares
from fp8rl.recipe.load import load_recipe, with_overrides
from fp8rl.recipe.rules import RecipeError
from fp8rl.recipe.schema import Recipe, Rollout, Task, TinyModel
from fp8rl.reward.score import Status, score_all
from tasks import prepare
from tests.folders import held, make_run, replace_file


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sums(count, start=0):
    return [{"question": f"{n} + 1?", "answer": n + 1} for n in range(start, start + count)]


def task_of(*sources, train=None, val=1, **more):
    given = [s if isinstance(s, Source) else Source(path=str(s)) for s in sources]
    return Task(sources=tuple(given), train_prompts=train, val_prompts=val, **more)


def drawn(*sources, **more):
    """The one source's report, and all rows by their question."""
    prompts = draw_prompts(task_of(*sources, **more), seed=0)
    for one in prompts.sources:
        assert_adds_up(one)
    return prompts.sources[0], {r["question"]: r for r in [*prompts.train, *prompts.val]}


def assert_adds_up(report):
    left = sum(told["rows"] for told in report["dropped"].values())
    assert report["rows"] == left + report["not_used"] + report["train"] + report["val"]


def reasons(report):
    return {reason: told["rows"] for reason, told in report["dropped"].items()}


# --- the shorthand


@pytest.mark.parametrize("task", [Task(), Task(name="reverse_digits")])
def test_the_default_recipe_has_the_prompts_it_always_had(tmp_path, task):
    """Digests of what prepare_data wrote before there were sources."""
    write_tiny_model(TinyModel(), tmp_path)
    prepare_data(Recipe(task=task), tmp_path, tmp_path / "data")
    digests = {}
    for split in ("train", "val"):
        columns = read_prompts(tmp_path / "data", split)
        digests[split] = hashlib.sha256(json.dumps(columns, sort_keys=True).encode()).hexdigest()
    assert digests == {
        "train": "c5c9e8e206d7877846097fd5a1cd3e39eb8cfb795abdac252f181ed29d6f6c8a",
        "val": "62b723dbccd13cc73dd0bd9ca8c5b1515015cf14d7951be7a3513beecfcd3018",
    }
    assert [p.name for p in sorted((tmp_path / "data").iterdir())] == ["train.parquet", "val.parquet"]


def test_a_generator_source_draws_what_the_shorthand_does():
    options = {"min_terms": 2, "max_terms": 2}
    short = draw_prompts(Task(name="chain_sum", options=options, train_prompts=20, val_prompts=5), 3)
    long = draw_prompts(task_of(Source(name="chain_sum", options=options), train=20, val=5), 3)
    for split in ("train", "val"):
        ours, theirs = getattr(long, split), getattr(short, split)
        assert [r["question"] for r in ours] == [r["question"] for r in theirs]
        without = [{k: v for k, v in json.loads(r["entry"]).items() if k != "source"} for r in ours]
        assert without == [json.loads(r["entry"]) for r in theirs]
        assert {json.loads(r["entry"])["source"] for r in ours} == {"chain_sum"}


# --- shipped columns, on small files that look like the sets

TURN = {"role": "user", "content": "Solve the problem step by step. What is 17 * 2?"}
LOOK_ALIKES = {
    "openai/gsm8k": (
        {"question": "Sheep?", "answer": "She has <<600+634=1,234>>.\n#### 1,234"},
        ("Sheep?", "1234", None),
    ),
    "nvidia/OpenMathInstruct-2": (
        {
            "problem": "Half of 1?",
            "generated_solution": "It is \\boxed{\\frac{1}{2}}.",
            "expected_answer": "\\frac{1}{2}",
            "problem_source": "math",
        },
        ("Half of 1?", "\\frac{1}{2}", None),
    ),
    "BytedTsinghua-SIA/DAPO-Math-17k": (
        {
            "data_source": "math_dapo",
            "prompt": [TURN],
            "ability": "MATH",
            "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
        },
        (TURN["content"], "34", None),
    ),
    "BytedTsinghua-SIA/AIME-2024": (
        {
            "prompt": [{"role": "system", "content": "Be brief."}, TURN],
            "reward_model": {"ground_truth": "34"},
        },
        (TURN["content"], "34", "Be brief."),
    ),
    "HuggingFaceH4/aime_2024": (
        {"id": 60, "problem": "Every morning?", "solution": "So 204.", "answer": "204", "year": "2024"},
        ("Every morning?", "204", None),
    ),
}


def written_as(kind, path, rows):
    table = pa.Table.from_pylist(rows)
    if kind == "parquet":
        pq.write_table(table, path)
    elif kind == "arrow":  # the file format
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    elif kind == "stream":  # as `datasets` writes
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)
    elif kind == "json":
        path.write_text(json.dumps(rows, indent=1))
    else:
        jsonl(path, rows)
    return path


def test_every_shipped_set_has_a_look_alike():
    assert set(LOOK_ALIKES) == set(SHIPPED)


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "arrow", "stream"])
@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alikes_are_read_with_the_shipped_columns(tmp_path, name, kind):
    row, (question, answer, system) = LOOK_ALIKES[name]
    field = "problem" if "problem" in row else "question"
    if "prompt" in row:
        turns = [*row["prompt"][:-1], {**TURN, "content": "Another?"}]
        another = {**row, "prompt": turns}
    else:
        another = {**row, field: "Another?"}
    suffix = "arrow" if kind == "stream" else kind
    path = written_as(kind, tmp_path / f"copy.{suffix}", [row, row, another])
    report, rows = drawn(Source(path=str(path), columns_of=name))
    assert reasons(report) == {"repeated question": 1}
    assert report["dropped"]["repeated question"]["first"] == f"{path}, row 2"
    entry = {"question": question, "answer": answer, "source": f"copy.{suffix}"}
    assert json.loads(rows[question]["entry"]) == entry
    assert (rows[question]["answer"], rows[question]["system"]) == (answer, system)
    assert report["files"] == {str(path): file_sha256(path)}


CACHED = "a" * 40


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """GSM8K's look-alike in a cache of the hub, as `datasets` leaves it."""
    folder = tmp_path / "cache" / "openai___gsm8k" / "main" / "0.0.0" / CACHED
    folder.mkdir(parents=True)
    splits = datasets.splits.SplitDict()
    for split, first in (("train", 0), ("test", 10)):
        rows = [{"question": f"{n}?", "answer": f"So.\n#### {n}"} for n in range(first, first + 4)]
        table = written_as("stream", folder / f"gsm8k-{split}.arrow", rows)
        assert table.is_file()
        splits[split] = datasets.SplitInfo(split, num_examples=4, dataset_name="gsm8k")
    text = datasets.Value("string")
    datasets.DatasetInfo(
        features=datasets.Features({"question": text, "answer": text}),
        builder_name="gsm8k",
        dataset_name="gsm8k",
        config_name="main",
        version="0.0.0",
        splits=splits,
    ).write_to_directory(str(folder))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def test_a_hub_data_set_is_read_from_the_cache(hub_cache):
    source = Source(hub="openai/gsm8k")
    task = Task(sources=(source,), val={"split": "test"}, train_prompts=None, val_prompts=None)
    prompts = draw_prompts(task, 0)
    assert sorted(row["answer"] for row in prompts.train) == ["0", "1", "2", "3"]
    assert sorted(row["answer"] for row in prompts.val) == ["10", "11", "12", "13"]
    labels = [json.loads(rows[0]["entry"])["source"] for rows in (prompts.train, prompts.val)]
    assert labels == ["openai/gsm8k", "openai/gsm8k#2"]
    assert prompts.sources[0]["hub"]["rows"] == 4
    assert prompts.sources[0]["hub"]["commit"] == CACHED
    verdict = score_all(task, ["10"], [next(r for r in prompts.val if r["answer"] == "10")["entry"]])[0]
    assert verdict.status is Status.OK


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Source(hub="openai/gsm8k", split="dev"), "split dev.*could not be loaded.*[Uu]nknown split"),
        (Source(hub="openai/gsm8k", config="socratic"), "socratic, split train.*HF_HUB_OFFLINE is set"),
        (Source(hub="nobody/nothing"), "HF_HUB_OFFLINE is set.*columns_of: nobody/nothing"),
    ],
)
def test_a_hub_data_set_that_is_not_in_the_cache_says_what_to_do(hub_cache, source, message):
    with pytest.raises(RecipeError, match=rf"(?s)task\.sources\[0\]\.hub: .*{message}"):
        draw_prompts(task_of(source), 0)


def test_a_revision_is_the_commit_that_is_read_or_an_error(hub_cache, monkeypatch):
    def read(revision):
        return draw_prompts(task_of(Source(hub="openai/gsm8k", revision=revision)), 0).sources[0]

    assert read(CACHED)["hub"]["commit"] == CACHED
    # Without the hub `datasets` takes what is in the cache, whatever commit it is asked for.
    key = r"task\.sources\[0\]\.revision: "
    with pytest.raises(RecipeError, match=f"{key}.* of commit {'b' * 40}, and .* of commit {CACHED}"):
        read("b" * 40)
    # What a name means only the hub can say.
    with pytest.raises(RecipeError, match=f"{key}which commit 'v1' of openai/gsm8k is.*40 digits"):
        read("v1")

    asked = []

    def load_dataset(name, config, *, split, revision):
        asked.append((name, config, split, revision))
        return cached(name, config, split=split, revision=revision)

    cached = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    read(CACHED)
    assert asked == [("openai/gsm8k", "main", "train", CACHED)]


def test_a_folder_does_not_stand_in_for_a_hub_data_set(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "openai" / "gsm8k").mkdir(parents=True)
    with pytest.raises(
        RecipeError, match=r"is a folder or file here. Name it as task.sources\[0\].path"
    ):
        draw_prompts(task_of(Source(hub="openai/gsm8k")), 0)


# --- own files


def test_own_columns_ids_and_system_turns(tmp_path):
    rows = [
        {"q": "1+1", "meta": {"a": "so ANSWER: 2"}, "uid": 7, "s": "Count."},
        {"q": "2+2", "meta": {"a": "ANSWER: x ANSWER: 4 "}, "uid": "8", "s": None},
        {"q": "3+3", "meta": {"a": 6}, "uid": 9},
    ]
    columns = Columns(question="q", answer="meta.a", id="uid", system="s", answer_after="ANSWER:")
    path = jsonl(tmp_path / "own.jsonl", rows)
    report, found = drawn(Source(path=str(path), columns=columns), train=1, chat=True)
    assert {q: (r["answer"], r["id"], r["system"]) for q, r in found.items()} == {
        "1+1": ("2", "7", "Count."),
        "2+2": ("4", "8", None),
    }
    assert json.loads(found["2+2"]["entry"])["id"] == "8"
    assert reasons(report) == {"no ANSWER: in the answer": 1}


def test_numbers_are_answers_as_they_are_written(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"question": f"{a}?", "answer": a} for a in (1, -2.5, "3e2")])
    _, found = drawn(path)
    assert sorted(row["answer"] for row in found.values()) == ["-2.5", "1", "3e2"]


def test_a_folder_is_read_in_order_of_names_and_what_is_no_data_is_left(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    jsonl(folder / "b.jsonl", sums(3))
    written_as("parquet", folder / "a.parquet", sums(2))
    (folder / "README.md").write_text("about")
    (folder / ".hidden.jsonl").write_text("{")
    (folder / "more.jsonl").mkdir()
    report, found = drawn(folder)
    assert list(report["files"]) == [str(folder / "a.parquet"), str(folder / "b.jsonl")]
    assert report["dropped"]["repeated question"]["first"] == f"{folder / 'b.jsonl'}, row 1"
    assert len(found) == 3


def test_files_are_drawn_in_an_order_of_the_seed_and_no_question_is_in_both_splits(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", sums(50))
    task = task_of(path, train=30, val=10)
    one, again, other = draw_prompts(task, 1), draw_prompts(task, 1), draw_prompts(task, 2)
    assert one == again
    assert [r["question"] for r in one.train] != [r["question"] for r in other.train]
    questions = [r["question"] for r in [*one.train, *one.val]]
    assert len(set(questions)) == 40
    assert one.sources[0]["not_used"] == 10


def test_a_fraction_is_held_out_also_where_validation_takes_less(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", sums(40))
    every = draw_prompts(
        Task(
            sources=(Source(path=str(path)),),
            train_prompts=None,
            val_prompts=None,
            val={"fraction": 0.25},
        ),
        0,
    )
    assert (len(every.train), len(every.val)) == (30, 10)
    some = draw_prompts(
        Task(
            sources=(Source(path=str(path)),), train_prompts=None, val_prompts=4, val={"fraction": 0.25}
        ),
        0,
    )
    assert {r["question"] for r in some.train} == {r["question"] for r in every.train}
    assert some.val == every.val[:4]
    assert some.sources[0]["not_used"] == 6


def test_validation_of_its_own_takes_its_questions_out_of_training(tmp_path):
    train, val = jsonl(tmp_path / "t.jsonl", sums(10)), jsonl(tmp_path / "v.jsonl", sums(5, start=8))
    task = Task(
        sources=(Source(path=str(train)),),
        val={"sources": [{"path": str(val)}]},
        train_prompts=None,
        val_prompts=None,
    )
    prompts = draw_prompts(task, 0)
    assert (len(prompts.train), len(prompts.val)) == (8, 5)
    assert reasons(prompts.sources[0]) == {"questions that are validation prompts": 2}
    for report in prompts.sources:
        assert_adds_up(report)
    assert json.loads(prompts.val[0]["entry"])["source"] == "v.jsonl"


def test_a_mixture_has_its_shares_and_each_entry_its_scorer(tmp_path):
    path = jsonl(
        tmp_path / "own.jsonl", [{"question": f"say {n}", "answer": f"w{n}"} for n in range(40)]
    )
    sources = (
        Source(name="chain_sum", options={"min_terms": 2, "max_terms": 2}, weight=2),
        Source(path=str(path)),
        Source(name="chain_sum", options={"min_terms": 3, "max_terms": 3}, weight=0.5),
    )
    task = task_of(*sources, train=35, val=7)
    prompts = draw_prompts(task, 0)
    assert [report["train"] for report in prompts.sources] == [20, 10, 5]
    assert [report["val"] for report in prompts.sources] == [4, 2, 1]
    labels = {json.loads(row["entry"])["source"] for row in prompts.train}
    assert labels == {"chain_sum", "own.jsonl", "chain_sum#2"}
    entries = [row["entry"] for row in prompts.train]
    assert {v.status for v in score_all(task, [r["answer"] for r in prompts.train], entries)} == {
        Status.OK
    }
    assert Status.OK not in {v.status for v in score_all(task, ["no such"] * 35, entries)}
    lost = score_all(task, ["1"], ['{"question": "", "answer": "1", "source": "x"}'])[0]
    assert lost.status is Status.ERROR


def test_any_generator_of_reasoning_gym_is_a_source():
    task = task_of(Source(name="gsm_symbolic"), Source(name="spell_backward"), train=8, val=4)
    prompts = draw_prompts(task, 0)
    assert [(report["train"], report["val"]) for report in prompts.sources] == [(4, 2), (4, 2)]
    rows = [*prompts.train, *prompts.val]
    verdicts = score_all(task, [r["answer"] for r in rows], [r["entry"] for r in rows])
    assert {verdict.status for verdict in verdicts} == {Status.OK}


def test_a_question_of_two_sources_is_asked_once(tmp_path):
    one, two = jsonl(tmp_path / "a.jsonl", sums(6)), jsonl(tmp_path / "b.jsonl", sums(6, start=2))
    prompts = draw_prompts(task_of(one, two, val=2), 0)
    questions = [row["question"] for row in [*prompts.train, *prompts.val]]
    assert len(set(questions)) == len(questions) == 8
    for report in prompts.sources:
        assert_adds_up(report)
    left = [reasons(report) for report in prompts.sources]
    assert sum(sum(told.values()) for told in left) == 4


def test_shares_are_whole_and_add_up():
    assert shares(10, [1, 1, 1]) == [4, 3, 3]
    assert shares(7, [2, 1, 0.5]) == [4, 2, 1]
    assert shares(3, [1e-9, 1.0]) == [0, 3]


def test_answers_that_extraction_would_lose_are_left_out(tmp_path):
    rows = [
        {"question": f"{n}?", "answer": a} for n, a in enumerate(["12", "1,234", "\\frac{1}{2}", "x"])
    ]
    path = jsonl(tmp_path / "a.jsonl", rows)
    task = task_of(path, extract="last_number")
    prompts = draw_prompts(task, 0)
    assert reasons(prompts.sources[0]) == {"answers that task.extract does not leave as they are": 2}
    entry = next(r for r in [*prompts.train, *prompts.val] if r["answer"] == "1,234")["entry"]
    assert [v.reward for v in score_all(task, ["It is 1234.", "It is 1,235."], [entry] * 2)] == [
        1.0,
        0.0,
    ]
    assert is_usable(Task(), " anything ")
    path = jsonl(tmp_path / "b.jsonl", [{"question": "a?", "answer": "b"}])
    with pytest.raises(RecipeError, match=r"none of the 1 rows of b.jsonl can be used: 1 answers that"):
        draw_prompts(task_of(path, extract="last_number"), 0)


WITHOUT_EXTRACT = (
    {"kind": "format", "pattern": ".*"},
    {"kind": "length", "max_chars": 9},
    {"kind": "function", "function": "mine:score"},
)


@pytest.mark.parametrize("kind", ["task", "exact", "numeric", "math_verify", None])
def test_answers_are_left_out_only_for_rewards_that_see_the_extracted_text(tmp_path, kind):
    rows = [{"question": f"{n}?", "answer": a} for n, a in enumerate(["12", "7", "\\frac{1}{2}", "x"])]
    path = jsonl(tmp_path / "a.jsonl", rows)
    rewards = WITHOUT_EXTRACT if kind is None else (*WITHOUT_EXTRACT, {"kind": kind})
    prompts = draw_prompts(task_of(path, extract="last_number", rewards=rewards), 0)
    left = {} if kind is None else {"answers that task.extract does not leave as they are": 2}
    assert reasons(prompts.sources[0]) == left
    assert len(prompts.train) + len(prompts.val) == (4 if kind is None else 2)


def test_a_generator_is_refused_only_for_rewards_that_see_the_extracted_text():
    task = {"name": "syllogism", "extract": "last_number", "train_prompts": 2, "val_prompts": 1}
    draw_prompts(Task(**task, rewards=WITHOUT_EXTRACT), 0)
    with pytest.raises(RecipeError, match=r"task\.extract: last_number makes None of syllogism's own"):
        draw_prompts(Task(**task), 0)


# --- rows that are left out and counted


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"question": null, "answer": "1"}', "no question"),
        ('{"question": "a?", "answer": null}', "no answer"),
        ('{"question": "a?"}', "no answer"),
        ('{"question": "", "answer": "1"}', "empty question"),
        ('{"question": "a?", "answer": " \\n"}', "empty answer"),
        ('{"question": "a\\u0000b", "answer": "1"}', "NUL in the question"),
        ('{"question": "a?", "answer": "\\u0000"}', "NUL in the answer"),
        ('{"question": "\\ud800", "answer": "1"}', "no valid Unicode in the question"),
        ('{"question": "1 + 1?", "answer": 2}', "repeated question"),
        ('{"question": "1 + 1?", "answer": 3}', "repeated question, with another answer"),
    ],
)
def test_rows_left_out_are_counted_with_the_first_of_them(tmp_path, line, reason):
    path = jsonl(tmp_path / "a.jsonl", sums(3))
    path.write_text(path.read_text() + f"\n{line}\n{line}\n")
    report, found = drawn(path)
    assert report["dropped"] == {reason: {"rows": 2, "first": f"{path}, row 5"}}
    assert len(found) == 3
    assert left_out({"sources": [report]}) == [
        f"a.jsonl: left out of 5 rows: 2 {reason} (first: {path}, row 5)"
    ]


# --- files that are refused


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"question": "a?", "answer": "1"', "broken JSON"),
        (b'{"question": "a?", "answer": "\xff"}', r"byte 31 \(0xff\) is no UTF-8"),
        (b'{"question": "a\x00?", "answer": "1"}', "broken JSON: Invalid control character"),
        (b"\x00\x00\x00", "broken JSON"),
        (b'["a?", "1"]', "a row is a JSON object, not list"),
        (b"null", "a row is a JSON object, not NoneType"),
        (b'{"question": "a?", "answer": "1", "answer": "2"}', "the key 'answer' stands there twice"),
        (b'{"question": ["a?"], "answer": "1"}', "column 'question': the roles of its turns"),
        (b'{"question": [], "answer": "1"}', "column 'question': the roles of its turns"),
        (
            b'{"question": true, "answer": "1"}',
            "column 'question': text or a number is needed, not bool",
        ),
        (
            b'{"question": "a?", "answer": [1]}',
            r"column 'answer': text or a number is needed, not list",
        ),
        (b'{"question": "a?", "answer": NaN}', "text or a number is needed, not float 'nan'"),
        (b'{"question": "a?", "answer": 1e999}', "text or a number is needed, not float 'inf'"),
        (b'{"question": "a?", "answer": ' + b"9" * 5000 + b"}", "broken JSON: Exceeds the limit"),
        (b"[" * 10**6, "nested too deeply"),
    ],
)
def test_a_broken_line_names_file_row_and_key(tmp_path, line, message):
    path = jsonl(tmp_path / "a.jsonl", sums(6))
    path.write_bytes(path.read_bytes() + line + b"\n" + b'{"question": "z", "answer": 1}\n')
    with pytest.raises(RecipeError, match=rf"task\.sources\[0\]\..*{path}, row 7[,:].*{message}"):
        draw_prompts(task_of(path), 0)


def test_a_line_that_is_no_row_but_a_whole_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "MAX_LINE", 2**20)
    path = jsonl(tmp_path / "a.jsonl", [*sums(3), {"question": "x" * 2**20, "answer": "1"}])
    with pytest.raises(RecipeError, match=r"row 4: the line is longer than 1 MiB"):
        draw_prompts(task_of(path), 0)
    monkeypatch.setattr(records, "MAX_JSON", 2**20)
    path = written_as("json", tmp_path / "a.json", [{"question": "x" * 2**21, "answer": "1"}])
    with pytest.raises(RecipeError, match=r"a.json is one JSON array of 2 MiB.*write it as .jsonl"):
        draw_prompts(task_of(path), 0)


def bad_utf8(path):
    raw = pa.array([b"fine?", b"\xff\xfe", b"ok?"], pa.binary())
    texts = pa.StringArray.from_buffers(3, *raw.buffers()[1:])
    pq.write_table(pa.table({"question": texts, "answer": ["1", "2", "3"]}), path)


def cut_short(path):
    written_as("parquet", path, sums(200))
    path.write_bytes(path.read_bytes()[:-30])


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("a.jsonl", lambda p: p.write_bytes(b""), "a.jsonl is empty"),
        ("a.jsonl", lambda p: p.write_bytes(b" \n\n"), "a.jsonl has no rows"),
        ("a.json", lambda p: p.write_text("[]"), "a.json has no rows"),
        ("a.json", lambda p: p.write_text("[1]"), "row 1: a row is a JSON object, not int"),
        ("a.json", lambda p: p.write_text('[{"question": 1,\n]'), r"broken JSON.*at line 2"),
        ("a.parquet", lambda p: p.write_bytes(b""), "a.parquet is empty"),
        ("a.parquet", lambda p: p.write_text("question,answer"), "not readable as Parquet"),
        (
            "a.parquet",
            lambda p: pq.write_table(pa.table({"question": [], "answer": []}), p),
            "has no rows",
        ),
        ("a.parquet", cut_short, "not readable as Parquet"),
        ("a.parquet", bad_utf8, "rows 1 to 3: .*Invalid UTF8 sequence at string index 1"),
        (
            "a.parquet",
            lambda p: pq.write_table(pa.table({"question": [1.5], "answer": [[1]]}), p),
            r"row 1, column 'answer': text or a number is needed, not list",
        ),
        (
            "a.parquet",
            lambda p: pq.write_table(pa.table({"question": ["a"], "answer": [b"1"]}), p),
            r"row 1, column 'answer': text or a number is needed, not bytes",
        ),
        ("a.arrow", lambda p: p.write_bytes(b"ARROW1"), "not readable as Arrow"),
        ("a.arrow", lambda p: p.write_bytes(b"\xff" * 64), "not readable as Arrow"),
        ("a.csv", lambda p: p.write_text("question,answer"), "a.csv ends in none of .jsonl, .json"),
        ("a.jsonl", lambda p: None, "there is no file or folder .*a.jsonl"),
        ("a", lambda p: p.mkdir(), "the folder .* has no file that ends in .jsonl"),
    ],
)
def test_files_that_are_not_what_they_are_called(tmp_path, name, make, message):
    make(tmp_path / name)
    with pytest.raises(RecipeError, match=rf"task\.sources\[0\].*{message}"):
        draw_prompts(task_of(tmp_path / name), 0)


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "arrow", "stream"])
def test_a_missing_column_names_those_that_are_there(tmp_path, kind):
    path = tmp_path / f"a.{'arrow' if kind == 'stream' else kind}"
    written_as(kind, path, [{"q": "1?", "answer": "1"}])
    message = (
        rf"task\.sources\[0\]\.columns\.question: {path} has no column 'question'; it has 'q', 'ans"
    )
    for refuse in (
        lambda: draw_prompts(task_of(path), 0),
        lambda: require_runnable(runnable(path)),
    ):
        with pytest.raises(RecipeError, match=message):
            refuse()


def runnable(*paths, **task):
    return Recipe(task=task_of(*paths, **task), warm_start={"steps": 0})


def test_ids_that_come_twice_name_both_rows(tmp_path):
    rows = [{"question": f"{n}?", "answer": 1, "id": n % 4} for n in range(6)]
    source = Source(path=str(jsonl(tmp_path / "a.jsonl", rows)), columns=Columns(id="id"))
    with pytest.raises(
        RecipeError, match=r"columns\.id: .*row 5 has the id '0', which .*row 1 has too"
    ):
        draw_prompts(task_of(source), 0)
    jsonl(tmp_path / "a.jsonl", [*rows[:2], {"question": "x", "answer": 1}])
    with pytest.raises(RecipeError, match="row 3, column 'id': an id is text or an integer, not null"):
        draw_prompts(task_of(source), 0)


def test_too_few_rows_say_what_became_of_the_others(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [*sums(5), {"question": "x", "answer": None}])
    with pytest.raises(
        RecipeError,
        match=r"task.train_prompts: a.jsonl has only 4 prompts of the 9 want"
        r"ed. Of its 6 rows are left out: 1 no answer .*; 1 are validation prompts",
    ):
        draw_prompts(task_of(path, train=9), 0)
    with pytest.raises(
        RecipeError, match=r"task.val_prompts: a.jsonl has only 5 prompts of the 7 wanted"
    ):
        draw_prompts(task_of(path, train=9, val=7), 0)
    with pytest.raises(RecipeError, match=r"task.train_prompts: no prompt of a.jsonl is left"):
        draw_prompts(task_of(path, val=5), 0)


# --- lengths


@pytest.fixture
def tokenizer_folder(tmp_path):
    write_tiny_model(TinyModel(), tmp_path / "model")
    return tmp_path / "model"


def test_long_prompts_are_refused_or_left_out_and_counted(tmp_path, tokenizer_folder):
    rows = [{"question": str(i) * n, "answer": "1"} for i, n in enumerate([3, 8, 9, 40, 5, 6])]
    path = jsonl(tmp_path / "a.jsonl", rows)
    task = task_of(path, train=4)
    recipe = Recipe(task=task, rollout=Rollout(prompts=4, max_prompt_tokens=5))
    message = r"max_prompt_tokens: \d of 4 train prompts are longer than 5 tokens.*task.too_long=drop"
    with pytest.raises(RecipeError, match=message):
        prepare_data(recipe, tokenizer_folder, tmp_path / "data")
    dropping = {"task": task.model_copy(update={"too_long": TooLong.DROP})}
    message = (
        r"task.train_prompts: a.jsonl has only 0 prompts of the 4 wanted.*5 prompts of more than 5 t"
    )
    with pytest.raises(RecipeError, match=message):
        prepare_data(recipe.model_copy(update=dropping), tokenizer_folder, tmp_path / "data")
    jsonl(path, [*rows, {"question": "9" * 2**20, "answer": "1"}])
    task = task_of(path, too_long="drop")
    recipe = Recipe(task=task, rollout=Rollout(prompts=5, max_prompt_tokens=10))
    message = "task.train_prompts, rollout.prompts: an iteration needs 5 different prompts; .* have 4"
    with pytest.raises(RecipeError, match=message):
        prepare_data(recipe, tokenizer_folder, tmp_path / "data")
    recipe = recipe.model_copy(update={"rollout": Rollout(prompts=4, max_prompt_tokens=10)})
    about = prepare_data(recipe, tokenizer_folder, tmp_path / "data")
    source = about["sources"][0]
    assert_adds_up(source)
    assert reasons(source) == {"prompts of more than 10 tokens": 2}
    assert source["longest_dropped_tokens"] == 2**20 + 1
    assert "the longest prompt had 1048577 tokens" in left_out(about)[0]
    for split, count in (("train", 4), ("val", 1)):
        written = tmp_path / "data" / f"{split}.parquet"
        assert about[split] == {"prompts": count, "fingerprint": file_sha256(written)}
        assert max(map(len, read_prompts(written.parent, split)["prompt_tokens"])) <= 10
    json.dumps(about)


def test_generators_draw_on_where_prompts_are_too_long():
    task = Task(name="chain_sum", options={"max_terms": 6}, train_prompts=50, val_prompts=10)
    length = Length(lambda question, system: list(question), 80)
    every = draw_prompts(task, 0, length)
    assert max(len(row["prompt_tokens"]) for row in every.train) > 80
    short = draw_prompts(task.model_copy(update={"too_long": "drop"}), 0, length)
    assert len(short.train) == 50
    assert max(len(row["prompt_tokens"]) for row in [*short.train, *short.val]) <= 80
    assert "prompts of more than 80 tokens" in left_out({"sources": short.sources})[0]


def test_a_rows_own_system_turn_comes_before_the_tasks(tmp_path, tokenizer_folder):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(tokenizer_folder)
    rows = [
        {"question": "1?", "answer": "1", "s": "Count."},
        {"question": "2?", "answer": "2", "s": None},
    ]
    source = Source(path=str(jsonl(tmp_path / "a.jsonl", rows)), columns=Columns(system="s"))
    task = task_of(source, chat=True, system="Be brief.")
    recipe = Recipe(task=task, rollout=Rollout(prompts=1))
    prepare_data(recipe, tokenizer_folder, tmp_path / "data")
    asked = {
        tokenizer.decode(tokens)
        for split in ("train", "val")
        for tokens in read_prompts(tmp_path / "data", split)["prompt_tokens"]
    }
    assert asked == {"[system]Count.[user]1?", "[system]Be brief.[user]2?"}
    turns = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]
    path = jsonl(
        tmp_path / "b.jsonl", [{"question": turns, "answer": 1}, {"question": "z", "answer": 1}]
    )
    with pytest.raises(RecipeError, match=r"task.chat: the data have system turns"):
        prepare_data(
            Recipe(task=task_of(path), rollout=Rollout(prompts=1)), tokenizer_folder, tmp_path / "d"
        )


# --- digests and resuming


def test_a_changed_file_is_noticed_and_one_that_is_gone_is_not_missed(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    one, two = jsonl(folder / "a.jsonl", sums(5)), jsonl(folder / "b.jsonl", sums(5, start=5))
    task = task_of(folder, train=6)
    recorded = source_digests(task)
    assert recorded == read_digests({"sources": draw_prompts(task, 0).sources})
    assert set(recorded) == {str(one), str(two)}
    assert require_unchanged(task, recorded, "r") == []
    content = one.read_bytes()
    one.unlink()
    assert require_unchanged(task, recorded, "r") == [
        f"{one} is gone; the run goes on with the prompts that it made of it"
    ]
    jsonl(one, sums(6))
    jsonl(folder / "c.jsonl", sums(1))
    message = rf"(?s)since run 'r' .*{one} was changed\n  {folder}/c.jsonl is new\n.*--fork NEW_NAME"
    with pytest.raises(RecipeError, match=message):
        require_unchanged(task, recorded, "r")
    one.write_bytes(content)
    (folder / "c.jsonl").unlink()
    assert require_unchanged(task, recorded, "r") == []
    for path in (one, two):
        path.unlink()
    folder.rmdir()
    assert len(require_unchanged(task, recorded, "r")) == 2


def test_a_run_whose_prompts_are_there_needs_no_file(tmp_path):
    recipe = runnable(tmp_path / "a.jsonl")
    with pytest.raises(RecipeError, match=r"task.sources\[0\].path: there is no file or folder"):
        require_runnable(recipe)
    require_runnable(recipe, is_prepared=True)


@pytest.fixture
def prepared(tmp_path):
    """(run, its source file): a run whose prompts were prepared of a file."""
    path = jsonl(tmp_path / "own.jsonl", sums(40))
    given = (f"task.sources=[{{path: {path}}}]", "task.train_prompts=null", "warm_start.steps=0")
    bf16 = ("precision.rollout=bf16", "precision.kv_cache=bf16", "task.val_prompts=4")
    run = make_run(tmp_path / "runs", until=(0, "prepare_data"), saved=(), overrides=(*given, *bf16))
    record = run.journal.record(0, "prepare_data")
    inputs = {**record.inputs, "files": source_digests(run.recipe.task)}
    files = tuple(run.folder / name for name in record.files)
    with held(run):
        output = {"train": {"prompts": 36}}
        run.journal.commit(StepRecord("prepare_data", 0, 0.1, inputs=inputs, output=output), {}, files)
    return run, path


def _about_files(found):
    """Notes but that on the machine, which is another than the folder says."""
    return [note for note in found.notes if not note.startswith("since the last attempt")]


def opened(run):
    found = open_run(run.recipe, run.name, "flow-2")
    found.lock.release()
    return found


def test_a_resume_names_a_changed_file_before_anything_runs(prepared):
    run, path = prepared
    assert not _about_files(opened(run))
    content = path.read_bytes()
    jsonl(path, sums(41))
    with pytest.raises(RecipeError, match=rf"(?s){path} was changed.*--fork NEW_NAME"):
        opened(run)
    path.write_bytes(content)
    assert not _about_files(opened(run))


def test_a_resume_does_without_a_file_that_is_gone(prepared):
    run, path = prepared
    context = opened(run).context()
    before = prepare._files(context, 0)
    assert before == {"files": {str(path): file_sha256(path)}}
    assert run.journal.record(0, "prepare_data").inputs["files"] == before["files"]
    path.unlink()
    assert "is gone; the run goes on" in opened(run).notes[0]
    assert prepare._files(context, 0) == before
    assert train_prompts(context) == 36
    # A run whose prompts are damaged prepares them again, and then needs it.
    replace_file(run.folder / "data" / "train.parquet", b"")
    with pytest.raises(RecipeError, match="there is no file or folder"):
        opened(run)


def test_a_fork_is_told_of_a_changed_file(prepared):
    run, path = prepared
    assert _other_files(run, run.recipe) == []
    jsonl(path, sums(41))
    assert _other_files(run, run.recipe) == [str(path)]


def test_paths_are_whole_once_a_run_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    task = Task(sources=({"path": "a.jsonl"}, {"hub": "b/c"}), val={"sources": ({"path": "/v"},)})
    recipe = settled(Recipe(task=task))
    assert [s.path for s in recipe.task.sources] == [str(tmp_path / "a.jsonl"), None]
    assert recipe.task.val.sources[0].path == "/v"
    assert settled(Recipe()).task == Recipe().task


# --- the recipe


def test_sources_in_a_recipe_take_the_place_of_the_bases_task(tmp_path):
    base = tmp_path / "base.yaml"
    base.write_text("task: {name: chain_sum, options: {max_terms: 2}, train_prompts: 9}\n")
    child = tmp_path / "child.yaml"
    child.write_text("extends: base.yaml\ntask:\n  sources: [{path: a.jsonl}]\n")
    loaded = load_recipe(child)
    task = loaded.recipe.task
    assert (task.name, task.options, task.train_prompts) == (None, {}, 9)
    assert task.sources == (Source(path="a.jsonl"),)
    assert loaded.origin("task.sources") == str(child)
    back = with_overrides(loaded.recipe, ["task.name=reverse_digits"]).task
    assert (back.name, back.sources) == ("reverse_digits", ())
    again = with_overrides(loaded.recipe, ["seed=1"]).task
    assert again == task


FILE = {"path": "a.jsonl"}


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"name": "chain_sum", "sources": [FILE]}, "task.name, task.sources: both say"),
        ({"options": {"x": 1}, "sources": [FILE]}, "task.options, task.sources: both say"),
        ({"sources": [{}]}, r"task.sources\[0\]: a source has exactly one of .*here: none"),
        ({"sources": [{"path": "a", "hub": "b/c"}]}, r"here: path and hub"),
        (
            {"sources": [{**FILE, "options": {"x": 1}}]},
            r"sources\[0\].options: it belongs to a source wi",
        ),
        (
            {"sources": [{**FILE, "split": "test"}]},
            r"sources\[0\].split: it belongs to a source with hub",
        ),
        (
            {"sources": [{**FILE, "revision": "v1"}]},
            r"sources\[0\].revision: it belongs to a source with hub, and this has path",
        ),
        (
            {"sources": [{"name": "chain_sum", "columns": {}}]},
            r"\.columns: .* path or hub, and this has n",
        ),
        ({"sources": [{**FILE, "columns": {}, "columns_of": "openai/gsm8k"}]}, "one of them is enough"),
        (
            {"sources": [{**FILE, "columns_of": "x/y"}]},
            "no columns are shipped for 'x/y'; there are tho",
        ),
        (
            {"sources": [{**FILE, "columns": {"system": "s"}}]},
            r"columns.system, task.chat: without a chat",
        ),
        ({"sources": [FILE, FILE]}, r"task.sources\[1\]: it stands there before"),
        ({"train_prompts": None}, "task.train_prompts: a generator has no end"),
        (
            {"train_prompts": None, "sources": [{**FILE, "weight": 2}]},
            "null takes every row of every sou",
        ),
        (
            {"sources": [{**FILE, "weight": 1e-6}, {"path": "b"}]},
            r"sources\[0\].weight.*4096 prompts is n",
        ),
        ({"val": {"fraction": 0.1}}, "task.val.fraction: a generator has no rows"),
        (
            {"sources": [FILE], "val": {"split": "test"}},
            "task.val.split: only hub data sets have splits",
        ),
        (
            {"sources": [{"hub": "a/b"}], "val": {"split": "train"}},
            "the split that training draws from",
        ),
        (
            {"sources": [FILE], "val": {"fraction": 0.1, "sources": [FILE]}},
            "task.val.fraction, task.val.s",
        ),
        (
            {"val_prompts": None},
            "task.val_prompts: null takes all that task.val holds, and it names noth",
        ),
        (
            {"val_prompts": None, "val": {"sources": [{"name": "chain_sum"}]}},
            "val_prompts: a generator ha",
        ),
        ({"sources": [FILE]}, "task.sources, warm_start.steps: the warm start makes its corpus"),
    ],
)
def test_choices_that_do_not_go_together_are_refused(task, message):
    with pytest.raises(RecipeError, match=message):
        require_runnable(Recipe(task=Task.model_validate(task)))


def test_all_rows_and_dynamic_sampling_go_together(tmp_path):
    """How many draws an epoch has is known once the prompts are prepared."""
    path = jsonl(tmp_path / "a.jsonl", sums(9))
    recipe = runnable(path).model_copy(update={"rollout": Rollout(prompts=2, max_draws=3)})
    require_runnable(recipe)
    assert [draws_allowed(recipe, first, 8) for first in range(5)] == [3, 3, 2, 1, 3]


@pytest.mark.parametrize(
    ("source", "users", "workers"),
    [({"hub": "a/b"}, None, "0"), ({"hub": "a/b"}, "1", "1"), ({"path": "a.jsonl"}, None, "1")],
)
def test_only_a_hub_source_may_ask_the_hub(tmp_path, monkeypatch, source, users, workers):
    monkeypatch.delenv("HF_HUB_OFFLINE")
    if users is not None:
        monkeypatch.setenv("HF_HUB_OFFLINE", users)
    recipe = runnable(Source.model_validate(source))
    context = RunContext(run="r", folder=tmp_path, model_dir=tmp_path, recipe=recipe)
    assert prepare._environment(context)["HF_HUB_OFFLINE"] == workers


def test_a_bad_generator_among_sources_is_named_by_its_key():
    recipe = runnable(Source(name="chain_sum"), Source(name="chain_sun"), train=100)
    with pytest.raises(RecipeError, match=r"task.sources\[1\].name: no task 'chain_sun'; did you mean"):
        require_runnable(recipe)
    recipe = runnable(Source(name="chain_sum", options={"digit": 1}), train=100)
    with pytest.raises(RecipeError, match=r"task.sources\[0\].options: chain_sum has no option digit"):
        require_runnable(recipe)


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "train", "val"), [("own-data", [32], [8]), ("mixture", [60, 40, 20, 0], [0, 0, 0, 32])]
)
def test_example_recipes_draw_their_prompts(monkeypatch, name, train, val):
    monkeypatch.chdir(ROOT)
    recipe = load_recipe(ROOT / "configs" / "examples" / f"{name}.yaml").recipe
    prompts = draw_prompts(recipe.task, recipe.seed)
    assert [report["train"] for report in prompts.sources] == train
    assert [report["val"] for report in prompts.sources] == val
    rows = [*prompts.train, *prompts.val]
    verdicts = score_all(
        recipe.task, [f"It is {r['answer']}." for r in rows], [r["entry"] for r in rows]
    )
    assert {verdict.status for verdict in verdicts} == {Status.OK}


# --- fuzz: rows whose counts add up, or an error that names the file

fuzzed = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
GOOD = b'{"question": "%d?", "answer": "1"}\n'
VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
LINES = (
    st.binary(max_size=30)
    | st.sampled_from([b"", b"{}", b"[1]", b"\xef\xbb\xbf", b'{"question": "a", "answer": "\\ud83d"}'])
    | st.builds(
        lambda q, a: json.dumps({"question": q, "answer": a}).encode(),
        VALUES | st.lists(VALUES, max_size=2),
        VALUES | st.dictionaries(st.text(max_size=2), VALUES, max_size=1),
    )
)


def assert_rows_or_error(path: Path) -> None:
    error, found = None, {}
    try:
        report, found = drawn(path)
    except RecipeError as refused:
        error = str(refused)
    if error is not None:
        assert error.startswith("task.")
        assert path.name in error
    else:
        assert len(found) == report["train"] + report["val"] > 0
    for row in found.values():
        assert row["question"].strip()
        assert row["answer"].strip()


@fuzzed
@given(lines=st.lists(LINES, max_size=6), good=st.integers(0, 3))
def test_fuzzed_lines_give_rows_or_an_error(tmp_path, lines, good):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join(GOOD % n for n in range(good)) + b"\n".join(lines))
    assert_rows_or_error(path)


@fuzzed
@given(content=st.binary(max_size=300), suffix=st.sampled_from(records.SUFFIXES))
def test_fuzzed_bytes_give_rows_or_an_error(tmp_path, content, suffix):
    path = tmp_path / f"a{suffix}"
    path.write_bytes(content)
    assert_rows_or_error(path)


@fuzzed
@given(data=st.data(), kind=st.sampled_from(["parquet", "arrow", "stream"]))
def test_damaged_tables_give_rows_or_an_error(tmp_path, data, kind):
    path = tmp_path / f"a.{'parquet' if kind == 'parquet' else 'arrow'}"
    content = bytearray(written_as(kind, path, sums(20)).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(len(content) // 2, len(content)))])
    assert_rows_or_error(path)
