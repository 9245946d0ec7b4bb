"""What a page is made of; HTML and Markdown render it.

Texts are plain here, names that users gave among them; who renders them escapes them.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Text:
    paragraphs: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """The first column names the row."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


@dataclass(frozen=True)
class Image:
    png: bytes
    alt: str
    note: str = ""


@dataclass(frozen=True)
class Section:
    title: str
    blocks: tuple[Text | Table | Image, ...]


@dataclass(frozen=True)
class Page:
    title: str
    sections: tuple[Section, ...]

    def first_tables(self, *titles: str) -> dict[str, Table]:
        """{title: the first table} of the sections called so."""
        found: dict[str, Table] = {}
        for section in self.sections:
            for block in section.blocks:
                if section.title in titles and isinstance(block, Table):
                    found.setdefault(section.title, block)
        return found
