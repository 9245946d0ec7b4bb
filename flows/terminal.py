"""What the parts of the `fp8rl` command share: its two outputs, and options that mean the same."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

# In a file or a pipe lines are as long as the tables need.
console = Console(width=None if sys.stdout.isatty() else 150)
errors = Console(stderr=True)

RecipePath = Annotated[Path, typer.Argument(help="Recipe file, for example configs/tiny/bf16.yaml")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Values to change: key=value, for example iterations=2")
]
RunName = Annotated[str, typer.Argument(help="A run's name; `fp8rl runs` lists them")]
RunsDir = Annotated[Path, typer.Option("--runs-dir", help="The runs folder")]


def say(text: str, style: str | None = None) -> None:
    """A line as it is: not broken, coloured or taken for markup."""
    console.print(text, style=style, soft_wrap=True, highlight=False, markup=False)
