"""Describe the machine that trains a run: processor, cores, GPU and versions. No name of a host, user or folder."""

import hashlib
import os
import platform
import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

CORES = "FEDNCV_CORES"  # the variable for machines whose cores several programs share
PACKAGES = ("fedncv", "torch", "numpy", "scipy")


def versions(device: str) -> dict[str, str]:
    """Return the versions that influence the numbers besides the config."""
    import torch  # here, because workers that only wait ask for ``num_cores``

    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    found |= {package: _version(package) for package in PACKAGES}
    if device.startswith("cuda") and torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(device)
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        found |= {"cuda": str(torch.version.cuda), "cudnn": str(cudnn)}
    return found


def num_cores() -> int:
    """Return the number of cores that this process may use: those of its affinity, at most ``FEDNCV_CORES``."""
    seen = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    given = os.environ.get(CORES, "")
    return max(1, min(seen, int(given))) if given.isdecimal() else seen


def memory() -> int:
    """Return the bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@cache
def sources() -> str:
    """Return a fingerprint of the code of fedncv: versions are equal between releases."""
    package, digest = Path(__file__).parent, hashlib.blake2b(digest_size=3)
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


@cache
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def facts(device: str) -> dict[str, Any]:
    """Return the processor, the cores that this process may use, the threads of one operation, and the versions.

    ``source`` tells versions of fedncv between releases apart.
    """
    import torch

    place = {"processor": _processor(), "cores": num_cores(), "threads": torch.get_num_threads()}
    return place | versions(device) | {"source": sources()}


@cache
def _processor() -> str:
    """Return the processor's name; empty if the system does not tell it."""
    try:
        if sys.platform == "darwin":
            asked = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except (OSError, subprocess.SubprocessError):
        return platform.processor()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())
