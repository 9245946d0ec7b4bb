"""Where a comparison is put: a folder, and the MLflow run "comparison" of its experiment."""

import re
from pathlib import Path

from fp8rl import tracking_server
from fp8rl.comparison.blocks import Page
from fp8rl.comparison.compare import Comparison
from fp8rl.comparison.render_csv import arms_csv, runs_csv
from fp8rl.comparison.render_html import to_html
from fp8rl.comparison.render_markdown import to_markdown
from fp8rl.files import sha256, write_atomic

FOLDER = "compare"
HTML, MARKDOWN = "comparison.html", "comparison.md"
_FILES = (HTML, MARKDOWN, "runs.csv", "arms.csv")
RUN = "comparison"
# Training runs have tracking_server.RUN_ID_TAG; a comparison has this one instead.
TAG = "fp8rl.comparison"


def default_folder(runs_dir: Path, experiment: str) -> Path:
    """runs/compare/<experiment>, in letters that any file system takes."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "-", experiment).lstrip(".")[:80]
    if plain != experiment or not plain:  # two names must not meet in one folder
        plain = f"{plain}-{sha256(experiment.encode())[:8]}"
    return runs_dir / FOLDER / plain


def write(comparison: Comparison, page: Page, folder: Path) -> list[Path]:
    """Writes the page as HTML and Markdown, and both CSV files; returns their paths."""
    contents = (to_html(page), to_markdown(page), runs_csv(comparison), arms_csv(comparison))
    paths = [folder / name for name in _FILES]
    for path, content in zip(paths, contents, strict=True):
        write_atomic(path, content.encode())
    return paths


def attach(comparison: Comparison, paths: list[Path]) -> str:
    """Keeps the files as artifacts of the experiment's comparison, replacing older ones; returns the id
    of its MLflow run.

    The experiment has one such run, found by its tag. Raises AwayError where MLflow does not answer.
    """
    recipe = comparison.arms[0].runs[0].recipe
    with tracking_server.Server(tracking_server.tracking_uri(recipe)).reached() as client:
        experiment = tracking_server.experiment_of(client, recipe, create=True)
        found = client.search_runs([experiment], f"tags.`{TAG}` = 'true'")
        if found:
            run = str(found[0].info.run_id)
        else:
            run = str(client.create_run(experiment, run_name=RUN, tags={TAG: "true"}).info.run_id)
        for path in paths:
            client.log_artifact(run, str(path))
        tags = {
            f"{TAG}.runs": ", ".join(r.name for r in comparison.runs),
            "mlflow.note.content": f"The arms side by side: `{HTML}`, under Artifacts.",
        }
        tracking_server.push_tags(client, run, tags)
        client.set_terminated(run)
    return run
