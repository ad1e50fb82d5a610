"""Builds `probe.cc` and drives its two processes; see there what it measures."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from kvstore.sim.bench import process_cpu_s

HERE = Path(__file__).resolve().parent
Order = npt.NDArray[np.int64]


class Probe:
    """Bare sockets between two processes: `with Probe(folder, total) as probe`."""

    def __init__(self, folder: Path, total: int) -> None:
        program, path = folder / "probe", str(folder / "probe.sock")
        compiler = shlex.split(os.environ.get("CXX", "g++"))
        sources = [HERE / "probe.cc", HERE.parent / "cpp" / "crc32c.cc"]
        includes = f"-I{HERE.parent / 'cpp'}"
        command = [*compiler, "-O3", "-std=c++20", includes, *map(str, sources), "-o", str(program)]
        subprocess.run(command, check=True)

        def start(*arguments: object) -> subprocess.Popen[str]:
            return subprocess.Popen(
                [str(program), *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )

        self.processes = [server := start("serve", path, total)]
        assert server.stdout
        port = server.stdout.readline().strip()
        self.processes.append(driver := start("drive", port, path, total))
        self.driver = driver
        assert driver.stdout
        if driver.stdout.readline() != "ready\n":
            self.close()
            raise SystemExit("the probe did not start")

    def _ask(self, line: str) -> str:
        assert self.driver.stdin
        assert self.driver.stdout
        self.driver.stdin.write(line + "\n")
        self.driver.stdin.flush()
        answer = self.driver.stdout.readline()
        if not answer:
            raise SystemExit("the probe ended early")
        return answer

    def stream(self, kind: str, block_bytes: int, batch: int, order: Order, to: Order) -> float:
        """Seconds to send blocks `order` into places `to`; kind "acked" or "free"."""
        numbers = " ".join(map(str, [*order.tolist(), *to.tolist()]))
        return float(self._ask(f"stream {kind} {block_bytes} {batch} {len(order)} {numbers}"))

    def trips(self, kind: str, request: int, reply: int, count: int) -> npt.NDArray[np.float64]:
        """Seconds of each of `count` bare round trips; kind "tcp" or "unix"."""
        answer = self._ask(f"trips {kind} {request} {reply} {count}")
        return np.array(answer.split(), np.float64) / 1e9

    def cpu_s(self) -> float:
        """Processor time of both processes so far."""
        return sum(process_cpu_s(process.pid) for process in self.processes)

    def close(self) -> None:
        """Both end."""
        for process in reversed(self.processes):  # the driver ends at the end of its input,
            assert process.stdin
            process.stdin.close()
            process.wait(timeout=60)  # the server when its driver has gone
            assert process.stdout
            process.stdout.close()

    def __enter__(self) -> Probe:  # noqa: PYI034 - Self needs Python 3.11
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
