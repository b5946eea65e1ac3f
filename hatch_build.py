"""Builds `keepstep/runtime/pump.c` beside its source when keepstep is installed. Optional: without it, Python does the same."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FLAGS = ["-std=gnu11", "-O3", "-Wall", "-Wextra", "-fPIC", "-shared"]


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        runtime = Path(self.root) / "keepstep" / "runtime"
        library = runtime / "_pump.so"
        compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if not compiler:
            print("keepstep: no C compiler: chunks will be moved in Python", file=sys.stderr)
            return
        fresh = library.with_suffix(f".{os.getpid()}.new")
        made = subprocess.run(
            [*compiler.split(), *FLAGS, "-o", str(fresh), str(runtime / "pump.c")], text=True, capture_output=True
        )
        if made.returncode:
            fresh.unlink(missing_ok=True)
            print(f"keepstep: {compiler} failed: chunks will be moved in Python\n{made.stderr}", file=sys.stderr)
            return
        fresh.replace(library)  # a process that has the old one mapped keeps it
        build_data["artifacts"].append("keepstep/runtime/_pump.so")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
