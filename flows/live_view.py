"""The live view of a run in the terminal: what is going on, and the last iterations."""

import time
from collections import deque
from contextlib import AbstractContextManager
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fp8rl import progress
from fp8rl.glance import ACCURACY, HEADINGS, cells

_KEPT = 8


class LiveView(AbstractContextManager["LiveView"]):
    """Shows the progress of a run while its block is open.

    In a terminal it redraws; where output goes to a file it prints a line per iteration.
    """

    def __init__(self, console: Console, title: str) -> None:
        self.console = console
        self.title = title
        self.bar = Progress(
            TextColumn("{task.description:<34}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self.bar.add_task("Prefect starts", total=None)
        self._rows: deque[tuple[int, dict[str, float]]] = deque(maxlen=_KEPT)
        self._accuracy = float("nan")
        self._live = Live(self._draw(), console=console, refresh_per_second=4, transient=False)
        self._listening = progress.listening(self._on_event)
        self._last_phase = ""

    def __enter__(self) -> "LiveView":
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
            columns = zip(HEADINGS, cells(*self._rows[-1]), strict=True)
            line = "  ".join(f"{name} {cell}" for name, cell in columns if cell)
            self.console.print(line, soft_wrap=True, highlight=False)
        elif event.kind == "phase" and event.text != self._last_phase:
            self._last_phase = event.text
            self.console.print(f"{time.strftime('%H:%M:%S')} {event.text}", highlight=False)

    def _draw(self) -> Group:
        table = Table(title=self.title, title_justify="left", expand=False)
        for heading in HEADINGS:
            table.add_column(heading, justify="right")
        for number, metrics in self._rows:
            table.add_row(*cells(number, metrics))
        return Group(table, self.bar)
