"""The live view of a sweep in the terminal: its children, and how far all of them are together."""

import time
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table

from flows.live import LiveDisplay
from fp8rl import progress

_COLOURS = {"running": "cyan", "finished": "green", "failed": "red", "killed": "red"}


class SweepView(LiveDisplay):
    """Shows a sweep; where output goes to a file, a line for each change of state and the table at the
    end."""

    def __init__(self, console: Console, title: str) -> None:
        self._rows: tuple[dict[str, Any], ...] = ()
        self._states: dict[str, str] = {}
        super().__init__(console, title, unit="iterations")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        if self._rows and not self.console.is_terminal:
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
