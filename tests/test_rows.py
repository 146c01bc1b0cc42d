"""Rows in a file: values like any other, the digits of rows in memory, O(m) a round, and no death that hurts."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from federations import FULL_FEDNCV, tiny, train

import fedncv
from fedncv import rows as rows_module
from fedncv import store
from fedncv.engine import problem as problem_module
from fedncv.engine.problem import arrivals, build, start
from fedncv.engine.sequential import run_round
from fedncv.engine.stacked import StackedEngine
from fedncv.results import read_run
from fedncv.rows import NAME, PAGE, RowFile, Rows, all_rows, rows_for
from fedncv.tree import leaves

CPU = torch.device("cpu")
QUICK = {"model": "mlp", "clients": 8, "per_round": 3, "rounds": 5, "epochs": 1, "checkpoint_every": 2}


def on_disk():
    return Rows(RowFile(CPU))


def same(tree, other):
    ours, theirs = dict(leaves(tree)), dict(leaves(other))
    assert ours.keys() == theirs.keys()
    for path, a in ours.items():
        assert torch.equal(a, theirs[path]) if isinstance(a, torch.Tensor) else a == theirs[path], path


# ---- values --------------------------------------------------------------------------------------------


def test_rows_are_values_that_nothing_changes():
    first = on_disk() | {3: torch.tensor([1.0, -0.0]), 1: torch.tensor([2.0, float("inf")])}
    second = first | {3: torch.tensor([5.0, 6.0]), 7: torch.tensor([7.0, 8.0])}
    assert first[3].tolist() == [1.0, 0.0]
    assert str(first[3][1]) == "tensor(-0.)"
    assert second[3].tolist() == [5.0, 6.0]
    assert list(second) == [3, 1, 7]
    assert len(first) == 2
    assert 7 in second
    assert 7 not in first
    assert first.get(7) is None
    assert second | {} is second
    with pytest.raises(KeyError):
        first[7]


class Pair(NamedTuple):
    a: torch.Tensor
    b: tuple


def test_a_row_may_be_any_tree_of_tensors():
    row = Pair(
        torch.arange(3, dtype=torch.float32),
        (torch.tensor(4, dtype=torch.int64), torch.zeros(0, 2), torch.ones(2, 2).double()),
    )
    stored = (on_disk() | {5: row})[5]
    assert isinstance(stored, Pair)
    same(stored, row)
    assert [leaf.dtype for _, leaf in leaves(stored)] == [leaf.dtype for _, leaf in leaves(row)]
    assert stored.b[1].shape == (0, 2)


def test_a_place_is_free_when_nobody_holds_its_row():
    """Three clients, 100 new rows for each: at most six at a time are held, the old three and the new three."""
    rows = on_disk()
    for k in range(100):
        rows = rows | {u: torch.tensor([float(k), float(u)]) for u in range(3)}
    assert rows.file._end <= 6
    held = rows | {0: torch.tensor([-1.0, -1.0])}
    del rows
    assert [float(held[u][0]) for u in range(3)] == [-1.0, 99.0, 99.0]


def test_equal_rows_of_two_clients_are_freed_once(tmp_path):
    file = RowFile(CPU)
    file.place(tmp_path / "rows.bin")
    zero = torch.zeros(4)
    rows = Rows(file) | {0: zero, 1: zero, 2: zero + 1}
    found = RowFile(CPU, form=file.form)
    found.place(tmp_path / "rows.bin")
    slots = found.find([rows.slot(u).name for u in range(3)])
    again = Rows(found, {u: slots[rows.slot(u).name] for u in range(3)})
    changed = again | {0: zero + 5}
    del again
    changed = changed | {3: zero + 6, 4: zero + 7}
    assert [float(changed[u][0]) for u in range(5)] == [5, 0, 1, 6, 7]


def test_of_two_places_with_one_name_the_whole_one_is_taken(tmp_path):
    """What a run leaves that is killed in the middle of a row: its new name, or an old one, before other numbers."""
    file = RowFile(CPU)
    file.place(tmp_path / "rows.bin")
    rows = Rows(file) | {0: torch.tensor([1.0, 2.0])}
    whole = (tmp_path / "rows.bin").read_bytes()
    half = whole[:NAME] + bytes(len(whole) - NAME)
    for content, place in ((half + whole, 1), (whole + half, 0), (half + whole + whole, 1)):
        (tmp_path / "copy.bin").write_bytes(content)
        copy = RowFile(CPU, form=file.form)
        copy.place(tmp_path / "copy.bin")
        (slot,) = copy.find([rows.slot(0).name]).values()
        assert slot.number == place
        assert copy.read(slot).tolist() == [1.0, 2.0]
        assert copy.free == [number for number in range(len(content) // len(whole)) if number != place]


def test_rows_that_fit_stay_in_memory():
    """Two dictionaries of 10 clients' rows, 16 bytes each: the second goes to a file if there is room for one only."""
    tree, row = ({}, (torch.zeros(2), {})), {3: torch.zeros(2).double()}
    for room, kinds in ((2 * 10 * 16, [dict, dict]), (2 * 10 * 16 - 1, [dict, Rows]), (10 * 16 - 1, [Rows, Rows])):
        made = rows_for(tree, room=room, num_clients=10, device=CPU)
        assert [type(rows | row) for rows in (made[0], made[1][1])] == kinds
        assert [type(rows | row) for rows in (made[1][1], made[0])] == kinds[::-1]  # asked again: as before
    assert type(rows_for(tree, room=0, num_clients=10, device=CPU)[0] | {3: ()}) is dict  # nothing to keep


def test_small_rows_leave_the_room_to_large_ones():
    """A number and a model of each client, as FedNCV's server has: half of the room would send the models to disk."""
    numbers, models = rows_for(({}, {}), room=10 * (8 + 8000), num_clients=10, device=CPU)
    assert type(numbers | {0: torch.zeros(1).double()}) is dict
    assert type(models | {0: torch.zeros(1000).double()}) is dict


def test_runs_that_share_the_memory_have_a_share_of_it(monkeypatch):
    """Room for what six runs remember of four clients."""
    problem = tiny("fedvarp")
    row = problem.model.start_P
    monkeypatch.setattr(problem_module, "room", lambda _: 3 * 2 * 4 * row.numel() * row.element_size())
    for runs, kind in ((1, dict), (6, dict), (7, Rows)):
        assert type(start(problem, runs=runs).kept | {0: row}) is kind


def test_seeds_of_a_stack_and_runs_that_go_on_share_the_memory(monkeypatch, tmp_path):
    """FedVARP's server remembers an update of each client; its clients keep nothing. There is room for four runs."""
    settings = {**QUICK, "rounds": 1, "method": "fedvarp"}
    row = fedncv.simulate(**settings, rows="memory").problem.model.start_P
    monkeypatch.setattr(problem_module, "room", lambda _: 2 * 2 * 8 * row.numel() * row.element_size())
    for seeds, kind in ((range(4), dict), (range(5), Rows)):
        results = fedncv.simulate_many(seeds=iter(seeds), **settings)
        assert {type(result.state.server.h) for result in results} == {kind}
    store.create(tmp_path / "run", results[0].problem.config)
    for runs, kind in ((4, dict), (5, Rows)):
        state = store.load_state(tmp_path / "run", results[0].problem, runs=runs)
        assert type(state.server.h | {0: row}) is kind


# ---- the same digits, O(m) a round ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "stacked"),
    [
        (FULL_FEDNCV, False),
        ("scaffold", True),
        ("fedvarp+momentum", False),
        ("fedncv", False),
        pytest.param(FULL_FEDNCV, True, marks=pytest.mark.slow),
        pytest.param("fedncv-sums", True, marks=pytest.mark.slow),
        pytest.param("scaffold", False, marks=pytest.mark.slow),
    ],
)
def test_where_rows_lie_changes_no_digit(method, stacked):
    states = []
    for place in ("memory", "disk"):
        problem = tiny(method, per_round=2, rows=place)
        state = start(problem)
        engine = StackedEngine([problem]) if stacked else None
        for _ in range(4):
            state = engine.run_rounds([state])[0][0] if engine else run_round(problem, state)[0]
        states.append(state)
    same(states[0], states[1])
    in_files = {path for path, rows in all_rows(states[1]) if len(rows)}
    assert in_files == IN_FILES[method]


IN_FILES = {
    FULL_FEDNCV: {"server.server.server.server.h", "server.server.server.c", "server.server.server.alpha"},
    "fedncv-sums": {"kept"},
    "fedncv": {"server.server.server.c", "server.server.server.alpha"},
    "scaffold": {"kept"},
    "fedvarp+momentum": {"server.server.h"},
}


class Counted:
    """Bytes that the file of rows reads and writes."""

    def __init__(self, monkeypatch):
        self.read = self.written = 0
        pread, pwrite = os.pread, os.pwrite

        def counted_read(descriptor, size, offset):
            self.read += size
            return pread(descriptor, size, offset)

        def counted_write(descriptor, data, offset):
            self.written += len(data)
            return pwrite(descriptor, data, offset)

        monkeypatch.setattr(rows_module.os, "pread", counted_read)
        monkeypatch.setattr(rows_module.os, "pwrite", counted_write)


@pytest.mark.parametrize(("method", "vectors"), [(FULL_FEDNCV, 2), ("fedncv+memory:beta=learned", 2), ("fedncv", 1)])
def test_a_round_reads_and_writes_the_rows_of_its_own_clients(method, vectors, monkeypatch):
    """Two replies: of two clients alpha, c and where it is kept h are written, whether 6 or 36 were seen before."""
    counts = {}
    for n in (6, 36):
        problem = tiny(method, sizes=(8,) * n, per_round=2, rows="disk")
        state = train(problem, ids=list(range(n)))
        with monkeypatch.context() as patch:
            counting = Counted(patch)
            train(problem, ids=[0, 1], state=state)
            counts[n] = (counting.read, counting.written)
    size = len(problem.model.start_P) * 8
    assert counts[6] == counts[36]
    assert counts[36][1] == 2 * (vectors * (NAME + size) + NAME + 8)
    assert 0 < counts[36][0] <= 20 * size


def test_a_checkpoint_writes_names_and_no_rows(tmp_path, monkeypatch):
    """Beside the model and the sums: an id and a name for each client and kind of row."""
    sizes = {}
    for n in (6, 36):
        problem = tiny(FULL_FEDNCV, sizes=(8,) * n, rows="disk")
        folder = tmp_path / str(n)
        store.create(folder, problem.config)
        state = start(problem)
        journal = store.Journal(folder, problem.config, state)
        state = train(problem, state=state)
        journal.append(state, {"round": 1}, {})
        with monkeypatch.context() as patch:
            counting = Counted(patch)
            journal.checkpoint()
        assert (counting.read, counting.written) == (0, 0)
        sizes[n] = (folder / "state.safetensors").stat().st_size
        same(store.read_state(folder, problem), state)
    per_client = (sizes[36] - sizes[6]) / 30
    # three kinds of rows, n_u of drift and of memory, and the id of its empty `kept`
    assert per_client < 3 * (8 + NAME) + 2 * 8 + 8 + 2


def test_messages_to_all_clients_are_made_a_few_at_a_time(monkeypatch):
    problem = tiny(FULL_FEDNCV, rows="disk")
    state = train(problem, rounds=2)
    whole = list(arrivals(problem, state, np.arange(4)))
    asked = []
    broadcast = problem.method.broadcast

    def noted(server, ids_S):
        asked.append(ids_S.tolist())
        return broadcast(server, ids_S)

    monkeypatch.setattr(problem_module, "MESSAGE_BYTES", 3 * len(problem.model.start_P) * 8)
    noting = problem._replace(method=problem.method._replace(broadcast=noted))
    for ours, theirs in zip(arrivals(noting, state, np.arange(4)), whole, strict=True):
        same(ours, theirs)
    assert asked == [[0, 1, 2], [3]]


# ---- deaths and damage ---------------------------------------------------------------------------------


KILLED = """
import json, sys, torch
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import dying
from federations import FULL_FEDNCV
from fedncv import rows, store
torch.set_num_threads(1)
dying.CONFIG = replace(dying.CONFIG, method=FULL_FEDNCV, rows="disk", rounds=5, checkpoint_every=2)
rows.write_point = lambda name: store.write_point(name)
base, points = Path(sys.argv[2]), json.loads(sys.argv[3])
dying.train(base / "reference")

def tried():
    for name, visit in points:
        kill = lambda folder: dying.wait(dying.fork(lambda: (dying.die_at(name, visit), dying.train(folder))))
        yield name, dying.survive(base / "run", base / "reference", kill)

print(json.dumps(dict(tried() if points else dying.points(base, base / "reference"))))
"""
MOMENTS = [
    f"rows: {moment}" for moment in ("before a row", "half a row", "a row under the name of an old one", "a row")
]


def killed(folder, points):
    """What became of runs killed at these (write point, visit), or at all of them, and resumed."""
    command = [sys.executable, "-c", KILLED, Path(__file__).parent, folder, json.dumps(points)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_killed_while_it_writes_rows_a_run_ends_with_the_same_bytes(tmp_path):
    """Three clients a round have nine rows: the 23rd is written in round 3, after the checkpoint of round 2."""
    points = [(MOMENTS[1], 23), (MOMENTS[2], 23), ("state: written, not renamed", 2)]
    assert killed(tmp_path, points) == {name: "equal" for name, _ in points}


@pytest.mark.slow
def test_killed_at_every_write_point_a_run_with_rows_on_disk_ends_with_the_same_bytes(tmp_path):
    verdicts = killed(tmp_path, [])
    assert set(MOMENTS) <= {name.rpartition(" (")[0] for name in verdicts}
    assert set(verdicts.values()) == {"equal"}, verdicts


def test_a_checkpoint_stays_whole_while_later_rounds_write(tmp_path):
    """The rows of round 2 are read back after round 5 has replaced them, all but the new checkpoint done."""
    problem = tiny(FULL_FEDNCV, rows="disk", per_round=3)
    store.create(tmp_path / "run", problem.config)
    state = start(problem)
    journal = store.Journal(tmp_path / "run", problem.config, state)
    state = train(problem, rounds=2, state=state)
    journal.append(state, {"round": 2}, {})
    journal.checkpoint()
    expected = {path: leaf.clone() for path, leaf in leaves(state) if isinstance(leaf, torch.Tensor)}
    for _ in range(3):
        state = train(problem, state=state)
        journal.append(state, {"round": state.round}, {})
    stored = dict(leaves(store.read_state(tmp_path / "run", problem)))
    for path, leaf in expected.items():
        assert torch.equal(stored[path], leaf), path


@pytest.fixture
def run(tmp_path):
    fedncv.simulate(out=tmp_path / "run", method="scaffold", rows="disk", **(QUICK | {"rounds": 2}))
    return tmp_path / "run"


def test_lost_and_damaged_rows_are_named(run):
    problem, path = build(read_run(run).config), run / "rows-kept.bin"
    whole = path.read_bytes()
    state = store.read_state(run, problem)
    client = next(iter(state.kept))
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"rows-kept.bin lacks the row of client \d+ .*restore it"):
        store.read_state(run, problem)
    path.unlink()
    with pytest.raises(ValueError, match=r"cannot read .*rows-kept.bin"):
        store.read_state(run, problem)
    damaged = bytearray(whole)
    slot = state.kept.slot(client).number
    damaged[slot * state.kept.file._stride + NAME + 5] ^= 1
    path.write_bytes(bytes(damaged))
    state = store.read_state(run, problem)
    with pytest.raises(ValueError, match=r"rows-kept.bin is damaged"):
        state.kept[client]


def test_overwriting_a_run_takes_its_rows_too(run):
    fedncv.simulate(out=run, method="fedavg", overwrite=True, **QUICK)
    assert not list(run.glob("rows-*"))


def test_a_run_goes_on_where_there_is_more_memory(tmp_path):
    """Rows stay where they were begun, and the digits are those of a run that was not stopped."""
    through = fedncv.simulate(out=tmp_path / "through", method="scaffold", rows="memory", **QUICK)

    def stop(row):
        if row["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedncv.simulate(out=tmp_path / "run", method="scaffold", rows="disk", on_round=stop, **QUICK)
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace('rows = "disk"', 'rows = "memory"'))
    resumed = fedncv.resume(tmp_path / "run")
    assert isinstance(resumed.state.kept, Rows)
    same(resumed.state, through.state)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == (tmp_path / "through" / "metrics.jsonl").read_bytes()


def many_clients(*arguments):
    script = Path(__file__).with_name("many_clients.py")
    return subprocess.run([sys.executable, script, *map(str, arguments)], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_ten_thousand_clients_in_bounded_memory_and_killed_between_checkpoints(tmp_path):
    """330 MB of rows and more; a run killed after 57 rounds, seven past its checkpoint, ends with the same state."""
    through = json.loads(many_clients(tmp_path / "through", 60).stdout)
    assert through["seen"] == 10_000
    assert through["rows"] > 2 * 10_000 * 4_000 * 4
    assert through["took"] < 0.5 * 2 * 10_000 * 4_000 * 4
    assert many_clients(tmp_path / "killed", 60, 57).returncode == -signal.SIGKILL
    resumed = json.loads(many_clients(tmp_path / "killed", 60).stdout)
    assert resumed["digest"] == through["digest"]


def test_a_round_of_a_large_federation_copies_only_the_pages_of_its_clients():
    """Clients of other pages keep the very objects of the old value, and the old value does not change."""
    old = on_disk() | {u: torch.tensor([float(u)]) for u in range(0, 20 * PAGE, 7)}
    new = old | {7: torch.tensor([-1.0]), 3 * PAGE + 1: torch.tensor([-2.0])}
    changed = {number for number in new._pages if new._pages[number] is not old._pages.get(number)}
    assert changed == {0, 3}
    assert old[7] == 7.0
    assert new[7] == -1.0
    assert new[14] == 14.0
    assert 3 * PAGE + 1 in new
    assert 3 * PAGE + 1 not in old
    assert sorted(new) == sorted({*range(0, 20 * PAGE, 7), 3 * PAGE + 1})
    assert len(new) == len(old) + 1


def test_a_checkpoint_has_ids_and_names_in_order_whatever_order_clients_came_in():
    clients = [5 * PAGE, 3, 2 * PAGE + 1, 1]
    rows = on_disk()
    for u in clients:
        rows = rows | {u: torch.tensor([float(u)])}
    ids, names = rows.ids_and_names()
    assert np.frombuffer(ids, dtype=np.int64).tolist() == sorted(clients)
    assert names == b"".join(rows.slot(u).name for u in sorted(clients))


def test_numbers_of_numpy_name_clients_too():
    rows = Rows(RowFile(CPU)) | {300: torch.zeros(2)}
    assert np.int64(300) in rows
    assert 300 in rows
    assert np.int64(44) not in rows
    assert "300" not in rows
