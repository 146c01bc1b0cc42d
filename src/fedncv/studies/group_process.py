"""The process that trains a group of runs for a worker of a cluster; it also checks and calibrates.

It reads its job from the standard input and writes events to the standard output: pickles, because both ends are one
version on one machine. The end of the input means that the worker is gone. Then the process ends at once: what it
would still write belongs to somebody else by now.
"""

import os
import pickle
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedncv import store
from fedncv.config import RunConfig
from fedncv.data import load
from fedncv.engine.check import check
from fedncv.objects import code_changes
from fedncv.studies.copies import Copier, write_files
from fedncv.studies.cost import costs
from fedncv.studies.group_job import CheckJob, CostJob, TrainJob
from fedncv.studies.jobs import Teller, work
from fedncv.study import PARTITION

LOCK_SECONDS = 60.0  # for the process of a worker that was lost to end


def main() -> None:
    events = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what somebody's code prints is not an event
    job = pickle.load(sys.stdin.buffer)
    root = job.root if isinstance(job, TrainJob) else ""
    threading.Thread(target=_end_with_worker, args=(root,), daemon=True).start()

    def put(event: Any) -> None:
        pickle.dump(event, events)
        events.flush()

    if isinstance(job, TrainJob):
        put(("over" if train(job, put) else "stopped",))
    elif isinstance(job, CheckJob):
        put(("unfit", unfit(job.configs)))
    elif isinstance(job, CostJob):
        put(("costs", costs(job.cells)))


def _end_with_worker(root: str) -> None:
    while os.read(0, 1):  # not sys.stdin, whose lock a daemon thread would hold at the end of the process
        pass
    if root:
        shutil.rmtree(root, ignore_errors=True)
    os._exit(1)


def unfit(configs: list[RunConfig]) -> str:
    """Return why these runs cannot be trained on this machine; empty if they can."""
    loaded = set()
    for config in configs:
        try:
            check(config)
            if (config.data, config.data_dir) not in loaded:
                load(config.data, config.data_dir or None)
        except (ValueError, OSError) as error:
            return str(error)
        loaded.add((config.data, config.data_dir))
        if changed := code_changes(config):
            return f"its code of {', '.join(changed)} differs from that of the driver's machine; copy the file"
    return ""


def train(job: TrainJob, put: Callable[[Any], object]) -> bool:
    """Train the group where it lies, or in copies; return whether it ended, and False if SIGTERM stopped it."""
    folders = [Path(folder) for folder in job.folders]
    if job.files is None:
        if job.again:
            _wait_for_locks(folders)
        return work(folders, Teller(put))
    ours, folders = folders, [Path(job.root) / str(i) / folder.name for i, folder in enumerate(folders)]
    for folder, files in zip(folders, job.files, strict=True):
        write_files(folder, files)
        if job.has_partition:
            (folder.parent / PARTITION).touch()
    copier = Copier(folders, job.copy_seconds, lambda found: tell("files", found))

    def named(value: Any) -> Any:
        """Return the value with the folders of the driver in place of the copies."""
        if isinstance(value, list):
            return [named(each) for each in value]
        for theirs, mine in zip(folders, ours, strict=True):
            if isinstance(value, str):
                value = value.replace(str(theirs), str(mine))
            elif value == theirs:
                return mine
        return value

    def put_named(event: Any) -> None:
        if event[0] == "begin":
            copier.begin(len(event[1]))
        put(tuple(map(named, event)))

    tell = Teller(put_named)
    ended = work(folders, tell, copier.on_round)
    copier.close()
    return ended


def _wait_for_locks(folders: list[Path]) -> None:
    """Lock the runs as soon as the process that trained them before is gone; if it stays, training says so."""
    until = time.monotonic() + LOCK_SECONDS
    for folder in folders:
        while True:
            try:
                store.hold(folder)
                break
            except ValueError:
                if time.monotonic() > until:
                    return
                time.sleep(0.5)
