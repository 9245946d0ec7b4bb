"""The block-scaled FP8 product on a CPU's matrix unit (AMX), rounded as FP8 tensor cores do it.

    C[m, n] = sum over groups g of  sa[m, g] * sb[n, g] * (sum over k in g of A[m, k] * B[n, k])

Products of FP8 values are exact, a group's sum is FP32, and one FP32 multiply-add per group scales it
into the result: nothing is rounded to BF16 on the way. Groups are taken in order, so the bits depend
neither on the number of threads nor on how many rows are computed together.

The kernel (`amx.cpp`) is compiled by g++ on first use, in about a second, and kept in the user's cache
folder. It runs on the threads of PyTorch's own OpenMP pool; a second pool beside it would fight it for
the cores.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8rl.machine import AMX_FLAGS, cpu_flags, cpu_model

_SOURCE = Path(__file__).with_suffix(".cpp")
_COMPILE = (
    *("g++", "-std=c++17", "-O3", "-fPIC", "-shared"),
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512vbmi", "-mavx512bf16", "-mfma"),
    *("-mamx-tile", "-mamx-bf16"),
)
_PANEL, _STEP = 32, 32
# Fewer elements than this are packed sooner by one thread than another one wakes up.
_ALONE = 1 << 16


@dataclass(frozen=True)
class Left:
    """The left operand [M, K], packed: opaque `tiles`, FP32 `scales` [G, M padded to 32]."""

    tiles: Tensor
    scales: Tensor
    rows: int
    groups: tuple[int, ...]


@dataclass(frozen=True)
class Right:
    """The right operand [N, K], packed. codes: its tiles hold E4M3 bytes, not BF16 values."""

    tiles: Tensor
    scales: Tensor
    rows: int
    groups: tuple[int, ...]
    codes: bool


@dataclass(frozen=True)
class _Kernel:
    pack: Callable[..., None]
    product: Callable[..., None]
    pool: int


def _library(cpu: str) -> Path:
    """Compiles the kernel unless the cache has it."""
    key = "\0".join((_SOURCE.read_text(), *_COMPILE, cpu))
    name = f"amx-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fp8rl"
    library = folder / name
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        # Another process may be compiling too: each writes its own file, and the last rename wins.
        with tempfile.TemporaryDirectory(dir=folder) as beside:
            made = Path(beside) / name
            subprocess.run([*_COMPILE, "-o", made, _SOURCE], check=True, capture_output=True, text=True)
            made.replace(library)
    return library


def _thread_pool() -> int | None:
    """The address of GOMP_parallel in the OpenMP runtime that PyTorch runs on."""
    # As the loader bound PyTorch's own calls: what is visible to all comes first (a preloaded
    # runtime), then the libraries that libtorch_cpu brought.
    for library in (None, str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")):
        try:
            return ctypes.cast(ctypes.CDLL(library).GOMP_parallel, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
    return None


def _load() -> _Kernel | str:
    """The kernel, or why there is none."""
    try:
        cpu, flags = cpu_model(), cpu_flags()
    except OSError as error:
        return f"this CPU's features are not known: {error}"
    if missing := [flag for flag in AMX_FLAGS if flag not in flags]:
        return f"this CPU has no AMX-BF16 (lacks {', '.join(missing)})"
    pool = _thread_pool()
    if pool is None:
        return "PyTorch's thread pool is not OpenMP's (no GOMP_parallel)"
    if shutil.which(_COMPILE[0]) is None:
        return "no C++ compiler (g++) found"
    try:
        library = ctypes.CDLL(str(_library(cpu)))
    except subprocess.CalledProcessError as error:
        lines: list[str] = error.stderr.strip().splitlines() or ["no message"]
        return f"g++ cannot compile {_SOURCE.name}: {lines[0]}"
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        return f"the compiled kernel cannot be kept or loaded: {error}"
    if error_number := library.fp8rl_enable():
        return f"the system refuses AMX to this process: {os.strerror(error_number)}"
    p, i, n = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    library.fp8rl_pack.argtypes = [p, i, p, n, i, p, i, i, i, i, p, p, n, n, p]
    library.fp8rl_product.argtypes = [p, i, p, p, p, p, p, i, i, i, i, i, p]
    library.fp8rl_pack.restype = library.fp8rl_product.restype = None
    return _Kernel(library.fp8rl_pack, library.fp8rl_product, pool)


_loaded = cache(_load)


def unavailable() -> str | None:
    """None, or why the kernel cannot be used here. Compiles it if need be; the answer is kept."""
    loaded = _loaded()
    return loaded if isinstance(loaded, str) else None


def _kernel() -> _Kernel:
    loaded = _loaded()
    if isinstance(loaded, str):
        raise RuntimeError(f"no AMX kernel: {loaded}")
    return loaded


@cache
def _sizes(groups: tuple[int, ...]) -> tuple[Any, int]:
    """`groups` as a C array, and the steps of 32 that they take together."""
    if not groups or min(groups) < 1:
        raise ValueError(f"groups {groups} are not sizes of 1 or more")
    return (ctypes.c_int * len(groups))(*groups), sum(-(-size // _STEP) for size in groups)


def _pack(
    values: Tensor, scale_inv: Tensor, groups: tuple[int, ...], contract: int, right: bool
) -> tuple[Tensor, Tensor, int]:
    kernel = _kernel()
    sizes, steps = _sizes(groups)
    if values.dim() != 2 or contract not in (0, 1):
        raise ValueError(f"values {tuple(values.shape)} are not 2-D, or contract={contract} not 0 or 1")
    rows, size = values.shape[1 - contract], values.shape[contract]
    if size != sum(groups):
        raise ValueError(f"groups {groups} add up to {sum(groups)}, but K is {size}")
    scales = (rows, len(groups)) if contract == 1 else (len(groups), rows)
    if scale_inv.shape != scales:
        raise ValueError(f"scale_inv {tuple(scale_inv.shape)} should be {scales}")
    codes = right and values.dtype is torch.uint8
    if not (codes or values.dtype is torch.bfloat16) or scale_inv.dtype is not torch.float32:
        raise ValueError(f"values {values.dtype} with scale_inv {scale_inv.dtype}: not BF16 and FP32")
    if values.stride(1) != 1 and values.shape[1] > 1:
        raise ValueError(f"values with strides {values.stride()}: the last has to be 1")
    if values.device.type != "cpu" or scale_inv.device.type != "cpu":
        raise ValueError(f"values on {values.device}, scale_inv on {scale_inv.device}: not on the CPU")
    padded = -(-rows // _PANEL) * _PANEL
    tiles = torch.empty((padded, steps * _STEP), dtype=values.dtype)
    packed = torch.empty((len(groups), padded), dtype=torch.float32)
    threads = 1 if values.numel() < _ALONE else torch.get_num_threads()
    kernel.pack(
        *(kernel.pool, threads, values.data_ptr(), values.stride(0), rows),
        *(sizes, len(groups), contract, right, codes, tiles.data_ptr()),
        *(scale_inv.data_ptr(), scale_inv.stride(1 - contract), scale_inv.stride(contract)),
        packed.data_ptr(),
    )
    return tiles, packed, rows


def pack_left(values: Tensor, scale_inv: Tensor, groups: tuple[int, ...], *, contract: int) -> Left:
    """The left operand from `values` on the FP8 grid, BF16, and FP32 descales.

    contract 1: values [M, K], scale_inv [M, G]. contract 0: values [K, M], scale_inv [G, M].
    groups: sizes of the G groups along K, in order. Raises ValueError where these do not fit.
    """
    tiles, scales, rows = _pack(values, scale_inv, groups, contract, right=False)
    return Left(tiles, scales, rows, groups)


def pack_right(values: Tensor, scale_inv: Tensor, groups: tuple[int, ...], *, contract: int) -> Right:
    """The right operand, as `pack_left` with N for M.

    `values` may be E4M3 codes (uint8) too: then one byte per element is kept and read.
    """
    tiles, scales, rows = _pack(values, scale_inv, groups, contract, right=True)
    return Right(tiles, scales, rows, groups, codes=values.dtype is torch.uint8)


def product(left: Left, right: Right, dtype: torch.dtype) -> Tensor:
    """The block-scaled product [M, N] in FP32, or rounded from it to BF16."""
    kernel = _kernel()
    if left.groups != right.groups:
        raise ValueError(
            f"left [{left.rows}, K] in groups {left.groups}, right [{right.rows}, K] in {right.groups}"
        )
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"dtype {dtype} is neither float32 nor bfloat16")
    out = torch.empty((left.rows, right.rows), dtype=dtype)
    kernel.product(
        *(kernel.pool, torch.get_num_threads(), left.tiles.data_ptr(), left.scales.data_ptr()),
        *(right.tiles.data_ptr(), right.scales.data_ptr(), _sizes(left.groups)[0], len(left.groups)),
        *(left.rows, right.rows, right.codes, dtype is torch.bfloat16, out.data_ptr()),
    )
    return out
