"""Builds the optional extension ``sharded_ckpt._C``; everything else is in pyproject.toml.

The package works without it (the Python engine takes over, more slowly), so a failed build is a
loud message and not an error. ``SHARDED_CKPT_NO_EXTENSION=1`` skips the build.
"""

import copy
import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

_BANNER = "=" * 88
_CORE = ["arena", "crc32c", "engine", "file", "reader", "shard_writer", "slots", "threads"]


def _say(why: str) -> None:
    print(
        f"{_BANNER}\nsharded_ckpt: the C++ engine is NOT built: {why}\n"
        f"The package works with the slower Python engine.\n{_BANNER}",
        file=sys.stderr,
    )


class OptionalBuild(build_ext):
    """A compiler that is missing or fails costs speed, not the installation."""

    def build_extension(self, ext: Extension) -> None:
        import nanobind

        # Added to a copy: setuptools lists the sources of extensions as files of this project, and
        # refuses a path outside it.
        own = copy.copy(ext)
        own.sources = [*ext.sources, str(Path(nanobind.source_dir()) / "nb_combined.cpp")]
        try:
            super().build_extension(own)
        except Exception as error:
            _say(str(error))


def _extensions() -> list[Extension]:
    if os.environ.get("SHARDED_CKPT_NO_EXTENSION") == "1":
        _say("SHARDED_CKPT_NO_EXTENSION=1")
        return []
    if not sys.platform.startswith("linux"):
        _say(f"it uses Linux system calls, this is {sys.platform}")
        return []
    try:
        import nanobind
    except ImportError:
        _say("nanobind is not installed")
        return []
    # nanobind without CMake: its sources are one file of our own extension ("linked mode").
    include = Path(nanobind.include_dir())
    return [
        Extension(
            "sharded_ckpt._C",
            sources=[f"csrc/{name}.cc" for name in [*_CORE, "bindings"]],
            depends=[str(path) for path in sorted(Path("csrc").glob("*.h"))],
            include_dirs=[
                "csrc",
                str(include),
                str(include.parent / "ext" / "robin_map" / "include"),
            ],
            define_macros=[("NB_COMPACT_ASSERTIONS", None)],
            extra_compile_args=[
                "-std=c++17",
                "-O3",
                "-g0",
                "-Wall",
                "-fvisibility=hidden",
                "-fno-strict-aliasing",
            ],
            extra_link_args=["-Wl,-s", "-pthread"],
            language="c++",
            optional=True,
        )
    ]


setup(ext_modules=_extensions(), cmdclass={"build_ext": OptionalBuild})
