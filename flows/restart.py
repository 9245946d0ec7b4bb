"""What a start or restart costs, by part: from the command to the first step that is done anew."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from fp8rl import progress


class StartTimes:
    """Seconds of each part, in order; closed when the first new step begins.

    began: Unix time at which the command, or Prefect's worker, started this process; of a second run in
    one process, now.
    """

    _is_first = True

    def __init__(self) -> None:
        began = psutil.Process().create_time() if StartTimes._is_first else time.time()
        StartTimes._is_first = False
        self.began = began
        self.parts: dict[str, float] = {"process, imports and Prefect": time.time() - began}
        self._last = time.time()
        self.total: float | None = None
        self._taken = False
        self.first_step = ""

    def mark(self, part: str) -> None:
        """Ends `part`, which began where the one before it ended."""
        now = time.time()
        self.parts[part] = self.parts.get(part, 0.0) + now - self._last
        self._last = now

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hears of replays and of the first new step."""
        with progress.listening(self._on_event):
            yield

    def _on_event(self, event: progress.Event) -> None:
        if self.total is not None:
            return
        if event.kind == "restored":
            # Inside the part that is being timed: shown by themselves, and taken off it.
            for part, key in (("learner from checkpoint", "load_s"), ("replay", "replay_s")):
                self.parts[part] = event.metrics[key]
                self._last += event.metrics[key]
        elif event.kind == "step" and event.text not in ("prepare_data", "warm_start"):
            self.mark("other")
            self.total = time.time() - self.began
            self.first_step = f"{event.text} of iteration {event.iteration}"

    def take(self) -> dict[str, float]:
        """{part: seconds}, with the total: once, after the first new step has begun; else empty."""
        if self.total is None or self._taken:
            return {}
        self._taken = True
        return {**{k: round(v, 3) for k, v in self.parts.items()}, "total": round(self.total, 3)}
