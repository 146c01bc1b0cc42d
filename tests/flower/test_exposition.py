"""Health and metrics on the loopback interface, and the files that start a part with its machine."""

import configparser
import contextlib
import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedncv[flower]'")

from fedncv.config import RunConfig
from fedncv.flower import audit, exposition, processes
from fedncv.flower import folder as folders
from fedncv.flower.exposition import Part, Sample, server_of, text_of


@pytest.fixture
def trial(tmp_path):
    folder = tmp_path / "trial"
    folders.init(folder, RunConfig(clients=2, per_round=2), host="127.0.0.1", port=0, listen="127.0.0.1")
    return folder


@contextlib.contextmanager
def served(part):
    """A port at which the part's metrics are served."""
    server = server_of(Part(part), 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


CONTAINERS = Path(__file__).parents[2] / "containers"


def get(port, path, *, host="127.0.0.1", method="GET"):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path, headers={"Host": f"{host}:{port}"})
        reply = connection.getresponse()
        return reply.status, reply.read().decode()
    finally:
        connection.close()


LINE = re.compile(r'fedncv_([a-z_]+)(\{(?:[a-z]+="(?:[^"\\\n]|\\["\\n])*",?)+\})? (-?[0-9.e+-]+|NaN|[+-]Inf)')


def parsed(text):
    """name and labels -> value, of Prometheus' text format; a metric has one help and one type, before its lines."""
    values, declared = {}, set()
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            assert kind in ("gauge", "counter")
            assert name not in declared
            declared.add(name)
        elif not line.startswith("# HELP "):
            found = LINE.fullmatch(line)
            assert found, line
            assert f"fedncv_{found[1]}" in declared
            values[found[1] + (found[2] or "")] = float(found[3])
    assert text.endswith("\n")
    return values


def test_labels_are_escaped_as_the_format_asks():
    text = text_of([Sample("run_round", 1, {"run": 'a"b\\c\nd'})])
    assert text.splitlines()[-1] == 'fedncv_run_round{run="a\\"b\\\\c\\nd"} 1'
    assert len(parsed(text)) == 1


def test_a_run_of_the_server_in_numbers(trial):
    server = trial / "server"
    run = server / "runs" / "first"
    run.mkdir()
    (run / "config.toml").write_text("rounds = 9\n")
    rows = [
        {"round": 0, "before": 0.5, "before_by": 2},
        {"round": 1, "bytes_down": 70, "bytes_up": 30, "absent": [1], "refused": {"0": "late"}},
        {"round": 2, "bytes_down": 140, "bytes_up": 60, "absent": [1], "before": 0.75, "before_by": 1},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"round": 3, "cut')
    (run / "timing.jsonl").write_text('{"round": 2, "seconds": 12.5}\n')
    (run / "progress.json").write_text('{"phase": "training", "round": 3, "rounds": 9, "asked": 2, "replied": 1}')
    (server / "flower").mkdir()
    (server / "flower" / "contacts.json").write_text('{"0": {"address": "10.0.0.1", "time": 1700000000.5}}')
    audit.append(server / audit.AUDIT, "begun")
    with served(server) as port:
        status, text = get(port, "/metrics")
        assert status == 200
        found = parsed(text)
        assert get(port, "/healthz") == (503, "Flower's server does not answer\n")
        with socket.create_server(("127.0.0.1", folders.read_server_settings(server).inner_port)):
            assert get(port, "/healthz") == (200, "ok\n")
    assert "10.0.0.1" not in text
    run = '{run="first"}'
    expected = {
        "up": 0, "clients": 2, f"run_round{run}": 2, f"run_rounds{run}": 9, f"run_asked{run}": 2,
        f"run_replied{run}": 1, f"run_round_seconds{run}": 12.5, 'run_left_out_total{run="first",reason="absent"}': 2,
        'run_left_out_total{run="first",reason="refused"}': 1, 'run_bytes_total{run="first",direction="up"}': 60,
        'run_score{run="first",when="before"}': 0.75, 'run_score_clients{run="first",when="before"}': 1,
        'run_phase{run="first",phase="training"}': 1, 'client_last_contact_timestamp_seconds{client="0"}': 1700000000.5,
        "audit_lines_total": 1,
    }  # fmt: skip
    assert {name: found.get(name) for name in expected} == expected


def test_a_client_in_numbers_without_loss_and_score(trial):
    part = trial / "clients" / "1"
    run = part / "runs" / "first-1"
    run.mkdir(parents=True)
    (run / "history.jsonl").write_text('{"round": 4, "loss": 0.123, "before": 0.876}\n')
    audit.append(part / audit.AUDIT, "answered", kind="training")
    audit.append(part / audit.AUDIT, "answered", kind="training", refused={"code": "consent", "said": "x"})
    with served(part) as port:
        assert get(port, "/healthz") == (503, "no contact with the server yet\n")
        (part / "flower").mkdir()
        (part / "flower" / "heartbeat").touch()
        assert get(port, "/healthz") == (200, "ok\n")
        audit.append(part / audit.AUDIT, "answered", kind="scoring")
        found = parsed(get(port, "/metrics")[1])
        assert found["up"] == 1
        assert found['run_round{run="first-1"}'] == 4
        assert {name: value for name, value in found.items() if name.startswith(("answers", "refusals", "audit"))} == {
            'answers_total{kind="training"}': 1, 'answers_total{kind="scoring"}': 1,
            'refusals_total{code="consent"}': 1, "audit_lines_total": 3,
        }  # fmt: skip
        assert not {0.123, 0.876} & set(found.values())
        old = time.time() - 2 * exposition.SILENT_SECONDS
        os.utime(part / "flower" / "heartbeat", (old, old))
        assert get(port, "/healthz")[1].startswith("no contact with the server for 120 s")


def test_only_this_machine_is_answered_and_only_two_pages(trial):
    with served(trial / "server") as port:
        assert get(port, "/metrics", host="evil.example.org")[0] == 403  # a name that points to 127.0.0.1
        assert get(port, "/metrics", host="localhost")[0] == 200
        assert get(port, "/")[0] == 404
        assert get(port, "/../server.key")[0] == 404
        assert get(port, "/metrics", method="POST")[0] == 501
        listening = [words.split() for words in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        (address,) = [words[1] for words in listening if words[1].endswith(f":{port:04X}") and words[3] == "0A"]
        assert address.startswith("0100007F:")  # 127.0.0.1


def test_damaged_files_make_no_false_number(trial):
    run = trial / "server" / "runs" / "first"
    run.mkdir()
    (run / "config.toml").write_text("rounds = 9\n")
    for name in ("metrics.jsonl", "timing.jsonl", "progress.json"):
        (run / name).write_text("\0\0\0\n")
    with served(trial / "server") as port:
        found = parsed(get(port, "/metrics")[1])
        assert found['run_round{run="first"}'] == 0
        (run / "config.toml").write_text("rounds")
        assert get(port, "/metrics")[0] == 500


def test_a_part_serves_metrics_only_if_a_port_is_set(trial):
    for part, read, write, commands in (
        (trial / "server", folders.read_server_settings, folders.write_server_settings, folders.server_commands),
        (trial / "clients" / "0", folders.read_client_settings, folders.write_client_settings, folders.client_commands),
    ):
        without = commands(part)
        assert not any("exposition" in word for command in without for word in command)
        write(part, read(part)._replace(metrics_port=9137))
        assert commands(part)[:-1] == without
        assert commands(part)[-1][-3:] == ["fedncv.flower.exposition", str(part), "9137"]


# ---- settings of a part -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('device = "cpu"', 'device = "gpu"', "unknown device 'gpu'; use cpu, cuda"),
        ('device = "cpu"', "device = 1", "unknown device 1; use cpu, cuda"),
        ('device = "cpu"', 'device = "cuda:7"', "device is 'cuda:7', but torch sees"),
        (
            'device = "cpu"',
            'devise = "cpu"',
            "must give client, server, port, and may give device, metrics_port; it gives",
        ),
        (
            "metrics_port = 0",
            "metrics_port = 65536",
            "metrics_port must be from 1 to 65535, or 0 for no metrics, not 65536",
        ),
        ("metrics_port = 0", "metrics_port = true", "metrics_port must be from 1 to 65535"),
    ],
)
def test_a_setting_of_a_client_that_is_wrong_gets_one_line_before_anything_starts(before, after, said, trial, capsys):
    from fedncv.cli import main

    path = trial / "clients" / "0" / "client.toml"
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after))
    assert main(["federation", "client", str(path.parent)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "client.toml" in error
    assert error.count("\n") == 1
    with pytest.raises(ValueError, match=r"client\.toml"):
        processes.start(trial, "0")


def test_parts_of_an_earlier_version_are_read(trial):
    part = trial / "clients" / "0"
    lines = (part / "client.toml").read_text().splitlines()
    (part / "client.toml").write_text("\n".join(line for line in lines if not line.startswith(("device", "metrics"))))
    assert folders.read_client_settings(part)[-2:] == ("cpu", 0)
    assert any('device="cpu"' in word for word in folders.client_commands(part)[0])


# ---- units --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["server", "client"])
def test_every_part_has_a_unit_for_systemd_and_a_compose_file(action, trial):
    part = trial / "server" if action == "server" else trial / "clients" / "1"
    unit = configparser.ConfigParser(strict=True, interpolation=None)
    unit.optionxform = str
    unit.read_string((part / f"fedncv-{action}.service").read_text())
    words = unit["Service"]["ExecStart"].split()
    assert words[1:3] == ["federation", action]
    assert unit["Service"]["ReadWritePaths"] == unit["Service"]["WorkingDirectory"] == words[3]
    assert unit["Service"]["KillMode"] == "mixed"  # clients sign off at the server
    assert unit["Install"]["WantedBy"] == "multi-user.target"
    yaml = pytest.importorskip("yaml")
    (service,) = yaml.safe_load((part / "compose.yaml").read_text())["services"].values()
    reference = yaml.safe_load((CONTAINERS / "compose.yaml").read_text())["x-part"]
    same = ("image", "init", "read_only", "cap_drop", "security_opt", "tmpfs", "environment", "restart", "user")
    assert {name: service[name] for name in same} == {name: reference[name] for name in same}
    assert service["command"] == [action, f"/federation/{action}"]
    assert service["volumes"] == [f".:/federation/{action}"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_the_units(trial, tmp_path):
    paths = []
    for part, action in ((trial / "server", "server"), (trial / "clients" / "0", "client")):
        text = (part / f"fedncv-{action}.service").read_text()
        program = "/opt/fedncv/bin/fedncv"
        assert text.count(program) == 1
        paths.append(tmp_path / f"fedncv-{action}.service")
        paths[-1].write_text(text.replace(program, "/bin/true").replace("User=fedncv\n", ""))
    done = subprocess.run(
        ["systemd-analyze", "verify", *map(str, paths)], capture_output=True, text=True, check=False, timeout=60
    )
    said = [line for line in done.stderr.splitlines() if "fedncv-" in line]
    assert said == []
