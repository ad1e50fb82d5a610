"""Builds the extension `kvstore._core` from cpp/*.cc; all else is declared in pyproject.toml.

KVSTORE_SANITIZE=address|undefined|thread (a comma joins them) and KVSTORE_DEBUG=1 change how;
CXX, CFLAGS and LDFLAGS mean what they always do. CONTRIBUTING.md shows each in use.
"""

import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, PlatformError

COMPILE_ARGS = [
    "-std=c++20",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wshadow",
    f"-isystem{pybind11.get_include()}",
]
# No -march: one build runs everywhere, faster instructions are chosen at run time.
RELEASE_ARGS = ["-O3"]
if "-g" not in os.environ.get("CFLAGS", "").split():  # Python's own flags may say it unasked,
    RELEASE_ARGS.append("-g0")  # and it makes the extension many times larger
DEBUG_ARGS = ["-O0", "-g", "-UNDEBUG", "-D_GLIBCXX_ASSERTIONS"]
SANITIZE_ARGS = ["-O1", "-g", "-UNDEBUG", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all"]
SANITIZERS = {"address", "undefined", "thread"}

# Uses the language and the library from C++20, and Python's own headers.
PROBE = """
#include <Python.h>
#include <bit>
#include <span>
static_assert(__cplusplus >= 202002L);
int probe(std::span<const unsigned> words) { return std::popcount(words[0]); }
"""
PROBE_FAILED = """

kvstore is built from C++ and found no usable compiler. It needs
  - GCC 11, Clang 14 or newer (C++20), and
  - Python's headers (Python.h) for this interpreter, {python}.
Debian, Ubuntu:  apt-get install g++ python3-dev
Fedora, RHEL:    dnf install gcc-c++ python3-devel
conda:           conda install cxx-compiler
Another compiler than the default is chosen by CXX=... in the environment.
The compiler's own words are above.
"""


class BuildCore(build_ext):
    """Compiles the sources side by side, and says what to install where that cannot work."""

    def build_extensions(self):
        if sys.platform != "linux":
            raise PlatformError("kvstore runs on Linux only: its memory is made of memfds")
        if "CXX" in os.environ:  # some setuptools compile C++ by CC
            self.compiler.set_executable("compiler_so", [os.environ["CXX"], "-fPIC"])
        self.probe()
        version = self.distribution.get_version()
        for ext in self.extensions:
            ext.define_macros.append(("KVSTORE_VERSION", f'"{version}"'))
        super().build_extensions()

    def probe(self):
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.cc")
            source.write_text(PROBE)
            try:
                self.compiler.compile(
                    [str(source)],
                    output_dir=folder,
                    include_dirs=self.include_dirs,
                    extra_postargs=["-std=c++20"],
                )
            except CompileError as error:
                message = PROBE_FAILED.format(python=sys.version.split()[0])
                raise CompileError(str(error) + message) from None

    def build_extension(self, ext):
        def compile_one(source):
            return self.compiler.compile(
                [source],
                output_dir=self.build_temp,
                macros=ext.define_macros,
                include_dirs=ext.include_dirs,
                extra_postargs=ext.extra_compile_args,
                depends=ext.depends,
            )

        with ThreadPoolExecutor(self.parallel or len(os.sched_getaffinity(0))) as pool:
            for objects in pool.map(compile_one, ext.sources):
                ext.extra_objects += objects
        ext.depends += ext.sources  # what makes it link again
        ext.sources = []
        super().build_extension(ext)


def sanitizers():
    names = [name for name in os.environ.get("KVSTORE_SANITIZE", "").split(",") if name]
    if unknown := set(names) - SANITIZERS:
        known = ", ".join(sorted(SANITIZERS))
        raise SystemExit(f"KVSTORE_SANITIZE: {', '.join(sorted(unknown))} is none of {known}")
    return names


def core():
    compile_args, link_args = list(COMPILE_ARGS), []
    if names := sanitizers():
        compile_args += [*SANITIZE_ARGS, f"-fsanitize={','.join(names)}"]
        link_args += [f"-fsanitize={','.join(names)}"]
    elif os.environ.get("KVSTORE_DEBUG"):
        compile_args += DEBUG_ARGS
    else:
        compile_args += RELEASE_ARGS
    return Extension(
        "kvstore._core",
        sources=sorted(str(path) for path in Path("cpp").glob("*.cc")),
        depends=sorted(str(path) for path in Path("cpp").glob("*.h")),
        include_dirs=["cpp"],
        extra_compile_args=compile_args,
        extra_link_args=link_args,
        language="c++",
    )


setup(ext_modules=[core()], cmdclass={"build_ext": BuildCore})
