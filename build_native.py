"""Hatchling's build hook: compile ``torchobs/_native.c`` where that can be done, and go on without it where it cannot.

The compiled part is optional (docs/overhead.md): without a compiler, or Python's headers, the wheel is a pure one, and one line
says so. With them it holds one module for all Pythons from 3.10 on (the limited API), and is tagged for the machine.
``TORCHOBS_BUILD_NATIVE``: ``0`` to make the pure wheel, ``1`` to fail where the module cannot be compiled.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NAME = "torchobs._native"
SOURCE = "torchobs/_native.c"
FLAGS = [
    "-std=c11", "-O2", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Wstrict-prototypes",
    "-Werror",
]  # fmt: skip


class NativeBuildHook(BuildHookInterface[Any]):
    """Adds the compiled module to a wheel; to the checkout for an editable install."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile it, and say in ``build_data`` what the wheel has."""
        wanted = os.environ.get("TORCHOBS_BUILD_NATIVE", "")
        if wanted == "0" or sysconfig.get_config_var("Py_GIL_DISABLED") or sys.implementation.name != "cpython":
            return  # a free-threaded Python has no limited API
        try:
            made = self._compile()
        except (Exception, SystemExit) as error:  # setuptools ends the process where a compiler fails
            if wanted == "1":
                raise
            why = str(error).strip().splitlines() or [type(error).__name__]
            sys.stderr.write(f"torchobs: built without its compiled part, which makes steps cheaper: {why[-1]}\n")
            return
        if version == "editable":
            target = Path(self.root, "torchobs", made.name)
            made.replace(target)
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"cp310-abi3-{_platform()}"
        build_data["force_include"][str(made)] = f"torchobs/{made.name}"

    def _compile(self) -> Path:
        from setuptools import Distribution, Extension
        from setuptools.command.build_ext import build_ext

        work = tempfile.mkdtemp(prefix="torchobs-native-")
        extension = Extension(NAME, [SOURCE], extra_compile_args=FLAGS, py_limited_api=True, libraries=["m"])
        command = build_ext(Distribution({"name": "torchobs", "ext_modules": [extension]}))
        command.build_lib, command.build_temp = f"{work}/lib", f"{work}/temp"
        before = Path.cwd()
        os.chdir(self.root)  # as setuptools expects
        try:
            command.ensure_finalized()
            command.run()
        finally:
            os.chdir(before)
        return Path(work, "lib", *command.get_ext_filename(NAME).split("/"))


def _platform() -> str:
    """Return the wheel tag of this machine."""
    from packaging.tags import platform_tags

    return next(iter(platform_tags()))
