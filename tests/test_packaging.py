"""What a user gets from an install: light imports, one version, a command, few libraries."""

import importlib.metadata
import itertools
import os
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import kvstore
from kvstore import _core

ROOT = Path(__file__).resolve().parents[1]

# What the extension may need of a system: the C and C++ runtimes, nothing else.
LIBRARIES = {
    "libc.so.6",
    "libgcc_s.so.1",
    "libm.so.6",
    "libpthread.so.0",
    "librt.so.1",
    "libstdc++.so.6",
    "ld-linux-x86-64.so.2",
    "ld-linux-aarch64.so.1",
}

STORE_SMOKE = """
spec = kvstore.BlockSpec(model="smoke", block_bytes=None)
with kvstore.open(spec, dram="64MiB") as store:
    data, back = bytes(range(256)) * 256, bytearray(65536)
    assert store.put(["key"], [data]).ok
    assert store.get(["key"], [back]).ok and back == data
"""


def fresh_python(code: str, folder: Path) -> str:
    """What a new interpreter prints, started where no source tree can be imported by chance."""
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_loads_nothing_heavy(tmp_path):
    code = "import sys, kvstore; print(*sorted(name.split('.')[0] for name in sys.modules))"
    loaded = set(fresh_python(code, tmp_path).split())
    assert "kvstore" in loaded
    assert loaded & {"grpc", "google", "typer", "click", "rich", "lmdb", "torch"} == set()


def test_version_is_the_same_everywhere():
    declared = re.search(
        r'^version = "([^"]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    changes = re.search(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert declared
    assert changes
    assert {
        declared[1],
        changes[1],
        importlib.metadata.version("llm-kvstore"),
        kvstore.__version__,
        _core.__version__,
    } == {declared[1]}


def test_console_script_answers_version_from_another_directory(tmp_path):
    folder = tmp_path / "a folder with a space"
    folder.mkdir()
    script = shutil.which("kvstore", path=sysconfig.get_path("scripts"))
    assert script, "the console script is not installed"
    result = subprocess.run(
        [script, "--version"], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert kvstore.__version__ in result.stdout


def test_package_is_typed():
    package = Path(kvstore.__file__).parent
    assert (package / "py.typed").exists()
    assert (package / "_core.pyi").exists()


def dynamic_section(path: str) -> dict[int, list[str]]:
    """String entries of an ELF file's dynamic section by tag: needed 1, rpath 15, runpath 29."""
    data = Path(path).read_bytes()
    assert data[:6] == b"\x7fELF\x02\x01", "64-bit, little-endian"
    header_at, header_bytes, headers = struct.unpack_from("<Q14xHH", data, 32)
    segments = [
        struct.unpack_from("<II6Q", data, header_at + index * header_bytes)
        for index in range(headers)
    ]
    dynamic = next(segment for segment in segments if segment[0] == 2)
    entries = list(struct.iter_unpack("<qQ", data[dynamic[2] : dynamic[2] + dynamic[5]]))
    strings = dict(entries)[5]
    load = next(s for s in segments if s[0] == 1 and s[3] <= strings < s[3] + s[5])
    table = strings - load[3] + load[2]

    def text(offset: int) -> str:
        return data[table + offset : data.index(b"\0", table + offset)].decode()

    return {tag: [text(at) for kind, at in entries if kind == tag] for tag in (1, 15, 29)}


def test_extension_links_only_the_allowed_libraries():
    section = dynamic_section(_core.__file__)
    sanitizers = {name for name in section[1] if re.match(r"lib[atu]b?san\.", name)}
    assert "libc.so.6" in section[1]
    assert set(section[1]) - LIBRARIES - sanitizers == set()
    assert (section[15], section[29]) == ([], []), "no search path of the building machine"


def test_import_order_does_not_matter(tmp_path):
    others = [name for name in ("numpy", "torch", "grpc", "pyarrow") if find_spec(name)]
    orders = [order for other in others for order in itertools.permutations(["kvstore", other])]
    orders += [("kvstore", *others), (*others, "kvstore")]
    for order in dict.fromkeys(orders):
        fresh_python("".join(f"import {name}\n" for name in order) + STORE_SMOKE, tmp_path)


def test_source_tree_is_not_what_is_tested():
    """Tests see the installed package, or the source tree by a deliberate `pip install -e`."""
    installed = Path(kvstore.__file__).parent
    assert installed != ROOT / "kvstore" or Path(_core.__file__).parent == installed
    assert "PYTHONPATH" not in os.environ
