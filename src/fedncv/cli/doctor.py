"""fedncv doctor: print what fedncv found on this machine, and what to do about what is missing."""

import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal, NamedTuple

from packaging.requirements import Requirement

from fedncv.cli.arguments import parse
from fedncv.machine import CORES, num_cores
from fedncv.portable import memory_bytes

State = Literal["ok", "note", "broken"]
FEW_BYTES = 2_000_000_000  # of free disk: a decoded dataset takes up to 1.3 GB
FOR_DEVELOPERS = ("test", "release")  # extras that users do not need
CPU_BUILD = "pip install torch --index-url https://download.pytorch.org/whl/cpu"


class Finding(NamedTuple):
    """One line of the diagnosis. A note is something missing that only some uses need."""

    name: str
    state: State
    found: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Print what fedncv found on this machine, and what to do about what is missing.

    Exit status 0, or 1 if something is broken: a package that fedncv needs, PyTorch itself, or the cache folder.
    """

    data_dir: str = ""
    """Folder with the datasets' files; empty: $FEDNCV_DATA, then the cache folder."""
    json: bool = False
    """Print the findings as JSON."""


def main(argv: list[str]) -> int:
    arguments = parse(Arguments, argv, command="doctor")
    findings = list(diagnosis(arguments.data_dir))
    broken = any(finding.state == "broken" for finding in findings)
    if arguments.json:
        print(json.dumps({"broken": broken, "findings": [finding._asdict() for finding in findings]}, indent=1))
    else:
        print("\n".join(lines(findings)))
    return 1 if broken else 0


def lines(findings: list[Finding]) -> Iterator[str]:
    width = max(len(finding.name) for finding in findings)
    for name, state, found, remedy in findings:
        yield f"{state:6}  {name:{width}}  {found}"
        if remedy:
            yield f"{'':6}  {'':{width}}  -> {remedy}"


def diagnosis(data_dir: str = "") -> Iterator[Finding]:
    """Yield every finding. A check that itself fails is one too, so that the others are made all the same."""
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("system", system), ("package", packages), ("torch", torch_), ("compiler", compiler), ("cache", cache),
        ("data", lambda: data(data_dir)), ("extra", extras),
    ]  # fmt: skip
    for name, check in checks:
        try:
            yield from check()
        except Exception as error:  # of whatever is installed here
            reason = f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}"
            yield Finding(name, "broken", f"cannot be checked: {reason}")


def system() -> Iterator[Finding]:
    words = f"fedncv {version('fedncv')}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    if sys.platform == "win32":
        lacks = "no federation, no Ray cluster, no client state on disk; for those use WSL 2"
        yield Finding("system", "note", words, f"Windows is not tested: {lacks}")
    elif sys.platform == "darwin":
        yield Finding("system", "note", words, "macOS is not tested; Apple's GPUs are not supported")
    else:
        yield Finding("system", "ok", words)
    limit = f" ({CORES}={os.environ[CORES]})" if CORES in os.environ else ""
    yield Finding("machine", "ok", f"{num_cores()} cores{limit}, {_bytes(memory_bytes())} memory")


def packages() -> Iterator[Finding]:
    """Compare the installed versions with those that the package asks for."""
    for requirement in _requirements():
        if requirement.marker is None:
            yield _package(requirement, missing="broken")


def extras() -> Iterator[Finding]:
    """Say for every extra whether its packages are installed, in versions that fit."""
    found: dict[str, list[Finding]] = {}
    for requirement in _requirements():
        for extra in _extras(requirement):
            found.setdefault(extra, []).append(_package(requirement, missing="note"))
    for extra, parts in found.items():
        install = f"pip install 'fedncv[{extra}]'"
        words = "; ".join(f"{part.name} {part.found}" for part in parts)
        missing = any(part.state != "ok" for part in parts)
        yield Finding(f"extra {extra}", "note" if missing else "ok", words, install if missing else "")
        if extra == "flower" and not missing and shutil.which("flwr") is None:
            remedy = f"activate the environment, or add {Path(sys.executable).parent} to PATH"
            yield Finding("extra flower", "note", "its command flwr is not on PATH", remedy)


def _requirements() -> list[Requirement]:
    return [Requirement(text) for text in requires("fedncv") or []]


def _extras(requirement: Requirement) -> list[str]:
    """Return the extras that a requirement belongs to, without those of developers."""
    named = re.findall(r"extra == [\"'](\w+)[\"']", str(requirement.marker or ""))
    return [extra for extra in named if extra not in FOR_DEVELOPERS]


def _package(requirement: Requirement, *, missing: State) -> Finding:
    wanted = f"{requirement.name}{requirement.specifier}"
    remedy = CPU_BUILD if requirement.name == "torch" else f"pip install '{wanted}'"
    try:
        there = version(requirement.name)
    except PackageNotFoundError:
        return Finding(requirement.name, missing, "not installed", remedy)
    if not requirement.specifier.contains(there, prereleases=True):
        return Finding(requirement.name, missing, f"{there}, but fedncv needs {wanted}", f"pip install '{wanted}'")
    return Finding(requirement.name, "ok", f"{there} (needs {requirement.specifier})")


def torch_() -> Iterator[Finding]:
    """Compute something, and say which devices and precisions there are."""
    import torch

    if torch.ones(2, 3).matmul(torch.ones(3, 2)).sum().item() != 12:
        yield Finding("torch", "broken", "a matrix product on the CPU is wrong", "install torch again")
        return
    from fedncv.engine.arithmetic import has_bf16, has_tf32

    cpu = torch.device("cpu")
    low = "bf16" if has_bf16(cpu) else "no bf16"
    yield Finding("device cpu", "ok", f"float32, float64, {low}; {torch.get_num_threads()} threads")
    built = torch.version.cuda
    if torch.cuda.is_available():
        for k in range(torch.cuda.device_count()):
            device, about = torch.device("cuda", k), torch.cuda.get_device_properties(k)
            fast = [name for name, has in (("tf32", has_tf32), ("bf16", has_bf16)) if has(device)]
            precisions = ", ".join(["float32", "float64", *(fast or ["neither tf32 nor bf16"])])
            words = f"{about.name}, {_bytes(about.total_memory)}, CUDA {built}; {precisions}"
            yield Finding(f"device cuda:{k}", "ok", words)
    elif _has_nvidia():
        why = f"torch is built for CUDA {built}" if built else f"torch {torch.__version__} is built for the CPU"
        remedy = (
            "update the driver (nvidia-smi shows its CUDA version)" if built else "install PyTorch's build for CUDA"
        )
        yield Finding("device cuda", "note", f"there is an NVIDIA driver, but {why} and sees no GPU", remedy)
    elif built:
        words = f"torch is built for CUDA {built}, and there is no GPU; the build for the CPU is a quarter as large"
        yield Finding("device cuda", "note", words, f"to save space: {CPU_BUILD} --force-reinstall")
    else:
        yield Finding("device cuda", "ok", "none, and torch is the build for the CPU")
    if torch.backends.mps.is_available():
        yield Finding("device mps", "note", "Apple's GPU is not supported", "use --device cpu")


def _has_nvidia() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def compiler() -> Iterator[Finding]:
    """Compile the layers for the CPU, or find them in the cache."""
    import torch

    from fedncv.engine.cpu_library import why_not

    if reason := why_not(torch.float32):
        remedy = "install a C compiler (on Debian: apt install gcc libc6-dev); without one, torch's layers are used"
        yield Finding("compiled layers", "note", reason, remedy)
    else:
        yield Finding("compiled layers", "ok", "a C compiler works, or its library is in the cache")


def cache() -> Iterator[Finding]:
    """Say where decoded datasets and compiled layers are kept, and whether there is room."""
    from fedncv.data.cache import cache_folder

    folder = cache_folder()
    another = "set FEDNCV_CACHE to a folder where you may write"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial = folder / f".doctor-{os.getpid()}"
        trial.touch()
        trial.unlink()
    except OSError as error:
        yield Finding("cache", "broken", f"{folder}: {error.strerror}", another)
        return
    free = shutil.disk_usage(folder).free
    words = f"{folder}, {_bytes(free)} free"
    if free < FEW_BYTES:
        yield Finding("cache", "note", words, "free some space, or set FEDNCV_CACHE to a folder on another disk")
    else:
        yield Finding("cache", "ok", words)


def data(data_dir: str) -> Iterator[Finding]:
    """Say which datasets are complete here, and which files of the others are missing."""
    from fedncv.cli.datasets import at_hand
    from fedncv.data import DATASETS
    from fedncv.data.idx import present
    from fedncv.data.load import data_folder

    root = data_folder(data_dir or None)
    there = {name: at_hand(name, entry, root) for name, entry in DATASETS.items()}
    complete = [name for name, where in there.items() if where != "no"]
    others = [name for name, where in there.items() if where == "no"]
    yield Finding("data", "ok" if root.is_dir() else "note", f"{root}{'' if root.is_dir() else ' does not exist'}")
    yield Finding("data complete", "ok", ", ".join(complete))
    for name in others:
        entry = DATASETS[name]
        for folder in (root / each for each in entry.folders):
            missing = [file for file in entry.files if not present(folder, file).exists()]
            if len(missing) < len(entry.files):
                words = f"{folder} lacks {', '.join(missing)}"
                yield Finding(f"data {name}", "note", words, f"fedncv datasets {name}")
    if others:
        remedy = "fedncv datasets NAME says which files to put where"
        yield Finding("data missing", "note", ", ".join(others), remedy)


def _bytes(number: float) -> str:
    return f"{number / 1e9:,.1f} GB"
