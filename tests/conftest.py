"""What holds for every test: where the traces are, and that no test can hang the run.

A test that overruns `timeout` (pyproject.toml) fails by pytest-timeout and the run goes on. Where
the interpreter itself is stuck, as under a native call that keeps its lock, faulthandler's own
thread prints all stacks and ends the run: a hang is never silent.
"""

import faulthandler
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

TIMEOUT_LONG_S = 3600
STUCK_AFTER_TIMEOUT_S = 60  # pytest-timeout has had its chance by then

STDERR = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STDERR] = os.dup(2)  # while a test runs, 2 itself is captured


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[STDERR])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(TIMEOUT_LONG_S))
        if item.get_closest_marker("trace"):
            item.user_properties.append(("marker", "trace"))  # a report tells which were skipped
            if "KVSTORE_TRACES" not in os.environ:
                reason = "KVSTORE_TRACES does not name a folder of traces"
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    marker = item.get_closest_marker("timeout")
    timeout_s = marker.args[0] if marker else float(item.config.getini("timeout"))
    stderr = item.config.stash[STDERR]
    faulthandler.dump_traceback_later(timeout_s + STUCK_AFTER_TIMEOUT_S, exit=True, file=stderr)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def trace_dir() -> Path:
    """The folder of recorded traces; tests that ask for it carry the marker `trace`."""
    return Path(os.environ["KVSTORE_TRACES"])


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Nodes that the tests of a module share (tests/ways.py)."""
    from ways import Nodes

    shared = Nodes(tmp_path_factory.mktemp("nodes"))
    yield shared
    shared.stop()


@pytest.fixture
def way(request: pytest.FixtureRequest, nodes: Any, tmp_path: Path) -> Any:
    """The way to a store that the test is run for: its name is the parameter."""
    from ways import Way, has_ipv6

    if request.param == "tcp6" and not has_ipv6():
        pytest.skip("this machine has no [::1]")
    return Way(request.param, nodes, tmp_path)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell starts its background jobs with SIGINT ignored, and children would inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True, scope="session")
def _away_from_the_source_tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A fresh interpreter started here would import the source folder, which has no extension."""
    here = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("cwd"))
    yield
    os.chdir(here)
