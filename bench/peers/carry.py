"""Collect the peers and what they import into a folder, for a machine that cannot install anything.

    python bench/peers/carry.py --flbench CLONE_OF_FL_BENCH --python 3.12

The folder (.carry/peers, which git ignores) then goes on the end of PYTHONPATH. It holds pure Python only; a compiled
file is an error. Compiled packages that a peer imports for a feature that is not used here get a stand-in, an empty
module, in the folder ``standins``. That folder is searched last (``peers.settings.use_standins``), so the real package
is used where it is installed.
"""

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

WHEELS = (
    "pfl==0.6.0", "dp-accounting==0.5.1", "prv-accountant==0.2.0", "multiprocess==0.70.18", "dill==0.4.1",
    "absl-py==1.4.0", "attrs==23.2.0", "mpmath==1.3.0", "packaging==25.0",  # pfl
    "blazefl==2.0.3", "tqdm==4.67.1",  # BlazeFL
    "hydra-core==1.3.2", "omegaconf==2.3.0", "nvidia-ml-py==12.560.30",  # FL-bench
    "rich==13.9.4", "markdown-it-py==3.0.0", "mdurl==0.1.2", "pygments==2.19.2",  # FL-bench
)  # fmt: skip
COMPILED = ("pyyaml==6.0.2",)  # works without its compiled part, which is left out
SOURCES = {"antlr4-python3-runtime==4.9.3": "src/antlr4"}
FL_BENCH = ("main.py", "LICENSE", "config", "src", "data/utils")

ANYTHING = """\"\"\"A stand-in: the real package is compiled, and no function of it is used here.\"\"\"


class _Unused:
    pass


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Unused
"""
STANDINS = {
    "ray/__init__.py": ANYTHING,  # FL-bench, its parallel mode
    "ray/actor.py": ANYTHING,
    "pandas.py": ANYTHING,  # FL-bench, for other datasets and the table of metrics
    "tree.py": ANYTHING,  # dp-accounting
    "sklearn/__init__.py": "",
    "sklearn/metrics.py": '''"""A stand-in: the one score that FL-bench computes when it evaluates the global model."""


def accuracy_score(y_true, y_pred, *, normalize=True):
    right = sum(int(a == b) for a, b in zip(y_true, y_pred, strict=True))
    return right / len(y_true) if normalize else right


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    raise NotImplementedError(f"sklearn.metrics.{name}: install scikit-learn")
''',
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flbench", type=Path, required=True, help="clone of KarhouTam/FL-bench, or its git directory")
    parser.add_argument("--python", default="{}.{}".format(*sys.version_info), help="version that will run the peers")
    parser.add_argument("--to", type=Path, default=Path(".carry/peers"))
    arguments = parser.parse_args()
    if arguments.to.exists():
        shutil.rmtree(arguments.to)
    arguments.to.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        download(Path(folder), arguments.python)
        for file in sorted(Path(folder).iterdir()):
            unpack(file, arguments.to)
    flbench(arguments.flbench, arguments.to / "FL-bench")
    for name, text in STANDINS.items():
        path = arguments.to / "standins" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    compiled = [path for path in arguments.to.rglob("*") if path.suffix in (".so", ".pyd", ".dll", ".dylib")]
    if compiled:
        raise SystemExit(f"compiled files in {arguments.to}: {', '.join(map(str, compiled))}")
    sizes = [path.stat().st_size for path in arguments.to.rglob("*") if path.is_file()]
    print(f"{arguments.to}: {len(sizes)} files, {sum(sizes) / 1e6:.1f} MB, pure Python")


def download(to: Path, python: str) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(to)]
    subprocess.run([*pip, "--only-binary=:all:", f"--python-version={python}", *WHEELS, *COMPILED], check=True)
    subprocess.run([*pip, "--no-binary=:all:", *SOURCES], check=True)


def unpack(file: Path, to: Path) -> None:
    """Unpack a wheel without its compiled files, or the package of a source archive."""
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as wheel:
            wheel.extractall(to, [name for name in wheel.namelist() if not name.endswith(".so")])
        return
    (inside,) = [path for source, path in SOURCES.items() if file.name.startswith(source.partition("==")[0])]
    with tempfile.TemporaryDirectory() as folder, tarfile.open(file) as archive:
        archive.extractall(folder, filter="data")
        (root,) = Path(folder).iterdir()
        shutil.copytree(root / inside, to / Path(inside).name)


def flbench(clone: Path, to: Path) -> None:
    """Copy what its FedAvg needs, at the latest commit, and write that commit down."""
    git = ["git", "-C", str(clone)]
    with tempfile.NamedTemporaryFile(suffix=".tar") as file:
        subprocess.run([*git, "archive", "--output", file.name, "HEAD", *FL_BENCH], check=True)
        with tarfile.open(file.name) as archive:
            archive.extractall(to, filter="data")
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    (to / "COMMIT").write_text(commit)


if __name__ == "__main__":
    main()
