"""engine=ray on a real Ray: workers that are killed, hang or come and go, and clusters that cannot be used."""

import os
import signal
import socket
import time

import pytest
from agreement import same
from federations import Tiny, tiny

from fedncv.cluster import connect, pool
from fedncv.cluster.connect import ClusterError
from fedncv.engine.problem import start
from fedncv.engine.ray_engine import RayEngine
from fedncv.engine.sequential import run_round

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray leaves its log files to the end of the process
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:Tip. In future versions of Ray:FutureWarning"),
]
SETTINGS = {"sizes": (20, 13, 9, 18, 31), "engine": "ray", "block": 2, "stragglers": 0.5}


@pytest.fixture(scope="module")
def cluster():
    """A Ray of this process with room for three workers; engines use it and leave it alone."""
    connect.connect("", cpus=3)
    folder, connect._ours.folder = connect._ours.folder, ""  # as if a program had connected by itself
    yield
    connect._ours.folder = folder
    connect.close()


class Deadly(Tiny):
    """Does to the process it runs in what the file says, a letter at a time: k kills it, h hangs, s stops it."""

    def __init__(self, shape, num_classes, file):
        super().__init__(shape, num_classes)
        self.file, self.driver = file, os.getpid()

    def forward(self, x):
        if self.training and os.getpid() != self.driver and self.file.exists() and (text := self.file.read_text()):
            self.file.write_text(text[1:])
            if text[0] == "h":
                time.sleep(1000)
            os.kill(os.getpid(), signal.SIGSTOP if text[0] == "s" else signal.SIGKILL)
        return super().forward(x)


@pytest.fixture
def deaths(tmp_path):
    return tmp_path / "deaths"


@pytest.fixture
def deadly(deaths):
    return tiny("scaffold", model=lambda shape, classes: Deadly(shape, classes, deaths), **SETTINGS, workers=2)


def test_a_worker_killed_in_a_round_is_replaced_and_nothing_changes(cluster, deadly, deaths, capfd):
    _, row = run_round(deadly, start(deadly))
    with RayEngine([deadly]) as engine:
        ((calm, calm_row),) = engine.run_rounds([start(deadly)])
        deaths.write_text("k")
        ((state, killed_row),) = engine.run_rounds([start(deadly)])
        assert {worker.number for worker in engine.pool.workers} & {0, 1} != {0, 1}
    same(state, calm)
    assert killed_row == calm_row
    assert killed_row.keys() == row.keys()
    said = capfd.readouterr().err
    assert said.count("a worker was lost (its process was killed or crashed)") == 1
    assert len(said.splitlines()) == 1


slow = pytest.mark.slow


@slow
@pytest.mark.parametrize("letter", ["h", "s"])
def test_a_worker_that_hangs_is_given_up_and_nothing_changes(cluster, deadly, deaths, letter, monkeypatch, capfd):
    monkeypatch.setattr(pool, "HUNG_FLOOR", 2.0)
    with RayEngine([deadly]) as engine:
        ((calm, _),) = engine.run_rounds([start(deadly)])
        deaths.write_text(letter)
        ((state, _),) = engine.run_rounds([start(deadly)])
        engine.run_rounds([state])
    same(state, calm)
    assert "no answer for 2 s" in capfd.readouterr().err


@slow
def test_a_block_that_kills_every_worker_is_named(cluster, deadly, deaths):
    with RayEngine([deadly]) as engine:
        deaths.write_text("kkkkkkk")
        with pytest.raises(ClusterError, match=r"clients? \d.* was lost 3 times"):
            engine.run_rounds([start(deadly)])


# ---- clusters that cannot be used --------------------------------------------------------------------------


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ClusterError, match=r'pip install "fedncv\[ray\]"'):
        connect.connect("", cpus=1)


def test_an_address_that_does_not_answer_is_refused_at_once():
    with socket.socket() as bound:  # nobody listens
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        began = time.monotonic()
        with pytest.raises(ClusterError, match=f"no Ray cluster answers at 127.0.0.1:{port}"):
            connect.connect(f"127.0.0.1:{port}", cpus=1)
    assert time.monotonic() - began < 2 * connect.ANSWER_SECONDS


@pytest.mark.parametrize("address", ["here", "ray://10.0.0.1:10001", "10.0.0.1:port", ":6379", "10.0.0.1:99999"])
def test_an_address_of_another_form_is_refused(address):
    with pytest.raises(ClusterError, match="cluster must be auto, HOST:PORT"):
        connect.connect(address, cpus=1)


@pytest.mark.parametrize("what", ["Python", "Ray", "torch", "fedncv"])
def test_a_node_with_another_version_is_named(what):
    here = {"Python": "3.12.1", "Ray": "2.55.1", "torch": "2.13.0", "fedncv": "0.1.0 #abc123"}
    connect.refuse_others("10.0.0.7", here, dict(here))
    with pytest.raises(ClusterError, match=f"node 10.0.0.7 of the cluster has {what} other, and this machine has"):
        connect.refuse_others("10.0.0.7", here, here | {what: "other"})


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("Task was killed due to the node running low on memory.\nMemory on the node was 7 GB", "ran out of memory"),
        ("The actor died unexpectedly.\nThe actor died because its node has died. Node Id: 0a", "its machine is gone"),
        ("The actor 78 is unavailable: RpcError: Socket closed", "its machine does not answer"),
        ("Something new.\nwith details", "Something new"),
    ],
)
def test_rays_errors_are_a_few_words(said, reason):
    assert connect.reason_of(RuntimeError(said)).endswith(reason)


def test_a_second_run_in_the_program_does_not_end_the_cluster_of_the_first(cluster):
    first, second = (RayEngine([tiny("fedavg", **SETTINGS, workers=1)]) for _ in range(2))
    second.close()
    second.close()  # twice is once
    ((state, _),) = first.run_rounds([start(first.problems[0])])
    first.close()
    assert state.round == 1


def test_a_connection_that_nobody_uses_gives_way_to_another_and_one_in_use_is_named(monkeypatch):
    """Ray has one connection per process."""
    opened = []
    monkeypatch.setattr(connect, "_ours", connect.Ours(folder="x", asked=("", 2, 0, None)))
    monkeypatch.setattr(connect, "close", lambda: opened.append("closed"))
    monkeypatch.setattr("ray.is_initialized", lambda: "closed" not in opened or "started" in opened)
    monkeypatch.setattr(connect, "_start", lambda *asked: opened.append("started"))
    monkeypatch.setattr(connect, "check_nodes", lambda: None)
    connect.connect("", cpus=2)
    assert not opened
    use = connect.Use()
    with pytest.raises(connect.ClusterError, match="already, and Ray has one connection per process; wait"):
        connect.connect("", cpus=3)
    assert not opened
    use.end()
    opened.clear()
    connect.connect("", cpus=3)
    assert opened == ["closed", "started"]
