"""Train the groups of a study on the workers of a Ray cluster.

The groups are those of one machine. A worker trains a group in a process of its own: in the study's folder if the
worker sees it, and otherwise in copies, which come back at least every ``COPY_SECONDS`` and at the end. If a worker is
lost, its group runs again from the latest checkpoint or copy, so that no number depends on the workers.
"""

import contextlib
import os
import secrets
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from fedncv import store
from fedncv.cluster import connect
from fedncv.cluster.connect import ClusterError, refuse_others
from fedncv.cluster.pool import TRIES, Pool, Task, Worker
from fedncv.config import RunConfig
from fedncv.notes import note
from fedncv.objects import code_of
from fedncv.results import METRICS, read_config
from fedncv.runner import Watch
from fedncv.studies.copies import read_files, write_files
from fedncv.studies.cost import expected_samples, measured_samples
from fedncv.studies.group_job import Answer, CheckJob, CostJob, Setup, Started, TrainJob
from fedncv.studies.group_worker import GroupWorker, calibrated, check, sees
from fedncv.studies.jobs import JobError
from fedncv.study import PARTITION, Cell

COPY_SECONDS = 60.0  # between two copies of a group
HUNG_SECONDS = 600.0  # without a row and without use of a processor, before a group is taken for hung
BEAT_SECONDS = 120.0  # without any answer, before a worker is taken for lost
STOP_SECONDS = 10.0  # for checkpoints and their copies, after Ctrl-C


class Share(NamedTuple):
    """What one group takes of a machine."""

    cpus: int
    gpus: float


class Place(NamedTuple):
    """A cluster that was joined and checked, and what a group takes of it."""

    share: Share
    setup: Setup

    @property
    def slots(self) -> int:
        """The number of groups that train at a time."""
        return sum(_rooms(self.share).values())


@contextlib.contextmanager
def joined(cluster: str, cells: list[Cell], jobs: int) -> Iterator[Place]:
    """Join the cluster and check that its machines can train these runs. Raise ClusterError if not."""
    device = cells[0].config.device
    _check_request(device, jobs)
    connect.connect(cluster, cpus=1)
    use = connect.Use()
    try:
        share = _share(device, jobs, len({_group(cell.config) for cell in cells}))
        alone = {replace(_group(cell.config), code=code_of(cell.config)): None for cell in cells}
        setup = Setup(
            path=[os.path.abspath(each) for each in sys.path], data=os.environ.get("FEDNCV_DATA", ""),
            cores=share.cpus, check=CheckJob(list(alone)), checked=frozenset(_rooms(share)),
        )  # fmt: skip
        for host, failed in _on_nodes(share, check, setup).items():
            if failed:
                raise ClusterError(f"machine {host} of the cluster cannot train this study: {failed}")
        yield Place(share, setup)
    finally:
        use.end()


def _group(config: RunConfig) -> RunConfig:
    """Return what the runs of a group have in common, for counting and checking them; their data may differ."""
    return replace(config, seed=0, lr=1.0)


def _check_request(device: str, jobs: int) -> None:
    if ":" in device:
        raise ClusterError(f"device={device} names a GPU of one machine; use --device cuda with --cluster")
    if device == "cpu" and jobs > 1:
        raise ClusterError(
            f"--jobs {jobs} is the number of groups on each GPU; on CPUs every group takes one CPU, or more "
            "if there are more CPUs than groups: leave out --jobs"
        )


def _share(device: str, jobs: int, groups: int) -> Share:
    """Return what a group takes. On CPUs: one, and more only if every group then still has a place."""
    if device != "cpu":
        share = Share(1, 1 / jobs)
        if not _rooms(share):
            there = connect.resources()
            raise ClusterError(
                f"a group needs a CPU and {_gpus(share.gpus)}, but no machine of the cluster has them free to give "
                f"(it has {there.get('CPU', 0.0):g} CPUs and {there.get('GPU', 0.0):g} GPUs); use --device cpu, "
                "or start Ray on machines with GPUs"
            )
        return share
    largest = max((int(node.get("CPU", 0)) for node in _nodes().values()), default=0)
    if not largest:
        raise ClusterError("a group needs a CPU, but the cluster has none; start Ray on machines with CPUs")
    enough = [n for n in range(1, largest + 1) if sum(_rooms(Share(n, 0.0)).values()) >= groups]
    return Share(max(enough, default=1), 0.0)


def _gpus(share: float) -> str:
    return "a GPU" if share == 1 else f"{share:.3g} of a GPU"


def _nodes() -> dict[str, dict[str, float]]:
    """Return what the machines that are alive have, whoever uses it."""
    import ray

    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return {node["NodeID"]: node["Resources"] for node in nodes if node["Alive"]}


def _rooms(share: Share) -> dict[str, int]:
    """Return how many groups fit on each machine that has room for one."""
    found = {}
    for name, there in _nodes().items():
        fit = int(there.get("CPU", 0.0) // share.cpus)
        if share.gpus:
            fit = min(fit, int(there.get("GPU", 0.0) / share.gpus + 1e-9))
        if fit:
            found[name] = fit
    return found


def _on_nodes(share: Share, function: Any, *arguments: Any) -> dict[str, Any]:
    """Call the function on each machine with room for a group; return what it returned, by the machine's address."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    rooms, found = _rooms(share), {}
    names = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}  # type: ignore[no-untyped-call]
    task: Any = ray.remote(num_cpus=0, max_retries=0)(function)
    asked = {
        node: task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(*arguments)
        for node in rooms
    }
    for node, answer in asked.items():
        name = names[node] if names[node] not in found else f"{names[node]} ({node[:6]})"
        try:
            found[name] = ray.get(answer)
        except ray.exceptions.RayTaskError as error:
            raise ClusterError(f"machine {name} of the cluster: {str(error).strip().splitlines()[-1]}") from None
        except ray.exceptions.RayError:  # the machine is gone
            continue
    return found


def calibrate(cells: list[Cell], place: Place) -> Any:
    """Return ``cost.costs``, measured by a worker with what a group takes."""
    import ray

    task: Any = ray.remote(num_cpus=place.share.cpus, num_gpus=place.share.gpus, max_retries=0)(calibrated)
    try:
        return ray.get(task.remote(CostJob(cells), place.setup))
    except ray.exceptions.RayError as error:
        raise ClusterError(f"the worker that measures the cost: {str(error).strip().splitlines()[-1]}") from None


# ---- training --------------------------------------------------------------------------------------------


def write_token(path: Path, content: str) -> None:
    path.write_text(content)


@contextlib.contextmanager
def with_token(place: Place, out: Path) -> Iterator[tuple[Place, str]]:
    """Write a file by which workers find out whether they see the study's folder; yield a line that says who does."""
    path, content = out.resolve() / f".cluster-{secrets.token_hex(4)}", secrets.token_hex(16)
    write_token(path, content)
    try:
        place = place._replace(setup=place.setup._replace(token=(str(path), content)))
        yield place, _line(place, out)
    finally:
        path.unlink(missing_ok=True)


def _line(place: Place, out: Path) -> str:
    found = list(_on_nodes(place.share, sees, place.setup).values())
    with_folder, copies = sum(found), f"send copies of their runs here, at least every {COPY_SECONDS:g} s"
    where = f"they see {out} and write into it" if all(found) else f"they do not see {out}, and {copies}"
    if with_folder and not all(found):
        where = f"{with_folder} of them see {out} and write into it, the others {copies}"
    share = f"{place.share.cpus} CPU{'s' * (place.share.cpus > 1)}"
    share += f" and {_gpus(place.share.gpus)}" if place.share.gpus else ""
    machines = f"{len(found)} machine{'s' * (len(found) > 1)}"
    return f"cluster: {machines}, {place.slots} groups at a time with {share} each; {where}"


def run_on_cluster(groups: list[list[Path]], place: Place, watch: Watch) -> None:
    """Train each group on a worker. Raise JobError at the end if some failed."""
    setup = place.setup._replace(copy_seconds=COPY_SECONDS, hung_seconds=HUNG_SECONDS)
    for folder in [folder for group in groups for folder in group]:
        _check_config(folder, place)
    if groups:
        Groups(groups, place._replace(setup=setup), watch).run()


def _check_config(folder: Path, place: Place) -> None:
    """Raise ClusterError if a run was started with an engine or device that these workers do not have."""
    config = read_config(folder)
    if config.engine == "ray" or (config.device != "cpu") != bool(place.share.gpus) or ":" in config.device:
        raise ClusterError(
            f"{folder} was started with engine={config.engine} and device={config.device}, and goes on with them; "
            f"finish the study with --engine {config.engine} --device {config.device}, or choose another --out"
        )


class Groups:
    """Groups on their way through the workers."""

    def __init__(self, groups: list[list[Path]], place: Place, watch: Watch) -> None:
        self._groups = [[folder.resolve() for folder in group] for group in groups]
        self._given = {folder.resolve(): folder for group in groups for folder in group}
        self._place, self._watch = place, watch
        self._failed: list[str] = []
        self._losses = [0] * len(groups)  # since the last row
        self._left = len(groups)
        self._copied: set[int] = set()  # groups that train in copies, whose folders are locked here
        self._setup: Any = None

    def run(self) -> None:
        import ray

        self._setup = ray.put(self._place.setup)
        pool = Pool(self._start, self._wanted, self._greet)
        tasks = [Task(_words(group), _work(group), beat=BEAT_SECONDS) for group in self._groups]
        try:
            pool.map(tasks, self._submit, self._take, lost=self._lost, ahead=1)
        except BaseException:
            self._stop(pool)
            raise
        finally:
            pool.close()
            for i in range(len(self._groups)):
                self._release(i)
        if self._failed:
            raise JobError("; ".join(self._failed))

    # ---- what the pool asks ------------------------------------------------------------------------------

    def _start(self) -> tuple[Any, list[Any]]:
        import ray

        def node() -> str:
            return str(ray.get_runtime_context().get_node_id())

        cpus, gpus = self._place.share
        actors: Any = ray.remote(num_cpus=cpus, num_gpus=gpus, max_restarts=0, max_task_retries=0)(GroupWorker)
        actor: Any = actors.remote(self._setup, node)
        return actor, [actor.alive.remote(), actor.started.remote()]

    def _wanted(self) -> int:
        return min(self._left, max(1, self._place.slots))

    def _greet(self, started: Started) -> None:
        refuse_others(started.host, connect.ours(), started.versions)
        if started.failed:
            raise ClusterError(f"machine {started.host} of the cluster cannot train this study: {started.failed}")

    def _submit(self, worker: Worker, i: int) -> Any:
        self._release(i)  # the worker locks the folders if it sees them, and otherwise asks for them
        return worker.actor.begin.remote(TrainJob([str(each) for each in self._groups[i]], bool(self._losses[i])))

    def _take(self, worker: Worker, i: int, answer: Answer) -> Any:
        if answer.needs_files:
            return self._send(worker, i)
        self._hear(i, answer)
        if answer.lost and self._lost(i, answer.lost):
            return self._submit(worker, i)
        if answer.lost:  # ``_lost`` has given it up
            return None
        if not answer.ended:
            return worker.actor.go_on.remote()
        self._over(i)
        return None

    def _send(self, worker: Worker, i: int) -> Any:
        """Lock the folders here and send their files."""
        group = self._groups[i]
        try:
            for folder in group:
                store.hold(folder)
        except ValueError as error:
            self._failed.append(str(error))
            for folder in group:
                self._watch.fail(self._given[folder], str(error))
            self._over(i)
            return None
        self._copied.add(i)
        return worker.actor.begin.remote(
            TrainJob(
                [str(each) for each in group], bool(self._losses[i]), [read_files(folder) for folder in group],
                has_partition=(group[0].parent / PARTITION).exists(), copy_seconds=self._place.setup.copy_seconds,
            )
        )  # fmt: skip

    def _lost(self, i: int, reason: str) -> bool:
        """Count the loss; return whether the group runs again."""
        words = _words(self._groups[i])
        self._losses[i] += 1
        if self._losses[i] < TRIES:
            note(f"cluster: the worker of {words} was lost ({reason}); running it again")
            return True
        self._failed.append(f"the worker of {words} was lost {TRIES} times (the last time: {reason})")
        self._over(i)
        return False

    def _over(self, i: int) -> None:
        self._left -= 1
        self._release(i)

    def _release(self, i: int) -> None:
        if i in self._copied:
            self._copied.remove(i)
            for folder in self._groups[i]:
                store.release(folder)

    # ---- what a group reports ----------------------------------------------------------------------------

    def _hear(self, i: int, answer: Answer) -> None:
        """Write the copies, and pass on all other events with the folders of this machine."""
        group = self._groups[i]
        for name, *given in answer.events:
            if name == "files":
                files: Any = given[0]
                for j, found in files.items():
                    write_files(group[j], found)
            elif name == "said":
                print(given[0], end="", file=sys.stderr)
            elif name == "failed":
                self._failed.append(str(given[0]))
            elif name == "row":
                self._losses[i] = 0
            if name in ("begin", "row", "fail", "end"):
                getattr(self._watch, str(name))(*map(self._here, given))

    def _here(self, value: Any) -> Any:
        """Return a folder as it was given."""
        if isinstance(value, list):
            return [self._here(each) for each in value]
        return self._given[value] if isinstance(value, Path) else value

    def _stop(self, pool: Pool) -> None:
        """Let the groups end with checkpoints, and take what they send, for at most ``STOP_SECONDS``."""
        import ray

        until = time.monotonic() + STOP_SECONDS
        busy = [worker for worker in pool.workers if worker.calls]
        ends = [(worker, worker.actor.stop.remote(STOP_SECONDS - 2)) for worker in busy]
        for worker, end in ends:
            for reference in (worker.calls[0].answer, end):
                with contextlib.suppress(ray.exceptions.RayError):
                    answer = ray.get(reference, timeout=max(0.1, until - time.monotonic()))
                    files = [event for event in answer.events if event[0] == "files"]
                    self._hear(worker.calls[0].task, Answer(files))


def _words(group: list[Path]) -> str:
    more = f" and {len(group) - 1} more" if len(group) > 1 else ""
    return f"{group[0].parent.name}/{group[0].name}{more}"


def _work(group: list[Path]) -> float:
    """Return the samples that a group still has to train on: the largest groups start first."""
    total = 0.0
    for folder in group:
        config, path = read_config(folder), folder / METRICS
        done = path.read_bytes().count(b"\n") / config.rounds if path.exists() and config.rounds else 0.0
        total += (expected_samples(config) + measured_samples(config)) * max(0.0, 1 - done)
    return total
