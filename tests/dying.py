"""Runs that are killed. A script, so that children are forked from a process with one thread.

    python dying.py points FOLDER            die at every named write point, at its first and its last visit
    python dying.py moments FOLDER N SEED    die at N random moments

Every time the run is then resumed, and must end with the bytes of one that was never disturbed. Prints one
JSON object: {what was tried: "equal" or what differed}.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import torch

from fedncv import store
from fedncv.config import RunConfig
from fedncv.simulation import resume, simulate

CONFIG = RunConfig(
    method="scaffold", model="mlp", clients=6, per_round=3, rounds=8, epochs=1, checkpoint_every=3, eval_every=2
)


def train(folder):
    """Begin the run, or go on with it: what a person would do after a crash."""
    if (folder / "config.toml").exists():
        resume(folder)
    else:
        simulate(CONFIG, out=folder)


def fork(work):
    """Run ``work`` in a child; its process id."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
    return child


def wait(child):
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def die_at(name, visit):
    visits = 0

    def at(point):
        nonlocal visits
        visits += point == name
        if point == name and visits == visit:
            os.kill(os.getpid(), signal.SIGKILL)

    store.write_point = at


def compare(folder, reference):
    names = ["config.toml", "metrics.jsonl", "state.safetensors"]
    different = [name for name in names if (folder / name).read_bytes() != (reference / name).read_bytes()]
    return f"differs: {different}" if different else "equal"


def survive(folder, reference, kill):
    """Kill a run, resume it, compare."""
    code = kill(folder)
    if wait(fork(lambda: train(folder))) != 0:
        return "could not be resumed"
    result = compare(folder, reference)
    shutil.rmtree(folder)
    return result if code == -signal.SIGKILL else f"was not killed ({code}), {result}"


def points(base, reference):
    visited = []
    store.write_point = visited.append
    train(base / "watched")
    store.write_point = lambda _point: None
    for name in dict.fromkeys(visited):
        for visit in sorted({1, visited.count(name)}):

            def kill(folder, name=name, visit=visit):
                return wait(fork(lambda: (die_at(name, visit), train(folder))))

            yield f"{name} ({visit})", survive(base / "run", reference, kill)


def moments(base, reference, number, seed):
    rng = random.Random(seed)
    began = time.monotonic()
    wait(fork(lambda: train(base / "timed")))
    duration = time.monotonic() - began

    for i in range(number):
        delay = rng.uniform(0, duration)

        def kill(folder, delay=delay):
            child = fork(lambda: train(folder))
            time.sleep(delay)
            os.kill(child, signal.SIGKILL)
            wait(child)
            return -signal.SIGKILL  # it may have been just done; then there is nothing to lose

        yield f"moment {i} ({delay:.3f} s)", survive(base / "run", reference, kill)


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, base = sys.argv[1], Path(sys.argv[2])
    reference = base / "reference"
    train(reference)
    tried = (
        points(base, reference) if what == "points" else moments(base, reference, int(sys.argv[3]), int(sys.argv[4]))
    )
    print(json.dumps(dict(tried)))
