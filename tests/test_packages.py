"""The wheel and the source distribution: what is in them, and that an empty environment can use them.

The slow tests build with the tools of the extra `release`. One of them installs all but torch from the package index.
"""

import email
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from fedncv import catalogue

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DESCRIPTION = (ROOT / PROJECT["readme"]).read_text()
QUICK = ["--model", "mlp", "--clients", "5", "--per-round", "2", "--rounds", "1", "--epochs", "1"]
NO_NETWORK = re.compile(
    r"Failed to establish a new connection|Temporary failure in name resolution|ProxyError|timed out"
)


def test_the_page_of_the_package_index_needs_no_file_beside_it():
    """README.md has links to files and pictures, which an index page could not show."""
    links = re.findall(r"\]\(([^)]*)\)|src=|href=", DESCRIPTION)
    assert all(re.match(r"https?://", link) for link in links)
    assert f"{len(catalogue.methods())} methods and {len(catalogue.switches())} switches" in DESCRIPTION
    described = set(re.findall(r"`fedncv\[(\w+)\]`", DESCRIPTION))
    assert described == set(PROJECT["optional-dependencies"]) - {"test", "release", "docs"}


def test_there_is_one_version_and_no_address_is_made_up():
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {PROJECT['version']}\n" in citation
    assert PROJECT["urls"] == {}
    assert not re.search(r"^(url|repository)", citation, re.MULTILINE)


def files(*under):
    """The files of the repository, without those that git ignores."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *under]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode:
        pytest.skip("needs git and the repository, whose files are built")
    return [name for name in listing.stdout.splitlines() if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """The source distribution, the wheel made from the tree, and the wheel made from the source distribution."""
    if find_spec("build") is None:
        pytest.skip("needs the extra `release`: pip install -e '.[release]'")
    tree, made = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("made")
    for name in files():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tree / name)

    def build(where, what, to):
        command = [sys.executable, "-m", "build", "--no-isolation", what, "--outdir", str(to), str(where)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        (built,) = to.iterdir()
        return built

    sdist = build(tree, "--sdist", made / "sdist")
    wheel = build(tree, "--wheel", made / "wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(made / "unpacked", filter="data")
    (unpacked,) = (made / "unpacked").iterdir()
    return sdist, wheel, build(unpacked, "--wheel", made / "again")


def contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.slow
def test_the_wheel_of_the_source_distribution_is_that_of_the_tree(packages):
    _, wheel, again = packages
    assert wheel.name == again.name == f"fedncv-{PROJECT['version']}-py3-none-any.whl"
    assert contents(wheel) == contents(again)


@pytest.mark.slow
def test_every_file_of_the_package_is_in_the_wheel_and_no_other(packages):
    ours = {name.removeprefix("src/") for name in files("src/fedncv")}
    theirs = {name for name in contents(packages[1]) if ".dist-info/" not in name}
    assert theirs == ours
    assert {Path(name).suffix for name in theirs} >= {".py", ".c", ".json", ".csv", ".html", ".css", ".js", ".typed"}


@pytest.mark.slow
def test_the_metadata_are_complete_and_the_page_renders(packages):
    sdist, wheel, _ = packages
    (name,) = [name for name in contents(wheel) if name.endswith("/METADATA")]
    found = email.message_from_bytes(contents(wheel)[name])
    assert found["Author"] == "fedncv contributors"
    assert found["License-Expression"] == "Apache-2.0"
    assert found["License-File"] == "LICENSE"
    assert found["Requires-Python"] == ">=3.11"
    versions = {line.rpartition(" :: ")[2] for line in found.get_all("Classifier") if "Python :: 3." in line}
    assert versions == {"3.11", "3.12", "3.13"}
    assert found.get_all("Project-URL") is None
    assert found.get_payload().strip() == DESCRIPTION.strip()
    command = [sys.executable, "-m", "twine", "check", "--strict", str(sdist), str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_source_distribution_has_no_tests_and_no_results(packages):
    with tarfile.open(packages[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md", "pyproject.toml", "constraints.txt"} <= names
    assert not [name for name in names if name.split("/")[0] in ("tests", "docs", "bench", "tools", "runs")]


def environment(folder, packages):
    """Make an environment with torch of this one, so that nobody downloads it; return its programs' folder."""
    venv.create(folder, with_pip=True)
    (theirs,) = folder.glob("lib/python3*/site-packages")
    ours = Path(find_spec("torch").origin).parents[1]
    for name in packages:
        for path in ours.glob(name):
            (theirs / path.name).symlink_to(path)
    return folder / "bin"


def use(bin, folder):
    """Use the package outside the repository: its data files, its C code, its types, its commands."""

    def run(*words, code=0):
        done = subprocess.run([str(word) for word in words], cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    where = run(bin / "python", "-c", "import fedncv; print(fedncv.__file__)").stdout
    assert Path(where.strip()).is_relative_to(bin.parent)
    fedncv = bin / "fedncv"
    assert run(fedncv, "--version").stdout == f"fedncv {PROJECT['version']}\n"
    said = run(fedncv, "run", *QUICK, "--layers", "compiled", "--method", "fedncv", "--out", "out")
    assert "No such file" not in said.stderr
    assert "label prior alone" in said.stdout
    run(fedncv, "report", "out")
    page = (folder / "out" / "report.html").read_text()
    assert "<style>" in page
    assert "<script>" in page
    assert "FedNCV" in run(fedncv, "methods", "fedncv").stdout
    run(fedncv, "theory", "--only", "leave-one-out")
    run(fedncv, "doctor")
    assert "complete" in run(fedncv, "completion", "bash").stdout
    (folder / "mine.py").write_text('import fedncv\n\nreveal_type(fedncv.simulate(method="fedavg"))\n')
    types = run(sys.executable, "-m", "mypy", "--python-executable", bin / "python", "mine.py").stdout
    assert 'Revealed type is "fedncv.simulation.Result"' in types  # Any without py.typed


@pytest.mark.slow
def test_the_wheel_works_outside_the_repository_beside_installed_dependencies(packages, tmp_path):
    bin = environment(tmp_path / "env", ())
    (site,) = (tmp_path / "env").glob("lib/python3*/site-packages")
    (site / "shared.pth").write_text(f"{Path(find_spec('torch').origin).parents[1]}\n")
    command = [bin / "python", "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", packages[1]]
    subprocess.run(command, check=True)
    (tmp_path / "elsewhere").mkdir()
    use(bin, tmp_path / "elsewhere")


@pytest.mark.slow
def test_the_wheel_brings_all_that_it_imports(packages, tmp_path):
    """Everything but torch comes from the package index: a dependency that is not declared would be missing."""
    bin = environment(tmp_path / "env", ("torch", "torchgen", "functorch", "torch-*.dist-info"))
    command = [bin / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries", "1"]
    command += ["-c", ROOT / "constraints.txt", packages[1]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and (reason := NO_NETWORK.search(done.stderr)):
        pytest.skip(f"pip cannot reach a package index here: {reason[0]}")
    assert done.returncode == 0, done.stderr
    listed = subprocess.run([bin / "python", "-m", "pip", "freeze"], capture_output=True, text=True, check=True).stdout
    assert not {"pytest", "flwr", "ray"} & {line.partition("==")[0] for line in listed.splitlines()}
    (tmp_path / "elsewhere").mkdir()
    use(bin, tmp_path / "elsewhere")
