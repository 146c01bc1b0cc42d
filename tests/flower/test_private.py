"""Other users of a machine see neither samples, nor state, nor tokens, and the server sees no text of an exception."""

import errno
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedncv[flower]'")

from federations import tiny
from flwr.app import Message, RecordDict
from flwr.supercore.constant import TaskType
from flwr.supercore.superexec.executor import ExecutionSpec

from fedncv.cli import main
from fedncv.config import RunConfig, write_toml
from fedncv.engine.problem import Kept
from fedncv.flower import client_app, executor, members, samples
from fedncv.flower import folder as folders
from fedncv.flower.own import Own, OwnError
from fedncv.flower.private import private_folder
from fedncv.flower.samples import SamplesError
from fedncv.flower.wire import WireError


@pytest.fixture
def open_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def open_to_others(folder):
    return [path for path in (folder, *folder.rglob("*")) if path.stat().st_mode & 0o077]


def test_all_that_init_and_its_processes_write_is_the_owner_s_alone(tmp_path, open_umask, monkeypatch):
    monkeypatch.setattr(members, "HERE_SECONDS", 0.0)
    folder = tmp_path / "trial"
    folders.init(folder, RunConfig(clients=2, per_round=2), host="127.0.0.1", port=0, listen="127.0.0.1")
    folders.server_environment(folder / "server")
    folders.client_environment(folder / "clients" / "0")
    main(["federation", "add", str(folder)])
    assert open_to_others(folder) == []
    assert (folder / "clients" / "0" / "data" / samples.FILE).is_file()


def test_what_a_client_keeps_is_its_own_alone(tmp_path, open_umask):
    problem = tiny("scaffold")
    own = Own(tmp_path / "runs", "first")
    with own.locked():
        own.write(1, Kept(problem.model.start_P, problem.model.start_R[:0]))
    assert open_to_others(tmp_path / "runs") == []
    assert {path.name for path in (tmp_path / "runs" / "first").iterdir()} == {"lock", "round-000001.safetensors"}


def test_an_open_folder_of_an_earlier_version_is_tightened(tmp_path, open_umask):
    place = tmp_path / "runs"
    (place / "first").mkdir(parents=True)
    (place / "first" / "round-000001.safetensors").write_bytes(b"state")
    (place / "first" / "tool").write_bytes(b"")
    (place / "first" / "tool").chmod(0o755)
    (place / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "outside").write_bytes(b"")
    private_folder(place)
    assert open_to_others(place / "first") == []
    assert (place / "first" / "tool").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "outside").stat().st_mode & 0o777 == 0o666  # what a link names is not ours


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ValueError, match=r"belongs to user \d+; run as that user"):
        private_folder(tmp_path)


def test_commands_of_the_federation_carry_no_secret(tmp_path):
    folder = tmp_path / "trial"
    folders.init(folder, RunConfig(clients=2, per_round=2), host="127.0.0.1", port=0, listen="127.0.0.1")
    places = (folder / "server", folder / "clients" / "0")
    commands = [*folders.server_commands(places[0]), *folders.client_commands(places[1])]
    folders.server_environment(places[0])
    folders.client_environment(places[1])
    needing = [command for command in commands if "--superexec-auth-secret-file" in command]
    assert len(needing) == 4  # Flower's servers, and what starts their tasks
    secrets = {(place / "flower" / folders.SECRET).read_bytes() for place in places}
    assert {len(secret) for secret in secrets} == {32}
    assert len(secrets) == 2
    for command in needing:
        named = command[command.index("--superexec-auth-secret-file") + 1]
        assert Path(named).read_bytes() in secrets
    for command in commands:
        if "--isolation" in command:  # in Flower's other mode the secret is ignored
            assert command[command.index("--isolation") + 1] == "process"


def test_a_task_s_token_is_in_a_file_and_not_in_the_command_line(tmp_path, monkeypatch):
    tool = tmp_path / "tool"
    tool.write_text(
        f"#!{sys.executable}\nimport os, sys\nname = sys.argv[sys.argv.index('--token-file') + 1]\n"
        "mode = oct(os.stat(name).st_mode & 0o777)\n"
        "print(open('/proc/self/cmdline').read().replace(chr(0), ' '), open(name).read(), mode, sep='|')\n"
    )
    tool.chmod(0o700)
    monkeypatch.setitem(executor.TASK_TYPE_TO_COMMAND, TaskType.CLIENT_APP, str(tool))
    started = []

    class Popen(subprocess.Popen):
        def __init__(self, words, **_):
            super().__init__(words, stdout=subprocess.PIPE, text=True)
            started.append(self)

    monkeypatch.setattr(executor.subprocess, "Popen", Popen)
    ours = executor.Private(tmp_path / "worker")
    spec = ExecutionSpec(
        task_type=TaskType.CLIENT_APP,
        runtime_api_address="127.0.0.1:1",
        token="t0ken",
        insecure=True,
        root_certificates_path=None,
        runtime_dependency_install=False,
        parent_pid=None,
        suppress_output=False,
        task_id=1,
    )
    ours.launch(spec)
    ours.reconcile()
    said, _ = started[0].communicate(timeout=60)
    line, token, mode = said.strip().split("|")
    assert (token, mode) == ("t0ken", "0o600")
    assert "t0ken" not in line
    assert (tmp_path / "worker").exists()  # a task was running
    ours.reconcile()
    assert list(tmp_path.glob("token-*")) == []


# ---- what the server is told ------------------------------------------------------------------------------


def answered(context, monkeypatch, *, error=None, handler=client_app.query):
    """Return code and words of the reply if making the client fails, with ``error`` if there is one."""
    if error is not None:

        def fail(_context):
            raise error

        monkeypatch.setattr(client_app, "client_in", fail)
    message = Message(RecordDict(), 1, "query")
    message.metadata.__dict__["_message_id"] = "1"
    reply = handler(message, context)
    assert list(reply.content) == ["refusal"]
    return dict(reply.content["refusal"])


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (SamplesError("/home/ann/data.csv has no column 'age'"), "unreadable", ""),
        (OwnError("state", "/home/ann/runs"), "state", ""),
        (WireError("/home/ann"), "message", ""),
        (OSError(errno.ENOSPC, "No space left", "/home/ann"), "disk", "ENOSPC"),
        (PermissionError(errno.EACCES, "denied", "/home/ann"), "disk", "EACCES"),
        (MemoryError("/home/ann"), "memory", ""),
        (ValueError("/home/ann"), "failed", ""),
        (KeyError("/home/ann"), "failed", ""),
    ],
)
def test_an_exception_becomes_a_code_and_its_text_stays_here(
    error, code, said, tmp_path, monkeypatch, caplog, as_a_task
):
    context = SimpleNamespace(node_config={"client": 0, "folder": str(tmp_path)}, run_config={"run": "first"})
    for handler in (client_app.query, client_app.train, client_app.evaluate):
        assert answered(context, monkeypatch, error=error, handler=handler) == {"code": code, "said": said}
    assert "/home/ann" in caplog.text


def test_missing_samples_are_told_without_their_path(tmp_path, monkeypatch, caplog, as_a_task):
    config = RunConfig(clients=2, per_round=2, model="mlp")
    context = SimpleNamespace(
        node_config={"client": 0, "folder": str(tmp_path)}, run_config={"run": "first", "study": write_toml(config)}
    )
    with caplog.at_level(logging.ERROR):
        assert answered(context, monkeypatch) == {"code": "unreadable", "said": ""}
    assert str(tmp_path) in caplog.text
