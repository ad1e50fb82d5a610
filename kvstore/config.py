"""What a store can be told: every option with its unit, default and reason; checked once, here."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvstore.errors import InvalidArgument

_UNITS = {"": 0, "b": 0, "kib": 10, "mib": 20, "gib": 30, "tib": 40, "pib": 50}  # powers of 2
_DRAM_MAX = 1 << 50
_SECONDS_MAX = 365 * 86400
_THREADS_MAX = 256
_TOKEN_BYTES_MAX = 4096
CONNECTIONS_MAX: Final = 64  # of one client to one node
TRANSPORTS: Final = ("auto", "shm", "tcp")


def show(value: object) -> str:
    """A value as an error names it; never too long, whatever was given."""
    if isinstance(value, int) and abs(value) >> 64:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 100 else f"a {type(value).__name__} of {len(text)} characters"


def parse_bytes(value: int | str, name: str) -> int:
    """Bytes of an int or of text such as "512MiB" or "4 GiB". Raises InvalidArgument."""
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        unit = "" if found is None else found[2]
        if re.fullmatch("[kmgt]b?", unit.lower()):
            wanted = f"{unit[0].upper()}iB"
            raise InvalidArgument(
                f"{name}={value!r}: {unit} is not accepted, as it may mean 1000 or 1024; "
                f"write {wanted}"
            )
        if found is None or found[2].lower() not in _UNITS:
            raise InvalidArgument(f'{name}={value!r} is no size; write "512MiB", "4GiB" or an int')
        amount = float(found[1]) * 2.0 ** _UNITS[found[2].lower()]
        value = int(amount) if amount <= _DRAM_MAX else _DRAM_MAX + 1  # may be infinite
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidArgument(f'{name}={value!r} is no size; write "512MiB", "4GiB" or an int')
    if not 1 <= value <= _DRAM_MAX:
        raise InvalidArgument(f"{name}={show(value)} bytes is out of range; use 1 byte to 1 PiB")
    return value


def parse_seconds(value: float, name: str, *, zero: bool = False) -> float:
    """Seconds, finite and positive (or zero, where that means something)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidArgument(f"{name}={value!r} is no number of seconds")
    # In this order: an int may be too long for a float, and not a number is in no range.
    if not 0 <= value <= _SECONDS_MAX or (value == 0 and not zero):
        least = "0" if zero else "more than 0"
        raise InvalidArgument(f"{name}={show(value)}; use {least} to {_SECONDS_MAX} seconds")
    return float(value)


def check_count(value: int, name: str, least: int, most: int) -> int:
    """An int of that range. Raises InvalidArgument."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InvalidArgument(f"{name}={show(value)}; use an int from {least} to {most}")
    return value


def split_address(text: str, name: str) -> tuple[str, int]:
    """Host and port of "127.0.0.1:7400" or "[::1]:7400". Raises InvalidArgument."""
    found = re.fullmatch(r"(?:\[([^\[\]\s]+)\]|([^:\[\]\s/]+)):(\d{1,5})", text)
    if found is None or int(found[3]) > 65535:
        raise InvalidArgument(
            f'{name}={show(text)} is no address; write HOST:PORT, "127.0.0.1:7400" or "[::1]:7400"'
        )
    return found[1] or found[2], int(found[3])


def parse_token(token: str | bytes | Path | None) -> bytes:
    """A cluster token's bytes, without white space around it; empty for None. A Path is the file
    it stands in, for its owner's eyes only. Raises InvalidArgument.
    """
    if token is None:
        return b""
    where = "token"
    if isinstance(token, Path):
        where = f"token file {token}"
        try:
            with token.open("rb") as file:
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                if mode & 0o077:
                    raise InvalidArgument(
                        f"{where} has mode {mode:04o}: others may read it; chmod 600 it"
                    )
                token = file.read(_TOKEN_BYTES_MAX + 1)
        except OSError as error:
            raise InvalidArgument(f"{where}: {error.strerror or error}") from None
    if not isinstance(token, (str, bytes)):
        raise InvalidArgument(
            f"token is {type(token).__name__}; pass str, bytes, or the pathlib.Path of its file"
        )
    try:
        stripped = (token.encode() if isinstance(token, str) else token).strip()
    except UnicodeEncodeError:
        raise InvalidArgument(f"{where} has no UTF-8 form; use plain characters") from None
    if not stripped:
        raise InvalidArgument(f"{where} is empty; put a secret there (openssl rand -hex 32)")
    if len(stripped) > _TOKEN_BYTES_MAX:
        raise InvalidArgument(f"{where} is longer than {_TOKEN_BYTES_MAX} bytes")
    return stripped


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Options of `kvstore.open`. Raises InvalidArgument naming the option, its value and the range.

    dram: size of the pool, bytes or text ("4GiB"); whole frames of 2 MiB.
    timeout_s: how long a call may take, waiting for room included, unless the call says otherwise.
        One second: recomputing a prefix costs about as much.
    lease_s: after this a lease that is not a view may be revoked, if its memory is needed.
    copy_threads: threads for one large batch, the caller's included; 0 chooses by the cores (at
        most 4: they saturate a socket's memory).
    reserve_blocks: free slots kept ready per block size by background eviction; 0 chooses (at most
        256, and no more than a sixteenth of what the size holds: a reserve costs hit ratio).
    view_fraction: share of the pool that zero-copy views may hold; the rest stays evictable.
    lock_memory: keep the pool from being swapped out; needs a sufficient memlock limit.
    log_evictions: keep the keys of evicted blocks for `evicted()`; for studies of policies.
    """

    dram: int | str = "1GiB"
    timeout_s: float = 1.0
    lease_s: float = 30.0
    copy_threads: int = 0
    reserve_blocks: int = 0
    view_fraction: float = 0.25
    lock_memory: bool = False
    log_evictions: bool = False

    def __post_init__(self) -> None:
        parse_bytes(self.dram, "dram")
        parse_seconds(self.timeout_s, "timeout_s", zero=True)
        parse_seconds(self.lease_s, "lease_s")
        check_count(self.copy_threads, "copy_threads", 0, _THREADS_MAX)
        check_count(self.reserve_blocks, "reserve_blocks", 0, 1 << 40)
        fraction = self.view_fraction
        if isinstance(fraction, bool) or not isinstance(fraction, (int, float)):
            raise InvalidArgument(f"view_fraction={fraction!r} is no number")
        if not 0 <= fraction <= 1:
            raise InvalidArgument(f"view_fraction={show(fraction)}; use 0 to 1")

    @property
    def dram_bytes(self) -> int:
        """`dram` in bytes."""
        return parse_bytes(self.dram, "dram")


@dataclass(frozen=True, slots=True)
class ConnectOptions:
    """Options of `kvstore.connect`. Raises InvalidArgument naming option, value and range.

    token: the cluster's secret: str or bytes, or the pathlib.Path of a file only its owner reads.
    timeout_s: how long a call may take, connecting included, unless the call says otherwise.
    transport: "shm" maps the node's memory and needs it on this machine; "tcp" goes everywhere;
        "auto" takes shm where it works.
    connections: to carry blocks, at most; they are opened when calls come at once.
    copy_threads: threads for one large batch over shm, the caller's included; 0 chooses.
    """

    token: str | bytes | Path | None = field(default=None, repr=False)
    timeout_s: float = 1.0
    transport: str = "auto"
    connections: int = 4
    copy_threads: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.token, Path):  # a file is read when it is needed
            parse_token(self.token)
        parse_seconds(self.timeout_s, "timeout_s")
        if self.transport not in TRANSPORTS:
            raise InvalidArgument(
                f"transport={show(self.transport)}; use one of {', '.join(TRANSPORTS)}"
            )
        check_count(self.connections, "connections", 1, CONNECTIONS_MAX)
        check_count(self.copy_threads, "copy_threads", 0, _THREADS_MAX)
