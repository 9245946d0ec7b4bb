"""Writes benchmark results with the machine and the date."""

import json
from datetime import date
from pathlib import Path
from typing import Any

from fp8rl import machine

RESULTS = Path(__file__).parent / "results"


def write(name: str, values: dict[str, Any]) -> Path:
    """Writes results/`name`.json; returns its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    about = machine.describe()
    del about["host"]  # results are published
    content = {"date": date.today().isoformat(), "machine": about, **values}
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path
