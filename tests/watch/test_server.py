"""The server by its answers: what it serves, to whom, and what it refuses."""

import contextlib
import http.client
import json
import re
import socket
import threading
from html.parser import HTMLParser

import pytest
from hostile_runs import MARKS, hostile_folder, hostile_study
from made_up_runs import made_up_study, write_run, write_study

from fedncv.cli import main
from fedncv.config import RunConfig
from fedncv.watch import live, server
from fedncv.watch.live import LivePage
from fedncv.watch.server import open_server

CONFIG = RunConfig(clients=20, per_round=5, rounds=20, eval_every=2)


@contextlib.contextmanager
def serving(folder, host="127.0.0.1"):
    """A server in a thread, that looks at the files whenever it is asked."""
    with open_server(LivePage(folder), host, 0) as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield found
        finally:
            found.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def always(monkeypatch):
    for name in ("LOOK_SECONDS", "LEAST_SECONDS", "SHARE", "IDLE_SECONDS"):
        monkeypatch.setattr(live, name, 0.0)


def ask(server, path, *, method="GET", host=None):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        connection.request(method, path, headers={"Host": host or f"127.0.0.1:{server.port}"})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()
    finally:
        connection.close()


def changes(server, seen=""):
    status, _, text = ask(server, f"/changes?seen={seen}")
    assert status == 200
    return json.loads(text)


def test_the_page_is_the_report_and_what_is_going_on_now(tmp_path):
    write_study(tmp_path, made_up_study(), skip=("cifar10/fedavg-seed1",))
    with serving(tmp_path) as here:
        status, headers, text = ask(here, "/")
        assert status == 200
        assert "8 of 9 runs finished" in text
        assert "88 % done" in text  # eight of nine equal runs
        for section in ("now", "verdict", "table", "curves", "clients", "partition", "work", "repeat"):
            assert f'<section id="{section}"' in text
        assert 'id="files"' not in text  # it serves no files
        assert "Kept current by <code>fedncv watch</code>" in text
        assert ask(here, "/", method="HEAD")[2] == ""
        nonce = re.search(r"script-src 'nonce-([\w-]{20,})'", headers["Content-Security-Policy"])[1]
        assert text.count(f'nonce="{nonce}"') == 2
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert "unsafe-inline" not in re.search(r"script-src[^;]*", headers["Content-Security-Policy"])[0]
        assert nonce not in ask(here, "/")[2]  # another one for each answer


def test_only_what_has_changed_is_sent(tmp_path):
    write_run(tmp_path, CONFIG, 0.5, until=7)
    with serving(tmp_path) as here:
        everything = changes(here)
        assert everything["order"][:2] == ["now", "curves"]
        assert set(everything["parts"]) == set(everything["order"])
        seen = everything["seen"]
        nothing = changes(here, seen)
        assert (nothing["seen"], nothing["parts"]) == (seen, {})
        assert not {"data", "begun", "title", "header"} & set(nothing)
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"round": 8, "before": 0.4}\n{"round": 9, "bef')
        more = changes(here, seen)
        assert set(more["parts"]) == {"now"}
        assert "8 of 20" in more["parts"]["now"]
        (part,) = more["begun"]["digits"]["before"]["fedavg"]
        assert part["points"][-1][:4] == [8, 0, 0, 0.4]
        assert len(part["points"]) == 5  # rounds 0, 2, 4, 6 and the new one
        for damaged in ("", "x", "x-1", f"{seen}9999999999999999999", f"{seen[:-1]}-1", "%00", "é"):
            assert set(changes(here, damaged.encode().hex() if damaged == "é" else damaged)["parts"]) == set(
                more["order"]
            )


def test_a_run_that_finishes_comes_into_the_tables(tmp_path):
    write_run(tmp_path / "a", CONFIG, 0.5, until=7)
    with serving(tmp_path) as here:
        first = changes(here)
        assert "table" not in first["order"]  # nothing is finished
        assert first["data"]["curves"][0]["metrics"] == {}
        write_run(tmp_path / "a", CONFIG, 0.5)
        second = changes(here, first["seen"])
        assert "1 of 1 run finished" in second["parts"]["now"]
        assert len(second["data"]["curves"][0]["metrics"]["before"]["fedavg"]) == 11
        assert second["begun"] == {CONFIG.data: {}}


def test_nothing_but_the_page_is_served(tmp_path):
    write_run(tmp_path, CONFIG, 0.5)
    (tmp_path.parent / "secret").write_text("secret")
    with serving(tmp_path) as here:
        for path in (
            "/config.toml", "/metrics.jsonl", "/../secret", "/..%2fsecret", "/%2e%2e/secret", "//etc/passwd",
            "/changes/../config.toml", "/page.js", "/favicon.ico", "/?/../secret/x", "/index.html", "/\\..\\secret",
            "http://evil.example/config.toml",
        ):  # fmt: skip
            status, headers, text = ask(here, path)
            assert (status, text) == (404, "fedncv watch serves only its page, at /.\n") or path == "/?/../secret/x"
            assert "rounds = 20" not in text
            assert headers["X-Content-Type-Options"] == "nosniff"
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "<script>"):
            assert ask(here, "/", method=method)[0] == 501
        with socket.create_connection(("127.0.0.1", here.port), timeout=30) as raw:
            raw.sendall(b"\x00\xff no request\r\n\r\n")
            assert b"Bad request" in raw.recv(4096)
        assert ask(here, "/")[0] == 200  # it goes on


@pytest.mark.parametrize(
    ("listens", "host", "allowed"),
    [
        ("127.0.0.1", "localhost:9000", True),  # through a tunnel
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "[::1]:8340", True),
        ("127.0.0.1", "evil.example:8340", False),
        ("127.0.0.1", "localhost.evil.example", False),
        ("127.0.0.1", "127.0.0.1.evil.example", False),
        ("127.0.0.1", "evil.example@localhost.evil.example", False),
        ("127.0.0.1", "10.0.0.1", False),
        ("127.0.0.1", "localhost:x", False),
        ("127.0.0.1", "[::1", False),
        ("0.0.0.0", "10.0.0.1:8340", True),  # an address cannot be turned to another machine by a name server
        ("0.0.0.0", "evil.example", False),
        ("0.0.0.0", socket.gethostname(), True),
        ("myhost", "myhost:8340", True),
    ],
)
def test_only_this_machine_may_be_named(listens, host, allowed):
    assert server.is_ours(host, listens) is allowed


def test_a_request_for_another_name_gets_nothing(tmp_path):
    write_run(tmp_path, CONFIG, 0.5)
    with serving(tmp_path) as here:
        for path in ("/", "/changes"):
            status, _, text = ask(here, path, host="evil.example")
            assert (status, "fedavg" in text.lower()) == (403, False)


def test_a_port_in_use_is_passed_over_and_all_in_use_is_one_line(tmp_path, monkeypatch):
    with open_server(LivePage(tmp_path), "127.0.0.1", 0) as first:
        with open_server(LivePage(tmp_path), "127.0.0.1", first.port) as second:
            assert first.port < second.port < first.port + server.TRIES
        monkeypatch.setattr(server, "TRIES", 1)
        with pytest.raises(ValueError, match=f"ports {first.port} to {first.port} are in use; choose another --port"):
            open_server(LivePage(tmp_path), "127.0.0.1", first.port)
    with pytest.raises(ValueError, match=r"--host no\.such\.host\.invalid is no address|cannot listen on no\.such"):
        open_server(LivePage(tmp_path), "no.such.host.invalid", 0)
    with pytest.raises(ValueError, match=r"cannot listen on 192\.0\.2\.1, port 0"):  # of nobody (RFC 5737)
        open_server(LivePage(tmp_path), "192.0.2.1", 0)


class Texts(HTMLParser):
    """Collects tags and attributes: what a browser would act upon."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]


@pytest.mark.parametrize("make", [hostile_folder, hostile_study])
def test_hostile_texts_stay_texts(tmp_path, make):
    root = make(tmp_path)
    with serving(root) as here:
        text, parts = ask(here, "/")[2], changes(here)
    assert "No report" not in parts["parts"].get("verdict", "")
    assert {"now", "curves", "verdict", "table", "repeat"} <= set(parts["order"])
    assert "alert(1)" in text  # it is there, as text
    for each in [text.replace(page_script(text), ""), *parts["parts"].values()]:
        for mark in MARKS:
            assert mark not in each
    found = Texts(text)
    assert found.tags.count("script") == 2
    assert not [name for name in found.attributes if name.startswith("on")]
    assert "img" not in found.tags or "data:image/png" in text


def page_script(text):
    """The page's own script, which is trusted."""
    return re.search(r'<script nonce="[^"]*">(.*)</script>\s*</body>', text, re.DOTALL)[1]


def test_a_folder_without_runs_a_study_that_is_damaged_and_runs_of_two_protocols_are_said_on_the_page(tmp_path):
    with serving(tmp_path) as here:
        assert "holds no run yet" in changes(here)["parts"]["now"]
        write_run(tmp_path / "a", CONFIG, 0.5)
        assert "1 of 1 run finished" in changes(here)["parts"]["now"]
        write_run(tmp_path / "b", RunConfig(clients=20, per_round=5, rounds=10, eval_every=2, seed=1), 0.5)
        found = changes(here)["parts"]
        assert "2 of 2 runs finished" in found["now"]
        assert "these runs follow different protocols" in found["verdict"]
        (tmp_path / "study.toml").write_text("name = ")
        assert "is not valid TOML" in changes(here)["parts"]["now"]
        (tmp_path / "study.toml").write_text("name = 1")
        assert "is not a study" in changes(here)["parts"]["now"]


def test_damaged_metrics_are_said_on_the_page_and_the_others_are_shown(tmp_path):
    write_study(tmp_path, made_up_study())
    (tmp_path / "cifar10/fedavg-seed1/metrics.jsonl").write_text('{"round": 0}\n{"round": NaN}\n')
    with serving(tmp_path) as here:
        parts = changes(here)["parts"]
    assert "line 2, has round NaN" in parts["now"]
    assert "8 of 9 runs finished" in parts["now"]


def test_whatever_goes_wrong_in_the_report_the_server_goes_on(tmp_path, monkeypatch):
    write_run(tmp_path, CONFIG, 0.5)

    def fail(*_, **__):
        raise RecursionError("too <deep>")

    monkeypatch.setattr(live.table, "main_table", fail)
    with serving(tmp_path) as here:
        assert "<b>No report:</b> RecursionError: too &lt;deep&gt;" in changes(here)["parts"]["verdict"]
        monkeypatch.undo()
        assert ask(here, "/")[0] == 200


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "there is no folder"),
        (["{here}/file"], "is a file; name a folder of runs"),
        (["{here}", "--port", "70000"], "--port must be from 1 to 65535, or 0 for a free one, not 70000"),
        ([], "needs an argument"),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, words, said):
    (tmp_path / "file").touch()
    assert main(["watch", *(word.format(here=tmp_path) for word in words)]) == 2
    found = capsys.readouterr()
    assert said in found.err
    assert found.err.count("\n") == 1


def test_the_command_says_where_it_is_and_whom_it_lets_in_and_ends_quietly(tmp_path, capsys, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(server.Server, "serve_forever", interrupt)
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    with open_server(LivePage(tmp_path), "127.0.0.1", 0) as taken:
        assert main(["watch", str(tmp_path), "--port", str(taken.port), "--open"]) == 0
        found = capsys.readouterr()
        assert f"port {taken.port} is in use, so the page is at port " in found.err
        assert found.out.startswith(f"page    {opened[0]}\n")
        assert "warning" not in found.err
    assert main(["watch", str(tmp_path), "--host", "0.0.0.0", "--port", "0"]) == 0
    assert "sees this page without a password" in capsys.readouterr().err
