"""A comparison's page as one HTML file: images inline, nothing fetched, light and dark."""

import base64
from html import escape

from fp8rl.comparison.blocks import Image, Page, Section, Table, Text

# Nothing may be loaded or run, whatever a name contains.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --page: #ffffff; --line: #d0d7de; --soft: #f3f5f7;
  --quiet: #59636e; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e9ed; --page: #14171b; --line: #3a424b;
  --soft: #1e2329; --quiet: #9aa4af; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page);
  max-width: 80rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: .35rem .8rem; text-align: left;
  vertical-align: top; overflow-wrap: break-word; max-width: 28rem; }
thead th { background: var(--soft); } tbody th { font-weight: 600; }
.note { color: var(--quiet); } p { max-width: 60rem; overflow-wrap: anywhere; }
img { max-width: 100%; height: auto; background: #ffffff; border-radius: 6px; padding: 4px; }
"""


def to_html(page: Page) -> str:
    """The whole document."""
    title = escape(page.title)
    body = "\n".join(_section(section) for section in page.sections)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
        f"{body}\n</body>\n</html>\n"
    )


def _section(section: Section) -> str:
    blocks = "\n".join(_block(block) for block in section.blocks)
    return f"<section>\n<h2>{escape(section.title)}</h2>\n{blocks}\n</section>"


def _block(block: Text | Table | Image) -> str:
    if isinstance(block, Text):
        return "\n".join(f"<p>{escape(paragraph)}</p>" for paragraph in block.paragraphs)
    note = f'<p class="note">{escape(block.note)}</p>' if block.note else ""
    if isinstance(block, Table):
        return f"{_table(block)}\n{note}".rstrip()
    data = base64.b64encode(block.png).decode()
    image = f'<img src="data:image/png;base64,{data}" alt="{escape(block.alt)}">'
    return f"<p>{image}</p>\n{note}".rstrip()


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in table.headings)
    rows = "\n".join(_row(row) for row in table.rows)
    return (
        f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody>\n</table></div>"
    )


def _row(row: tuple[str, ...]) -> str:
    name, *cells = row
    data = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return f'<tr><th scope="row">{escape(name)}</th>{data}</tr>'
