"""FP8 on one NVIDIA GPU: is it right, and how fast. Needs PyTorch, NumPy and this repository only.

    python infra/gpu_check.py [--out table.md] [--budget 330]
    python infra/gpu_check.py --cpu-dry-run     no GPU: the checks that a CPU can do, tiny, no timings

1. the card, driver and versions
2. the quantiser: the bits of the card against the definition on the CPU; the same for the Triton kernel
3. the `torch` backend against `reference`: forward, dgrad, wgrad, and a linear under autograd
4. BF16 against FP8 linears of two 8B models: the products alone, and with all quantisation
5. the quantiser's bandwidth beside that of a copy

A section that fails is reported and the next one runs. Prints tables; --out writes them as Markdown.
Ends with 0, 1 where anything failed, 2 where there is no GPU. Written for a Hopper card (H100, H200):
elsewhere block and channel scaling are refused, and that counts as a failure. Timings are of
synthetic data, medians over CUDA events, one shape at a time, eager (no CUDA graphs): the plain
quantiser waits for the host once a tensor, and so does Triton's.
"""

import argparse
import itertools
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8rl.numerics.backends import Backend, BackendError, FusedWeight, Projections, backend
from fp8rl.numerics.elements import encode
from fp8rl.numerics.formats import (
    BLOCK,
    E4M3,
    E5M2,
    Fp8Recipe,
    ScaleRule,
    Scaling,
    Scheme,
    activation_scheme,
    fp8_recipe,
    weight_scheme,
)
from fp8rl.numerics.linear import Fp8Weight, fp8_linear, quantise_parts
from fp8rl.numerics.quantise import Quantised, define, quantise

TOKENS = (1, 127, 128, 129, 1000)
TIMED_TOKENS = 8192
# Relative Frobenius error of a product. Hopper keeps about 13 bits of a sum between its promotions to
# FP32; a BF16 result is rounded to 8 bits besides. A wrong layout of codes or descales is far beyond.
LIMITS = {torch.float32: 3e-3, torch.bfloat16: 6e-3}
POW2 = ScaleRule.POW2
RECIPES = {
    "block, FP32 scales": fp8_recipe(),
    "block, power-of-two scales": fp8_recipe(weights=POW2, activations=POW2),
    "tensor": fp8_recipe(Scaling.TENSOR),
    "tensor, hybrid": fp8_recipe(Scaling.TENSOR, hybrid=True),
    "channel": fp8_recipe(Scaling.CHANNEL),
    "channel, hybrid": fp8_recipe(Scaling.CHANNEL, hybrid=True),
}


@dataclass
class Report:
    """What was found, as Markdown; printed as it comes."""

    lines: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def say(self, line: str = "") -> None:
        print(line, flush=True)
        self.lines.append(line)

    def fail(self, what: str) -> None:
        self.failures.append(what)
        self.say(f"**FAILED**: {what}")

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self.say()
        for row in (header, ["---"] * len(header), *rows):
            self.say(f"| {' | '.join(row)} |")
        self.say()


@dataclass
class Run:
    """device: what is checked. tiny: small sizes. deadline: of the whole run, for time.monotonic().

    triton: whether its kernel's bits were found right.
    """

    device: torch.device
    report: Report
    tiny: bool
    deadline: float
    triton: bool = False

    def late(self) -> bool:
        return time.monotonic() > self.deadline


# ---- data -------------------------------------------------------------------------------------------


def spread_out(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """[rows, columns] on the CPU: magnitudes over many powers of two, with zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    for shape in ((rows, 1), (1, columns)):
        x = x * torch.exp2(torch.randint(-6, 7, shape, generator=generator).float())
    x[torch.rand(rows, columns, generator=generator) < 0.02] = -0.0
    x[: rows // 4, : columns // 4] = 0.0
    return x.to(dtype)


def edges(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """As `spread_out`, from the smallest to the largest values of `dtype`, subnormals included."""
    x = spread_out(rows, columns, torch.float32, seed)
    info = torch.finfo(dtype)
    third = -(-columns // 3)
    x[:, :third] *= info.tiny / 64
    x[:, 2 * third :] *= info.max / 2**16
    return x.clamp(-info.max, info.max).to(dtype)


def megatron_order(heads: int, kv_heads: int, head_dim: int) -> Tensor:
    """`Projections.order` of q, k, v as Megatron has them: by KV group, its q heads, its k, its v."""
    group = heads // kv_heads
    rows = torch.arange((heads + 2 * kv_heads) * head_dim).view(kv_heads, group + 2, head_dim)
    return torch.cat([part.flatten() for part in rows.split((group, 1, 1), 1)])


def projections_of(sizes: Sequence[int], order: Tensor | None, device: torch.device) -> Projections:
    names = tuple(f"projection {number}" for number in range(len(sizes)))
    return Projections(names, tuple(sizes), None if order is None else order.to(device))


def layers(run: Run) -> list[tuple[Projections, int]]:
    """(projections, K) of the layers that backends are compared on; the first is taken in a dry run."""
    kinds: list[tuple[list[int], Tensor | None, int]] = [
        ([144, 48, 48], megatron_order(6, 2, 24), 200),
        ([512, 256, 256], megatron_order(4, 2, BLOCK), 384),
        ([320, 200], None, 384),
        ([200], None, 200),
    ]
    return [(projections_of(s, o, run.device), k) for s, o, k in kinds[: 1 if run.tiny else None]]


# ---- 1, 2: the machine, the quantiser ----------------------------------------------------------------


def machine(run: Run) -> None:
    facts = {"date (UTC)": time.strftime("%Y-%m-%d %H:%M", time.gmtime())}
    if run.device.type == "cuda":
        properties = torch.cuda.get_device_properties(run.device)
        facts |= {
            "card": f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, "
            f"{properties.multi_processor_count} multiprocessors",
            "compute capability": f"{properties.major}.{properties.minor}",
            "driver": driver(),
        }
    else:
        facts["card"] = "none: dry run on the CPU"
    facts |= {"PyTorch": torch.__version__, "CUDA of PyTorch": str(torch.version.cuda)}
    try:
        import triton

        facts["Triton"] = triton.__version__
    except ImportError:
        facts["Triton"] = "not installed"
    run.report.table(["", ""], [[name, value] for name, value in facts.items()])


def driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({type(error).__name__})"
    return done.stdout.split("\n")[0].strip()


def schemes() -> Iterator[tuple[str, Scheme]]:
    """Every way to quantise: (mode, scheme)."""
    makes = (weight_scheme, activation_scheme)
    rules = (ScaleRule.FP32, ScaleRule.POW2)
    for scaling, make, element, rule in itertools.product(Scaling, makes, (E4M3, E5M2), rules):
        if scaling is Scaling.MXFP8 and rule is POW2:
            continue
        scheme = make(scaling, element, rule)
        for each in (scheme, scheme.turned()):
            yield f"{scaling}, {element.name.upper()}, {each.rule}", each


def differences(run: Run, scheme: Scheme, quantiser: Callable[..., Quantised]) -> tuple[int, int]:
    """(codes and descales compared, how many differ) between `quantiser` here and the definition."""
    shapes = [(1, 1), (1, 300), (128, 128), (129, 257), (513, 640)]
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    compared = wrong = 0
    for shape, dtype in itertools.product(
        *([(129, 140)], dtypes[1:2]) if run.tiny else (shapes, dtypes)
    ):
        for x in (spread_out(*shape, dtype), edges(*shape, dtype)):
            values, scale_inv = define(x, scheme)
            want = encode(values, scheme.element)
            got = quantiser(x.to(run.device), scheme)
            codes, found = got.codes.cpu(), got.scale_inv.cpu().contiguous()
            compared += want.numel() + scale_inv.numel()
            wrong += int((codes != want).sum())
            wrong += int((found.view(torch.int32) != scale_inv.view(torch.int32)).sum())
    return compared, wrong


def quantiser_bits(run: Run) -> None:
    found: dict[str, tuple[int, int]] = {}
    for mode, scheme in schemes():
        compared, wrong = differences(run, scheme, quantise)
        before = found.get(mode, (0, 0))
        found[mode] = (before[0] + compared, before[1] + wrong)
    rows = [[mode, f"{n:,}", f"{wrong:,}"] for mode, (n, wrong) in found.items()]
    run.report.table(["mode", "codes and descales compared", "that differ"], rows)
    wrong = sum(wrong for _, wrong in found.values())
    if wrong:
        run.report.fail(f"the quantiser's bits on {run.device.type} differ in {wrong} places")


def triton_bits(run: Run) -> None:
    """Sets `run.triton` where Triton is there and its kernel's bits are the definition's."""
    if run.device.type != "cuda":
        run.report.say("Not here: tests/contract/test_scaled_mm.py runs it in Triton's interpreter.")
        return
    try:
        from fp8rl.numerics import triton_quantise
    except ImportError as error:
        run.report.say(f"Not checked ({error}): only the plain quantiser is timed.")
        return
    compared = wrong = 0
    for _, scheme in schemes():
        if triton_quantise.covers(scheme):
            more, bad = differences(run, scheme, triton_quantise.quantise)
            compared, wrong = compared + more, wrong + bad
    run.triton = compared > 0 and wrong == 0
    run.report.say(f"{compared:,} codes and descales compared, {wrong:,} differ.")
    if not run.triton:
        run.report.fail(f"the Triton quantiser's bits differ in {wrong} of {compared} places")


# ---- 3: the products ---------------------------------------------------------------------------------


def error_of(got: Tensor, want: Tensor) -> float:
    """Relative Frobenius error; infinite for another shape or dtype, or for NaN."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return float("inf")
    error = float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30))
    return error if error == error else float("inf")


def three_products(
    made: Backend, weight: FusedWeight, x: Tensor, dy: Tensor, recipe: Fp8Recipe
) -> list[Tensor]:
    prepared = made.prepare(weight)
    return [
        made.forward(x, prepared, recipe.input),
        made.dgrad(dy, prepared, recipe.gradient),
        made.wgrad(dy, x, recipe, weight.projections),
    ]


def worst_errors(run: Run, made: Backend, recipe: Fp8Recipe) -> dict[tuple[str, torch.dtype], float]:
    """The largest error of each product and result dtype against `reference`."""
    reference = backend("reference")
    worst: dict[tuple[str, torch.dtype], float] = {}
    for (projections, columns), tokens in itertools.product(layers(run), (33,) if run.tiny else TOKENS):
        size = sum(projections.sizes)
        w = (spread_out(size, columns, torch.float32, 1) * 0.02).to(run.device)
        forward = quantise_parts(w, projections, recipe.weight)
        turned = recipe.weight.turned()
        same = turned == recipe.weight
        weight = FusedWeight(
            projections, forward, forward if same else quantise_parts(w, projections, turned)
        )
        for dtype in (torch.float32, torch.bfloat16):
            x = spread_out(tokens, columns, dtype, 2).to(run.device)
            dy = spread_out(tokens, size, dtype, 3).to(run.device)
            got = three_products(made, weight, x, dy, recipe)
            want = three_products(reference, weight, x, dy, recipe)
            for name, a, b in zip(("forward", "dgrad", "wgrad"), got, want, strict=True):
                key = (name, b.dtype)
                worst[key] = max(worst.get(key, 0.0), error_of(a, b))
    return worst


def autograd_error(run: Run, made: Backend, recipe: Fp8Recipe) -> float:
    """The largest error of y, dx and dW of one BF16 linear, against `reference` under autograd."""
    projections, columns = layers(run)[0]
    w = (spread_out(sum(projections.sizes), columns, torch.float32, 4) * 0.02).to(run.device)
    results = []
    for each in (backend("reference"), made):
        fp8 = Fp8Weight(projections, recipe, each)
        x = spread_out(2 * 33, columns, torch.bfloat16, 5).view(2, 33, columns).to(run.device)
        x.requires_grad_()
        master = w.clone().requires_grad_()
        y = fp8_linear(x, master, fp8)
        results.append((y.detach(), *torch.autograd.grad(y.float().square().sum(), (x, master))))
    return max(error_of(a, b) for a, b in zip(results[1], results[0], strict=True))


def backends(run: Run) -> None:
    from fp8rl.numerics.backends.scaled_mm import BACKEND

    rows, quantisers = [], [("plain", BACKEND)]
    if run.triton:
        quantisers.append(("Triton", replace(BACKEND, use_triton=True)))
    for (name, recipe), (quantiser, made) in itertools.product(RECIPES.items(), quantisers):
        block = recipe.weight.tile == (BLOCK, BLOCK)
        if quantiser == "Triton" and not block:
            continue
        if run.device.type == "cpu" and block:
            rows.append([name, quantiser, *["not on a CPU"] * 4])
            continue
        try:
            if run.device.type == "cuda":
                made.check(recipe)
            worst = worst_errors(run, made, recipe)
            through = autograd_error(run, made, recipe)
        except BackendError as error:
            run.report.fail(f"{name}: refused: {error}")
            continue
        except Exception as error:  # the other recipes are still worth a look
            traceback.print_exc()
            run.report.fail(f"{name} ({quantiser}): {type(error).__name__}: {error}")
            continue
        cells = []
        for product in ("forward", "dgrad", "wgrad"):
            found = {dtype: value for (which, dtype), value in worst.items() if which == product}
            cells.append(", ".join(f"{v:.1e} {str(d)[6:]}" for d, v in found.items()))
            for dtype, value in found.items():
                if not value <= LIMITS[dtype]:
                    run.report.fail(f"{name} ({quantiser}): {product} is off by {value:.1e} in {dtype}")
        rows.append([name, quantiser, *cells, f"{through:.1e}"])
        if not through <= 2 * LIMITS[torch.bfloat16]:
            run.report.fail(f"{name} ({quantiser}): autograd is off by {through:.1e}")
    limits = ", ".join(f"{value:g} for {str(dtype)[6:]}" for dtype, value in LIMITS.items())
    run.report.say(
        f"Relative Frobenius error against `reference`, the worst of {len(layers(run))} layers and all "
        f"token counts. Limits: {limits} results, twice the latter under autograd, where a gradient "
        "starts from its own forward pass."
    )
    run.report.table(["recipe", "quantiser", "forward", "dgrad", "wgrad", "autograd"], rows)


# ---- 4, 5: timings -----------------------------------------------------------------------------------


def milliseconds(body: Callable[[], Any], seconds: float = 0.25) -> float:
    """The median time of `body` on the GPU, after a warm-up; about `seconds` of repeats, 5 to 100."""
    for _ in range(3):
        body()
    torch.cuda.synchronize()
    start = time.monotonic()
    body()
    torch.cuda.synchronize()
    repeats = max(5, min(100, int(seconds / max(time.monotonic() - start, 1e-6))))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2 * repeats)]
    for number in range(repeats):
        marks[2 * number].record()
        body()
        marks[2 * number + 1].record()
    torch.cuda.synchronize()
    times = [marks[2 * n].elapsed_time(marks[2 * n + 1]) for n in range(repeats)]
    return statistics.median(times)


@dataclass(frozen=True)
class Layer:
    """A linear of the timed models: fused projections of `sizes` rows, K columns."""

    name: str
    sizes: tuple[int, ...]
    columns: int
    order: Tensor | None = None


def timed_layers() -> list[Layer]:
    """The linears of Llama-3.1-8B and Qwen3-8B: hidden 4096, 32 heads and 8 KV heads of 128 in both."""
    hidden, heads, kv_heads, head_dim = 4096, 32, 8, 128
    order = megatron_order(heads, kv_heads, head_dim)
    both = [
        Layer("qkv, both", (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim), hidden, order),
        Layer("o, both", (hidden,), heads * head_dim),
    ]
    for model, inner in (("Llama-3.1-8B", 14336), ("Qwen3-8B", 12288)):
        both.append(Layer(f"gate_up, {model}", (inner, inner), hidden))
        both.append(Layer(f"down, {model}", (hidden,), inner))
    return both


class Recorder:
    """scaled_mm, remembering what it was called with: to time the products alone."""

    def __init__(self, product: Callable[..., Tensor]) -> None:
        self.product = product
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, *args: Any, **options: Any) -> Tensor:
        self.calls.append((args, options))
        return self.product(*args, **options)

    def replay(self, calls: slice) -> None:
        for args, options in self.calls[calls]:
            self.product(*args, **options)


def linear_times(run: Run, layer: Layer) -> tuple[list[str], list[str], list[str]]:
    """Rows of the forward, the forward and backward, and the weight's table."""
    from fp8rl.numerics.backends.scaled_mm import BACKEND

    tokens, size, recipe = TIMED_TOKENS, sum(layer.sizes), fp8_recipe()
    projections = projections_of(layer.sizes, layer.order, run.device)
    generator = torch.Generator(run.device).manual_seed(0)
    make: dict[str, Any] = {"device": run.device, "generator": generator}
    master = (torch.randn(size, layer.columns, **make) * 0.02).requires_grad_()
    x = torch.randn(tokens, layer.columns, **make).bfloat16()
    dy = torch.randn(tokens, size, **make).bfloat16()

    half, leaf = master.detach().bfloat16().requires_grad_(), x.clone().requires_grad_()

    def bf16_both() -> None:
        torch.autograd.grad(F.linear(leaf, half), (leaf, half), dy)

    recorder = Recorder(BACKEND.product)
    made = replace(BACKEND, product=recorder)
    prepared = Fp8Weight(projections, recipe, made).prepared(master)
    made.forward(x, prepared, recipe.input)
    forward_calls = len(recorder.calls)
    made.dgrad(dy, prepared, recipe.gradient)
    made.wgrad(dy, x, recipe, projections)

    def fp8_both(each: Fp8Weight) -> None:
        torch.autograd.grad(fp8_linear(leaf, master, each), (leaf, master), dy)

    def requantise() -> None:
        Fp8Weight(projections, recipe, BACKEND).prepared(master)

    with torch.no_grad():
        forward = [milliseconds(partial(F.linear, x, half))]
    forward.append(milliseconds(partial(recorder.replay, slice(0, forward_calls))))
    both = [milliseconds(bf16_both), milliseconds(partial(recorder.replay, slice(None)))]
    recorder.calls.clear()
    for use_triton in (False, True) if run.triton else (False,):
        made = replace(BACKEND, use_triton=use_triton)
        forward.append(milliseconds(partial(made.forward, x, prepared, recipe.input)))
        both.append(milliseconds(partial(fp8_both, Fp8Weight(projections, recipe, made))))
    once = milliseconds(requantise)
    flops = 2 * tokens * size * layer.columns
    name = [layer.name, f"{size} x {layer.columns}"]
    return (
        [*name, *cells(forward, flops)],
        [*name, *cells(both, 3 * flops)],
        [*name, f"{once:.2f}"],
    )


def cells(times: Sequence[float], flops: int) -> list[str]:
    """Times in ms with TFLOP/s, and the ratio to the first of all others."""
    out = [f"{times[0]:.3f} ({flops / times[0] / 1e9:.0f})"]
    out += [f"{t:.3f} ({flops / t / 1e9:.0f}), {times[0] / t:.2f}x" for t in times[1:]]
    return out


def linears(run: Run) -> None:
    tables: tuple[list[list[str]], ...] = ([], [], [])
    for layer in timed_layers():
        if run.late():
            run.report.say(f"{layer.name}: left out, the time budget is spent.")
            continue
        try:
            rows = linear_times(run, layer)
        except Exception as error:  # the other shapes are still worth timing
            traceback.print_exc()
            run.report.fail(f"timing {layer.name}: {type(error).__name__}: {error}")
            continue
        for table, row in zip(tables, rows, strict=True):
            table.append(row)
        torch.cuda.empty_cache()
    run.report.say(
        f"{TIMED_TOKENS} tokens, block scaling with FP32 scales, BF16 activations: ms (TFLOP/s), and "
        "how many times as fast as BF16. `products` are FP8 GEMMs on operands that are there already; "
        "the other columns quantise activations and gradients too (the weight once a version: below)."
    )
    header = ["layer", "N x K", "BF16", "FP8 products", "FP8, plain quantiser"]
    header += ["FP8, Triton quantiser"] if run.triton else []
    run.report.say()
    run.report.say("Forward:")
    run.report.table(header, tables[0])
    run.report.say("Forward, dgrad and wgrad (FP8's weight gradient is FP32, BF16's is BF16):")
    run.report.table(header, tables[1])
    run.report.say("A new weight version, FP32 master to operands of forward and dgrad, ms:")
    run.report.table(["layer", "N x K", "plain quantiser"], tables[2])


def bandwidth(run: Run) -> None:
    big = torch.randn(TIMED_TOKENS, 28672, device=run.device).bfloat16()
    copy = 4 * big.numel() / milliseconds(big.clone) / 1e6
    rows = [["copy (torch.clone), BF16", f"{copy:.0f}", "100%"]]
    activation = activation_scheme(Scaling.BLOCK)
    cases = [
        ("activation, 1x128 along the columns, BF16", activation, torch.bfloat16),
        ("activation, 1x128 along the tokens, BF16", activation.turned(), torch.bfloat16),
        ("weight, 128x128, FP32", weight_scheme(Scaling.BLOCK), torch.float32),
    ]
    quantisers: dict[str, Callable[..., Quantised]] = {"plain": quantise}
    if run.triton:
        from fp8rl.numerics import triton_quantise

        quantisers["Triton"] = triton_quantise.quantise
    x = big[:, :14336].contiguous()
    for (what, scheme, dtype), (name, quantiser) in itertools.product(cases, quantisers.items()):
        if run.late():
            run.report.say("The rest is left out, the time budget is spent.")
            break
        y = x.to(dtype)
        moved = y.numel() * (y.element_size() + 1) + 4 * quantiser(y, scheme).scale_inv.numel()
        rate = moved / milliseconds(partial(quantiser, y, scheme)) / 1e6
        rows.append([f"{what}, {name}", f"{rate:.0f}", f"{rate / copy:.0%}"])
    run.report.say(f"Bytes that must be moved (input, codes, descales) by time, {tuple(x.shape)}:")
    run.report.table(["", "GB/s", "of a copy"], rows)


# ---- all of it ---------------------------------------------------------------------------------------


def section(run: Run, title: str, body: Callable[[Run], None]) -> None:
    run.report.say(f"## {title}")
    run.report.say()
    start = time.monotonic()
    try:
        body(run)
    except Exception as error:  # one section's failure must not hide the others
        traceback.print_exc()
        run.report.fail(f"{title}: {type(error).__name__}: {error}")
    print(f"({time.monotonic() - start:.1f} s)\n", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the checks; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="write the tables to this Markdown file")
    parser.add_argument("--budget", type=float, default=330, help="seconds; no timing starts after")
    parser.add_argument("--cpu-dry-run", action="store_true", help="no GPU: tiny checks, no timings")
    options = parser.parse_args(arguments)
    if not options.cpu_dry_run and not torch.cuda.is_available():
        print("PyTorch sees no CUDA device here. --cpu-dry-run runs the script without one.")
        return 2
    torch.set_flush_denormal(False)
    torch.backends.cuda.matmul.allow_tf32 = False  # the reference's products are FP32
    device = torch.device("cpu" if options.cpu_dry_run else "cuda")
    run = Run(device, Report(), options.cpu_dry_run, time.monotonic() + options.budget)
    run.report.say("# FP8 on a GPU")
    run.report.say()
    section(run, "Machine", machine)
    section(run, "Quantiser: the same bits as the definition", quantiser_bits)
    section(run, "Triton quantiser: the same bits", triton_bits)
    section(run, "Products: the torch backend against the reference", backends)
    if device.type == "cuda":
        section(run, "Linears, BF16 against FP8", linears)
        section(run, "Quantiser: bandwidth", bandwidth)
    failures = run.report.failures
    run.report.say("All checks passed." if not failures else f"{len(failures)} failed:")
    for failure in failures:
        run.report.say(f"- {failure}")
    if options.out is not None:
        options.out.write_text("\n".join(run.report.lines) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
