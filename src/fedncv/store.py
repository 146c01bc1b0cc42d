"""A run on disk. The machine may crash at any moment: nothing is lost or counted twice.

    config.toml         all settings, including the defaults
    metrics.jsonl       one row per round, append-only, without clock times: equal runs give equal bytes
    timing.jsonl        the duration of each round, the layers it was trained in, and when more rounds were planned
    machine.jsonl       date, machine, versions, engine, layers and resolved method, a line for every start and resume
    partition.json      samples of each class at each client, for the report; of a study it is in the column's folder
    privacy.jsonl       with differential privacy, what each round spends: written before the round (ledger.py)
    status.json         what the training process last said of itself, for `fedncv watch`; no result depends on it
    state.safetensors   the latest checkpoint: written to a new file, flushed, renamed; no pickle is ever loaded
    rows-*.bin          rows of clients, if they are stored on disk; the checkpoint names those it refers to

A checkpoint stores the length of metrics.jsonl. Resuming truncates the file to that length and continues, so a
resumed run ends with the same bytes as one that was never stopped. (Except rows-*.bin: equal checkpoints refer to
equal rows, but not at equal positions.)

Damage is recognised: a checkpoint has checksums of its tensors, of its other content, and of metrics.jsonl up to that
length; every row of rows-*.bin, every line of timing.jsonl and machine.jsonl, and partition.json have their own. The
settings in config.toml that change the numbers are compared with those in the checkpoint.
"""

import json
import math
import os
import sys
import zlib
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedncv.config import (
    OBJECTS,
    RunConfig,
    differences,
    named,
    own_functions,
    own_object,
    short_name,
    write_toml,
)
from fedncv.data import DATASETS
from fedncv.engine import budget
from fedncv.engine.problem import Problem, State, keeps, start
from fedncv.files import NEW, checksum, open_here, records, sealed, sweep, truncate
from fedncv.files import write_atomically as replace_file
from fedncv.fingerprint import fingerprint
from fedncv.machine import facts
from fedncv.methods import in_full
from fedncv.methods.base import BufferRule
from fedncv.notes import note
from fedncv.objects import code_changes
from fedncv.portable import LockedError, lock
from fedncv.results import (
    CONFIG,
    LEDGER,
    LOCK,
    MACHINE,
    METRICS,
    MODEL,
    STATE,
    STATUS,
    TIMING,
    checkpoint,
    extensions,
    header_config,
    is_run,
    metrics_fault,
    read_header,
    read_rows,
    unplanned,
    unusable,
)
from fedncv.rows import NAME, RowFile, Rows, all_rows
from fedncv.schedule import lr_factor
from fedncv.study import PARTITION
from fedncv.tree import leaves, row, stack, tree_map


def write_point(name: str) -> None:
    """Mark a moment at which a crash would do most harm. Tests send SIGKILL here."""


def write_atomically(path: Path, data: bytes, *, name: str) -> None:
    """Write the file such that a crash leaves the old one or the new one, never a part."""
    replace_file(path, data, mark=lambda moment: write_point(f"{name}: {moment}"))


# ---- the folder ----------------------------------------------------------------------------------------


_held: dict[Path, int] = {}  # folders that this process trains


def hold(folder: Path) -> None:
    """Lock the run in ``folder`` until ``release`` or the end of this process. Raise ValueError if it is locked.

    The lock ends with its process, even after a crash, and forked workers do not inherit it.
    """
    folder = folder.resolve()
    if folder in _held:
        return
    descriptor = open_here(folder / LOCK, os.O_RDWR | os.O_CREAT)
    try:
        lock(descriptor)
    except OSError:
        os.close(descriptor)
        raise
    except LockedError:
        os.close(descriptor)
        raise ValueError(f"{folder} is being trained by another process; wait for it, or stop it first") from None
    _held[folder] = descriptor


def release(folder: Path) -> None:
    descriptor = _held.pop(folder.resolve(), None)
    if descriptor is not None:
        os.close(descriptor)


def refuse_runs(folders: list[Path]) -> None:
    """Raise ValueError if one holds a run, in the words of the command line; ``create`` speaks to Python."""
    for folder in filter(is_run, folders):
        raise ValueError(
            f"{folder} already holds a run; resume it with `fedncv resume {quote(str(folder))}`, "
            "repeat it with --overwrite, or choose another --out"
        )


def create(folder: Path, config: RunConfig, *, overwrite: bool = False) -> None:
    """Make a folder with only the config in it. Raise ValueError if it holds a run, unless ``overwrite``."""
    if is_run(folder):
        if not overwrite:
            raise ValueError(
                f"{folder} already holds a run; go on with fedncv.resume({str(folder)!r}), repeat it with "
                "overwrite=True, or choose another out"
            )
        hold(folder)
        for name in (
            STATE,
            METRICS,
            TIMING,
            MACHINE,
            STATUS,
            PARTITION,
            LEDGER,
            MODEL,
        ):  # replaced below: it is a run at every moment
            (folder / name).unlink(missing_ok=True)
        for path in folder.glob(_rows_name("*")):
            path.unlink(missing_ok=True)
    elif folder.exists() and any(path.name != LOCK and not _is_begun(path.name) for path in folder.iterdir()):
        raise ValueError(f"{folder} exists and is not a run; choose another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot create the folder {folder}: {error.strerror}") from None
    write_atomically(folder / CONFIG, write_toml(config).encode(), name="config")


def _is_begun(name: str) -> bool:
    """Return whether this is the name of a config that a process died writing."""
    return name.startswith(CONFIG) and name.endswith(NEW)


# ---- metrics -------------------------------------------------------------------------------------------


def append(folder: Path, name: str, values: dict[str, Any]) -> bytes:
    """Write one more line, and return it."""
    line = json.dumps(values, allow_nan=False).encode() + b"\n"
    descriptor = open_here(folder / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with os.fdopen(descriptor, "ab", buffering=0) as file:
        file.write(line[: len(line) // 2])
        write_point(f"{name}: half a row")
        file.write(line[len(line) // 2 :])
    write_point(f"{name}: a row")
    return line


class Written(NamedTuple):
    """The beginning of metrics.jsonl that belongs to a state: its bytes and their CRC-32."""

    length: int = 0
    check: int = 0

    def and_then(self, line: bytes) -> "Written":
        return Written(self.length + len(line), zlib.crc32(line, self.check))


def _written(path: Path) -> Written:
    length = _size(path)
    return Written(length, checksum(path, length) or 0) if length else Written()


def _cut_half_a_line(path: Path) -> None:
    """Remove a last line that a crash cut short, so that the next one does not continue it."""
    data = path.read_bytes() if path.exists() else b""
    if data and not data.endswith(b"\n"):
        truncate(path, data.rfind(b"\n") + 1)


# ---- checkpoints ---------------------------------------------------------------------------------------


class Journal:
    """Write the rows and checkpoints of a run in progress.

    It keeps the latest state whose row is complete, so it can write a checkpoint at any moment, even in the middle
    of a round or of a row.
    """

    def __init__(
        self, folder: Path, config: RunConfig, state: State, *, constants: float = 0.0, samples: str = "",
        order: str = "", graph: str = "",
    ) -> None:  # fmt: skip
        hold(folder)
        self._folder, self._config = folder, config
        # of the model and of the user's own data, which no checkpoint holds
        marks = {"constants": constants, "samples": samples, "order": order, "graph": graph}
        self._marks = {name: mark for name, mark in marks.items() if mark}
        self._layers: dict[str, str] = {}  # empty for a federation of real machines
        self._before = str(checkpoint(folder).get("layers", ""))
        self._complete = (state, _written(folder / METRICS))
        self._saved = state  # referenced, so that the rows of the checkpoint on disk are not replaced
        for name in (CONFIG, STATE, PARTITION):
            sweep(folder / name)
        for path, rows in all_rows(state):
            rows.file.place(folder / _rows_name(path))

    @property
    def layers(self) -> str:
        """The layers of the latest round, as ``trains_in`` recorded them; empty before the first round."""
        if not self._complete[0].round:
            return ""
        return self._layers.get("layers") or self._before or str(_last_timing(self._folder).get("layers", ""))

    def trains_in(self, layers: str) -> None:
        """Record the layers of the next rounds. Print a line if they changed: the last bits then differ."""
        before = self.layers or layers
        if before != layers:
            note(
                f"{self._folder}: {before} layers until round {self._complete[0].round}, {layers} layers from now on; "
                "they agree up to rounding, not bit for bit"
            )
        self._layers = {"layers": layers}

    def begin(self, engine: str, layers: str, why: str, partition: dict[str, Any]) -> None:
        """Record what the next rounds are trained with and on, and which samples the clients hold."""
        for name in (MACHINE, TIMING):
            _cut_half_a_line(self._folder / name)
        self.trains_in(layers)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        words = {"date": now, "round": self._complete[0].round, "engine": engine, "layers": layers}
        words |= {"why": why} if why else {}
        words["method"] = _in_full(self._config.method)  # with every knob, also those of its parts and defaults
        append(self._folder, MACHINE, sealed(words | {"device": self._config.device} | facts(self._config.device)))
        if not any((folder / PARTITION).exists() for folder in (self._folder, self._folder.parent)):
            write_atomically(self._folder / PARTITION, json.dumps(sealed(partition)).encode(), name="partition")

    def append(self, state: State, row: dict[str, Any], timing: dict[str, Any]) -> None:
        """Write the row of the round that led to ``state``."""
        line = append(self._folder, METRICS, row)
        self._complete = (state, self._complete[1].and_then(line))
        append(self._folder, TIMING, sealed(timing | self._layers))

    def checkpoint(self) -> None:
        """Save the latest complete state, after the rows it refers to are on disk."""
        state, written = self._complete
        metrics = self._folder / METRICS
        if metrics.exists():
            truncate(metrics, written.length)
        for _, rows in all_rows(state):
            rows.file.sync()
        tensors, numbers = _flatten({"state": _packed(state)})
        header = {
            "numbers": numbers,
            "metrics_bytes": written.length,
            "metrics_check": written.check,
            "config": write_toml(self._config),
            "method": _in_full(self._config.method),
            "check": _checksum(tensors),
            **({"layers": self.layers} if self.layers else {}),
            **self._marks,
        }
        write_atomically(self._folder / STATE, save(tensors, {"fedncv": json.dumps(sealed(header))}), name="state")
        self._saved = state

    def fail(self, reason: str) -> None:
        """Save the latest complete state, and write the reason to the metrics; resuming removes that line."""
        self.checkpoint()
        append(self._folder, METRICS, {"round": self._complete[0].round + 1, "failed": reason})

    def stop(self, reason: str) -> None:
        """Save the latest complete state, and write why the run was stopped; resuming removes that line."""
        self.checkpoint()
        append(self._folder, METRICS, {"round": self._complete[0].round, "stopped": reason})


def _last_timing(folder: Path) -> dict[str, Any]:
    """Return the latest row of timing.jsonl; empty if it is missing or damaged."""
    rows = records(folder / TIMING)
    return rows[-1] if rows else {}


def _rows_name(path: str) -> str:
    return f"rows-{path}.bin"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _check_metrics(folder: Path, header: dict[str, Any]) -> None:
    """Raise ValueError unless metrics.jsonl begins with the rows that the checkpoint refers to."""
    if fault := metrics_fault(folder, header):
        raise ValueError(f"{folder / METRICS} {fault}; restore it, or delete {STATE} to repeat the run from its start")
    if "metrics_check" in header:
        return
    rows, done = read_rows(folder, within=header["metrics_bytes"]), header["numbers"]["state.round"]
    if (rows[-1]["round"] if rows else 0) != done:
        raise ValueError(
            f"{folder / STATE} is of round {done}, but {METRICS} ends with round {rows[-1]['round'] if rows else 0} "
            f"there; restore one of them, or delete {STATE} to repeat the run from its start"
        )
    print(
        f"{folder}: its checkpoint is of an earlier version of fedncv and has no checksum of {METRICS}; "
        "damage there would not be noticed until the next checkpoint",
        file=sys.stderr,
    )


def load_state(folder: Path, problem: Problem, *, runs: int = 1) -> State:
    """Return the latest checkpoint, or the start if there is none, and truncate metrics.jsonl to it.

    ``runs`` is the number of runs that share the memory. Raise ValueError if a file is damaged or the config differs.
    """
    hold(folder)
    path, metrics = folder / STATE, folder / METRICS
    if not path.exists():
        metrics.unlink(missing_ok=True)
        return start(problem, runs=runs)
    tensors, header = _read(path)
    _check_config(folder, header, problem)
    _check_own_method(folder, header, problem.config.method)
    if header.get("samples", "") not in ("", mark := samples_mark(problem)):
        raise ValueError(
            f"{folder} was started with other samples than {problem.config.data!r} gives now "
            f"(#{header['samples']}, now #{mark}): a file was changed, or a function draws without a seed; "
            "restore the data, or repeat the run with --overwrite"
        )
    graph = "" if problem.topology is None else problem.topology.mark
    if header.get("graph", "") != graph:
        raise ValueError(
            f"{folder} was started with another graph than {problem.config.topology!r} gives now; restore that file, "
            "or repeat the run with --overwrite"
        )
    _check_metrics(folder, header)
    if metrics.exists():
        truncate(metrics, header["metrics_bytes"])
    return _restore(problem, folder, tensors, header["numbers"], runs)


def samples_mark(problem: Problem) -> str:
    """Return a fingerprint of the samples if a text names the user's own file or function, and "" otherwise.

    Built-in datasets have published checksums, and an object that was passed from Python has its own fingerprint.
    """
    text, data = problem.config.data, problem.dataset
    if text.partition(":")[0] in DATASETS or own_object(text):
        return ""
    return fingerprint((data.x, data.y, data.owners))


def is_finished(folder: Path) -> bool:
    """Return whether the run has its last round and all files agree on it; otherwise resuming it says what to do."""
    try:
        config, (_, header) = (folder / CONFIG).read_text(encoding="utf-8"), _read(folder / STATE)
        return (
            header["config"] == config
            and header["numbers"]["state.round"] >= header_config(folder, header).rounds
            and _size(folder / METRICS) == header["metrics_bytes"]
            and bool(read_rows(folder))
        )
    except (ValueError, KeyError, OSError):
        return False


def read_state(folder: Path, problem: Problem) -> State:
    """Return the latest checkpoint, and change nothing."""
    if not (folder / STATE).exists():
        raise ValueError(f"{folder} has no {STATE} yet; `fedncv resume {quote(str(folder))}` trains it")
    tensors, header = _read(folder / STATE)
    _check_config(folder, header, problem)
    if (model := own_functions(problem.config).get("model")) in code_changes(problem.config):
        note(
            f"{folder}: the code of {model} has changed since this run; its numbers go by the names of the model "
            "as it is now"
        )
    return _restore(problem, folder, tensors, header["numbers"])


def _check_config(folder: Path, header: dict[str, Any], problem: Problem, *, extending: bool = False) -> None:
    """Raise ValueError if settings differ from the checkpoint's; machine and measurement settings may differ."""
    ours, theirs = problem.config, header_config(folder, header)
    now = _in_full(ours.method)
    try:
        begun = _in_full(header.get("method") or theirs.method)  # knobs added since then have their defaults
    except ValueError:
        if "method" not in own_functions(theirs):
            raise ValueError(
                f"an older version of fedncv trained {folder}, and its {theirs.method} cannot be resumed by this one; "
                "resume it with that version, or repeat it with --overwrite"
            ) from None
        begun = ""
    # the user's own code is compared before
    differing = differences(theirs, ours, but=("rounds", "code", *named("machine", "measurement")))
    if begun == now:  # the same method, spelled differently
        differing.pop("method", None)
    for name in OBJECTS:  # own objects: compared with config.toml when they were passed
        if own_object(getattr(theirs, name)) and own_object(getattr(ours, name)):
            differing.pop(name, None)
    if differing:
        words = ", ".join(f"{name} {before!r}, now {after!r}" for name, (before, after) in differing.items())
        raise ValueError(f"{folder / STATE} does not match {folder / CONFIG} ({words}); restore one of them")
    if header.get("order", "") != problem.model.layout.order:
        raise ValueError(
            f"another version of fedncv wrote {folder / STATE}, with the filters of convolutions in another order; "
            "resume it with that version, or repeat it with --overwrite"
        )
    begun_with = header.get("constants", problem.model.constants_mark)
    if not math.isclose(begun_with, problem.model.constants_mark, rel_tol=1e-4):
        raise ValueError(
            f"{folder} was started with other frozen weights or constant buffers than the model has now; "
            "give the model's function the same ones again"
        )
    if begun != now and not own_object(now) and "method" not in own_functions(ours):
        raise ValueError(
            f"{folder} was started as {begun}, but {ours.method!r} means {now} in this version of fedncv; "
            f'to resume it as it was, write method = "{begun}" into {folder / CONFIG}'
        )
    if theirs.rounds != ours.rounds:
        _check_rounds(folder, header["numbers"]["state.round"], theirs.rounds, problem)
        if not extending and (fault := unplanned(folder, theirs.rounds, ours.rounds)):
            raise ValueError(fault)


def _check_own_method(folder: Path, header: dict[str, Any], method: str) -> None:
    """Raise ValueError if the knobs of the user's own method have other values now, because of its defaults."""
    begun, now = header.get("method", ""), _in_full(method)
    if not begun or own_object(method):
        return
    try:
        begun = _in_full(begun)
    except ValueError as error:
        raise ValueError(f"{folder} was started as {begun}, but your file has changed since: {error}") from None
    if begun != now:
        raise ValueError(
            f"{folder} was started as {begun}, but {method!r} means {now} now: your file has other defaults; "
            f'to resume it as it was, write method = "{begun}" into {folder / CONFIG}'
        )


def _check_rounds(folder: Path, done: int, planned: int, problem: Problem) -> None:
    """Raise ValueError if the finished rounds would differ in a run of as many rounds as ``problem`` has.

    Then another number of rounds gives what a run of that many rounds from the start gives, bit for bit.
    """
    config = problem.config
    if config.rounds < done:
        raise ValueError(f"{folder} has {done} rounds; rounds must be at least that, not {config.rounds}")
    if config.rounds == done < planned:
        raise ValueError(
            f"{folder} has done {done} of {planned} rounds, and the scores of the last round are still to be measured; "
            f"rounds must be at least {done + 1}"
        )
    for t in range(done):
        before, now = (lr_factor(config.schedule, t, rounds) for rounds in (planned, config.rounds))
        if before != now:
            raise ValueError(
                f"{folder} was planned with {planned} rounds, and its schedule {config.schedule} depends on that: with "
                f"{config.rounds} rounds, round {t} would have had {now / before:.3g} times its learning rate; "
                "start another run"
            )
    if done:
        budget.refuse_more(problem, planned)
    if done and _at_start(problem, planned) != _at_start(problem, config.rounds):
        raise ValueError(
            f"{folder} was planned with {planned} rounds, and {short_name(config.method)} depends on that number; "
            f"start another run with {config.rounds} rounds"
        )


def _at_start(problem: Problem, rounds: int) -> str:
    """Return a fingerprint of the server's state before the first of so many rounds."""
    here = problem.at(0)
    federation, rule = here.federation._replace(rounds=rounds), here.buffer_rule
    server = here.method.init(here.model.start_P, federation)
    return fingerprint((server, rule.init(here.model.start_R, federation) if isinstance(rule, BufferRule) else ()))


def extend(folder: Path, problem: Problem, *, only_check: bool = False) -> None:
    """Write the rounds of ``problem`` into the run's config. Raise ValueError if its checkpoint does not permit it."""
    hold(folder)
    try:
        if (folder / STATE).exists():
            header = _read(folder / STATE)[1]
            _check_config(folder, header, problem, extending=True)
            _check_own_method(folder, header, problem.config.method)
            if not only_check:
                _note_extension(folder, header, problem.config.rounds)
        if not only_check:
            write_atomically(folder / CONFIG, write_toml(problem.config).encode(), name="config")
    finally:
        release(folder)


def _note_extension(folder: Path, header: dict[str, Any], rounds: int) -> None:
    """Record in timing.jsonl that the plan changes after the checkpoint. A number that nobody planned is refused."""
    planned = header_config(folder, header).rounds
    if rounds != planned or extensions(folder):
        layers = {key: value for key, value in _last_timing(folder).items() if key == "layers"}
        words = {"round": header["numbers"]["state.round"], "seconds": 0.0, "planned": planned, "extended": rounds}
        _cut_half_a_line(folder / TIMING)
        append(folder, TIMING, sealed(words | layers))


def _in_full(method: str) -> str:
    return method if own_object(method) else in_full(method)


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    header = read_header(path)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dictionary)
        if header["check"] != _checksum(tensors, forms="metrics_check" in header):
            raise ValueError("its checksum differs")
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise unusable(path, str(error) or type(error).__name__) from None
    return tensors, header


def _checksum(tensors: dict[str, Tensor], *, forms: bool = True) -> int:
    """Return the CRC-32 of names, types, shapes and values; earlier versions left out types and shapes."""
    check = 0
    for name in sorted(tensors):
        tensor = tensors[name]
        about = f"{name} {tensor.dtype} {tuple(tensor.shape)}" if forms else name
        values = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        check = zlib.crc32(values.data, zlib.crc32(about.encode(), check))
    return check


def _packed(tree: Any) -> Any:
    """Return the tree with every dictionary of clients stacked: a few tensors instead of thousands.

    For rows in a file it holds only their names.
    """
    if isinstance(tree, Rows) and tree:
        ids, names = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in tree.ids_and_names())
        return {"ids": ids.view(torch.int64), "names": names.view(-1, NAME), "form": tree.file.form}
    if isinstance(tree, Mapping):
        clients = sorted(tree)
        ids = torch.tensor(clients, dtype=torch.int64)
        return {"ids": ids, "rows": stack([tree[u] for u in clients])} if clients else {"ids": ids}
    if isinstance(tree, tuple):
        parts = [_packed(part) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    return tree


def _flatten(tree: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors, numbers = {}, {}
    for path, leaf in leaves(tree):
        if isinstance(leaf, Tensor):
            tensors[path] = leaf.detach().cpu().contiguous().clone()
        else:
            numbers[path] = leaf
    return tensors, numbers


class _Stored(NamedTuple):
    """A checkpoint's content, and where its rows are."""

    folder: Path
    tensors: dict[str, Tensor]
    numbers: dict[str, Any]
    device: torch.device


def _fill(template: Any, path: str, stored: _Stored) -> Any:
    """Return a tree of the template's form with the stored leaves; a dictionary has the clients that were stored."""
    if isinstance(template, Tensor):
        return stored.tensors[path].to(template.device)
    if isinstance(template, Rows | dict):
        return _fill_rows(template, path, stored)
    if isinstance(template, tuple):
        names: Iterable[Any] = getattr(template, "_fields", range(len(template)))
        parts = [_fill(part, f"{path}.{name}", stored) for name, part in zip(names, template, strict=True)]
        return type(template)(*parts) if hasattr(template, "_fields") else tuple(parts)
    return stored.numbers[path]


def _fill_rows(template: Any, path: str, stored: _Stored) -> Any:
    ids = stored.tensors[f"{path}.ids"].tolist()
    if not ids:
        return template if isinstance(template, Rows) else {}
    like = template.file.like if isinstance(template, Rows) else next(iter(template.values()), None)
    like = torch.empty(0, device=stored.device) if like is None else like  # no example: each row is one tensor
    if f"{path}.names" in stored.tensors:
        return _find_rows(like, path, ids, stored)
    rows = _fill(like, f"{path}.rows", stored)
    return {u: tree_map(torch.clone, row(rows, i)) for i, u in enumerate(ids)}


def _find_rows(like: Any, path: str, ids: list[int], stored: _Stored) -> Rows:
    """Return the rows that the checkpoint names, from their file."""
    written = stored.tensors[f"{path}.names"].numpy().tobytes()
    names = [written[i : i + NAME] for i in range(0, len(written), NAME)]
    file = RowFile(stored.device, like=like, form=stored.numbers[f"{path}.form"])
    place = stored.folder / _rows_name(path.removeprefix("state."))
    file.place(place)
    remedy = "restore it, or repeat with --overwrite"
    try:
        slots = file.find(names)
    except OSError as error:
        raise ValueError(f"cannot read {place}: {error.strerror}; {remedy}") from None
    for u, name in zip(ids, names, strict=True):
        if name not in slots:
            raise ValueError(f"{place} lacks the row of client {u} that {STATE} refers to; {remedy}")
    return Rows(file, {u: slots[name] for u, name in zip(ids, names, strict=True)})


def _check_size(problem: Problem, folder: Path, server: Any, tensors: dict[str, Tensor]) -> None:
    """Raise ValueError if the checkpoint's model has another number of parameters than the model has now."""
    size = problem.model.start_P.shape
    for path, leaf in leaves({"state": {"server": server}}):
        if isinstance(leaf, Tensor) and leaf.shape == size and path in tensors and tensors[path].shape != size:
            raise ValueError(
                f"{folder / STATE} holds a model of {tensors[path].numel()} numbers, but {problem.config.model} makes "
                f"one of {size.numel()} now; restore the code of the model"
            )


def _restore(
    problem: Problem, folder: Path, tensors: dict[str, Tensor], numbers: dict[str, Any], runs: int = 1
) -> State:
    template = start(problem, runs=runs)
    _check_size(problem, folder, template.server, tensors)
    kept = keeps(problem.at(0), template, 0)
    if isinstance(template.kept, Rows):
        template.kept.file.like = kept
    else:
        template = template._replace(kept={0: kept})
    try:
        state = _fill(template, "state", _Stored(folder, tensors, numbers, problem.model.start_P.device))
    except KeyError as error:
        raise ValueError(
            f"another version of fedncv wrote {folder / STATE}, and this one cannot resume it (it has no {error}); "
            "resume it with that version, or repeat it with --overwrite"
        ) from None
    assert isinstance(state, State)
    return state
