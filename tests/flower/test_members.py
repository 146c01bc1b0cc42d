"""Who takes part: keys that are removed, changed and added, and certificates that are renewed."""

import asyncio
import base64
import contextlib
import datetime
import os
import shutil
import ssl
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedncv[flower]'")

from cryptography import x509
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from flwr.supernode.cli.flower_supernode import load_ssh_private_key

from fedncv.cli import main
from fedncv.cli.federation import status
from fedncv.config import RunConfig
from fedncv.flower import certificates, coordinator, members, processes
from fedncv.flower import folder as folders
from fedncv.flower.admission import Admission, Last, RefusedError


@pytest.fixture
def trial(tmp_path, monkeypatch):
    """A federation of two clients that is not running."""
    monkeypatch.setattr(members, "HERE_SECONDS", 0.0)
    folder = tmp_path / "trial"
    folders.init(
        folder, RunConfig(clients=2, per_round=2, partition="iid"), host="fed.example.org", port=8443, listen="0.0.0.0"
    )
    return folder


def admitted(folder, part):
    """The client as which the gate takes this part; None if it refuses its key."""
    key = load_ssh_private_key((part / "node.key").read_bytes(), None)
    at = datetime.datetime.now(datetime.UTC).isoformat()
    headers = {
        b"flwr-public-key": base64.b64encode(public_key_to_bytes(key.public_key())),
        b"flwr-timestamp": at.encode(),
        b"flwr-signature": base64.b64encode(sign_message(key, at.encode("ascii"))),
    }
    with contextlib.suppress(RefusedError):
        return Admission(folder / "server" / "keys").admit(headers, "192.0.2.1", now=0.0, time=time.time())
    return None


def test_a_revoked_client_is_shut_out_and_no_run_begins_without_it(trial, capsys):
    part = trial / "clients" / "1"
    assert admitted(trial, part) == 1
    assert main(["federation", "revoke", str(trial), "--client", "1"]) == 0
    assert "client 1 is shut out as soon as the server starts" in capsys.readouterr().out
    assert admitted(trial, part) is None
    assert admitted(trial, trial / "clients" / "0") == 0
    with pytest.raises(ValueError, match=r"clients \[1\] of .* have no key: they were revoked"):
        coordinator.create(trial, "first", RunConfig(clients=2, per_round=2))
    assert main(["federation", "revoke", str(trial), "--client", "1"]) == 2
    assert "client 1 has no key" in capsys.readouterr().err


def test_a_rotated_key_replaces_the_old_one_also_after_it_was_revoked(trial, tmp_path, capsys):
    part, old = trial / "clients" / "1", tmp_path / "old"
    old.mkdir()
    (old / "node.key").write_bytes((part / "node.key").read_bytes())
    members.revoke(trial, 1)
    assert main(["federation", "rotate", str(trial), "--client", "1"]) == 0
    assert "the new key of client 1 is accepted" in capsys.readouterr().out
    assert admitted(trial, part) == 1
    assert admitted(trial, old) is None


def test_a_key_is_rotated_on_two_machines(trial, tmp_path, capsys):
    """The client's part is elsewhere: a new key there, its public half here."""
    part = tmp_path / "client"
    (trial / "clients" / "1").rename(part)
    assert main(["federation", "rotate", str(trial), "--client", "1"]) == 2
    assert "the part of client 1 is on another machine" in capsys.readouterr().err
    assert main(["federation", "rotate", str(part)]) == 0
    assert "fedncv federation rotate FOLDER --client 1 --key node.pub" in capsys.readouterr().out
    assert admitted(trial, part) is None  # the server does not have it yet
    assert main(["federation", "rotate", str(trial), "--client", "1", "--key", str(part / "node.pub")]) == 0
    assert admitted(trial, part) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rotate", "trial", "--client", "2"], "client must be from 0 to 1, not 2"),
        (["rotate", "trial"], "client must be from 0 to 1, not -1"),
        (["rotate", "trial", "--client", "1", "--key", "nowhere"], "nowhere: No such file or directory; copy node.pub"),
        (
            ["rotate", "trial", "--client", "1", "--key", "trial/clients/1/node.key"],
            "is not the public key of a client",
        ),
        (["rotate", "trial", "--client", "1", "--key", "trial/clients/0/node.pub"], "is already the key of client 0"),
        (["rotate", "trial/clients/0", "--client", "1"], "is the part of client 0; leave --client 1 out"),
        (["revoke", "trial", "--client", "-1"], "client must be from 0 to 1, not -1"),
        (["revoke", "nowhere", "--client", "1"], "there is no nowhere/server/server.toml"),
        (["add", "trial", "--host", "my host"], "'my host' is not a host name or address"),
        (["renew", "nowhere"], "renew on the machine where `init` ran"),
        (["stop", "nowhere"], "there is no nowhere/server/server.toml"),
    ],
)
def test_a_mistake_gets_one_line_and_changes_no_key(words, said, trial, monkeypatch, capsys):
    monkeypatch.chdir(trial.parent)
    before = folders.read_keys(trial / "server")
    assert main(["federation", *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert folders.read_keys(trial / "server") == before


def test_an_added_client_has_a_part_and_a_key_and_no_samples(trial, capsys):
    assert main(["federation", "add", str(trial)]) == 0
    assert "clients/2: client 2" in capsys.readouterr().out
    part = trial / "clients" / "2"
    assert folders.read_client_settings(part)[:2] == (2, "fed.example.org:8443")
    assert folders.read_server_settings(trial / "server").clients == 3
    assert admitted(trial, part) == 2
    assert (part / "ca.crt").read_bytes() == (trial / "authority" / "ca.crt").read_bytes()
    assert not (part / "data").exists()
    assert processes.names(trial) == ["server", "0", "1", "2"]


# ---- what Flower is told ----------------------------------------------------------------------------------


@pytest.fixture
def told(monkeypatch):
    """The commands that Flower gets; it numbers nodes from 100."""
    commands = []

    class Call:
        def __init__(self, number):
            self.number = number

        def kill(self):
            pass

        wait = kill

    def call(_server, *words, **_):
        commands.append(words[1:3])
        return Call(99 + len(commands))

    monkeypatch.setattr(processes, "wait_for_port", lambda *_: None)
    monkeypatch.setattr(processes, "flwr", call)
    monkeypatch.setattr(processes, "_start_flwr", call)
    monkeypatch.setattr(processes, "_answer", lambda call, _: {"node-id": call.number})
    return commands


def test_flower_is_told_of_new_removed_and_changed_keys_only(trial, told):
    server = trial / "server"
    key = {u: folders.key_file(server, u) for u in range(2)}
    processes.register(server)
    assert told == [("register", str(key[0])), ("register", str(key[1]))]
    assert folders.read_nodes(server) == {0: 100, 1: 101}
    processes.register(server)
    assert len(told) == 2
    members.revoke(trial, 0)  # removed
    certificates.write_node(trial)
    key[1].write_bytes((trial / "node.pub").read_bytes())  # changed, by hand
    processes.register(server)
    assert told[2:] == [("unregister", "100"), ("unregister", "101"), ("register", str(key[1]))]
    assert folders.read_nodes(server) == {1: 104}
    assert folders.read_registered(server) == folders.read_keys(server)


def test_nodes_that_an_earlier_version_registered_are_kept(trial, told):
    server = trial / "server"
    (server / "nodes.json").write_text('{"0": "7", "1": "8"}')
    processes.register(server)
    assert told == []
    folders.key_file(server, 1).unlink()
    processes.register(server)
    assert told == [("unregister", "8")]


# ---- certificates -----------------------------------------------------------------------------------------


def handshake(server, authority):
    """Whether a client that trusts ``authority`` takes the server for fed.example.org."""
    ours = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ours.load_cert_chain(server / "server.crt", server / "server.key")
    theirs = ssl.create_default_context(cafile=authority)

    async def go():
        served = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=ours)
        async with served:
            port = served.sockets[0].getsockname()[1]
            try:
                _, writer = await asyncio.open_connection(
                    "127.0.0.1", port, ssl=theirs, server_hostname="fed.example.org"
                )
            except ssl.SSLError:
                return False
            writer.close()
            return True

    return asyncio.run(go())


def test_renewed_certificates_are_trusted_with_the_old_authority_and_the_new(trial, tmp_path, monkeypatch, capsys):
    server, authority = trial / "server", trial / "authority" / "ca.crt"
    old = tmp_path / "ca.crt"
    old.write_bytes(authority.read_bytes())
    before = x509.load_pem_x509_certificate((server / "server.crt").read_bytes())
    monkeypatch.setattr(certificates, "VALID_DAYS", 2000)
    assert main(["federation", "renew", str(trial)]) == 0
    after = x509.load_pem_x509_certificate((server / "server.crt").read_bytes())
    assert (after.not_valid_after_utc - before.not_valid_after_utc).days >= 2000 - 825
    assert f"valid until {after.not_valid_after_utc:%Y-%m-%d}" in capsys.readouterr().out
    assert authority.read_bytes() != old.read_bytes()
    copies = [server / "ca.crt", *(trial / "clients" / str(u) / "ca.crt" for u in range(2))]
    assert [path.read_bytes() for path in copies] == [authority.read_bytes()] * 3
    assert handshake(server, authority)
    assert handshake(server, old)
    (tmp_path / "other").mkdir()
    certificates.write_authority(tmp_path / "other")
    assert not handshake(server, tmp_path / "other" / "ca.crt")


def test_status_warns_of_certificates_that_expire(trial, monkeypatch, capsys):
    monkeypatch.setattr(certificates, "VALID_DAYS", 10)
    monkeypatch.setattr(processes, "online", lambda *_, **__: [])
    assert main(["federation", "status", str(trial)]) == 0
    assert "expire" not in capsys.readouterr().out
    members.renew(trial)
    assert main(["federation", "status", str(trial)]) == 0
    assert "the certificates expire in 10 days; renew them" in capsys.readouterr().out


# ---- status -----------------------------------------------------------------------------------------------

NOW = 1.8e9


@pytest.fixture
def frozen(monkeypatch):
    """The clock of `status` stands still."""
    monkeypatch.setattr(status, "time", SimpleNamespace(time=lambda: NOW))


@pytest.mark.parametrize(("ago", "said"), [(3, "connected"), (100, "silent")])
def test_status_believes_the_gate_and_not_flower_alone(ago, said, trial, frozen, monkeypatch, capsys):
    """Flower counts both clients as online; the gate has heard of client 0 only, and ``ago`` seconds ago."""
    monkeypatch.setattr(processes, "online", lambda *_, **__: [0, 1])
    admission = Admission(trial / "server" / "keys")
    admission.last[0] = Last("192.0.2.7", 0.0, NOW - ago)
    (trial / "server" / "flower").mkdir()
    admission.write_contacts(trial / "server" / "flower" / "contacts.json")
    shutil.rmtree(trial / "clients" / "0")  # it is on another machine
    assert main(["federation", "status", str(trial)]) == 0
    _, first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.split()[2] == said
    assert f"on another machine (192.0.2.7), last contact {ago} s ago" in first
    assert second.split()[2] == "silent"
    assert "not started here, no contact yet" in second


def test_status_on_a_client_s_machine_says_when_it_last_reached_the_server(trial, frozen, capsys):
    part = trial / "clients" / "0"

    def said():
        assert main(["federation", "status", str(part)]) == 0
        return capsys.readouterr().out

    assert "client 0    no contact with fed.example.org:8443, no contact yet" in said()
    folders.client_environment(part)
    for name, ago in ((folders.HEARTBEAT, 70), (folders.WORKER, 20)):
        (part / "flower" / name).touch()
        os.utime(part / "flower" / name, (NOW - ago,) * 2)
    assert "client 0    in contact with fed.example.org:8443, last contact 20 s ago" in said()
    os.utime(part / "flower" / folders.WORKER, (NOW - 60,) * 2)
    assert "client 0    no contact with fed.example.org:8443, last contact 60 s ago" in said()
