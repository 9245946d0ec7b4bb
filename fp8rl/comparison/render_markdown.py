"""A comparison's page as Markdown, for the Prefect artifact: its texts and tables, without pictures."""

import re
from collections.abc import Iterable
from html import escape

from fp8rl.comparison.blocks import Page, Section, Table, Text

_SPECIAL = re.compile(r"([\\`*_{}\[\]()#+!|~$^=:@-])")


def to_markdown(page: Page) -> str:
    """The whole document."""
    sections = filter(None, map(_section, page.sections))
    return "\n\n".join([f"# {_text(page.title)}", *sections]) + "\n"


def _text(text: str) -> str:
    """On one line, with nothing that Markdown or HTML would act on."""
    line = " ".join(text.split())
    # A bare address would become a link; with the colon escaped it does not.
    return _SPECIAL.sub(r"\\\1", escape(line, quote=False))


def _section(section: Section) -> str:
    blocks = [f"## {_text(section.title)}"]
    for block in section.blocks:
        if isinstance(block, Text):
            blocks += [_text(paragraph) for paragraph in block.paragraphs]
        elif isinstance(block, Table):
            blocks.append(_table(block))
            blocks += [_text(block.note)] if block.note else []
    return "\n\n".join(blocks) if len(blocks) > 1 else ""  # pictures only


def _table(table: Table) -> str:
    lines = [table.headings, *table.rows]
    head, *rows = (_cells(map(_text, line)) for line in lines)
    return "\n".join([head, _cells(["---"] * len(table.headings)), *rows])


def _cells(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
