"""`fp8rl compare`: the arms of an experiment side by side, as a flow of its own."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.artifacts import acreate_markdown_artifact
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from flows.asked import OptionalText
from flows.environment import set_quiet
from flows.showing import artifact_key
from fp8rl import progress
from fp8rl.comparison.compare import Request
from fp8rl.comparison.compare import compare as make
from fp8rl.comparison.page import ACCURACY, VERDICT, make_page
from fp8rl.comparison.publish import HTML, attach, default_folder, write
from fp8rl.comparison.render_markdown import to_markdown
from fp8rl.comparison.selection import DEFAULT_MARGIN
from fp8rl.tracking_server import TrackingError


def _flow_run_name() -> str:
    return f"compare {flow_run.get_parameters().get('experiment') or 'the experiment'}"


@flow(name="compare", flow_run_name=_flow_run_name)
async def compare(
    experiment: OptionalText = "",
    runs: tuple[str, ...] = (),
    runs_dir: OptionalText = "",
    reference: OptionalText = "",
    margin: float = DEFAULT_MARGIN,
    allow_different: tuple[str, ...] = (),
    out: OptionalText = "",
) -> dict[str, Any]:
    """Compares the arms of `experiment` (see docs/compare.md); returns where the page is, and its
    first tables as text, by title.

    Raises ComparisonError, NoRunError, IdentityError or JournalError where runs cannot be compared.

    Args:
        experiment: The recipe key tracking.experiment of the runs. Empty: the only one that there is.
        runs: Only these runs of it, a name in each item. Empty: all.
        runs_dir: Where runs are kept. Empty: runs.
        reference: The arm that the others are compared with. Empty: the one that is BF16 everywhere.
        margin: So much accuracy, up or down, counts as equal.
        allow_different: Recipe keys, or sections, in which runs may differ, one in each item.
        out: Folder of the page. Empty: compare/<experiment> among the runs.
    """
    set_quiet()  # a worker starts this flow without the command
    place = Path(runs_dir or "runs").resolve()
    wanted, arm = experiment or None, reference or None
    request = Request(place, wanted, tuple(runs), arm, margin, tuple(allow_different))
    comparison = make(request)
    page = make_page(comparison)
    folder = Path(out).resolve() if out else default_folder(place, comparison.experiment)
    paths = write(comparison, page, folder)
    mlflow_run = None
    try:
        mlflow_run = attach(comparison, paths)
    except TrackingError as error:  # the page is there all the same
        text = f"MLflow did not get the comparison ({error}); call it again once the server is back"
        get_run_logger().warning(text)
        progress.emit(progress.Event("note", text))
    key = artifact_key("comparison", comparison.experiment)
    description = f"Comparison of experiment {comparison.experiment}; with pictures: {folder / HTML}"
    await acreate_markdown_artifact(to_markdown(page), key=key, description=description)
    first = page.first_tables(VERDICT, ACCURACY)
    return {
        "experiment": comparison.experiment,
        "files": [str(path) for path in paths],
        "mlflow_run": mlflow_run,
        "tables": {title: asdict(table) for title, table in first.items()},
    }
