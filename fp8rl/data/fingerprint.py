"""Digests of a task's local files, by which a resume notices that one was changed. Imports without
torch."""

from pathlib import Path
from typing import Any

from fp8rl.data.pool import Drops, local_files
from fp8rl.data.records import files_of
from fp8rl.files import file_sha256
from fp8rl.recipe.data import all_sources
from fp8rl.recipe.rules import RecipeError
from fp8rl.recipe.schema import Task


def source_digests(task: Task) -> dict[str, str]:
    """{path: sha256} of each local file that the prompts come from; raises RecipeError where one is
    missing."""
    paths = [path for one in all_sources(task) for path in local_files(one.source, one.key)]
    return {str(path): file_sha256(path) for path in dict.fromkeys(paths)}


def read_digests(about: dict[str, Any]) -> dict[str, str]:
    """{path: sha256} of the files that `prepare_data` read, by what it returned."""
    return {
        path: digest for source in about["sources"] for path, digest in source.get("files", {}).items()
    }


def left_out(about: dict[str, Any]) -> list[str]:
    """What `prepare_data` left out of files and hub data sets, and as too long: a line for each source
    that lost a row."""
    lines = []
    for source in about["sources"]:
        # A generator that repeats itself loses nothing.
        reasons = {
            reason: told
            for reason, told in source["dropped"].items()
            if "rows" in source or "tokens" in reason
        }
        if reasons:
            of = f" of {source['rows']} rows" if "rows" in source else ""
            longest = source.get("longest_dropped_tokens")
            long = f"; the longest prompt had {longest} tokens" if longest else ""
            lines.append(f"{source['source']}: left out{of}: {Drops(reasons)}{long}")
    return lines


def require_unchanged(task: Task, recorded: dict[str, str], run: str) -> list[str]:
    """Compares the local files with their digests when the prompts of `run` were prepared.

    Returns a note for each file that is gone: the run keeps its prompts and goes on without it. Raises
    RecipeError naming every file that is another now, or is new in a folder.
    """
    gone = [path for path in recorded if not Path(path).exists()]
    other = [
        path
        for path, digest in recorded.items()
        if path not in gone and file_sha256(Path(path)) != digest
    ]
    folders = [Path(s.source.path) for s in all_sources(task) if s.source.path is not None]
    new = [
        str(path)
        for folder in folders
        if folder.is_dir()
        for path in _data_in(folder)
        if str(path) not in recorded
    ]
    if other or new:
        lines = [f"  {path} was changed" for path in other] + [f"  {path} is new" for path in new]
        raise RecipeError(
            f"task.sources: since run {run!r} prepared its prompts\n"
            + "\n".join(lines)
            + "\nThe run keeps the prompts that it has. To go on with them put the files back as they "
            "were, or move the changed ones away; to train on the new content begin a new run, or "
            f"`fp8rl resume {run} --fork NEW_NAME`"
        )
    return [f"{path} is gone; the run goes on with the prompts that it made of it" for path in gone]


def _data_in(folder: Path) -> list[Path]:
    try:
        return files_of(folder, "task.sources")
    except RecipeError:
        return []
