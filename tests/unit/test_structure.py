"""The layout's rules, which a reader relies on."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FORBIDDEN = {
    "fp8rl": {"prefect", "flows", "tasks", "ray"},
    "tasks": {"flows", "torch"},
    "flows": {"torch"},
}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("package", FORBIDDEN)
def test_arrows_point_one_way(package):
    # Inside actor methods, in the actor's process.
    allowed_lazily = {f"tasks/{kind}_actor.py": {"torch"} for kind in ("learner", "engine")}
    for path in (ROOT / package).rglob("*.py"):
        name = str(path.relative_to(ROOT))
        wrong = imports(path) & FORBIDDEN[package] - allowed_lazily.get(name, set())
        assert not wrong, f"{name} imports {wrong}"


def test_modules_stay_small():
    for package in ("fp8rl", "tasks", "flows"):
        for path in (ROOT / package).rglob("*.py"):
            assert len(path.read_text().splitlines()) <= 400, path


def test_recipes_and_flows_import_without_torch():
    """`fp8rl validate` answers at once, and the flow process never holds tensors."""
    code = (
        "import sys, fp8rl.recipe.load, fp8rl.device, fp8rl.model.precision, fp8rl.model.tiny; "
        "import flows.cli, flows.cli_sweep, flows.explain; assert 'torch' not in sys.modules; "
        "assert 'prefect' not in sys.modules; "
        "import flows.training; assert 'torch' not in sys.modules, 'flows'"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr


def test_environment_lacks_only_what_the_lock_leaves_out_on_purpose():
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    left_out = "torchaudio|torchcodec|torchvision|llm|llama-cpp-python"
    expected = re.compile(rf"requires ({left_out}), which is not installed")
    unexpected = [line for line in done.stdout.splitlines() if not expected.search(line)]
    assert done.stdout, done.stderr
    assert not unexpected


def test_pages_are_whole_and_what_they_link_exists():
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        text = page.read_text()
        assert "@@" not in text
        for linked in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
            assert (page.parent / linked).is_file(), f"{page.name}: {linked}"
