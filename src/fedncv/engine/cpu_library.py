"""Compile cpu_block.c for this machine if there is a C compiler, and cache the library.

The file name contains a hash of the source, the compiler's version and the processor, so another machine with the
same home directory compiles its own, and a hash of the library itself, so that a damaged one is compiled anew. The
library's code is run, so only this user may write to its folder.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from fedncv.data.cache import cache_folder
from fedncv.notes import note

SOURCE = Path(__file__).with_name("cpu_block.c")
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fPIC", "-shared")
REALS = {torch.float32: "float", torch.float64: "double"}
FAILURES = (OSError, RuntimeError, subprocess.SubprocessError)  # RuntimeError: a user without a home
PATIENCE = 60  # seconds for a compiler


class Shape(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("samples", "inputs", "height", "width", "outputs", "rows", "columns")]


@functools.cache
def library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """Return the library for this dtype; print the reason and return None if there is none."""
    if dtype not in REALS or not hasattr(os, "geteuid"):  # Windows
        return None
    try:
        made = _loaded(dtype)
    except FAILURES as error:
        note(f"compiled kernels: {_reason(error)}; torch's own are used instead")
        return None
    pointer = ctypes.c_void_p
    made.forward.argtypes = [Shape, *[pointer] * 7, ctypes.c_double, ctypes.c_double, *[pointer] * 6]
    made.backward.argtypes = [Shape, *[pointer] * 17]
    made.forward.restype = made.backward.restype = None
    return made


def why_not(dtype: torch.dtype) -> str:
    """Return why there is no library for this dtype; an empty text if there is one."""
    if not hasattr(os, "geteuid"):
        return "not on Windows"
    try:
        _loaded(dtype)
    except FAILURES as error:
        return _reason(error)
    return ""


def _loaded(dtype: torch.dtype) -> ctypes.CDLL:
    path = compiled(dtype)
    try:
        return ctypes.CDLL(str(path))
    except OSError:  # a damaged file
        path.unlink(missing_ok=True)
        return ctypes.CDLL(str(compiled(dtype)))


def compiled(dtype: torch.dtype) -> Path:
    """Return the library's file; compile it if it does not exist."""
    found = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if found is None:
        raise FileNotFoundError("no C compiler (cc, gcc, clang) was found")
    compiler = shlex.split(found) if os.environ.get("CC") else [found]  # CC may hold options
    command = [*compiler, *FLAGS, f"-DREAL={REALS[dtype]}"]
    machine = _run([*compiler, "-march=native", "-dM", "-E", "-x", "c", os.devnull])  # its version, the processor
    digest = hashlib.sha256(b"\0".join([SOURCE.read_bytes(), *map(str.encode, command), machine])).hexdigest()
    name, place = f"block-{digest[:24]}", _own_folder()
    for path in sorted(place.glob(f"{name}-*.so")):
        with contextlib.suppress(FileNotFoundError):  # another process has just removed it
            if path == _named(path, name):
                return path
            path.unlink()  # damaged
    with tempfile.TemporaryDirectory(dir=place) as folder:  # complete or missing
        made = Path(folder) / "block.so"
        _run([*command, str(SOURCE), "-o", str(made), "-lm"])
        with made.open("rb") as file:
            os.fsync(file.fileno())
        path = place / _named(made, name).name
        made.replace(path)
    return path


def _named(path: Path, name: str) -> Path:
    """Return the path beside this library with the name that its content must have."""
    return path.with_name(f"{name}-{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}.so")


def _own_folder() -> Path:
    """Return this user's folder in the cache; raise PermissionError if others could write to it."""
    user = os.geteuid()
    folder = cache_folder() / f"kernels-{user}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = folder.stat()
    if about.st_uid != user or about.st_mode & 0o022:
        raise PermissionError(f"others may write to {folder}, and its files are run (remove it, or chmod 700)")
    return folder


def _run(command: list[str]) -> bytes:
    return subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE).stdout


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        return f"{error.cmd[0]} failed ({lines[0] if lines else f'exit code {error.returncode}'})"
    return str(error)
