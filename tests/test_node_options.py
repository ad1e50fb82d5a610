"""What a node and a connection are told: from where, in which order, and what is refused."""

import os
from pathlib import Path
from typing import Any

import pytest
from builders import write_private

import kvstore
from kvstore.config import parse_token
from kvstore.errors import InvalidArgument
from kvstore.node_options import (
    OPTIONS,
    NodeOptions,
    check_reach,
    is_loopback,
    load_options,
    numa_cpus,
)

ANY = kvstore.BlockSpec("any", block_bytes=None)


# ---- options -------------------------------------------------------------------------------------


def test_flags_go_before_environment_before_file_before_defaults(tmp_path: Path) -> None:
    config = str(
        write_private(tmp_path / "a.toml", '[node]\ndram = "3MiB"\nlease_s = 3\nstop_s = 3\n')
    )
    environment = {"KVSTORE_DRAM": "2MiB", "KVSTORE_LEASE_S": "2", "PATH": "/bin"}
    options = load_options({"dram": "1MiB", "lease_s": None}, environment, config)
    assert (options.dram, options.lease_s, options.stop_s) == ("1MiB", 2.0, 3)
    assert options.view_fraction == NodeOptions().view_fraction
    named = load_options({}, {"KVSTORE_CONFIG": config})
    assert (named.dram, named.lease_s) == ("3MiB", 3)
    assert load_options({}, {}) == NodeOptions()


VALUES: dict[str, tuple[str, str, Any]] = {  # as a variable, as TOML, and what it is
    "listen": ("[::1]:1, localhost:2", '["[::1]:1", "localhost:2"]', ("[::1]:1", "localhost:2")),
    "socket": ("", '""', ""),
    "dram": ("4GiB", '"4GiB"', "4GiB"),
    "token_file": ("/a b", '"/a b"', "/a b"),
    "lock_memory": ("yes", "true", True),
    "view_fraction": ("0.5", "0.5", 0.5),
    "lease_s": ("1.5", "1.5", 1.5),
    "copy_threads": ("3", "3", 3),
    "reserve_blocks": ("7", "7", 7),
    "io_threads": ("2", "2", 2),
    "connections_max": ("9", "9", 9),
    "numa_node": ("0", "0", 0),
    "stop_s": ("0", "0", 0),
    "log_format": ("json", '"json"', "json"),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_has_a_variable_and_a_place_in_the_file(tmp_path: Path, option: str) -> None:
    text, toml, value = VALUES[option]
    assert getattr(load_options({}, {f"KVSTORE_{option.upper()}": text}), option) == value
    config = write_private(tmp_path / "a.toml", f"[node]\n{option} = {toml}\n")
    assert getattr(load_options({}, {}, str(config)), option) == value
    assert getattr(load_options({option: value}, {}), option) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[node]\ndarm = 1\n", ["unknown option 'darm'", "dram, token_file"]),
        ("[nodes]\n", ["unknown 'nodes'", "[node]"]),
        ("node = 3\n", ["[node]"]),
        ("[node\n", ["is no TOML"]),
        ('[node]\ndram = "much"\n', ["dram='much' is no size"]),
        ("[node]\nlisten = 7400\n", ["listen=7400", "list of addresses"]),
        ("[node]\nsocket = true\n", ["socket=True"]),
        ("[node]\nlock_memory = 1\n", ["lock_memory=1", "true or false"]),
        ("[node]\nlease_s = 0\n", ["lease_s=0"]),
    ],
)
def test_mistakes_in_the_file_are_named(tmp_path: Path, text: str, words: list[str]) -> None:
    config = write_private(tmp_path / "wrong.toml", text)
    with pytest.raises(InvalidArgument) as caught:
        load_options({}, {}, str(config))
    for word in [str(config), *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "word"),
    [
        ("DRAM", "4 kilos", "is no size"),
        ("IO_THREADS", "many", "whole number"),
        ("IO_THREADS", "-1", "from 0"),
        ("STOP_S", "soon", "use a number"),
        ("LOCK_MEMORY", "perhaps", "true or false"),
        ("LISTEN", "7400", "write HOST:PORT"),
        ("LOG_FORMAT", "xml", "text, json"),
    ],
)
def test_mistakes_in_the_environment_are_named(name: str, text: str, word: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^KVSTORE_{name}.*{word}"):
        load_options({}, {f"KVSTORE_{name}": text})


@pytest.mark.parametrize(
    "change",
    [
        {"listen": ("127.0.0.1",)},
        {"listen": ("127.0.0.1:70000",)},
        {"listen": ("::1:7400",)},
        {"listen": ("",)},
        {"listen": (), "socket": ""},
        {"socket": "/" + "x" * 107},
        {"socket": "a\0b"},
        {"token_file": "a\0b"},
        {"dram": 0},
        {"view_fraction": 2},
        {"connections_max": 0},
        {"numa_node": -1},
        {"stop_s": -1},
    ],
)
def test_impossible_options_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(
        InvalidArgument, match=next(iter(change)).replace("listen", "listen|addres")
    ):
        NodeOptions(**change)


def test_only_loopback_goes_without_a_token() -> None:
    for address in ("127.0.0.1:1", "127.8.9.1:1", "[::1]:1", "localhost:1"):
        assert is_loopback(address)
        check_reach(NodeOptions(listen=(address,)))
    for address in ("0.0.0.0:1", "[::]:1", "10.0.0.5:1", "some.host:1", "localhost.some.host:1"):
        assert not is_loopback(address)
        with pytest.raises(InvalidArgument, match=r"--token-file"):
            check_reach(NodeOptions(listen=("127.0.0.1:1", address)))
        check_reach(NodeOptions(listen=(address,), token_file="x"))


def test_a_token_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    assert parse_token(write_private(tmp_path / "good", " secret\n")) == b"secret"
    assert parse_token(" secret\n") == parse_token(b"secret") == b"secret"
    assert parse_token(None) == b""
    for mode in (0o640, 0o604, 0o660, 0o601):
        with pytest.raises(InvalidArgument, match=f"mode 0{mode:o}.*chmod 600"):
            parse_token(write_private(tmp_path / "open", "secret", mode))
    for empty in (write_private(tmp_path / "empty", " \n"), "", b" "):
        with pytest.raises(InvalidArgument, match="is empty"):
            parse_token(empty)
    with pytest.raises(InvalidArgument, match=r"absent: No such file"):
        parse_token(tmp_path / "absent")
    with pytest.raises(InvalidArgument, match="longer than"):
        parse_token(write_private(tmp_path / "long", "x" * 5000))
    for odd in (7, "\ud800"):
        with pytest.raises(InvalidArgument):
            parse_token(odd)  # type: ignore[arg-type]


def test_a_numa_node_gives_its_cpus(tmp_path: Path) -> None:
    usable = os.sched_getaffinity(0)
    for number, cpus in ((0, f"{min(usable)}-{max(usable)},9000"), (3, "9000-9001")):
        (tmp_path / f"node{number}").mkdir()
        write_private(tmp_path / f"node{number}" / "cpulist", cpus + "\n")
    assert numa_cpus(0, tmp_path) == usable
    with pytest.raises(InvalidArgument, match="numa_node=3 has none of the CPUs"):
        numa_cpus(3, tmp_path)
    with pytest.raises(InvalidArgument, match="numa_node=1 does not exist; there is 0, 3"):
        numa_cpus(1, tmp_path)


# ---- connect's arguments -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"address": 7400}, "address=7400"),
        ({"address": ""}, "address=''"),
        ({"spec": "model"}, "spec is str"),
        ({"token": 5}, "token is int"),
        ({"token": ""}, "token is empty"),
        ({"token": Path("/nowhere")}, "token file /nowhere"),
        ({"timeout_s": 0}, "timeout_s=0"),
        ({"timeout_s": "soon"}, "timeout_s='soon'"),
        ({"transport": "rdma"}, "auto, shm, tcp"),
        ({"connections": 0}, "connections=0"),
        ({"connections": True}, "connections=True"),
        ({"copy_threads": -1}, "copy_threads=-1"),
    ],
)
def test_connects_arguments_are_checked(arguments: dict[str, Any], word: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        kvstore.connect(**{"address": "127.0.0.1:1", "spec": ANY, **arguments})
    assert word in str(caught.value)


def test_a_token_is_not_shown() -> None:
    assert "secret" not in repr(kvstore.ConnectOptions(token="secret"))
