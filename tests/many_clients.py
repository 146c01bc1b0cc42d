"""A server that has seen ten thousand clients. A script, so that its memory is its own and it can be killed.

    python many_clients.py FOLDER ROUNDS [KILLED_AFTER]

Begins the run, or goes on with it: replies are made up, 200 clients a round, so that only the server works. After
KILLED_AFTER rounds of this process it kills itself, between two checkpoints. Prints one JSON object: clients seen,
the bytes that their rows take, the most memory that this process took above what it had before the first round, and
a digest of the state.
"""

import hashlib
import json
import os
import resource
import signal
import sys
from pathlib import Path

import numpy as np
import torch
from federations import FULL_FEDNCV, inside
from torch import nn

from fedncv import store
from fedncv.config import RunConfig
from fedncv.data import Clients, Dataset
from fedncv.engine.problem import build
from fedncv.keys import generator, key_for
from fedncv.methods import fedavg, find_method
from fedncv.methods.base import Replies, ServerAsk, aggregate
from fedncv.methods.switches.drift import Up
from fedncv.tree import leaves

CLIENTS, PER_ROUND, PARAMETERS = 10_000, 200, 4_000
CONFIG = RunConfig(
    method="custom", data="custom", model="custom", clients=CLIENTS, per_round=PER_ROUND, rounds=1000, rows="disk"
)


def problem():
    samples = torch.zeros(CLIENTS, PARAMETERS, dtype=torch.uint8)
    dataset = Dataset("zeros", samples, torch.zeros(CLIENTS, dtype=torch.int64), 1)
    nobody = np.array([], dtype=np.int64)
    return build(
        CONFIG,
        data=dataset,
        clients=Clients([np.array([u]) for u in range(CLIENTS)], [nobody] * CLIENTS),
        model=lambda shape, outputs: nn.Linear(shape[0], outputs, bias=False),
        method=find_method(FULL_FEDNCV),
    )


def replies(round):
    """Everybody once, then at random."""
    rng = generator(0, "made up", round)
    first = round * PER_ROUND
    ids = np.arange(first, first + PER_ROUND) if first < CLIENTS else rng.choice(CLIENTS, PER_ROUND, replace=False)
    delta_SQ = torch.from_numpy(rng.normal(size=(PER_ROUND, PARAMETERS)).astype(np.float32))
    ups = Up(fedavg.Up(delta_SQ), torch.full((PER_ROUND,), 0.1))
    ones_S = torch.ones(PER_ROUND, dtype=torch.float64)
    return Replies(ups, torch.from_numpy(np.sort(ids)), ones_S, ones_S * PER_ROUND / CLIENTS)


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def digest(state):
    total = hashlib.blake2b()
    for path, leaf in sorted(leaves(state), key=lambda pair: pair[0]):
        total.update(path.encode())
        total.update(leaf.numpy().tobytes() if isinstance(leaf, torch.Tensor) else str(leaf).encode())
    return total.hexdigest()


def main(folder, rounds, killed_after):
    here = problem()
    if not (folder / "config.toml").exists():
        store.create(folder, CONFIG)
    state = store.load_state(folder, here)
    journal = store.Journal(folder, CONFIG, state)
    before = peak()
    done = 0
    while state.round < rounds:
        t = state.round
        ask = ServerAsk(here.model, t, key_for(0, "server", t))
        server = aggregate(here.method, ask, state.server, replies(t)).server
        state = state._replace(round=t + 1, server=server)
        journal.append(state, {"round": state.round}, {})
        done += 1
        if done == killed_after:
            os.kill(os.getpid(), signal.SIGKILL)
        if state.round % 10 == 0:
            journal.checkpoint()
    took = peak() - before
    rows = sum(path.stat().st_size for path in folder.glob("rows-*.bin"))
    return {"seen": len(inside(state.server, "h")), "rows": rows, "took": took, "digest": digest(state)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    killed_after = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), killed_after)))
