"""When a client's node is taken as stuck, and how it survives a bad connection."""

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedncv[flower]'")

import httpx
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supernode import fleet_http_connection, start_client_internal

from fedncv.flower import keeper, node, processes
from fedncv.flower.gate import ONCE
from fedncv.flower.keeper import REACHABLE_SECONDS, STALE_SECONDS, Watch, Watcher, main


class Life:
    """Two files whose times a node sets, and a server that can be reached or not; a clock that jumps by a second."""

    def __init__(self, tmp_path):
        self.files = [tmp_path / "heartbeat", tmp_path / "worker"]
        self.now, self.reachable, self.ticks = 0.0, True, 0
        watch = Watch("127.0.0.1:1", "", tuple(map(str, self.files)))
        self.watcher = Watcher(watch, lambda _: self.reachable, self.now)

    def live(self, seconds, *, touching=()):
        """Seconds until it is taken as stuck; None if it is not within that time."""
        for second in range(1, seconds + 1):
            self.now += 1.0
            for i in touching:
                self.ticks += 1
                self.files[i].touch()
                os.utime(self.files[i], ns=(self.ticks, self.ticks))
            if self.watcher.stuck(self.now):
                return second
        return None


@pytest.fixture
def life(tmp_path):
    return Life(tmp_path)


def test_a_node_that_sets_both_times_is_not_stuck(life):
    assert life.live(1000, touching=(0, 1)) is None


@pytest.mark.parametrize("working", [(), (0,), (1,)])
def test_a_node_of_which_a_thread_stopped_is_stuck(working, life):
    """Neither the heartbeat alone nor the worker alone is enough."""
    assert life.live(100, touching=(0, 1)) is None
    least = STALE_SECONDS + REACHABLE_SECONDS
    assert least <= life.live(1000, touching=working) <= least + 5


def test_while_the_server_cannot_be_reached_a_node_is_left_alone(life):
    life.reachable = False
    assert life.live(1000) is None
    life.reachable = True
    assert life.live(int(REACHABLE_SECONDS) - 5) is None  # it has that long to come back by itself
    assert life.live(20, touching=(0, 1)) is None
    assert life.live(int(STALE_SECONDS + REACHABLE_SECONDS) - 5) is None


def test_the_keeper_starts_a_stuck_command_again(tmp_path):
    """With its limits cut to nothing, and a server that answers."""
    code = (
        "import sys; from fedncv.flower import keeper\n"
        "keeper.STALE_SECONDS = keeper.REACHABLE_SECONDS = keeper.PROBE_SECONDS = keeper.RESTART_SECONDS = 0.0\n"
        "keeper.keep.__defaults__ = (None, None, lambda _: True)\n"
        "sys.exit(keeper.main(sys.argv[1:]))\n"
    )
    child = "import os, time; os.write(1, b'begins\\n'); time.sleep(600)"  # in one piece, or it is killed in between
    words = [
        "--watch",
        "127.0.0.1:1",
        "ca.crt",
        str(tmp_path / "a"),
        str(tmp_path / "b"),
        "--",
        sys.executable,
        "-c",
        child,
    ]
    with subprocess.Popen(
        [sys.executable, "-c", code, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert [process.stdout.readline(), process.stdout.readline()] == ["begins\n", "begins\n"]
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "no contact with 127.0.0.1:1" in said


def test_down_ends_a_keeper_of_which_no_file_is_left_and_no_other(tmp_path):
    ours, other = tmp_path / "trial", tmp_path / "trial-2"
    child = "import time; print('begins', flush=True); time.sleep(600)"
    started = [
        subprocess.Popen(
            [sys.executable, "-P", processes.KEEPER, sys.executable, "-c", child, f"{folder}/server/ca.crt"],
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        for folder in (ours, other)
    ]
    try:
        for process in started:
            assert process.stdout.readline() == b"begins\n"
        assert processes.down(ours) == [f"process group {started[0].pid}"]
        assert started[1].poll() is None
        assert processes.down(ours) == []
    finally:
        processes.down(other)
        for process in started:
            process.stdout.read()  # until the last process of the group has ended
            process.wait(60)
            process.stdout.close()


def test_words_of_a_watch_are_read_back(monkeypatch):
    seen = []
    monkeypatch.setattr(keeper, "keep", lambda *arguments, **named: seen.append((arguments, named)) or 0)
    watch = Watch("host:1", "ca.crt", ("a", "b"))
    main([*keeper.watch_words(watch), "one", "x", "--", "two"])
    main(["one", "--", "two"])
    assert seen == [(([["one", "x"], ["two"]],), {"watch": watch}), (([["one"], ["two"]],), {"watch": None})]


# ---- the node ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["[SSL: UNEXPECTED_EOF_WHILE_READING] EOF", "[SSL: SSLV3_ALERT_BAD_RECORD_MAC] bad"])
def test_flower_repeats_a_request_that_a_broken_connection_lost(text):
    """By itself Flower gives up on it, for good."""
    calls = []

    def request(error_of):
        calls.append(1)
        if len(calls) == 1:
            raise error_of(httpx.ReadError(text))
        return "answer"

    with pytest.raises(httpx.ReadError):
        make_simple_http_retry_invoker().invoke(request, lambda error: error)
    calls.clear()
    invoker = make_simple_http_retry_invoker()
    invoker.wait_function = lambda _: None
    assert invoker.invoke(request, node._retryable) == "answer"


def test_a_certificate_that_is_not_trusted_is_no_broken_connection():
    error = httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed certificate")
    assert node._retryable(error) is error


@pytest.fixture
def reaching(tmp_path, monkeypatch):
    """The node's interceptor, and what its requests meet."""
    monkeypatch.setattr(node.Reaching, "heartbeat", tmp_path / "heartbeat", raising=False)
    monkeypatch.setattr(node.Reaching, "worker", tmp_path / "worker", raising=False)
    monkeypatch.setattr(node.NodeAuthHttpInterceptor, "intercept", lambda _self, context, call_next: call_next(context))
    return object.__new__(node.Reaching)


def context(message, call="PullMessages"):
    request = httpx.Request("POST", "https://server/v1/fleet/x")
    return SimpleNamespace(rpc_method=f"/flwr.proto.Fleet/{call}", message=message, request=request)


def test_repetitions_of_a_request_share_a_key_and_other_requests_do_not(reaching):
    one, other = object(), object()
    sent = []
    for message in (one, one, other, one):
        asked = context(message)
        reaching.intercept(asked, lambda _: httpx.Response(200))
        sent.append(asked.request.headers[ONCE.decode()])
    assert sent[0] == sent[1]
    assert len(set(sent)) == 3


@pytest.mark.parametrize(
    ("call", "status", "touched"),
    [("SendNodeHeartbeat", 200, ["heartbeat"]), ("PullMessages", 200, ["worker"]), ("PullMessages", 503, [])],
)
def test_an_answered_request_is_contact(call, status, touched, reaching, tmp_path):
    reaching.intercept(context(object(), call), lambda _: httpx.Response(status))
    assert sorted(path.name for path in tmp_path.iterdir()) == touched


def test_a_message_that_flower_drops_ends_the_node(monkeypatch):
    ended = []
    monkeypatch.setattr(os, "kill", lambda pid, number: ended.append((pid, number)))
    logger = logging.Logger("flwr")
    logger.addHandler(node.Ending())
    logger.error("Connection attempt failed: %s", "x")
    assert ended == []
    logger.error("Failed to send message %s: %s", "id", "why")
    assert ended == [(os.getpid(), signal.SIGTERM)]


def test_flower_still_has_what_the_node_relies_on():
    """Names that are replaced, and words of its log; Flower is pinned to a minor version."""
    source = Path(start_client_internal.__file__).read_text()
    for words in node.LOST:
        assert f'"{words} %s: %s"' in source
    assert "NodeAuthHttpInterceptor(private_key, public_key)" in Path(fleet_http_connection.__file__).read_text()
