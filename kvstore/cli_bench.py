"""`kvstore bench transfer`: options, and the table."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvstore.cli_shared import (
    EXIT_WRONG_BYTES,
    Connect,
    Json,
    TokenFile,
    exits,
    note,
    parse_size,
    print_json,
    progress_bar,
    size_text,
)
from kvstore.sim.bench import BenchOptions, BenchReport, TransferFigures, measure
from kvstore.sim.replay import Percentiles

TOO_LARGE = "Try a smaller --total: it is taken up to four times."

BlockBytes = Annotated[
    int, typer.Option(parser=parse_size, metavar="SIZE", show_default="1MiB", help="Of a block.")
]
Total = Annotated[
    int,
    typer.Option(
        parser=parse_size,
        metavar="SIZE",
        show_default="256MiB",
        help="All blocks of a round; more than the caches hold. The memory is up to four times it.",
    ),
]

bench_app = typer.Typer(
    help="Measure a store beside what this machine can do.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@bench_app.callback()
def bench() -> None:
    """Measure a store beside what this machine can do."""


@bench_app.command(name="transfer", short_help="Blocks in and out, over each transport.")
def bench_transfer(
    transport: Annotated[
        str, typer.Option(metavar="local|shm|tcp|all", help="The way to the blocks.")
    ] = "all",
    operation: Annotated[
        str, typer.Option("--op", metavar="put|get|both", help="What is shown.")
    ] = "both",
    block_bytes: BlockBytes = 1 << 20,
    batch: Annotated[int, typer.Option(min=1, metavar="N", help="Blocks of one call.")] = 32,
    threads: Annotated[int, typer.Option(min=1, metavar="N", help="Callers at once.")] = 1,
    total: Total = 256 << 20,
    rounds: Annotated[
        int, typer.Option(min=1, metavar="N", help="Counted ones; figures are medians.")
    ] = 5,
    connect: Connect = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Put blocks into a store and get them back: in this process (local), and from a node
    in another one over shared memory (shm) and TCP. Without --connect a node is started,
    and stopped at the end. Every byte that comes back is checked.

    \b
    Examples:
      kvstore bench transfer
      kvstore bench transfer --transport shm --block-bytes 64KiB --batch 64
      kvstore bench transfer --transport tcp --threads 4 --op get
      kvstore bench transfer --total 1GiB --rounds 9 --json
      kvstore bench transfer --connect 10.0.0.5:7400 --token-file token

    Beside it stands what the machine did in the same run: memcpy of one thread, over the
    same blocks, and a bare TCP stream over loopback. Shared machines vary a lot from run
    to run; the ratios vary less. Exit code 1 means that bytes came back wrong; 2 that it
    could not run as asked.
    """
    with exits(TOO_LARGE):
        options = BenchOptions(
            transport=transport,
            operation=operation,
            block_bytes=block_bytes,
            batch=batch,
            threads=threads,
            total_bytes=total,
            rounds=rounds,
            connect=connect,
            token_file=token_file,
        )
        note(
            f"{options.blocks:,} blocks of {size_text(block_bytes)}, "
            f"{size_text(options.memory_bytes)} of memory in all"
        )
        with progress_bar("bench", (rounds + 1) * len(options.transports)) as advance:
            report = measure(options, progress=advance)
        if as_json:
            print_json(report.as_dict())
        else:
            _print_report(report)
        if not report.ok:
            note(f"kvstore: WRONG BYTES in {report.wrong_blocks:,} blocks that came back")
            raise typer.Exit(EXIT_WRONG_BYTES)


def _print_report(report: BenchReport) -> None:
    title = f"blocks of {size_text(report.block_bytes)}, {report.batch:,} a call"
    if report.threads > 1:
        title += f", {report.threads} threads"
    table = Table(title=Text(title), title_justify="left")
    table.add_column("")
    for name in ("GB/s", "ratio", "call, us", "CPU s/GB", "node's"):
        table.add_column(name, justify="right")
    for figures in report.figures:
        table.add_row(*_row(figures))
    Console().print(table)
    print(
        f"ratio: of memcpy by one thread, {report.memcpy_gb_per_s:.2f} GB/s here; for tcp of a\n"
        f"bare stream over loopback, {report.loopback_gb_per_s:.2f} GB/s here. Medians of "
        f"{report.rounds} rounds;\ncalls: p50 / p90 / p99. "
        f"{size_text(report.verified_bytes)} came back and were checked."
    )


def _row(figures: TransferFigures) -> tuple[str, ...]:
    node = figures.node_cpu_s_per_gb
    return (
        f"{figures.transport} {figures.operation}",
        f"{figures.gb_per_s:.2f}",
        f"{figures.ratio:.2f}",
        _times(figures.call),
        f"{figures.client_cpu_s_per_gb:.2f}",
        "" if node is None else f"{node:.2f}",
    )


def _times(call: Percentiles) -> str:
    return f"{call.p50_us:,.0f} / {call.p90_us:,.0f} / {call.p99_us:,.0f}"
