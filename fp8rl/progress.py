"""Progress events: the flow tells, a live view listens. With no listener nothing happens."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Event:
    """kind: "phase" (text, done, total), "step" (a step begins: text, iteration), "cached" (it was
    committed before), "chunk" (of a rollout: iteration, done, total), "restored" (the learner: metrics
    load_s, replay_s, replayed), "iteration" (iteration, metrics), "note" (text), "sweep" (text, done
    and total iterations of all children, table: a row for each child).
    """

    kind: str
    text: str = ""
    iteration: int = 0
    done: int = 0
    total: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    table: tuple[dict[str, Any], ...] = ()


Listener = Callable[[Event], None]
_listeners: list[Listener] = []


def emit(event: Event) -> None:
    """Tells every listener of this process."""
    for listener in _listeners:
        listener(event)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Has `listener` told of every event inside the block."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
