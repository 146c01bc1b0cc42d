"""Faults of a Ray cluster: every run ends with the bytes of an undisturbed one. Several raylets on this machine."""

import functools
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch
from agreement import close
from federations import Tiny, tiny_dataset
from raylets import QUIET, assert_same_bytes, left_of

from fedncv.cluster import pool
from fedncv.cluster.connect import ClusterError
from fedncv.simulation import resume, simulate

pytestmark = [pytest.mark.slow, *QUIET]
SETTINGS = {
    "method": "scaffold",
    "partition": "iid",
    "clients": 8,
    "per_round": 6,
    "rounds": 6,
    "epochs": 1,
    "batch_size": 4,
    "dtype": "float64",
    "checkpoint_every": 100,
    "eval_every": 3,
    "engine": "ray",
    "block": 2,
    "buffers": "personal",
}


class Slow(Tiny):
    def forward(self, x):
        if self.training and torch.is_grad_enabled():
            time.sleep(0.05)
        return super().forward(x)


OBJECTS = {"data": tiny_dataset(80), "model": Slow}


def run(folder, made, **changes):
    return simulate(**(SETTINGS | OBJECTS | {"cluster": made.address} | changes), out=folder)


def soon(function, *arguments):
    """Call it in the middle of the next round."""
    threading.Timer(0.15, function, arguments).start()


def test_nodes_that_are_removed_and_added_in_a_round_change_nothing(cluster, tmp_path, capfd):
    run(tmp_path / "calm", cluster)  # one worker
    second = cluster.add_node(num_cpus=1)
    run(tmp_path / "two", cluster)
    assert_same_bytes(tmp_path / "two", tmp_path / "calm")
    cluster.add_node(num_cpus=1)
    run(tmp_path / "three", cluster)
    assert_same_bytes(tmp_path / "three", tmp_path / "calm")

    def disturb(row):
        if row["round"] == 2:
            soon(cluster.remove_node, second, False)
        if row["round"] == 3:
            cluster.add_node(num_cpus=2)

    capfd.readouterr()
    run(tmp_path / "disturbed", cluster, on_round=disturb, rounds=6)
    assert_same_bytes(tmp_path / "disturbed", tmp_path / "calm")
    assert "a worker was lost" in capfd.readouterr().err


def test_without_machines_the_run_stops_with_a_checkpoint_and_resumes_to_the_same_bytes(cluster, tmp_path, monkeypatch):
    cluster.remove_node(cluster.head_node)
    cluster.head_node = None
    cluster.add_node(num_cpus=0, include_dashboard=False)
    worker = cluster.add_node(num_cpus=1)
    run(tmp_path / "calm", cluster)

    def disturb(row):
        if row["round"] == 2:
            monkeypatch.setattr(pool, "NOBODY_SECONDS", 3.0)
            soon(cluster.remove_node, worker, False)

    with pytest.raises(ClusterError, match="room for a worker for 3 s; machines are gone, or other"):
        run(tmp_path / "run", cluster, on_round=disturb)
    assert (tmp_path / "run" / "state.safetensors").exists()
    monkeypatch.undo()
    cluster.add_node(num_cpus=1)
    resume(tmp_path / "run", **OBJECTS)
    assert_same_bytes(tmp_path / "run", tmp_path / "calm")


def test_a_full_object_store_changes_nothing(tmp_path):
    """The samples do not fit in it: Ray puts what is too much on the disk."""
    from ray.cluster_utils import Cluster

    made = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "include_dashboard": False, "object_store_memory": 80 << 20},
    )
    try:
        data = OBJECTS["data"]
        wide = torch.nn.functional.pad(data.x, (0, 200_000))  # 128 MB
        changes = {"data": data._replace(x=wide), "model": First, "rounds": 2}
        result = run(tmp_path / "full", made, **changes)
        calm = run(tmp_path / "calm", made, **(changes | {"engine": "sequential", "cluster": ""}))
    finally:
        made.shutdown()
    close(result.state, calm.state)


class Hungry(Tiny):
    """Takes up to six gigabytes in the first process that trains it, other than the driver."""

    def __init__(self, shape, num_classes, file):
        super().__init__(shape, num_classes)
        self.file, self.driver, self.food = file, os.getpid(), []

    def forward(self, x):
        if self.training and torch.is_grad_enabled() and os.getpid() != self.driver and not self.file.exists():
            self.file.touch()
            for _ in range(60):
                self.food.append(torch.ones(100 << 20, dtype=torch.uint8))
                time.sleep(0.2)  # Ray looks at the memory ten times a second here
        return super().forward(x)


def test_a_worker_that_ray_ends_for_its_memory_changes_nothing(tmp_path, capfd):
    """Ray ends a worker when this machine has three gigabytes more in use than now, of which Ray itself takes one."""
    from ray.cluster_utils import Cluster

    memory = psutil.virtual_memory()
    limit = (memory.total - memory.available + (3 << 30)) / memory.total
    if limit > 0.9:
        pytest.skip("needs five gigabytes of free memory")
    system = {"memory_usage_threshold": limit, "memory_monitor_refresh_ms": 100}
    head = {"num_cpus": 1, "include_dashboard": False, "_system_config": system}
    made = Cluster(initialize_head=True, head_node_args=head)
    hungry = functools.partial(Hungry, file=tmp_path / "eaten")
    try:
        result = run(tmp_path / "run", made, model=hungry, rounds=2)
        assert (tmp_path / "eaten").exists()
        assert "memory" in capfd.readouterr().err
        calm = run(tmp_path / "calm", made, model=hungry, rounds=2)
    finally:
        made.shutdown()
    close(result.state, calm.state)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == (tmp_path / "calm" / "metrics.jsonl").read_bytes()


class First(Tiny):
    """A model of the first four of many inputs."""

    def __init__(self, _shape, num_classes):
        super().__init__((4,), num_classes)

    def forward(self, x):
        return super().forward(x[:, :4])


# ---- the driver ------------------------------------------------------------------------------------------

WORDS = [
    *("--method", "scaffold", "--model", "mlp", "--clients", "12", "--per-round", "8", "--epochs", "1"),
    *("--partition", "iid", "--eval-every", "20", "--engine", "ray", "--block", "3", "--workers", "2"),
]


def started(folder, *words, wait_for=0):
    """A run in a process group of its own, as in a terminal, that has at least so many rounds."""
    command = [sys.executable, "-m", "fedncv", "run", *WORDS, "--out", str(folder), *words]
    process = subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    rows = folder / "scaffold-seed0" / "metrics.jsonl"
    while wait_for and (not rows.exists() or rows.read_bytes().count(b"\n") < wait_for):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    return process


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calm")
    output, _ = started(folder, "--rounds", "120", "--checkpoint-every", "10").communicate()
    assert (folder / "scaffold-seed0" / "state.safetensors").exists(), output
    return folder / "scaffold-seed0"


def resumed(folder):
    done = subprocess.run(
        [sys.executable, "-m", "fedncv", "resume", str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder / "scaffold-seed0"


def test_a_driver_that_is_killed_is_resumed_to_the_same_bytes_and_leaves_no_process(tmp_path, calm):
    process = started(tmp_path, "--rounds", "120", "--checkpoint-every", "10", wait_for=35)
    process.kill()
    process.wait()
    assert_same_bytes(resumed(tmp_path), calm)
    deadline = time.monotonic() + 60
    while left_of(process) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not left_of(process)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_sigterm_leave_a_checkpoint_and_no_process(tmp_path, calm, number, code):
    process = started(tmp_path, "--rounds", "120", "--checkpoint-every", "10", wait_for=35)
    began = time.monotonic()
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    assert time.monotonic() - began < 10
    assert process.returncode == code
    assert "nothing is lost" in output
    assert not left_of(process)
    assert_same_bytes(resumed(tmp_path), calm)


def test_bad_input_is_one_line_and_leaves_nothing_half_started(tmp_path):
    for words, said in (
        (("--cluster", "127.0.0.1:1"), "no Ray cluster answers at 127.0.0.1:1"),
        (("--cluster", "auto"), "no Ray cluster runs on this machine"),
        (("--workers", "1000"), "1000 workers need 1000 CPUs, but the cluster has"),
        (("--block", "0"), "block must be at least 1, not 0"),
    ):
        process = started(tmp_path / "run", "--rounds", "1", *words)
        output, _ = process.communicate()
        assert process.returncode == 2, output
        assert said in output
        assert output.count("\n") == 1, output
        assert not (tmp_path / "run").exists()
        assert not left_of(process)


def test_a_library_such_as_ray_is_imported_only_when_asked_for():
    code = "import sys, fedncv.runner, fedncv.engine.choose, fedncv.cli.run; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
