"""Writes benchmark results with the machine and the date."""

import json
import os
import platform
from datetime import date
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    model = "unknown"
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = [x for x in cpuinfo.read_text().splitlines() if x.startswith("model name")]
        model = lines[0].split(":", 1)[1].strip() if lines else model
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
    }


def write(name: str, values: dict[str, Any]) -> Path:
    """Writes results/`name`.json; returns its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    content = {"date": date.today().isoformat(), "machine": machine(), **values}
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path
