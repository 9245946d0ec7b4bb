"""Names that users gave are shown and never obeyed: in HTML, Markdown, CSV and pictures."""

import csv
import io
import math
import re
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from flows.showing import artifact_key
from fp8rl.comparison.compare import Request, compare
from fp8rl.comparison.page import make_page
from fp8rl.comparison.plots import METRICS, label, panels, plot_curves
from fp8rl.comparison.publish import TAG, attach, default_folder, write
from fp8rl.comparison.render_csv import arms_csv, runs_csv
from fp8rl.comparison.render_html import to_html
from fp8rl.comparison.render_markdown import to_markdown
from fp8rl.tracking_server import RUN_ID_TAG, tracking_uri
from tests.comparison_oracle import PageReader
from tests.comparison_runs import FP8, make_run

# A picture's font need not have every letter.
pytestmark = pytest.mark.filterwarnings("ignore:Glyph")

HOSTILE = (
    *("<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "</table></div>", "<b>&amp;</b>"),
    *('=HYPERLINK("http://x","y")', "+1", "-1", "@SUM(A1)", "\t=1"),
    *("a | b \\| c", "![x](http://x/y.png) [z](javascript:alert(1))", "`code` **bold** _it_ ~~s~~"),
    *("two\nlines\r\n# heading", "$\\frac{1}$ $x$", "_hidden", "名前 😀"),
)
ALLOWED_TAGS = {
    *("html", "head", "meta", "title", "style", "body", "h1", "h2", "section", "p", "div", "img"),
    *("table", "thead", "tbody", "tr", "th", "td"),
}


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    runs = tmp_path_factory.mktemp("hostile")
    experiment = "<i>x</i> | `y`"
    for arm in HOSTILE:
        overrides = [*FP8] if arm != HOSTILE[0] else []
        run = make_run(runs, arm, overrides=overrides, done=1, chances={1: 0.5}, firings={1: [arm]})
        recipe = run.recipe
        tracking = recipe.tracking.model_copy(update={"experiment": experiment})
        run.change_recipe(recipe.model_copy(update={"tracking": tracking}))
    comparison = compare(Request(runs))
    return comparison, make_page(comparison)


def test_html_shows_names_and_obeys_none(hostile):
    html = to_html(hostile[1])
    page = PageReader(html)
    assert page.tags <= ALLOWED_TAGS
    assert not [key for _, key, _ in page.attributes if key.startswith("on")]
    firsts = [row[0] for row in page.tables["Accuracy"][0][1:]]
    assert sorted(firsts) == sorted(HOSTILE)
    assert {len(row) for row in page.tables["Accuracy"][0]} == {7}


def test_markdown_shows_names_and_obeys_none(hostile):
    text = to_markdown(hostile[1])
    tokens = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).parse(text)
    every = [inner for token in tokens for inner in (token, *(token.children or ()))]
    kinds = {token.type for token in every}
    forbidden = re.compile("html|link|image|code|strong|em_|^s_|fence|list|break")
    assert not [kind for kind in kinds if forbidden.search(kind)]
    cells = {"".join(t.content for t in token.children) for token in tokens if token.type == "inline"}
    for name in HOSTILE:
        assert " ".join(name.split()) in cells, name
    rows = text.split("## Accuracy")[1].split("##")[0]
    table = [line for line in rows.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table} == {8}


def test_csv_has_no_cell_that_a_spreadsheet_computes(hostile):
    for text in (runs_csv(hostile[0]), arms_csv(hostile[0])):
        rows = list(csv.DictReader(io.StringIO(text)))
        assert len(rows) == len(HOSTILE)
        shown = {row["arm"].removeprefix("'") for row in rows}
        assert shown == set(HOSTILE)
        for row in rows:
            for key, cell in row.items():
                if cell.startswith(("=", "+", "-", "@", "\t", "\r", "\n")):
                    assert math.isfinite(float(cell)), (key, cell)  # a negative number
                    assert key != "arm"


def test_pictures_take_any_name():
    series = {name: [{metric: {1: 0.5, 2: 0.7} for metric, _, _ in METRICS}] for name in HOSTILE}
    assert plot_curves(panels(series, [name for name, _, _ in METRICS])).startswith(b"\x89PNG")
    assert label("x" * 99).endswith("…")
    assert "\n" not in label("a\nb")


@pytest.mark.parametrize("name", ["fp8rl", "../..", "", "a/b", ".hidden", "ä", "x" * 300, "a b"])
def test_every_experiment_has_a_folder_and_a_key_of_its_own(name, tmp_path):
    folder = default_folder(tmp_path, name)
    assert folder.parent == tmp_path / "compare"
    assert re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", folder.name)
    assert re.fullmatch(r"[a-z0-9][a-z0-9-]*", artifact_key("comparison", name))
    assert default_folder(tmp_path, f"{name}/") != folder


def test_mlflow_has_one_comparison_of_an_experiment_beside_its_runs(tmp_path):
    from mlflow import MlflowClient

    runs = tmp_path / "runs"
    make_run(runs, "bf16", overrides=["tracking.experiment=mine"])
    comparison = compare(Request(runs))
    page = make_page(comparison)
    paths = write(comparison, page, tmp_path / "out")
    first = attach(comparison, paths)
    paths[0].write_text("newer")
    assert attach(comparison, paths) == first
    recipe = comparison.runs[0].recipe
    client = MlflowClient(tracking_uri(recipe))
    experiment = client.get_experiment_by_name("mine")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "comparison"
    assert run.info.status == "FINISHED"
    assert run.data.tags[TAG] == "true"
    assert RUN_ID_TAG not in run.data.tags
    assert {f.path for f in client.list_artifacts(first)} == {path.name for path in paths}
    kept = client.download_artifacts(first, paths[0].name, str(tmp_path))
    assert Path(kept).read_text() == "newer"


def test_differences_of_last_bits_are_drawn_flat():
    import matplotlib.pyplot as plt

    from fp8rl.comparison.plots import _at_least

    _, (flat, steep) = plt.subplots(2)
    flat.plot([1.0, 1.0 + 1e-10])
    _at_least(flat, 1e-3)
    low, high = flat.get_ylim()
    assert high - low > 0.9e-3
    steep.plot([1.0, 2.0])
    before = steep.get_ylim()
    _at_least(steep, 1e-3)
    assert steep.get_ylim() == before
    plt.close("all")
