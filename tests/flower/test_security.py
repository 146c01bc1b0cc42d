"""Who is not let in, between real processes."""

import contextlib
import json
import os
import signal
import ssl
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedncv[flower]'")

import httpx
from flwr.proto.runtime_pb2 import AcquireTaskRequest

from fedncv.flower import certificates, processes
from fedncv.flower import folder as folders

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def federation(live):
    return live(2)


@pytest.fixture
def stranger(federation, tmp_path):
    """A third client's part, made by somebody who knows the address and the certificate."""
    place = tmp_path / "stranger"
    place.mkdir()
    (place / "ca.crt").write_bytes((federation.folder / "authority" / "ca.crt").read_bytes())
    certificates.write_node(place)
    settings = folders.read_client_settings(federation.folder / "clients" / "0")
    folders.write_client_settings(place, settings._replace(client=2, port=folders.free_ports(1)[0]))
    return place


def join(command, place, *, seconds=90):
    """What a SuperNode says on trying to join, and its exit code; one that is let in does not end."""
    with (place / "said.txt").open("w") as file:
        process = subprocess.Popen(
            [*command, "--max-retries", "2"],
            env=folders.client_environment(place),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        code = process.wait(seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its helper outlives it
        process.wait()
    return code, (place / "said.txt").read_text()


def test_an_unregistered_key_is_refused(federation, stranger):
    _, said = join(folders.client_commands(stranger)[0], stranger)
    assert "SuperNode ID" not in said
    assert "the server refuses the key of this client" in said
    assert processes.online(federation.folder / "server") == [0, 1]


def test_a_server_with_another_authority_s_certificate_is_refused(stranger, tmp_path):
    (stranger / "ca.crt").unlink()
    certificates.write_authority(tmp_path)
    (stranger / "ca.crt").write_bytes((tmp_path / "ca.crt").read_bytes())
    code, said = join(folders.client_commands(stranger)[0], stranger)
    assert code != 0
    assert "CERTIFICATE_VERIFY_FAILED" in said or "certificate verify failed" in said


def test_a_connection_without_tls_is_refused(federation, stranger):
    command = folders.client_commands(stranger)[0]
    at = command.index("--root-certificates")
    plain = [*command[:at], *command[at + 2 :], "--insecure"]
    at = plain.index("--auth-supernode-private-key")
    code, said = join([*plain[:at], *plain[at + 2 :]], stranger)
    assert code != 0
    assert "SuperNode ID" not in said


def test_a_key_of_a_client_that_is_connected_cannot_be_used_a_second_time(federation, stranger):
    (stranger / "node.key").unlink()
    (stranger / "node.key").write_bytes((federation.folder / "clients" / "0" / "node.key").read_bytes())
    (stranger / "node.key").chmod(0o600)
    code, said = join(folders.client_commands(stranger)[0], stranger)
    assert code != 0
    assert "SuperNode ID" not in said


def test_nobody_starts_a_run_from_outside(federation, stranger):
    """Flower's control interface asks for no account; behind the gate it is this machine's alone."""
    settings = folders.read_server_settings(federation.folder / "server")
    trusted = ssl.create_default_context(cafile=stranger / "ca.crt")
    with httpx.Client(verify=trusted, trust_env=False) as client:
        outside, inside = f"https://127.0.0.1:{settings.port}", f"https://127.0.0.1:{settings.inner_port}"
        for path in ("/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/get-nodes"):
            assert client.post(outside + path, content=b"").status_code == 403
        assert client.post(inside + "/v1/control/list-nodes", content=b"").status_code != 403
        assert client.post(outside + "/v1/fleet/push-object", content=bytes(17 * 2**20)).status_code == 413


def test_another_user_of_a_machine_gets_no_task_and_sees_no_token(federation):
    """Over the loopback interface, of the server and of a client; and in the list of processes."""
    trusted = ssl.create_default_context(cafile=federation.folder / "server" / "ca.crt")
    server = folders.reachable(folders.read_server_settings(federation.folder / "server"))
    port = folders.read_client_settings(federation.folder / "clients" / "0").port
    ask = AcquireTaskRequest(supported_task_types=["flwr-clientapp", "flwr-serverapp"]).SerializeToString()
    headers = {"content-type": "application/protobuf", "accept": "application/protobuf"}
    with httpx.Client(verify=trusted, trust_env=False) as client:
        for place in (f"https://{server}", f"http://127.0.0.1:{port}"):
            reply = client.post(f"{place}/v1/runtime/acquire-task", content=ask, headers=headers)
            assert reply.status_code in (401, 403), reply.text
    federation.begin("tokens", rounds=1, epochs=20)
    number = federation.submit("tokens")
    federation.wait(lambda: federation.training("tokens", client=0, round=1))
    lines = command_lines()
    assert any(b"--token-file" in words for words in lines)
    assert not any(b"--token" in words for words in lines)
    federation.finish("tokens", submitted=number)
    federation.wait(lambda: not list(federation.folder.rglob("token-*")))


def command_lines():
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            found.append(path.read_bytes().split(b"\0"))
    return found


def test_secrets_can_be_read_by_their_owner_only(federation):
    secrets = [*federation.folder.rglob("*.key")]
    assert len(secrets) == 4
    assert [path for path in federation.folder.rglob("*") if path.stat().st_mode & 0o077] == []


def test_the_server_s_part_holds_no_sample_and_a_client_s_part_nobody_else_s_key(federation):
    server = {path.name for path in (federation.folder / "server").rglob("*") if path.is_file()}
    assert not any("samples" in name or name == "node.key" for name in server)
    assert json.loads((federation.folder / "server" / "nodes.json").read_text()).keys() == {"0", "1"}
    for u in range(2):
        assert len([*(federation.folder / "clients" / str(u)).rglob("node.key")]) == 1
