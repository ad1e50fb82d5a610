"""What the commands share: exit codes, notes, sizes, options that several have, the bar.

Results go to stdout, everything else to stderr: progress, notes, errors.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvstore.config import parse_bytes
from kvstore.errors import InvalidArgument, KvstoreError, NotEnoughMemory

EXIT_WRONG_BYTES: Final = 1
EXIT_COULD_NOT_RUN: Final = 2
EXIT_INTERRUPTED: Final = 130


def parse_size(text: str | int) -> int:
    """A size given as an option."""
    try:
        return parse_bytes(text, "SIZE")
    except InvalidArgument as error:
        raise typer.BadParameter(str(error)) from None


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Connect = Annotated[
    str | None,
    typer.Option(
        "--connect",
        metavar="ADDRESS",
        help="Use the node that runs there: HOST:PORT, or the path of its unix socket.",
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option("--token-file", metavar="PATH", help="The secret of the node of --connect."),
]


@contextmanager
def exits(too_large: str = "") -> Iterator[None]:
    """Turns what a command raises into one line on stderr and an exit code.

    `too_large`: what to do where memory does not suffice.
    """
    try:
        yield
    except KeyboardInterrupt:
        note("kvstore: interrupted; the store was closed and its memory given back")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except (NotEnoughMemory, MemoryError) as error:
        note(f"kvstore: error: {error}" + (f"\n{too_large}" if too_large else ""))
        raise typer.Exit(EXIT_COULD_NOT_RUN) from None
    except KvstoreError as error:
        note(f"kvstore: error: {error}")
        raise typer.Exit(EXIT_COULD_NOT_RUN) from None


@contextmanager
def progress_bar(title: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on a terminal, nothing elsewhere; what is called after each of `total` steps."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description:<14}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)


def note(text: str) -> None:
    """A line for people, beside the results."""
    print(text, file=sys.stderr, flush=True)


def print_json(value: dict[str, Any]) -> None:
    """The one object of --json."""
    print(json.dumps(value))


def size_text(num_bytes: int) -> str:
    """1536 → '1,536 B', 65536 → '64 KiB', 1.5e9 → '1.4 GiB'."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:,.0f} {unit}" if size >= 10 or size == int(size) else f"{size:.1f} {unit}"
