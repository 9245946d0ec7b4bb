"""Tasks, prompts, corpus, seeds and verifiers."""

from random import Random

import pytest
from transformers import AutoTokenizer

from fp8rl.data.chat import question_tokens, require_chat_template
from fp8rl.data.corpus import corpus
from fp8rl.data.prepare import prepare_data, read_prompts
from fp8rl.data.seeds import seed_of
from fp8rl.data.tasks import build_prompts, make_generator, prompts_of_batch
from fp8rl.model.tiny import ALPHABET, write_tiny_model
from fp8rl.recipe.rules import RecipeError
from fp8rl.recipe.schema import Extract, Recipe, Rollout, Task, TinyModel
from fp8rl.reward.extract import extract
from fp8rl.reward.score import Status, count_statuses, score_all

TASK = Task(options={"digits": 4}, train_prompts=200, val_prompts=50)


def test_prompts_are_different_disjoint_and_repeatable():
    train, val = build_prompts(TASK, seed=3)
    questions = [*train["question"], *val["question"]]
    assert len(questions) == len(set(questions)) == 250
    again, _ = build_prompts(TASK, seed=3)
    assert list(again["question"]) == list(train["question"])
    other, _ = build_prompts(TASK, seed=4)
    assert list(other["question"]) != list(train["question"])


def test_task_that_is_too_small_says_so():
    with pytest.raises(RecipeError, match=r"train_prompts: reverse_digits gave only \d+ different"):
        build_prompts(Task(options={"digits": 2}, train_prompts=90, val_prompts=20), seed=0)


def test_another_reasoning_gym_task_stands_in_by_name():
    task = Task(
        name="chain_sum", options={"min_terms": 2, "max_terms": 2}, train_prompts=20, val_prompts=5
    )
    train, _ = build_prompts(task, seed=0)
    verdicts = score_all(task, [train[0]["answer"], "no number"], [train[0]["entry"]] * 2)
    assert verdicts[0].status is Status.OK
    assert verdicts[1].status is Status.WRONG


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (Task(name="revers_digits"), "did you mean reverse_digits"),
        (Task(options={"digit": 3}), "has no option digit; it has digits"),
        (Task(options={"digits": 99}), "digits must be 2 to 32"),
    ],
)
def test_bad_task_is_refused(task, message):
    with pytest.raises(RecipeError, match=message):
        make_generator(task, seed=0, size=1)


@pytest.mark.parametrize("name", ["arc_agi", "rubiks_cube"])
def test_tasks_that_do_not_survive_json_or_give_no_answer_are_refused(name):
    with pytest.raises(RecipeError, match=f"task.name: {name}"):
        build_prompts(Task(name=name, train_prompts=2, val_prompts=2), seed=0)


def test_verdicts():
    train, _ = build_prompts(TASK, seed=0)
    row = train[0]
    texts = [row["answer"], f" {row['answer']}\n", row["answer"][::-1] + "1", "", "  "]
    statuses = [v.status for v in score_all(TASK, texts, [row["entry"]] * 5)]
    assert statuses == [Status.OK, Status.OK, Status.WRONG, Status.UNPARSABLE, Status.UNPARSABLE]
    assert count_statuses(statuses) == {"ok": 2, "wrong": 1, "unparsable": 2, "error": 0}


@pytest.mark.parametrize(
    ("completion", "number"),
    [
        ("The answer is 12.", "12"),
        ("12", "12"),
        ("3 + 4 = 7, not 8.\n", "8"),
        ("It is -5.", "-5"),
        ("It is \u22125!", "-5"),
        ("9-4", "4"),
        ("9 - 4", "4"),
        ("(2)-3", "3"),
        ("9 - -4", "-4"),
        ("x=-4", "-4"),
        ("-4", "-4"),
        ("about 1,234,567 sheep", "1234567"),
        ("it is .5 of it", ".5"),
        ("near 1.5e-3.", "1.5e-3"),
        ("-1,234.50, roughly", "-1234.50"),
        ("1, 2, 3", "3"),
        ("1,2,3", "3"),
        ("12,34", "34"),
        ("pi is 3.14.", "3.14"),
        ("**7**", "7"),
        ("$0.25", "0.25"),
        ("no number", None),
        ("", None),
    ],
)
def test_last_number_of_a_completion(completion, number):
    assert extract(Extract.LAST_NUMBER, completion) == number


def test_answers_inside_sentences_are_scored_by_their_last_number():
    options = {"min_terms": 2, "max_terms": 2}
    task = Task(name="chain_sum", options=options, train_prompts=20, val_prompts=5)
    talkative = task.model_copy(update={"extract": Extract.LAST_NUMBER})
    train, _ = build_prompts(talkative, seed=0)
    row = train[0]
    texts = [f"The answer is {row['answer']}.", "It is 1 more than 123456.", "I cannot say.", " "]
    verdicts = score_all(talkative, texts, [row["entry"]] * 4)
    wrong, none = Status.WRONG, Status.UNPARSABLE
    assert [v.status for v in verdicts] == [Status.OK, wrong, none, none]
    assert [v.reward for v in verdicts if v.status is none] == [0.0, 0.0]
    whole = score_all(task, texts, [row["entry"]] * 4)
    assert [v.status for v in whole] == [wrong, wrong, wrong, none]


def test_extraction_that_loses_the_tasks_own_answers_is_refused():
    task = Task(name="spell_backward", extract="last_number", train_prompts=5, val_prompts=5)
    with pytest.raises(RecipeError, match=r"task\.extract: last_number makes None of spell_backward's"):
        build_prompts(task, seed=0)


def test_scorer_that_raises_is_counted_not_fatal():
    verdicts = score_all(TASK, ["1", "2"], ["{}", '{"answer": "2"}'])
    assert verdicts[0].status is Status.ERROR
    assert "KeyError" in verdicts[0].detail
    assert verdicts[1].status is Status.OK


def test_batches_cover_an_epoch_once_and_reshuffle():
    epoch = [prompts_of_batch(20, 6, n, seed=1) for n in (0, 1, 2)]
    seen = [i for part in epoch for i in part]
    assert len(seen) == len(set(seen)) == 18
    assert prompts_of_batch(20, 6, 3, seed=1) != epoch[0]
    assert prompts_of_batch(20, 6, 1, seed=1) == epoch[1]
    assert prompts_of_batch(20, 6, 0, seed=2) != epoch[0]


def prompts_of_iteration(total, count, iteration, seed):
    """What iterations sampled before they could draw more than one batch."""
    epoch, place = divmod(iteration - 1, total // count)
    order = list(range(total))
    Random(f"{seed}/{epoch}").shuffle(order)
    return order[place * count : (place + 1) * count]


@pytest.mark.parametrize(("total", "count"), [(20, 6), (20, 5), (7, 7), (33, 1)])
def test_runs_that_draw_once_an_iteration_have_the_prompts_they_always_had(total, count):
    for seed in (0, 3):
        for iteration in range(1, 4 * (total // count) + 1):
            want = prompts_of_iteration(total, count, iteration, seed)
            assert prompts_of_batch(total, count, iteration - 1, seed) == want


def test_corpus_has_the_asked_share_of_right_answers_and_no_excluded_question():
    excluded = {f"{n:04d}>" for n in range(0, 10000, 3)}
    batches = corpus(TASK, steps=10, batch_size=100, correct=0.4, seed=0, exclude=excluded)
    assert [len(b) for b in batches] == [100] * 10
    pairs = [pair for batch in batches for pair in batch]
    assert not excluded & {q for q, _ in pairs}
    right = sum(a == q[:-1][::-1] for q, a in pairs) / len(pairs)
    assert 0.37 < right < 0.47  # some spoilt answers are right by chance


def test_corpus_that_the_task_cannot_fill_is_refused():
    task = Task(options={"digits": 2})
    everything = {f"{n:02d}>" for n in range(100)}
    with pytest.raises(RecipeError, match="gave 0 questions outside the validation set; 40 are needed"):
        corpus(task, steps=4, batch_size=10, correct=0.5, seed=0, exclude=everything)
    assert corpus(task, steps=0, batch_size=10, correct=0.5, seed=0, exclude=set()) == []


def test_seeds_differ_in_every_part_and_repeat():
    parts = [(r, i, p, s) for r in (0, 1) for i in (1, 11) for p in (1, 11) for s in (1, 11)]
    seeds = {seed_of(*part) for part in parts}
    assert len(seeds) == len(parts)
    assert seed_of(0, 1, 2, 3) == seed_of(0, 1, 2, 3)
    assert max(seeds) < 2**48


def test_tokenizer_writes_every_character_and_reads_it_back(tmp_path):
    write_tiny_model(TinyModel(), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer(ALPHABET).input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert len(ids) == len(ALPHABET) + 1
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids[1:], skip_special_tokens=True) == ALPHABET


def test_prepared_data_hold_tokens_and_refuse_long_prompts(tmp_path):
    write_tiny_model(TinyModel(), tmp_path)
    recipe = Recipe(task=TASK)
    about = prepare_data(recipe, tmp_path, tmp_path / "data")
    assert about["train"]["prompts"] == 200
    val = read_prompts(tmp_path / "data", "val")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.decode(val["prompt_tokens"][0], skip_special_tokens=True) == val["question"][0]
    assert val["answer_tokens"][0][-1] == tokenizer.eos_token_id
    short = recipe.model_copy(update={"rollout": Rollout(max_prompt_tokens=3)})
    with pytest.raises(RecipeError, match="200 of 200 train prompts are longer than 3 tokens"):
        prepare_data(short, tmp_path, tmp_path / "data2")


# --- chat


@pytest.fixture
def chat_folder(tmp_path):
    """The tiny tokenizer with a chat template that knows user and system turns."""
    write_tiny_model(TinyModel(), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_questions_are_asked_in_the_chat_template(chat_folder):
    tokenizer = AutoTokenizer.from_pretrained(chat_folder)

    def asked(**task):
        return tokenizer.decode(question_tokens(tokenizer, Task(**task), "1+2?"))

    assert asked() == "<bos>1+2?"
    assert asked(chat=True) == "[user]1+2?[assistant]"
    assert asked(chat=True, system="Be brief.") == "[system]Be brief.[user]1+2?[assistant]"
    tokenizer.chat_template = "{{ raise_exception('no system turns') }}"
    with pytest.raises(RecipeError, match=r"task\.chat, task\.system: .*no system turns"):
        asked(chat=True, system="Be brief.")


def test_prepared_data_are_chats_and_answers_stay_answers(chat_folder):
    recipe = Recipe(task=TASK.model_copy(update={"chat": True}))
    require_chat_template(recipe.task, chat_folder)
    prepare_data(recipe, chat_folder, chat_folder / "data")
    val = read_prompts(chat_folder / "data", "val")
    tokenizer = AutoTokenizer.from_pretrained(chat_folder)
    assert tokenizer.decode(val["prompt_tokens"][0]) == f"[user]{val['question'][0]}[assistant]"
    assert tokenizer.decode(val["answer_tokens"][0]) == f"{val['answer'][0]}<eos>"


def test_chat_without_a_template_is_refused(tmp_path):
    write_tiny_model(TinyModel(), tmp_path)
    recipe = Recipe(task=TASK.model_copy(update={"chat": True}))
    for refuse in (
        lambda: require_chat_template(recipe.task, tmp_path),
        lambda: prepare_data(recipe, tmp_path, tmp_path / "data"),
    ):
        with pytest.raises(RecipeError, match=r"task\.chat: the tokenizer in .* has no chat template"):
            refuse()
    require_chat_template(TASK, tmp_path)
