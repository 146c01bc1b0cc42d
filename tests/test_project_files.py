"""The files around the code: workflows, issue forms, containers and citation, by the linters of the extra `release`."""

import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
SCHEMAS = {
    "vendor.github-workflows": [".github/workflows/test.yml"],
    "vendor.github-issue-forms": [".github/ISSUE_TEMPLATE/bug.yml", ".github/ISSUE_TEMPLATE/method.yml"],
    "vendor.github-issue-config": [".github/ISSUE_TEMPLATE/config.yml"],
    "vendor.compose-spec": ["containers/compose.yaml"],
    "vendor.citation-file-format": ["CITATION.cff"],
}
LINTERS = {
    "hadolint": ["--failure-threshold", "info", "containers/Dockerfile"],
    "yamllint": ["--strict", ".github", "containers", "CITATION.cff"],
    "zizmor": ["--offline", "--no-progress", "--config", ".github/zizmor.yml", ".github/workflows"],
}


def lint(name, *words):
    program = BIN / name
    if not program.exists():
        pytest.skip(f"{name} is not installed: pip install -e '.[release]'")
    done = subprocess.run([program, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", LINTERS)
def test_a_linter_finds_nothing(name):
    lint(name, *LINTERS[name])


@pytest.mark.slow
@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_follow_their_published_schemas(schema):
    lint("check-jsonschema", "--builtin-schema", schema, *SCHEMAS[schema])


def test_the_workflow_tries_every_declared_version_of_python_and_only_targets_that_make_knows():
    workflow = (ROOT / ".github/workflows/test.yml").read_text()
    (tried,) = re.findall(r"python: \[(.*)\]", workflow)
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    declared = {line.rpartition(" :: ")[2] for line in classifiers if "Python :: 3." in line}
    assert set(re.findall(r"[\d.]+", tried)) == declared
    targets = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)) | {"docs"}
    assert set(re.findall(r"run: make (\S+)", workflow)) <= targets
    assert all(re.fullmatch(r"v\d+\.\d+\.\d+", ref) for ref in re.findall(r"uses: \S+@(\S+)", workflow))


def test_images_get_the_files_they_copy_and_no_others():
    """.dockerignore is a list of what may be copied: data, runs and keys cannot get into an image."""
    first, *allowed = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert first == "*"
    allowed = {line[1:] for line in allowed if line.startswith("!")}
    assert not {name.split("/")[0] for name in allowed} & {"runs", "tests", ".git", ".data", "docs"}
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (ROOT / "containers/Dockerfile").read_text(), re.MULTILINE)
    names = {name for line in copied for name in line.split()}
    assert names <= allowed
    assert all((ROOT / name).exists() for name in allowed)


def test_no_image_runs_as_root():
    stages = (ROOT / "containers/Dockerfile").read_text().split("\nFROM ")[2:]  # without the one that builds
    assert stages[0].startswith("${BASE} AS base")
    assert re.search(r"^USER 10001$", stages[0], re.MULTILINE)
    assert all(stage.startswith("base AS ") and "USER" not in stage and "HEALTHCHECK" in stage for stage in stages[1:])


def test_a_container_is_healthy_while_flower_runs_in_it(tmp_path):
    """A shell that only mentions Flower, as a health check does, is not Flower."""
    runs = runpy.run_path(str(ROOT / "containers" / "healthy.py"))["runs"]
    (tmp_path / "1").mkdir()
    (tmp_path / "self").mkdir()
    for words, expected in {
        (b"/opt/fedncv/bin/python3", b"/opt/fedncv/bin/flower-supernode", b"--superlink"): True,
        (b"flower-superlink", b"--host"): True,
        (b"sh", b"-c", b"pgrep flower-supernode"): False,
        (b"python3", b"/opt/healthy.py", b"8443"): False,
        (b"",): False,
    }.items():
        (tmp_path / "1" / "cmdline").write_bytes(b"\0".join(words) + b"\0")
        assert runs(tmp_path) == expected, words
    shutil.rmtree(tmp_path / "1")
    assert not runs(tmp_path)


def test_a_server_that_does_not_answer_is_not_healthy():
    import socket

    answers = runpy.run_path(str(ROOT / "containers" / "healthy.py"))["answers"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert answers(port)
    assert not answers(port)
