"""`kvstore node`: flags, and what its help teaches."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from kvstore.cli_shared import exits
from kvstore.errors import InvalidArgument
from kvstore.node import run_node
from kvstore.node_options import load_options

Listen = Annotated[
    list[str] | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Where to listen; may be given several times. Port 0: any free one. Empty: only "
        "on the unix socket.",
        show_default="127.0.0.1:7400",
    ),
]
Socket = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        help="A unix socket, by which clients on this machine share the node's memory. Empty: "
        "none.",
        show_default="PORT.sock in $XDG_RUNTIME_DIR/kvstore/ or /tmp/kvstore-UID/",
    ),
]
NoSocket = Annotated[bool, typer.Option("--no-socket", help="No unix socket.")]
Dram = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Memory for blocks.", show_default="1GiB"),
]
TokenFile = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        help="The secret that clients must know; a file only its owner can read. Required "
        "beyond loopback.",
    ),
]
LockMemory = Annotated[
    bool | None,
    typer.Option("--lock-memory/--no-lock-memory", help="Never swap the memory out."),
]
ViewFraction = Annotated[
    float | None,
    typer.Option(help="Share of the memory that views may hold.", show_default="0.25"),
]
LeaseS = Annotated[
    float | None,
    typer.Option(
        help="After this a lease may be revoked, if its memory is needed.", show_default="30"
    ),
]
CopyThreads = Annotated[
    int | None, typer.Option(help="For one large batch; 0 chooses.", show_default="0")
]
ReserveBlocks = Annotated[
    int | None,
    typer.Option(help="Free slots kept by eviction; 0 chooses.", show_default="0"),
]
IoThreads = Annotated[
    int | None,
    typer.Option(help="That serve connections; 0 chooses by the CPUs.", show_default="0"),
]
ConnectionsMax = Annotated[
    int | None, typer.Option(help="Beyond, clients are refused.", show_default="1024")
]
NumaNode = Annotated[
    int | None, typer.Option(help="Run on the CPUs of this NUMA node.", show_default="all")
]
StopS = Annotated[
    float | None,
    typer.Option(help="Seconds for requests under way when it stops.", show_default="5"),
]
LogFormat = Annotated[
    str | None, typer.Option(metavar="text|json", help="Of the log.", show_default="text")
]
Config = Annotated[
    str | None,
    typer.Option(metavar="FILE.toml", help="More options, in a table [node]."),
]
StopOnEof = Annotated[
    bool,
    typer.Option(
        "--stop-on-eof", help="Stop when stdin ends: it never outlives who holds the pipe."
    ),
]


def node_command(
    listen: Listen = None,
    socket: Socket = None,
    no_socket: NoSocket = False,
    dram: Dram = None,
    token_file: TokenFile = None,
    lock_memory: LockMemory = None,
    view_fraction: ViewFraction = None,
    lease_s: LeaseS = None,
    copy_threads: CopyThreads = None,
    reserve_blocks: ReserveBlocks = None,
    io_threads: IoThreads = None,
    connections_max: ConnectionsMax = None,
    numa_node: NumaNode = None,
    stop_s: StopS = None,
    log_format: LogFormat = None,
    config: Config = None,
    stop_on_eof: StopOnEof = False,
) -> None:
    """Serve a store to other processes: kvstore.connect("127.0.0.1:7400", spec). Ends on
    Ctrl-C or SIGTERM, when the requests under way are done; a second one ends it at once.

    \b
    Examples:
      kvstore node --dram 4GiB
      (umask 077; openssl rand -hex 32 > token)
      kvstore node --dram 64GiB --listen 0.0.0.0:7400 --token-file token
      kvstore node --listen 127.0.0.1:0         its port: first line of stdout
      kvstore node --config /etc/kvstore.toml --log-format json

    \b
    An option is taken from the flag, else from the environment (KVSTORE_DRAM),
    else from the file of --config or KVSTORE_CONFIG:
      [node]
      dram = "64GiB"
      listen = ["10.0.0.5:7400", "127.0.0.1:7400"]

    Exit code 0: stopped; 1: cut short; 2: could not start, stderr says why. Events go to
    stderr, one a line.
    """
    flags = {
        "listen": tuple(each for each in listen if each) if listen else None,
        "socket": "" if no_socket else socket,
        "dram": dram,
        "token_file": token_file,
        "lock_memory": lock_memory,
        "view_fraction": view_fraction,
        "lease_s": lease_s,
        "copy_threads": copy_threads,
        "reserve_blocks": reserve_blocks,
        "io_threads": io_threads,
        "connections_max": connections_max,
        "numa_node": numa_node,
        "stop_s": stop_s,
        "log_format": log_format,
    }
    with exits():
        if no_socket and socket:
            raise InvalidArgument(f"--socket {socket} and --no-socket; give one of them")
        options = load_options(flags, os.environ, config)
        code = run_node(
            options,
            environment=os.environ,
            out=sys.stdout,
            err=sys.stderr,
            until_eof=stop_on_eof,
        )
    raise typer.Exit(code)
