"""Studies over a Ray cluster: the bytes of one machine, whatever happens to workers. Several raylets stand in."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from raylets import QUIET, assert_same_bytes, left_of

from fedncv.cli import main
from fedncv.config import RunConfig
from fedncv.objects import code_of
from fedncv.results import LOCK, STATE, read_run
from fedncv.runner import Watch, alike, run_folders, run_group
from fedncv.studies import cluster as over
from fedncv.studies import copies as copies_
from fedncv.studies.cells import prepare
from fedncv.studies.cluster import Share, _share, joined, run_on_cluster, with_token
from fedncv.studies.copies import Copier, read_files, write_files
from fedncv.studies.cost import Cost, makespan, seconds_of, time_on
from fedncv.studies.group_process import unfit
from fedncv.studies.group_worker import Process
from fedncv.study import Cell, folder_name

pytestmark = QUIET
slow = pytest.mark.slow
CONFIG = RunConfig(model="mlp", clients=5, per_round=2, rounds=4, epochs=1, eval_every=1, lr=0.05)


def cells(*methods, seeds=(0, 1), **changes):
    configs = [replace(CONFIG, method=method, seed=seed, **changes) for method in methods for seed in seeds]
    return [Cell(Path("digits") / folder_name(config), config) for config in configs]


def watching(row=lambda folder, row: None):
    return Watch(lambda folders, rounds: None, row, lambda folder, reason: None, lambda folders: None)


def trained_here(folder, plan):
    folders = prepare(folder, plan)
    run_folders(folders, watching())
    return folders


def train(address, out, plan, watch=None):
    folders = prepare(out, plan)
    with joined(address, plan, 1) as place, with_token(place, out) as (place, line):
        run_on_cluster(alike(folders), place, watch or watching())
    return folders, line


def assert_same(folders, others):
    for folder, other in zip(folders, others, strict=True):
        assert_same_bytes(folder, other)
        assert {path.name for path in folder.iterdir()} - {LOCK} == {path.name for path in other.iterdir()} - {LOCK}


def processes():
    """Processes that train groups."""
    found = []
    for each in psutil.process_iter(["cmdline"]):
        if "group_process" in " ".join(each.info["cmdline"] or []) and each.status() != psutil.STATUS_ZOMBIE:
            found.append(each)
    return found


def gone():
    deadline = time.monotonic() + 15
    while processes() and time.monotonic() < deadline:
        time.sleep(0.2)
    return not processes()


@pytest.fixture
def apart(monkeypatch):
    """Workers do not see the study's folder, and send a copy of every round."""
    monkeypatch.setattr(over, "write_token", lambda path, content: None)
    monkeypatch.setattr(over, "COPY_SECONDS", 0.0)


# ---- on a real Ray ---------------------------------------------------------------------------------------


def test_a_study_on_a_cluster_has_the_bytes_of_one_machine(tmp_path, cluster):
    plan = cells("fedavg", rounds=2)
    rows = []
    folders, line = train(
        cluster.address, tmp_path / "out", plan, watching(lambda folder, row: rows.append((folder, row)))
    )
    assert_same(folders, trained_here(tmp_path / "here", plan))
    assert line.startswith("cluster: 1 machine, 1 groups at a time with 1 CPU each; they see")
    assert [(folder, row["round"]) for folder, row in rows] == [(f, t) for t in range(3) for f in folders]
    assert gone()
    assert not list((tmp_path / "out").glob(".cluster-*"))


@slow
@pytest.mark.parametrize("rows", ["memory", "disk"])
def test_two_nodes_that_do_not_see_the_folder_give_the_same_bytes(tmp_path, cluster, apart, rows):
    cluster.add_node(num_cpus=1)
    plan = cells("fedavg", "scaffold", "fedncv", rows=rows)
    begun = []
    watch = watching()._replace(begin=lambda folders, _rounds: begun.extend(folders))
    folders, line = train(cluster.address, tmp_path / "out", plan, watch)
    assert sorted(begun) == sorted(folders)  # each once
    assert "2 machines, 2 groups at a time" in line
    assert "send copies of their runs here" in line
    ours = trained_here(tmp_path / "here", plan)
    assert_same(folders, ours)
    machine = json.loads((folders[0] / "machine.jsonl").read_text())
    assert machine["cores"] == 1
    assert gone()


def kill_trainer(_out):
    for each in processes():
        each.kill()


def kill_worker(_out):
    for each in processes():
        each.parent().kill()


@slow
@pytest.mark.parametrize("kill", [kill_trainer, kill_worker])
@pytest.mark.parametrize("sees", [True, False])
def test_a_group_that_loses_its_worker_ends_with_the_same_bytes(tmp_path, cluster, kill, sees, request, capfd):
    if not sees:
        request.getfixturevalue("apart")
    plan = cells("scaffold", rounds=60, checkpoint_every=5)
    begins, killed = [], []

    def row(folder, row):
        if row["round"] >= 20 and not killed:
            killed.append(row["round"])
            kill(tmp_path)

    watch = watching(row)._replace(begin=lambda folders, rounds: begins.append(rounds[0]))
    folders, _ = train(cluster.address, tmp_path / "out", plan, watch)
    assert capfd.readouterr().err.count("was lost") == 1
    assert len(begins) == 2
    assert begins[0] == 0
    assert begins[1] > 0  # not from the start
    assert_same(folders, trained_here(tmp_path / "here", plan))
    assert gone()


@slow
def test_a_node_that_is_removed_and_one_that_joins(tmp_path, cluster, apart):
    second = cluster.add_node(num_cpus=1)
    plan = cells("fedavg", "scaffold", "fedprox", rounds=40, checkpoint_every=5)
    done = []

    def row(_folder, row):
        if row["round"] == 10 and not done:
            done.append(row)
            threading.Thread(target=cluster.remove_node, args=(second, False)).start()
            cluster.add_node(num_cpus=2)

    folders, _ = train(cluster.address, tmp_path / "out", plan, watching(row))
    assert_same(folders, trained_here(tmp_path / "here", plan))


# ---- the command -----------------------------------------------------------------------------------------

QUICK = ["--model", "mlp", "--clients", "5", "--per-round", "2", "--epochs", "1", "--eval-every", "20"]


def study(out, *words):
    return ["study", "smoke", *QUICK, "--methods", "fedavg", "scaffold", "--seeds", "2", "--out", str(out), *words]


@slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("sees", [True, False])
def test_ctrl_c_and_sigterm_leave_checkpoints_and_the_same_command_resumes(tmp_path, cluster, number, code, sees):
    long = ("--rounds", "150", "--checkpoint-every", "1000")
    program = "import sys; from fedncv.cli import main; from fedncv.studies import cluster\n"
    if not sees:
        program += "cluster.write_token = lambda path, content: None\n"
    program += "sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, *study(tmp_path / "out", *long, "--cluster", cluster.address)]
    process = subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    folder = tmp_path / "out" / "digits" / "fedavg-seed0"
    if sees:
        while not (folder / "metrics.jsonl").exists() or (folder / "metrics.jsonl").read_bytes().count(b"\n") < 10:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.05)
    else:
        while not processes() or processes()[0].cpu_times().user < 5:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.05)
    began = time.monotonic()
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    output, _ = process.communicate(timeout=40)
    assert time.monotonic() - began < 12
    assert process.returncode == code, output
    assert "nothing is lost" in output
    assert not left_of(process)
    assert gone()
    stopped = [read_run(path.parent).rounds for path in tmp_path.glob(f"out/digits/*/{STATE}")]
    assert stopped
    assert all(0 < rounds < 150 for rounds in stopped)
    assert not list((tmp_path / "out").glob(".cluster-*"))
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert f"begins at round {stopped[0]}/150" in again.stderr
    assert main(study(tmp_path / "here", *long)) == 0
    names = [f"{method}-seed{seed}" for method in ("fedavg", "scaffold") for seed in (0, 1)]
    for name in names:
        assert_same_bytes(tmp_path / "out" / "digits" / name, tmp_path / "here" / "digits" / name)


@slow
def test_tuning_and_a_dry_run_on_a_cluster(tmp_path, cluster, capsys):
    words = ("--rounds", "3", "--tune", "--tuning-lr", "0.05", "0.1", "--tuning-seeds", "1", "--seeds", "1")
    assert main(study(tmp_path / "out", *words, "--cluster", cluster.address, "--dry-run")) == 0
    said = capsys.readouterr().out
    assert "one round of each method on a worker of the cluster" in said
    assert " for what is left, 1 groups at a time, the longest first" in said
    assert not (tmp_path / "out").exists()
    assert main(study(tmp_path / "out", *words, "--cluster", cluster.address)) == 0
    assert main(study(tmp_path / "here", *words)) == 0
    for path in (tmp_path / "here").glob("**/metrics.jsonl"):
        assert_same_bytes(tmp_path / "out" / path.parent.relative_to(tmp_path / "here"), path.parent)


@slow
def test_bad_input_is_one_line_and_makes_no_folder(tmp_path, cluster, capsys):
    for words, said in (
        (("--cluster", "127.0.0.1:1"), "no Ray cluster answers at 127.0.0.1:1"),
        (("--cluster", "nonsense"), "cluster must be auto, HOST:PORT"),
        (("--cluster", cluster.address, "--device", "cuda"), "a group needs a CPU and a GPU, but no machine"),
        (("--cluster", cluster.address, "--device", "cuda:1"), "use --device cuda with --cluster"),
        (("--cluster", cluster.address, "--jobs", "2"), "leave out --jobs"),
        (("--cluster", cluster.address, "--jobs", "0"), "--jobs must be at least 1, not 0"),
        (("--cluster", cluster.address, "--engine", "ray", "--jobs", "2"), "leave out --jobs"),
        (
            ("--cluster", cluster.address, "--datasets", "mnist", "--data-dir", str(tmp_path / "none")),
            str(tmp_path / "none"),
        ),
    ):
        assert main(study(tmp_path / "out", *words)) == 2, words
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1, error
        assert not (tmp_path / "out").exists()


# ---- without Ray -----------------------------------------------------------------------------------------


def place(cpus=1):
    return over.Place(Share(cpus, 0.0), over.Setup([], "", 1, over.CheckJob([]), frozenset()))


def test_a_group_whose_worker_is_lost_three_times_without_a_row_between_is_given_up(tmp_path, capsys):
    groups = over.Groups([[tmp_path / "a"]], place(), watching())
    assert [groups._lost(0, "why") for _ in range(2)] == [True, True]
    groups._hear(0, over.Answer([("row", tmp_path / "a", {"round": 1})]))
    assert [groups._lost(0, "why") for _ in range(3)] == [True, True, False]
    assert groups._failed == [f"the worker of {tmp_path.name}/a was lost 3 times (the last time: why)"]


def test_a_folder_that_another_process_trains_is_not_sent(tmp_path):
    plan = cells("fedavg", seeds=(0,))
    (folder,) = prepare(tmp_path, plan)
    program = "import sys, time; from pathlib import Path; from fedncv import store; store.hold(Path(sys.argv[1]))"
    holder = subprocess.Popen(
        [sys.executable, "-c", program + "; print(1, flush=True); time.sleep(100)", str(folder)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        holder.stdout.readline()
        groups = over.Groups([[folder]], place(), watching())
        assert groups._send(None, 0) is None
        assert "is being trained by another process" in groups._failed[0]
    finally:
        holder.kill()
        holder.communicate()


NODES = {"a": {"CPU": 8.0}, "b": {"CPU": 4.0, "GPU": 2.0}, "c": {"GPU": 1.0}}


@pytest.mark.parametrize(
    ("device", "jobs", "groups", "share", "slots"),
    [
        ("cpu", 1, 100, Share(1, 0.0), 12),
        ("cpu", 1, 12, Share(1, 0.0), 12),
        ("cpu", 1, 6, Share(2, 0.0), 6),
        ("cpu", 1, 2, Share(4, 0.0), 3),  # 5 and more have room only once
        ("cpu", 1, 1, Share(8, 0.0), 1),
        ("cuda", 1, 5, Share(1, 1.0), 2),  # the machine without CPUs cannot help
        ("cuda", 2, 5, Share(1, 0.5), 4),
        ("cuda", 3, 5, Share(1, 1 / 3), 4),  # six thirds of a GPU, but four CPUs
    ],
)
def test_what_a_group_takes(monkeypatch, device, jobs, groups, share, slots):
    monkeypatch.setattr(over, "_nodes", lambda: NODES)
    assert _share(device, jobs, groups) == share
    assert sum(over._rooms(share).values()) == slots


def test_the_time_on_a_cluster_is_that_of_groups_on_slots_the_longest_first(tmp_path):
    assert makespan([3.0, 2.0, 2.0], 2) == 4.0
    assert makespan([], 2) == 0.0
    plan = cells("fedavg", "scaffold", "fedprox", seeds=(0, 1))
    lines = [("digits", name, 2, Cost(0.0, 0.0, each), "") for name, each in (("a", 3.0), ("b", 1.0), ("c", 1.5))]
    seconds = seconds_of(plan, lines)
    assert time_on(1, plan, seconds, tmp_path) == 11.0
    assert time_on(2, plan, seconds, tmp_path) == 6.0
    trained_here(tmp_path, plan[:2])  # fedavg is done: 2 and 3 are left
    assert time_on(2, plan, seconds, tmp_path) == 3.0
    assert time_on(2, plan, dict.fromkeys(seconds), tmp_path) is None


def test_copies_at_any_round_are_resumed_to_the_same_bytes(tmp_path, monkeypatch):
    """Rows on the disk, in a file whose places are used again; every copy is written over the one before."""
    monkeypatch.setattr(copies_, "SHARE", 0)
    plan = cells("scaffold", rows="disk", rounds=6)
    ours = trained_here(tmp_path / "calm", plan)
    theirs, copies = prepare(tmp_path / "theirs", plan), prepare(tmp_path / "copies", plan)
    sent = []

    def take(found):
        sent.append(found)
        for i, files in found.items():
            write_files(copies[i], files)

    copier = Copier(theirs, 0.0, take)

    class EnoughError(Exception):
        pass

    def stop(folder, row):
        if row["round"] == 4 and folder == theirs[1]:
            raise EnoughError

    copier.begin(2)
    with pytest.raises(EnoughError):
        run_group(theirs, watching(stop), copier.on_round)
    assert all(found.keys() == {0, 1} for found in sent)  # both runs, of one round
    assert len(sent) == 4
    for folder in copies:
        assert (folder / "metrics.jsonl").read_bytes().count(b"\n") == 4
    run_folders(copies, watching())
    for folder, other in zip(copies, ours, strict=True):
        assert_same_bytes(folder, other)


def test_while_the_earlier_checkpoint_is_there_its_rows_are_too(tmp_path, monkeypatch):
    before, after = {"rows-own.bin": b"old", STATE: b"1"}, {"rows-own.bin": b"new", STATE: b"2", "metrics.jsonl": b"m"}
    write_files(tmp_path, before)
    seen = []
    real = over.store.write_atomically

    def write(path, data, *, name):
        seen.append(read_files(tmp_path))
        real(path, data, name=name)

    monkeypatch.setattr("fedncv.studies.copies.write_atomically", write)
    write_files(tmp_path, after)
    for files in [*seen, read_files(tmp_path)]:
        assert {b"1": b"old", b"2": b"new"}[files[STATE]] in files["rows-own.bin"]
        assert files[STATE] == b"1" or files["metrics.jsonl"] == b"m"
    assert read_files(tmp_path) == after


def test_a_machine_without_the_data_or_the_code_is_unfit(tmp_path):
    (tmp_path / "mine_on_cluster.py").write_text("from fedncv.methods.fedavg import fedavg as method\n")
    mine = replace(CONFIG, method="mine_on_cluster:method", code_dir=str(tmp_path))
    mine = replace(mine, code=code_of(mine))
    assert unfit([CONFIG, mine]) == ""
    assert str(tmp_path) in unfit([replace(CONFIG, data="mnist", data_dir=str(tmp_path))])
    assert "nowhere_to_be_found" in unfit([replace(CONFIG, method="nowhere_to_be_found:method")])
    other = replace(mine, code=mine.code[:-6] + "000000")
    assert unfit([other]).startswith("its code of mine_on_cluster:method differs")


def test_a_process_that_computes_nothing_is_taken_for_hung_and_one_that_is_killed_is_named(tmp_path):
    setup = place().setup._replace(hung_seconds=1.0)
    process = Process(over.CheckJob([CONFIG]), setup)
    try:
        os.kill(process._process.pid, signal.SIGSTOP)
        reasons, until = [], time.monotonic() + 20
        while not any(reasons) and time.monotonic() < until:
            assert not [event for event in process.events() if event[0] != "said"]
            reasons.append(process.lost())
        assert reasons[-1] == "it has computed nothing for 1 s"
        process._process.kill()
        while not process.lost().startswith("its process ended with code -9 (killed"):
            assert time.monotonic() < until
            process.events()
    finally:
        process.close()


def test_workers_that_wait_for_groups_import_no_torch():
    code = "import sys, fedncv.studies.group_worker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- the files of docs/cluster ---------------------------------------------------------------------------

FILES = Path(__file__).parents[2] / "docs" / "cluster"


def test_the_kubernetes_manifest_is_a_ray_cluster_of_one_image_without_public_ports():
    yaml = pytest.importorskip("yaml")
    cluster, policy = yaml.safe_load_all((FILES / "raycluster.yaml").read_text())
    assert (cluster["apiVersion"], cluster["kind"]) == ("ray.io/v1", "RayCluster")
    spec = cluster["spec"]
    assert set(spec) == {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    assert len(groups) > 1
    images = set()
    for group in groups:
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        (container,) = group["template"]["spec"]["containers"]
        images.add(container["image"])
        assert "ports" not in container
        assert container["resources"]["requests"] == container["resources"]["limits"]
        volumes = {each["name"] for each in group["template"]["spec"]["volumes"]}
        assert {each["name"] for each in container["volumeMounts"]} == volumes
        assert not {"hostNetwork", "hostPort"} & set(group["template"]["spec"])
    assert len(images) == 1
    for group in spec["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        assert group["groupName"]
    assert spec["headGroupSpec"]["serviceType"] == "ClusterIP"
    assert policy["kind"] == "NetworkPolicy"
    labels = {"ray.io/cluster": cluster["metadata"]["name"]}
    assert policy["spec"]["podSelector"]["matchLabels"] == labels
    assert policy["spec"]["policyTypes"] == ["Ingress"]


def test_the_slurm_script_is_a_script_of_bash_with_arguments_that_ray_takes():
    script = FILES / "study.sbatch"
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    lines = script.read_text().replace("\\\n", " ").splitlines()
    (words,) = [line.split() for line in lines if "symmetric-run" in line and line.startswith("srun")]
    ray_words = words[words.index("symmetric-run") + 1 : words.index("--")]
    taken = subprocess.run(
        [sys.executable, "-m", "ray.scripts.scripts", "start", "--help"], capture_output=True, text=True, check=False
    )
    for word in ray_words:
        assert not word.startswith("--") or word in ("--address", "--min-nodes") or f"{word} " in taken.stdout, word
