"""Connect to a Ray cluster, or start one on this machine, and check that all its machines are alike.

    ""          start a cluster on this machine; it listens on 127.0.0.1 only and ends with the last ``close``
    "auto"      join the cluster that runs on this machine
    HOST:PORT   join the cluster whose head listens there

If the program has connected to Ray by itself, that connection is used and stays open. Every problem is a ValueError
with one line that names the remedy.
"""

import atexit
import contextlib
import importlib.util
import logging
import os
import platform
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from fedncv.machine import sources
from fedncv.portable import need_posix

ANSWER_SECONDS = 5.0  # for the head of a cluster to accept a connection
CHECK_SECONDS = 60.0  # for all nodes to say what they run
LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # Ray's switch for clusters of one machine, on every system
ORPHANS = "RAY_gcs_rpc_server_reconnect_timeout_s"  # how long Ray's own processes outlive a driver that was killed
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is reported to anybody
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # a worker without a GPU of its own may still see them
}


class ClusterError(ValueError):
    """The cluster cannot be used; the message says why, and what to do."""


@dataclass
class Ours:
    """What this process has opened, and so closes; Ray itself has one connection per process."""

    folder: str = ""  # sockets and logs of the cluster that it has started
    joined: bool = False
    asked: tuple[Any, ...] = ()  # what it was opened with
    users: int = 0


_ours = Ours()


def check_installed() -> None:
    """Raise ClusterError unless Ray can be imported."""
    if importlib.util.find_spec("ray") is None:
        raise ClusterError('engine=ray and --cluster need Ray, which is not installed; run: pip install "fedncv[ray]"')


def connect(cluster: str, *, cpus: int, gpus: int = 0, visible: str | None = None) -> None:
    """Connect, unless this process is connected already. A local cluster gets so many ``cpus`` and ``gpus``.

    A connection to another cluster is closed first; if a run uses it, raise ClusterError. ``visible`` are the GPUs of a
    local cluster as CUDA_VISIBLE_DEVICES names them; None leaves the variable as it is.
    """
    need_posix("a Ray cluster")
    need_posix("a Ray cluster")
    check_installed()
    if cluster not in ("", "auto"):
        _check_answers(cluster)
    os.environ.update({name: os.environ.get(name, value) for name, value in QUIET.items()})
    import ray

    asked = (cluster,) if cluster else (cluster, cpus, gpus, visible)
    if ray.is_initialized() and (_ours.folder or _ours.joined) and _ours.asked != asked:
        if _ours.users:
            theirs = _ours.asked[0] or "a cluster of its own"
            raise ClusterError(
                f"this program trains on {theirs} already, and Ray has one connection per process; wait for the end of "
                "that run, or start this one in another process"
            )
        close()
    if ray.is_initialized():
        return
    _silence()
    with _own_signals():
        if cluster:
            _join(cluster)
        else:
            _start(cpus, gpus, visible)
    _ours.asked = asked
    try:
        check_nodes()
    except BaseException:
        close()
        raise


class Use:
    """A use of the connection. The last one that ends closes it."""

    def __init__(self) -> None:
        self._lasts = True
        _ours.users += 1

    def end(self) -> None:
        """End the use; a second call does nothing."""
        if self._lasts:
            self._lasts = False
            _ours.users -= 1
            if not _ours.users:
                close()


def close() -> None:
    """Leave the cluster, and end it if this process has started it."""
    if not (_ours.folder or _ours.joined):
        return
    import ray

    with _own_signals():
        ray.shutdown()
    if _ours.folder:
        shutil.rmtree(_ours.folder, ignore_errors=True)
    _ours.folder, _ours.joined, _ours.asked = "", False, ()


def resources() -> dict[str, float]:
    """Return the CPUs and GPUs of all machines that are alive, whoever uses them."""
    import ray

    found: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return found


def _start(cpus: int, gpus: int, visible: str | None) -> None:
    import ray
    from ray._private import ray_constants

    folder = tempfile.mkdtemp(prefix="fedncv-ray-")
    everywhere = ray_constants.ENABLE_RAY_CLUSTER
    changes = {LOOPBACK: "0", ORPHANS: "10"} | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    ray_constants.ENABLE_RAY_CLUSTER = False  # read when Ray was imported: listen on 127.0.0.1, not on all addresses
    try:
        ray.init(
            address="local", num_cpus=cpus, num_gpus=gpus, include_dashboard=False, log_to_driver=False,
            logging_level=logging.CRITICAL, configure_logging=False, _temp_dir=folder,
        )  # fmt: skip
    except Exception as error:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
        raise ClusterError(f"cannot start Ray on this machine: {_first_line(error)}") from None
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = everywhere
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
    _ours.folder = folder
    atexit.register(close)  # of a run that was refused after its cluster had started


def _join(cluster: str) -> None:
    import ray

    try:
        ray.init(address=cluster, log_to_driver=False, logging_level=logging.CRITICAL, configure_logging=False)
    except Exception as error:
        ray.shutdown()
        if cluster == "auto" and isinstance(error, ConnectionError):
            raise ClusterError(
                "cluster=auto, but no Ray cluster runs on this machine; start one with `ray start --head`, give its "
                'address as HOST:PORT, or leave cluster empty (--cluster "") to use this machine alone'
            ) from None
        raise ClusterError(f"cannot join the Ray cluster {cluster!r}: {_first_line(error)}") from None
    _ours.joined = True


def _check_answers(cluster: str) -> None:
    """Raise ClusterError unless something listens there; Ray itself would try for a minute."""
    host, _, port = cluster.rpartition(":")
    if "/" in cluster or not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ClusterError(f"cluster must be auto, HOST:PORT such as 10.0.0.5:6379, or empty, not {cluster!r}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_SECONDS).close()
    except OSError as error:
        raise ClusterError(
            f"no Ray cluster answers at {cluster} ({error.strerror or error}); check the address that "
            "`ray start --head` printed, and that this machine can reach its port"
        ) from None


def _silence() -> None:
    """Keep the log of a lost machine off the terminal; our own line says what is done about it."""
    from ray._private import worker

    worker.print_to_stdstream = lambda *_, **__: None


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Keep our handlers: Ray's handler of SIGTERM ends the process without a checkpoint."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---- every machine must run the same ---------------------------------------------------------------------


def ours() -> dict[str, str]:
    """Return what decides whether two machines understand each other and compute the same digits."""
    return {
        "Python": platform.python_version(),
        "Ray": version("ray"),
        "torch": version("torch"),
        "fedncv": f"{version('fedncv')} #{sources()}",
    }


def check_nodes() -> None:
    """Raise ClusterError if a machine of the cluster has another Python, Ray, torch or fedncv than this one."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def theirs() -> dict[str, str]:  # sent by value, because a function of ours would need our package to be there
        try:
            from fedncv.cluster.connect import ours
        except ImportError:
            return {"fedncv": "not installed"}
        return ours()

    nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    task = ray.remote(num_cpus=0, max_retries=0)(theirs)
    asked = [
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote()
        for node in nodes
    ]
    here = ours()
    for node, answer in zip(nodes, asked, strict=True):
        name = node["NodeManagerAddress"]
        try:
            found = ray.get(answer, timeout=CHECK_SECONDS)
        except ray.exceptions.GetTimeoutError:
            raise ClusterError(f"node {name} of the cluster did not answer within {CHECK_SECONDS:g} s") from None
        except ray.exceptions.RayTaskError as error:
            raise ClusterError(f"node {name} of the cluster cannot run a task: {_first_line(error)}") from None
        except ray.exceptions.RayError:  # the node is gone, or is going: its workers will say so
            continue
        refuse_others(name, here, found)


def refuse_others(name: str, here: dict[str, str], found: dict[str, str]) -> None:
    """Raise ClusterError if a node runs other versions than this machine."""
    for what, theirs in found.items():
        if theirs != here[what]:
            raise ClusterError(
                f"node {name} of the cluster has {what} {theirs}, and this machine has {here[what]}; "
                "install the same version on all machines"
            )


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


REASONS = {  # words of Ray's errors -> the reason, in order
    "low on memory": "it ran out of memory",
    "node has died": "its machine is gone",
    "node was dead": "its machine is gone",
    "is unavailable": "its machine does not answer",
    "process has died": "its process was killed or crashed",
}


def reason_of(error: BaseException) -> str:
    """Return why a worker is gone, in a few words, from Ray's error of several lines."""
    text = str(error)
    return next((reason for words, reason in REASONS.items() if words in text), _first_line(error).rstrip("."))
