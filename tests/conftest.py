import signal

import pytest
import torch

torch.set_num_threads(1)  # tests run side by side, and engines promise equal bits with one thread


@pytest.fixture
def cluster(monkeypatch):
    """A Ray cluster: a head with one CPU; tests add nodes, which are raylets on this machine."""
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    from ray.cluster_utils import Cluster

    from fedncv.cluster import connect

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    yield made
    connect.close()
    made.shutdown()
    for number, handler in handlers.items():  # a raylet that this process starts brings Ray's own
        signal.signal(number, handler)
