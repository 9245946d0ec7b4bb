"""The live view of a sweep in the terminal: its children, and how far all of them are together."""

import time
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fp8rl import progress

_COLOURS = {"running": "cyan", "finished": "green", "failed": "red", "killed": "red"}


class SweepView(AbstractContextManager["SweepView"]):
    """Shows a sweep while its block is open.

    In a terminal it redraws; where output goes to a file it prints a line for each change of state.
    """

    def __init__(self, console: Console, title: str) -> None:
        self.console, self.title = console, title
        self.bar = Progress(
            TextColumn("{task.description:<34}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("iterations"),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self.bar.add_task("Prefect starts", total=None)
        self._rows: tuple[dict[str, Any], ...] = ()
        self._states: dict[str, str] = {}
        self._live = Live(self._draw(), console=console, refresh_per_second=4, transient=False)
        self._listening = progress.listening(self._on_event)

    def __enter__(self) -> "SweepView":
        self._listening.__enter__()
        if self.console.is_terminal:
            self._live.__enter__()
        else:
            self.console.print(self.title)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._listening.__exit__(kind, error, trace)
        if self.console.is_terminal:
            self._live.update(self._draw())
            self._live.__exit__(kind, error, trace)
        elif self._rows:
            self.console.print(children_table(self.title, self._rows))

    def _on_event(self, event: progress.Event) -> None:
        if event.kind == "note":
            self.console.print(event.text, soft_wrap=True, highlight=False)
        if event.kind != "sweep":
            return
        self._rows = event.table
        self.bar.update(self._task, description=event.text, completed=event.done, total=event.total)
        if self.console.is_terminal:
            self._live.update(self._draw())
            return
        for row in self._rows:
            if row["state"] != self._states.get(row["child"], "waiting"):
                said = f": {row['reason']}" if row["reason"] else ""
                line = f"{time.strftime('%H:%M:%S')} {row['child']} {row['state']}{said}"
                self.console.print(line, soft_wrap=True, highlight=False, markup=False)
            self._states[row["child"]] = row["state"]

    def _draw(self) -> Group:
        return Group(children_table(self.title, self._rows), self.bar)


def children_table(title: str, rows: tuple[dict[str, Any], ...]) -> Table:
    """A line for each child: state, how far it is, accuracy, mismatch, and why it is not running."""
    table = Table(title=title, title_justify="left", expand=False)
    for heading in ("child", "state", "iteration", "accuracy", "mismatch", "why"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        state = str(row["state"])
        colour = _COLOURS.get(state)
        numbers = (("accuracy", "{:.1%}"), ("mismatch", "{:.4f}"))
        cells = ["" if row[key] is None else fmt.format(row[key]) for key, fmt in numbers]
        table.add_row(
            row["child"],
            f"[{colour}]{state}[/]" if colour else state,
            f"{row['iteration']} of {row['of']}",
            *cells,
            escape(str(row["reason"])),
        )
    return table
