"""What a node in a process of its own is told.

    flags > KVSTORE_* variables > [node] of a TOML file > defaults ──> NodeOptions

Pure but for the files it is pointed to: the caller hands in the environment.
"""

from __future__ import annotations

import ipaddress
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from kvstore.config import StoreOptions, check_count, parse_seconds, show, split_address
from kvstore.errors import InvalidArgument

PORT: Final = 7400
SOCKET_PATH_BYTES_MAX: Final = 107  # what an address of a unix socket holds
LOG_FORMATS: Final = ("text", "json")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """Options of `kvstore node`. Raises InvalidArgument naming the option, its value and the range.

    listen: addresses; port 0 takes a free one. Without one, the unix socket alone.
    socket: path of a unix socket, by which clients on this machine share the memory. None: one in
        a folder of this user's own; empty: no socket.
    token_file: file of the secret that clients prove; required beyond loopback.
    io_threads: that serve connections; 0 chooses by the cores.
    connections_max: a client has a handful; the rest is refused.
    numa_node: run on its CPUs, so that memory is populated beside them.
    stop_s: how long requests under way may take when it is told to stop.
    dram, lock_memory, view_fraction, lease_s, copy_threads, reserve_blocks: see `StoreOptions`.
    """

    listen: tuple[str, ...] = (f"127.0.0.1:{PORT}",)
    socket: str | None = None
    dram: int | str = "1GiB"
    token_file: str | None = None
    lock_memory: bool = False
    view_fraction: float = 0.25
    lease_s: float = 30.0
    copy_threads: int = 0
    reserve_blocks: int = 0
    io_threads: int = 0
    connections_max: int = 1024
    numa_node: int | None = None
    stop_s: float = 5.0
    log_format: str = "text"

    def __post_init__(self) -> None:
        self.store_options()
        for address in self.listen:
            split_address(address, "listen")
        for name in ("socket", "token_file"):
            path = getattr(self, name) or ""
            if "\0" in path:
                raise InvalidArgument(f"{name}={show(path)} is no path: a zero byte is in it")
        if len(os.fsencode(self.socket or "")) > SOCKET_PATH_BYTES_MAX:
            raise InvalidArgument(
                f"socket={show(self.socket)} is longer than {SOCKET_PATH_BYTES_MAX} bytes; "
                "use a shorter path"
            )
        if not self.listen and self.socket == "":
            raise InvalidArgument("neither an address nor a socket; give one of listen and socket")
        check_count(self.io_threads, "io_threads", 0, 256)
        check_count(self.connections_max, "connections_max", 1, 1 << 20)
        if self.numa_node is not None:
            check_count(self.numa_node, "numa_node", 0, 1 << 16)
        parse_seconds(self.stop_s, "stop_s", zero=True)
        if self.log_format not in LOG_FORMATS:
            raise InvalidArgument(
                f"log_format={show(self.log_format)}; use one of {', '.join(LOG_FORMATS)}"
            )

    def store_options(self) -> StoreOptions:
        """Those of the memory, checked."""
        return StoreOptions(
            dram=self.dram,
            lease_s=self.lease_s,
            copy_threads=self.copy_threads,
            reserve_blocks=self.reserve_blocks,
            view_fraction=self.view_fraction,
            lock_memory=self.lock_memory,
        )


# ---- where options come from ---------------------------------------------------------------------

OPTIONS: Final = tuple(field.name for field in fields(NodeOptions))
CONFIG_VARIABLE: Final = "KVSTORE_CONFIG"
_TRUE: Final = ("1", "true", "yes", "on")
_FALSE: Final = ("0", "false", "no", "off")
_INTEGERS: Final = ("copy_threads", "reserve_blocks", "io_threads", "connections_max", "numa_node")
_NUMBERS: Final = ("view_fraction", "lease_s", "stop_s")


def variable(option: str) -> str:
    """The environment variable of an option."""
    return f"KVSTORE_{option.upper()}"


def load_options(
    flags: Mapping[str, Any], environment: Mapping[str, str], config: str | None = None
) -> NodeOptions:
    """Options by flags (None: not given), else environment, else TOML file, else default.

    `config`: path of the file; without one, that of KVSTORE_CONFIG. Raises InvalidArgument naming
    what is wrong and where it stands.
    """
    config = config or environment.get(CONFIG_VARIABLE)
    values: dict[str, Any] = _from_file(Path(config)) if config else {}
    for option in OPTIONS:
        text = environment.get(variable(option))
        if text is not None:
            values[option] = _checked(variable(option), option, _from_text(option, text))
    values.update({option: value for option, value in flags.items() if value is not None})
    return NodeOptions(**values)


def _from_file(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror or error}") from None
    except ValueError as error:  # not TOML, not UTF-8
        raise InvalidArgument(f"{path} is no TOML: {error}") from None
    for name in table:
        if name != "node":
            raise InvalidArgument(f"{path}: unknown {name!r}; options stand in one table, [node]")
    found = table.get("node", {})
    if not isinstance(found, dict):
        raise InvalidArgument(f"{path}: node={show(found)}; make it a table, [node]")
    for name in found:
        if name not in OPTIONS:
            raise InvalidArgument(f"{path}: unknown option {name!r}; known: {', '.join(OPTIONS)}")
    return {name: _checked(str(path), name, _from_toml(path, name, found[name])) for name in found}


def _from_toml(path: Path, option: str, value: Any) -> Any:
    if option == "listen":
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise InvalidArgument(f"{path}: listen={show(value)}; use a list of addresses")
        return tuple(text for text in texts if text)
    if option in ("socket", "token_file", "log_format") and not isinstance(value, str):
        raise InvalidArgument(f"{path}: {option}={show(value)}; use text")
    if option == "lock_memory" and not isinstance(value, bool):
        raise InvalidArgument(f"{path}: {option}={show(value)}; use true or false")
    return value


def _from_text(option: str, text: str) -> Any:
    where = f"{variable(option)}={show(text)}"
    if option == "listen":
        return tuple(each for each in re.split(r"[,\s]+", text) if each)
    if option == "lock_memory":
        if text.lower() not in (*_TRUE, *_FALSE):
            raise InvalidArgument(f"{where}; use true or false")
        return text.lower() in _TRUE
    try:
        if option in _INTEGERS:
            return int(text)
        if option in _NUMBERS:
            return float(text)
    except ValueError:
        kind = "a whole number" if option in _INTEGERS else "a number"
        raise InvalidArgument(f"{where}; use {kind}") from None
    return text


def _checked(where: str, option: str, value: Any) -> Any:
    """The value, if it is one by itself; so that the message names where it stands."""
    try:
        NodeOptions(**{option: value})
    except InvalidArgument as error:
        raise InvalidArgument(f"{where}: {error}") from None
    return value


# ---- what must hold before it listens ------------------------------------------------------------


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches it. A name other than localhost is not asked for."""
    host, _ = split_address(address, "listen")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def check_reach(options: NodeOptions) -> None:
    """InvalidArgument if others could connect without proving anything."""
    for address in options.listen:
        if not is_loopback(address) and options.token_file is None:
            raise InvalidArgument(
                f"{address} is reachable from other machines, and there is no token; listen on "
                "127.0.0.1, or make a token: (umask 077; openssl rand -hex 32 > FILE) and give "
                "--token-file FILE here and to the clients"
            )


def numa_cpus(number: int, nodes: Path = Path("/sys/devices/system/node")) -> set[int]:
    """CPUs of a NUMA node, as far as this process may use them. Raises InvalidArgument."""
    known = sorted(int(path.name[4:]) for path in nodes.glob("node[0-9]*"))
    if number not in known:
        there = ", ".join(map(str, known)) or "none that this system names"
        raise InvalidArgument(f"numa_node={number} does not exist; there is {there}")
    cpus: set[int] = set()
    for part in filter(None, (nodes / f"node{number}" / "cpulist").read_text().strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    allowed = os.sched_getaffinity(0)
    if not cpus & allowed:
        raise InvalidArgument(
            f"numa_node={number} has none of the CPUs this process may use, {sorted(allowed)}"
        )
    return cpus & allowed
