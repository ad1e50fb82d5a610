"""Processes of ours that are told what to do in lines of JSON, and answer in such lines.

A child is a file of this folder run by name; it ends with its stdin, so none outlives a test that
was killed. What it writes to stderr is kept and shown when something fails.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import kvstore

HERE = Path(__file__).parent
ANSWER_TIMEOUT_S = 30.0


class Told:
    """The parent's end: `ask`, and signals by its own pid."""

    def __init__(
        self,
        file: str,
        log: Path,
        options: Mapping[str, Any],
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        path = [str(Path(kvstore.__file__).parents[1]), str(HERE)]
        self.log = log.open("w+b")
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / file), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env={**environment, "PYTHONPATH": os.pathsep.join(path)},
        )
        self.pid = self.process.pid
        self._rest = b""

    def answer(self, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        """Its next line. AssertionError with its log if none comes."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            left = max(0, deadline - time.monotonic())
            ready, _, _ = select.select([self.process.stdout], [], [], left)
            assert ready, f"no answer in time: {self.said()}"
            piece = os.read(self.process.stdout.fileno(), 1 << 16)
            assert piece, f"it has ended: {self.said()}"
            self._rest += piece
        line, self._rest = self._rest.split(b"\n", 1)
        return json.loads(line)

    def tell(self, what: str, *arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([what, *arguments]).encode() + b"\n")
        self.process.stdin.flush()

    def ask(self, what: str, *arguments: Any, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        self.tell(what, *arguments)
        answer = self.answer(timeout_s)
        assert not isinstance(answer, dict) or "raised" not in answer, (what, answer)
        return answer

    def ask_in_vain(self, what: str, *arguments: Any) -> str:
        """What it raises, by name."""
        self.tell(what, *arguments)
        return str(self.answer()["raised"])

    def said(self) -> str:
        self.log.seek(0)
        return self.log.read().decode(errors="replace")

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        wait_for(lambda: state_of(self.pid) == "T")

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> int:
        """Kindly at first; its exit code."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if self.process.poll() is None:
            self.resume()
        try:
            self.process.stdin.close()
        except BrokenPipeError:  # it is dead, and something was not written yet
            self.process.poll()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()
        self.process.stdout.close()
        self.log.close()
        return self.process.returncode

    def __enter__(self) -> "Told":  # noqa: PYI034 - Self needs Python 3.11
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            print(f"{type(self).__name__} {self.pid} said: {self.said()}")
        self.end()


def serve_lines(actor: Any) -> None:
    """The child's end: each line names a method of `actor` and its arguments."""
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        try:
            answer = getattr(actor, what)(*arguments)
        except Exception as error:
            traceback.print_exc()
            answer = {"raised": type(error).__name__}
        tell_parent(answer)


def tell_parent(value: Any) -> None:
    print(json.dumps(value), flush=True)


def rss_anon(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) << 10


def num_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def state_of(pid: int) -> str:
    """As in /proc: T stopped, Z dead."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def wait_for(
    happened: Callable[[], bool], timeout_s: float = 30, why: Callable[[], str] = lambda: ""
) -> None:
    deadline = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < deadline, why() or "it did not happen in time"
        time.sleep(0.01)
