"""The live view of a run in the terminal: what is going on, and the last iterations."""

import time
from collections import deque
from collections.abc import Iterable

from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table

from flows.live import LiveDisplay
from fp8rl import progress
from fp8rl.glance import ACCURACY, HEADINGS, cells, line

KEPT = 8


def iterations_table(title: str, rows: Iterable[tuple[int, dict[str, float]]]) -> Table:
    """A line for each iteration (number, metrics)."""
    table = Table(title=escape(title), title_justify="left", expand=False)
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    for number, metrics in rows:
        table.add_row(*cells(number, metrics))
    return table


class LiveView(LiveDisplay):
    """Shows the progress of a run; where output goes to a file, a line per iteration."""

    def __init__(self, console: Console, title: str) -> None:
        self._rows: deque[tuple[int, dict[str, float]]] = deque(maxlen=KEPT)
        self._accuracy = float("nan")
        self._last_phase = ""
        super().__init__(console, title)

    def _on_event(self, event: progress.Event) -> None:
        if event.kind == "phase":
            self.bar.update(
                self._task, description=event.text, completed=event.done, total=event.total or None
            )
        elif event.kind == "step":
            self.bar.update(self._task, description=f"iteration {event.iteration}: {event.text}")
        elif event.kind == "chunk" and event.total > 1:
            text = f"iteration {event.iteration}: rollout, chunk {event.done + 1} of {event.total}"
            self.bar.update(self._task, description=text)
        elif event.kind == "iteration":
            # The last one measured, until there is another.
            self._accuracy = event.metrics.get(ACCURACY, self._accuracy)
            self._rows.append((event.iteration, event.metrics | {ACCURACY: self._accuracy}))
            self.bar.update(self._task, completed=event.iteration, total=event.total)
        if event.kind == "note":
            self.console.print(event.text, soft_wrap=True, highlight=False)
        elif self.console.is_terminal:
            self._live.update(self._draw())
        else:
            self._print_line(event)

    def _print_line(self, event: progress.Event) -> None:
        if event.kind == "iteration":
            self.console.print(line(*self._rows[-1]), soft_wrap=True, highlight=False)
        elif event.kind == "phase" and event.text != self._last_phase:
            self._last_phase = event.text
            self.console.print(f"{time.strftime('%H:%M:%S')} {event.text}", highlight=False)

    def _draw(self) -> Group:
        return Group(iterations_table(self.title, self._rows), self.bar)
