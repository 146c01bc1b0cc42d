"""Compare the cost of a round of a real federation with a plain Flower app doing FedAvg on the same nodes.

    python bench/federation.py                      2 and 5 nodes, LeNet5 on the digits, 6 rounds each
    python bench/federation.py --nodes 2 --rounds 4
    python bench/federation.py --secure --nodes 5 20 --rounds 3      with secure sums in place of the plain app

Both apps run on one federation of real processes with TLS and node authentication, in turns: ours, plain, ours,
plain. The plain app is Flower's quickstart with its own strategy: it stores nothing, checks nothing and writes
no checkpoint. Seconds are the time between the server's rounds, the median over all rounds except the first of each
turn. Bytes are per client and round: the numbers in the messages, and all bytes that Flower counted on its
connections, with joining and the app's delivery divided over the rounds. With ``--secure`` the plain app is replaced by
ours with secure sums.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fedncv.config import RunConfig
from fedncv.flower import coordinator, processes
from fedncv.flower import folder as folders
from fedncv.results import read_rows, read_run

LIMIT = 1.25  # most seconds of ours, as a multiple of the plain app's
EPOCHS = 1

PYPROJECT = """\
[project]
name = "plain-fedavg"
version = "1.0.0"
description = "Flower's quickstart: FedAvg on LeNet5"
license = "Apache-2.0"
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "plain"

[tool.flwr.app.components]
serverapp = "plain.server:app"
clientapp = "plain.client:app"

[tool.flwr.app.config]
rounds = {rounds}
nodes = {nodes}
epochs = {epochs}
"""

TASK = """\
import torch
from torch import nn


def net():
    return nn.Sequential(
        nn.Conv2d(1, 6, 5), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )
"""

CLIENT = """\
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from safetensors.torch import load_file
from torch.utils.data import DataLoader, TensorDataset

from plain.task import net

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    model = net()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    samples = load_file(context.node_config["folder"] + "/data/samples.safetensors")
    x, y = samples["x"][samples["train"]].float() / 255, samples["y"][samples["train"]]
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.train()
    total = 0.0
    for _ in range(context.run_config["epochs"]):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            total += loss.item()
    metrics = MetricRecord({"train_loss": total / len(loader), "num-examples": len(x)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)
"""

SERVER = """\
import json
import os
import time

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from plain.task import net

app = ServerApp()
times = []


class Timed(FedAvg):
    def configure_train(self, *arguments, **named):
        times.append(time.perf_counter())
        return super().configure_train(*arguments, **named)


@app.main()
def main(grid: Grid, context: Context) -> None:
    nodes = context.run_config["nodes"]
    strategy = Timed(fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)
    strategy.start(grid=grid, initial_arrays=ArrayRecord(net().state_dict()), num_rounds=context.run_config["rounds"])
    times.append(time.perf_counter())
    folder = os.environ["FEDNCV_FEDERATION_SERVER"]
    with open(folder + "/plain.json.new", "w") as file:
        json.dump([b - a for a, b in zip(times, times[1:])], file)
    os.replace(folder + "/plain.json.new", folder + "/plain.json")
"""


def plain(folder: Path, rounds: int, nodes: int, seconds: float) -> tuple[list[float], int]:
    """Return the seconds of every round of the plain app, and Flower's number of the run."""
    app = folder / "server" / "apps" / "plain"
    (app / "plain").mkdir(parents=True, exist_ok=True)
    (app / "pyproject.toml").write_text(PYPROJECT.format(rounds=rounds, nodes=nodes, epochs=EPOCHS))
    texts = {"__init__.py": "", "task.py": TASK, "client.py": CLIENT, "server.py": SERVER}
    for name, text in texts.items():
        (app / "plain" / name).write_text(text)
    done = folder / "server" / "plain.json"
    done.unlink(missing_ok=True)
    number = coordinator.submit(folder, "plain")
    deadline = time.monotonic() + seconds
    while not done.exists():
        if time.monotonic() > deadline:
            raise ValueError(f"the plain app is not done after {seconds:g} s; see {folder / 'logs'}")
        time.sleep(0.5)
    return json.loads(done.read_text()), number


def ours(folder: Path, name: str, rounds: int, nodes: int, seconds: float, secure: str = "") -> tuple[list[float], int]:
    method = "fedavg+fixed_point" if secure else "fedavg"
    config = RunConfig(
        method=method, partition="iid", clients=nodes, per_round=nodes, rounds=rounds, epochs=EPOCHS, eval_every=0
    )
    coordinator.create(folder, name, config, secure)
    number = coordinator.submit(folder, name)
    coordinator.follow(folder, name, seconds=seconds, submitted=number)
    lines = (folder / "server" / "runs" / name / "timing.jsonl").read_text().splitlines()
    return [json.loads(line)["seconds"] for line in lines[1:]], number


def traffic(folder: Path, number: int) -> int:
    """Return the bytes of a run on Flower's connections, after counting has ended."""
    for _ in range(30):
        (found,) = processes.flwr(folder / "server", "list", folders.LINK, "--run-id", str(number))["runs"]
        if str(found["status"]).startswith("finished"):
            break
        time.sleep(1.0)
    return int(found["network-traffic"]["total-bytes"])


def measure(nodes: int, rounds: int, turns: int, seconds: float, secure: bool = False) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "federation"
        config = RunConfig(partition="iid", clients=nodes, per_round=nodes)
        folders.init(folder, config, host="127.0.0.1", port=0, listen="127.0.0.1")
        taken: dict[str, list[float]] = {"ours": [], "plain": []}
        wire: dict[str, list[int]] = {"ours": [], "plain": []}
        try:
            processes.up(folder, seconds=seconds)
            for turn in range(turns):
                lasted, number = ours(folder, f"ours{turn}", rounds, nodes, seconds)
                taken["ours"] += lasted[1:]
                wire["ours"].append(traffic(folder, number))
                if secure:
                    settings = f"threshold={nodes // 2 + 1}"
                    lasted, number = ours(folder, f"secure{turn}", rounds, nodes, seconds, settings)
                else:
                    lasted, number = plain(folder, rounds, nodes, seconds)
                taken["plain"] += lasted[1:]
                wire["plain"].append(traffic(folder, number))
            assert read_run(folder / "server" / "runs" / "ours0").status == "finished"
            last = read_rows(folder / "server" / "runs" / "ours0")[-1]
        finally:
            processes.down(folder)
    per = nodes * rounds
    return {
        "nodes": nodes,
        "seconds_ours": statistics.median(taken["ours"]),
        "seconds_plain": statistics.median(taken["plain"]),
        "bytes_down": last["bytes_down"] / per,
        "bytes_up": last["bytes_up"] / per,
        "wire_ours": statistics.median(wire["ours"]) / per,
        "wire_plain": statistics.median(wire["plain"]) / per,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 5])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--secure", action="store_true", help="compare with secure sums instead of the plain app")
    parser.add_argument("--seconds", type=float, default=900.0, help="for a single run")
    arguments = parser.parse_args()
    other = "with secure sums" if arguments.secure else "plain Flower"
    print(f"| nodes | s per round, ours | {other} | ratio | numbers, down + up | on the wire, ours | {other} |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    worst = 0.0
    for nodes in arguments.nodes:
        m = measure(nodes, arguments.rounds, arguments.turns, arguments.seconds, arguments.secure)
        ratio = m["seconds_ours"] / m["seconds_plain"]
        worst = 0.0 if arguments.secure else max(worst, ratio)
        print(
            f"| {nodes} | {m['seconds_ours']:.2f} | {m['seconds_plain']:.2f} | {ratio:.2f} "
            f"| {m['bytes_down']:,.0f} + {m['bytes_up']:,.0f} | {m['wire_ours']:,.0f} | {m['wire_plain']:,.0f} |",
            flush=True,
        )
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
