"""The README's section on one's own model, data and reward, done word by word."""

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from fp8rl.data.draw import draw_prompts
from fp8rl.files import file_sha256
from fp8rl.recipe.load import load_recipe
from fp8rl.reward.score import score_all
from fp8rl.runs import Run
from fp8rl.tables import from_parquet
from tests.compare import mlflow_values
from tests.families import write_family
from tests.kill.harness import clean_environment

pytestmark = pytest.mark.pipeline

README = Path(__file__).parents[2] / "README.md"
HEADING = "## Your own model, data and reward\n"
BLOCK = re.compile(r'^```\w+ title="([^"\n]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
COMMANDS = "commands"
# Whole blocks of 128, so that every reader of FP8 reads the export.
SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4}
CHAT = "{% for m in messages %}{{ m.content }}\n{% endfor %}"


@dataclass
class Section:
    """The section's text, its blocks by title, and a folder with what it tells the reader to make."""

    text: str
    blocks: dict[str, str]
    folder: Path

    @property
    def commands(self) -> list[str]:
        return self.blocks[COMMANDS].splitlines()

    @property
    def recipe_path(self) -> str:
        return next(title for title in self.blocks if title.endswith(".yaml"))

    def call(self, command: str, timeout: float = 300) -> str:
        """Runs a line of the section in a shell, and returns all that it printed."""
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}"
        return done.stdout


@pytest.fixture(scope="module")
def section(tmp_path_factory):
    text = README.read_text().partition(HEADING)[2].partition("\n## ")[0]
    blocks = dict(BLOCK.findall(text))
    assert len(blocks) == text.count("```") // 2, "a block without a title would not be tried"
    folder = tmp_path_factory.mktemp("reader")
    for title, content in blocks.items():
        if title != COMMANDS:
            (folder / title).parent.mkdir(exist_ok=True)
            (folder / title).write_text(content)
    # What a reader has: this environment, and a model at the path that the recipe says.
    (folder / ".venv").mkdir()
    (folder / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
    model = re.search(r"model: \{path: (\S+)\}", text)
    assert model, text
    _write_model(folder / model[1])
    return Section(text, blocks, folder)


def _write_model(folder: Path) -> None:
    from transformers import AutoTokenizer

    write_family("qwen3", folder, **SIZES)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)


def test_the_recipe_is_short_and_names_what_is_shown(section):
    recipe = section.blocks[section.recipe_path]
    assert len(recipe.splitlines()) < 30
    assert {Path(title).suffix for title in section.blocks} == {".jsonl", ".py", ".yaml", ""}
    assert [re.match(r"\S+fp8rl (\w+)", line)[1] for line in section.commands] == [
        *("validate", "run", "samples", "export")
    ]


def test_its_first_command_finds_the_recipe_valid(section):
    told = section.call(section.commands[0])
    assert "valid (digest" in told
    assert "reward brevity: in a worker process" in told
    assert not (section.folder / "runs").exists()


def test_all_its_prompts_are_used_and_its_function_knows_their_answers(section, monkeypatch):
    monkeypatch.chdir(section.folder)
    task = load_recipe(section.recipe_path).recipe.task
    drawn = draw_prompts(task, 0)
    shown = next(body for title, body in section.blocks.items() if title.endswith(".jsonl"))
    rows = [json.loads(line) for line in shown.splitlines()]
    prompts = [*drawn.train, *drawn.val]
    assert {p["question"]: p["answer"] for p in prompts} == {r["problem"]: r["solution"] for r in rows}
    texts = [text for p in prompts for text in (p["answer"], f"It is {p['answer']}.", "none")]
    scores = score_all(task, texts, [p["entry"] for p in prompts for _ in range(3)])
    brevity = [score.parts[1].reward for score in scores]
    assert set(brevity[0::3]) == {1.0}
    assert all(0 < reward < 0.5 for reward in brevity[1::3])
    assert set(brevity[2::3]) == {0.0}
    assert [score.status for score in scores] == ["ok", "ok", "unparsable"] * len(prompts)


@pytest.mark.slow
def test_its_commands_train_show_and_export_the_model(section, monkeypatch):
    monkeypatch.syspath_prepend(section.folder / "my")
    from my_rewards import score  # what the section shows, by another way than the pipeline's

    _, begin, show, take = section.commands
    section.call(begin)
    run = Run(section.folder / "runs" / "mine")
    assert run.attempts()[-1]["state"] == "finished"
    last = run.recipe.iterations

    # The data are those of the file.
    (source,) = run.journal.record(0, "prepare_data").output["sources"]
    path = section.folder / "my" / "prompts.jsonl"
    assert source["files"] == {str(path.resolve()): file_sha256(path)}
    assert source["rows"] == source["train"] + source["val"] == len(path.read_text().splitlines())

    # The rewards are those of the function, and tell samples apart.
    rewards = []
    for n in range(1, last + 1):
        rollouts = from_parquet(run.journal.read_file(n, "rollout", "rollouts.parquet"))
        columns = from_parquet(run.journal.read_file(n, "reward", "rewards.parquet"))
        want = [
            score(question="", completion=text, answer=json.loads(entry)["answer"], entry={})
            for text, entry in zip(rollouts["text"], rollouts["entry"], strict=True)
        ]
        assert columns["reward_brevity"] == want
        rewards += want
    assert len(set(rewards)) > 1

    # The metrics that the text names are there.
    points = mlflow_values(run)
    named = set(re.findall(r"`((?:reward|val)/\w+)`", section.text))
    assert named
    assert named <= points.keys()

    answers = section.call(show)
    assert f"run mine, iteration {last}: the best" in answers
    assert "How many" in answers

    told = section.call(take)
    assert "note:" not in told
    exported = Path(told.strip().splitlines()[-1].rpartition(": ")[2])
    assert exported.parent == (section.folder / "runs" / "mine" / "export").resolve()
    _require_loadable(exported)


def _require_loadable(folder: Path) -> None:
    """transformers makes of the codes and descales what they are, and can generate with it."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    parameters = dict(model.named_parameters())
    codes = [name for name, value in tensors.items() if value.dtype is torch.float8_e4m3fn]
    assert len(codes) == 14
    for name in codes:
        scales = tensors[f"{name}_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
        assert torch.equal(parameters[name], (tensors[name].float() * scales).to(torch.bfloat16)), name
    inputs = AutoTokenizer.from_pretrained(folder)("How many?", return_tensors="pt")
    assert model.generate(**inputs, max_new_tokens=3, do_sample=False).shape[1] > len("How many?")
