"""The `kvstore` command: demo, replay, trace make, trace stat; node is in `cli_node`.

Only the modules named cli read argv and the environment and import typer and rich. Results go to
stdout, everything else to stderr: progress, notes, errors.
Exit codes: 0 done, 1 bytes came back wrong, 2 could not run as asked, 130 interrupted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import kvstore
from kvstore.cli_bench import bench_app
from kvstore.cli_node import node_command
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
from kvstore.config import parse_token
from kvstore.errors import InvalidArgument
from kvstore.sim.processes import NodeAddress, replay_by_processes
from kvstore.sim.replay import Percentiles, ReplayOptions, ReplayReport, pool_size, replay
from kvstore.sim.workload import (
    Request,
    TraceSummary,
    Workload,
    make_trace,
    read_trace,
    summarize,
    write_trace,
)

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)
trace_app = typer.Typer(
    help="Make a trace, or count one.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(trace_app, name="trace")
app.add_typer(bench_app, name="bench")
app.command(name="node", short_help="Serve a store to other processes.")(node_command)

TOO_LARGE = "Try a smaller --block-bytes, or --capacity-blocks."


BlockBytes = Annotated[
    int,
    typer.Option(
        parser=parse_size,
        metavar="SIZE",
        show_default="64KiB",
        help="Of a block: 4096, 64KiB, 1MiB.",
    ),
]
Clients = Annotated[
    int,
    typer.Option(
        min=1,
        metavar="N",
        help="1: in this process, exact and in order. More: as many processes, over a node of "
        "their own or that of --connect.",
    ),
]
Seed = Annotated[int, typer.Option(min=0, metavar="N", help="The same seed makes the same trace.")]
Requests = Annotated[int, typer.Option(min=1, metavar="N", help="Rows of the made trace.")]
TraceArgument = Annotated[
    str | None,
    typer.Argument(metavar="TRACE", help="A trace file, or its name in the folder of --trace."),
]
TraceFolder = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="PATH",
        envvar="KVSTORE_TRACES",
        help="A folder of traces, or one file. Without TRACE: its first trace by name.",
    ),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"kvstore {kvstore.__version__}")
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print it and end."),
    ] = False,
) -> None:
    """A store for the KV cache of language models.

    \b
    First steps:
      kvstore demo                              a made trace, every byte checked
      kvstore trace make my.jsonl.gz            write such a trace to a file
      kvstore replay my.jsonl.gz                replay it
      kvstore replay my.jsonl.gz --capacity-blocks 2000
      kvstore node                              a store for kvstore.connect
      kvstore bench transfer                    how fast, and what the machine can
    """


@app.command(short_help="Replay a made trace twice: with much memory and with little.")
def demo(
    seed: Seed = 0,
    requests: Requests = 1_000,
    block_bytes: BlockBytes = 64 << 10,
    capacity_blocks: Annotated[
        int, typer.Option(min=1, metavar="N", help="Blocks of memory in the second replay.")
    ] = 1_500,
    clients: Clients = 1,
    connect: Connect = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Replay a made trace, twice: with memory for everything, then with little. Every
    byte read is checked.

    \b
    Examples:
      kvstore demo                              some seconds, half a GiB of memory
      kvstore demo --seed 7 --capacity-blocks 500
      kvstore demo --requests 5000 --block-bytes 4KiB --json
      kvstore demo --clients 4                  four processes and a node
      kvstore demo --connect 127.0.0.1:7400     once, with the memory of that node
    """
    with exits(TOO_LARGE):
        node = _node(connect, token_file)
        trace = make_trace(seed, requests)
        summary = summarize(trace)
        note(
            f"made trace, seed {seed}: {summary.requests:,} requests, {summary.blocks:,} blocks, "
            f"{summary.distinct_blocks:,} distinct; blocks of {size_text(block_bytes)}"
        )
        reports = [
            _replay(
                trace,
                ReplayOptions(
                    block_bytes=block_bytes,
                    capacity_blocks=capacity,
                    clients=clients,
                    generation=generation,
                ),
                node,
            )
            for generation, capacity in enumerate((0, capacity_blocks) if node is None else (0,))
        ]
        if as_json:
            print_json(
                {
                    "trace": {"seed": seed, **asdict(summary)},
                    "replays": [report.as_dict() for report in reports],
                }
            )
        else:
            _print_reports(f"kvstore demo (seed {seed})", reports, node)
            print("Try next: kvstore trace make my.jsonl.gz, then kvstore replay my.jsonl.gz")
        _end(reports)


@app.command(name="replay", short_help="Replay a trace from a file.")
def replay_command(
    trace: TraceArgument = None,
    folder: TraceFolder = None,
    block_bytes: BlockBytes = 64 << 10,
    capacity_blocks: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Blocks the store holds when a request arrives, at most: the rest is evicted. "
            "0: room for every block of the trace.",
        ),
    ] = 0,
    clients: Clients = 1,
    speed: Annotated[
        float,
        typer.Option(
            min=0.0,
            metavar="X",
            help="Times faster than recorded: 60 replays an hour in a minute, 1 takes as long as "
            "the trace. 0: as fast as it goes, without pauses.",
        ),
    ] = 0.0,
    connect: Connect = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Replay a trace (.jsonl or .jsonl.gz), one put per request after one prefix match and
    read. Every byte read is checked.

    \b
    Examples:
      kvstore replay my.jsonl.gz
      kvstore replay my.jsonl.gz --block-bytes 4KiB --capacity-blocks 10000
      kvstore replay my.jsonl.gz --clients 4    four processes and a node
      kvstore replay my.jsonl.gz --connect 127.0.0.1:7400 --clients 4
      kvstore replay my.jsonl.gz --speed 60     an hour of trace in a minute
      KVSTORE_TRACES=/data/traces kvstore replay conversation_trace.jsonl.gz

    Exit code 1 means that bytes came back wrong; 2 that it could not run as asked.
    """
    with exits(TOO_LARGE):
        node = _node(connect, token_file)
        options = ReplayOptions(
            block_bytes=block_bytes,
            capacity_blocks=capacity_blocks,
            clients=clients,
            speed=speed,
        )
        path = _find_trace(trace, folder)
        rows = list(read_trace(path))
        pool = size_text(pool_size(options, summarize(rows)).dram_bytes)
        where = f"a pool of {pool}" if node is None else f"the node at {node.address}"
        note(f"{path}: {len(rows):,} requests; blocks of {size_text(block_bytes)}, {where}")
        report = _replay(rows, options, node)
        if as_json:
            print_json({"trace": str(path), **report.as_dict()})
        else:
            _print_reports(path.name, [report], node)
        _end([report])


@trace_app.command(name="make", short_help="Write a made trace.")
def trace_make(
    out: Annotated[Path, typer.Argument(help="The file to write; .gz compresses it.")],
    seed: Seed = 0,
    requests: Requests = 1_000,
    rate: Annotated[float, typer.Option(help="Requests a second.")] = Workload().rate_per_s,
    tool_share: Annotated[
        float, typer.Option(help="Share of tool calls, 0 to 1; the rest are chats.")
    ] = Workload().tool_share,
    turns: Annotated[float, typer.Option(help="Mean turns of a chat.")] = Workload().turns,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file.")] = False,
) -> None:
    """Write a made trace: growing chats behind shared system prompts, and tool calls with
    long shared prompts, arriving as a Poisson process. The same options give the same file.

    \b
    Examples:
      kvstore trace make my.jsonl.gz
      kvstore trace make tools.jsonl --seed 7 --requests 5000 --tool-share 0.6
    """
    with exits(TOO_LARGE):
        if _exists(out) and not force:
            raise InvalidArgument(f"{out} exists; --force overwrites it")
        shape = Workload(rate_per_s=rate, tool_share=tool_share, turns=turns)
        trace = make_trace(seed, requests, shape)
        write_trace(out, trace)
        _print_summary(str(out), summarize(trace))
        print(f"Try next: kvstore replay {out}")


@trace_app.command(name="stat", short_help="Count a trace without replaying it.")
def trace_stat(
    trace: TraceArgument = None, folder: TraceFolder = None, as_json: Json = False
) -> None:
    """Count a trace without replaying it.

    \b
    Example:
      kvstore trace stat my.jsonl.gz
    """
    with exits(TOO_LARGE):
        path = _find_trace(trace, folder)
        summary = summarize(list(read_trace(path)))
        if as_json:
            ratio = {"hit_ratio_max": summary.hit_ratio_max}
            print_json({"trace": str(path), **asdict(summary), **ratio})
        else:
            _print_summary(str(path), summary)


# ---- running -------------------------------------------------------------------------------------


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:  # a name too long
        raise InvalidArgument(f"{path}: {error.strerror or error}") from None


def _replay(
    trace: Sequence[Request], options: ReplayOptions, node: NodeAddress | None
) -> ReplayReport:
    """By one client in this process, unless there are several, or a node is named."""
    with progress_bar(_title(options.capacity_blocks, node), len(trace)) as advance:
        if options.clients == 1 and node is None:
            return replay(trace, options, progress=advance)
        return replay_by_processes(trace, options, progress=advance, node=node)


def _title(capacity_blocks: int, node: NodeAddress | None) -> str:
    if node is not None:
        return node.address
    return f"{capacity_blocks:,} blocks" if capacity_blocks else "unlimited"


def _node(address: str | None, token_file: Path | None) -> NodeAddress | None:
    if address is None:
        if token_file is not None:
            raise InvalidArgument("--token-file without --connect; name the node")
        return None
    return NodeAddress(address, parse_token(token_file))


def _find_trace(trace: str | None, folder: Path | None) -> Path:
    if trace is not None:
        for path in (Path(trace), *([folder / trace] if folder else [])):
            if path.is_file():
                return path
            if path.is_dir():
                raise InvalidArgument(
                    f"{path} is a folder; name a file in it, or --trace {path} for its first trace"
                )
        where = f"here or in {folder}" if folder else "here; --trace names a folder to look in"
        raise InvalidArgument(
            f"{trace}: no such file {where}\nTo make one: kvstore trace make my.jsonl.gz"
        )
    if folder is None:
        raise InvalidArgument(
            "which trace? Name a file, or a folder of traces by --trace or KVSTORE_TRACES\n"
            "To make one: kvstore trace make my.jsonl.gz"
        )
    if not folder.is_dir():
        return folder
    found = sorted(path for path in folder.iterdir() if path.name.endswith((".jsonl", ".jsonl.gz")))
    if not found:
        raise InvalidArgument(f"{folder}: no .jsonl or .jsonl.gz in this folder")
    if len(found) > 1:
        note(f"{folder} holds {len(found)} traces; taking the first")
    return found[0]


def _end(reports: Sequence[ReplayReport]) -> None:
    if all(report.ok for report in reports):
        return
    for report in reports:
        for each in report.mismatches:
            note(
                f"kvstore: WRONG BYTES: request {each.request}, key index {each.key_index} "
                f"(id {each.hash_id}), offset {each.offset}: expected {each.expected}, "
                f"got {each.got}; {each.wrong_bytes:,} bytes of this block differ"
            )
        for status, count in report.unread_blocks.items():
            note(f"kvstore: NOT RETURNED: {count:,} leased blocks were {status}")
    raise typer.Exit(EXIT_WRONG_BYTES)


# ---- printing ------------------------------------------------------------------------------------


def _print_summary(name: str, summary: TraceSummary) -> None:
    table = Table(title=Text(name), title_justify="left", show_header=False)
    rows = {
        "requests": f"{summary.requests:,} in {summary.duration_ms / 1000:,.0f} s",
        "input tokens": f"{summary.input_tokens:,} ({summary.input_tokens / summary.requests:,.0f}"
        " a request)",
        "output tokens": f"{summary.output_tokens:,} "
        f"({summary.output_tokens / summary.requests:,.0f} a request)",
        "blocks": f"{summary.blocks:,}, {summary.distinct_blocks:,} distinct",
        "longest chain": f"{summary.chain_blocks_max:,} blocks",
        "best block hit ratio": f"{summary.hit_ratio_max:.4f} (nothing evicted)",
    }
    for label, value in rows.items():
        table.add_row(label, value)
    Console().print(table)


def _print_reports(
    title: str, reports: Sequence[ReplayReport], node: NodeAddress | None = None
) -> None:
    table = Table(title=Text(title), title_justify="left")
    table.add_column("")
    for report in reports:
        table.add_column(_title(report.capacity_blocks, node), justify="right")
    columns = [_report_rows(report) for report in reports]
    for label in columns[0]:
        table.add_row(label, *(column[label] for column in columns))
    Console().print(table)
    print(f"Times are p50 / p90 / p99 of a call. Blocks of {size_text(reports[0].block_bytes)}.")
    if reports[0].clients > 1:
        print(
            f"{reports[0].clients} clients over {reports[0].transport}: "
            "hit ratios depend on how requests interleave."
        )
    if reports[0].speed:
        print(
            f"Sent at {reports[0].speed:g} x trace time, the requests of one tick spread evenly "
            f"inside it;\nat most {reports[0].late_ms_max:,.0f} ms behind."
        )


def _report_rows(report: ReplayReport) -> dict[str, str]:
    hits = f"{report.hit_blocks:,} of {report.blocks:,}"
    unstored = ", ".join(f"{count:,} {name}" for name, count in report.unstored_blocks.items())
    return {
        "block hit ratio": f"{report.block_hit_ratio:.4f}",
        "token hit ratio": f"{report.token_hit_ratio:.4f}",
        "blocks hit": hits,
        "blocks evicted": f"{report.evictions:,}",
        "orphaned by it": "not counted" if report.orphaned is None else f"{report.orphaned:,}",
        "not stored": unstored or "0",
        "read, GB/s": f"{report.read_gb_per_s:.2f}",
        "written, GB/s": f"{report.write_gb_per_s:.2f}",
        "match, us": _times(report.match),
        "get, us": _times(report.get),
        "put, us": _times(report.put),
        "bytes checked": f"{size_text(report.verified_bytes)}",
        "bytes wrong": f"{report.wrong_bytes:,}",
        "run time": f"{report.wall_s:.1f} s",
    }


def _times(times: Percentiles) -> str:
    if times.count == 0:
        return "none"
    return f"{times.p50_us:,.0f} / {times.p90_us:,.0f} / {times.p99_us:,.0f}"


def main() -> None:
    """Entry point of the `kvstore` command."""
    app(prog_name="kvstore")
