"""cpu_block.c as a library of this machine: compiled where a C compiler is, kept for the next time.

The name of the file holds a hash of the source and of everything the compiler says of itself and the processor, so
another machine with the same home directory compiles its own.
"""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("cpu_block.c")
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fPIC", "-shared")
REALS = {torch.float32: "float", torch.float64: "double"}
PATIENCE = 60  # seconds for a compiler


class Shape(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("samples", "inputs", "height", "width", "outputs", "rows", "columns")]


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedncv"


@functools.cache
def library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """The library for numbers of this type; None, after one line that says why, where there can be none."""
    if dtype not in REALS:
        return None
    try:
        made = ctypes.CDLL(str(compiled(dtype)))
    except (OSError, subprocess.SubprocessError) as error:
        print(f"compiled kernels: {_reason(error)}; torch's own are used instead", file=sys.stderr)
        return None
    pointer = ctypes.c_void_p
    made.forward.argtypes = [Shape, *[pointer] * 7, ctypes.c_double, ctypes.c_double, *[pointer] * 6]
    made.backward.argtypes = [Shape, *[pointer] * 17]
    made.forward.restype = made.backward.restype = None
    return made


def compiled(dtype: torch.dtype) -> Path:
    """The library's file, compiled now if it is not there."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise FileNotFoundError("no C compiler (cc, gcc, clang) was found")
    command = [compiler, *FLAGS, f"-DREAL={REALS[dtype]}"]
    machine = _run([compiler, "-march=native", "-dM", "-E", "-x", "c", os.devnull])  # its version, the processor
    digest = hashlib.sha256(b"\0".join([SOURCE.read_bytes(), *map(str.encode, command), machine])).hexdigest()
    path = cache_folder() / f"block-{digest[:24]}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # whole or not there, whoever else compiles it
            made = Path(folder) / path.name
            _run([*command, str(SOURCE), "-o", str(made), "-lm"])
            made.replace(path)
    return path


def _run(command: list[str]) -> bytes:
    return subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE).stdout


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        return f"{error.cmd[0]} failed ({lines[0] if lines else f'exit code {error.returncode}'})"
    return str(error)
