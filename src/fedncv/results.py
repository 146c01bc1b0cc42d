"""Read the files of runs. Imports no training code, and changes nothing."""

import difflib
import json
import math
import tomllib
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

from fedncv.config import (
    RunConfig,
    changed_code,
    code_marks,
    differences,
    from_dict,
    named,
    own_functions,
    own_object,
    read_toml,
    short_name,
    short_names,
)
from fedncv.files import SEAL, checksum, is_intact, parse

CONFIG, METRICS, TIMING, STATE = "config.toml", "metrics.jsonl", "timing.jsonl", "state.safetensors"
MACHINE = "machine.jsonl"  # a line for every time the run was started or resumed: when, and on which machine
LOCK = ".lock"  # held by the process that trains the run
STATUS = "status.json"  # what that process last said of itself, for `fedncv watch`
ACCURACY = "accuracy"  # the only score shown in percent and compared with the label prior
LEDGER = "privacy.jsonl"  # what each round spends of a privacy budget
MODEL = "model.safetensors"  # written by `fedncv export`

LOWER_IS_BETTER = ("log_loss", "brier", "ece", "rmse", "mae")  # of the built-in metrics

ROW_BEGINS = b'{"round": '
PER_CLIENT = "_clients"  # suffix of a metric that is a list with one number per client
STANDARD_ERROR = "_standard_error"  # suffix of a score's standard error, if a sample of the clients was scored
UNSEEN = "unseen_"  # before the name of a score or metric of clients that never train
NO_NUMBERS = {  # other values that are not numbers; dictionaries hold a federation's reasons by client
    "failed": str, "stopped": str, "score_name": str, "skipped": list, "sizes": list, "counted": list, "absent": list,
    "barred": dict, "refused": dict, "clipped": dict,
}  # fmt: skip
PROTOCOL = tuple(name for name in named("protocol") if name not in ("seed", "code"))
SHOWN = 44  # characters of a wrong value that a message shows

Points = dict[int, list[float]]  # round -> the values of the seeds


class Score(NamedTuple):
    """The score measured as "before" and "after", and how to show it: scale times the number, then the unit."""

    name: str
    scale: int
    unit: str

    def show(self, value: float, digits: int) -> str:
        """
        >>> PERCENT.show(0.1234, 1), Score("minus squared error", 1, "").show(-0.1234, 1)
        ('12.3', '-0.1234')
        """
        return self.written(self.scale * value, digits)

    def written(self, scaled: float, digits: int) -> str:
        """Return a number that is already multiplied by the scale."""
        return f"{scaled:.{digits}f}" if self.unit else f"{scaled:.4g}"

    def axis(self, what: str = "") -> str:
        """
        >>> PERCENT.axis("before"), Score("minus squared error", 1, "").axis()
        ('accuracy before, %', 'minus squared error')
        """
        return f"{self.name} {what}".strip() + ("," + self.unit if self.unit else "")


PERCENT = Score(ACCURACY, 100, " %")


class Sample(NamedTuple):
    """Clients that were scored, of all that have test samples."""

    scored: int
    of: int

    @property
    def words(self) -> str:
        """
        >>> Sample(1000, 1_000_000).words
        'scored on 1,000 of 1,000,000 clients'
        """
        return f"scored on {self.scored:,} of {self.of:,} clients"


class Run(NamedTuple):
    folder: Path
    config: RunConfig
    rows: list[dict[str, Any]]

    @property
    def rounds(self) -> int:
        """Number of finished rounds."""
        return max((row["round"] for row in self.rows if "failed" not in row), default=0)

    @property
    def status(self) -> str:
        """finished, failed or unfinished."""
        if self.rows and "failed" in self.rows[-1]:
            return "failed"
        finished = bool(self.rows) and self.rounds == self.config.rounds
        return "finished" if finished else "unfinished"

    @property
    def stopped(self) -> str:
        """Reason why a callback stopped the run before its last round; empty if none did."""
        return str(self.rows[-1].get("stopped", "")) if self.rows else ""

    @property
    def score(self) -> "Score":
        name = self.last("score_name") or PERCENT.name
        return PERCENT if name == PERCENT.name else Score(name, 1, "")

    @property
    def sample(self) -> Sample | None:
        """The sample of clients that was scored; None if all were."""
        clients, of = self.last("scored_clients"), self.last("scored_of")
        return None if clients is None or of is None else Sample(len(clients), of)

    @property
    def scorers(self) -> str:
        """How many clients of a federation told the latest score, in words; empty for a simulation."""
        by, among = self.last("before_by"), self.last("scored_among")
        return "" if by is None or among is None else f"scored by {by} of {among} clients"

    def last(self, name: str) -> Any:
        """Return the latest value of a metric, or None."""
        return next((row[name] for row in reversed(self.rows) if row.get(name) is not None), None)


class Extension(NamedTuple):
    """A run got another number of rounds when it had finished ``round`` of the ``planned`` ones."""

    round: int
    planned: int
    rounds: int


def extensions(folder: Path) -> list[Extension]:
    """Return how the plan of a run was changed, from timing.jsonl; lines that are damaged are passed over.

    Of several plans that were made after one round, the last one holds.
    """
    path = folder / TIMING
    found: dict[tuple[int, int], Extension] = {}
    for line in path.read_bytes().split(b"\n") if path.exists() else []:
        if b'"extended"' in line:
            try:
                row = parse(line)
                each = Extension(row["round"], row["planned"], row["extended"])
                if is_intact(row) and all(type(number) is int for number in each):
                    found[each.round, each.planned] = each
            except (ValueError, KeyError, TypeError):
                continue
    return [each for each in found.values() if each.planned != each.rounds]


# ---- what a checkpoint says, read without torch ----------------------------------------------------------


def unusable(path: Path, reason: str) -> ValueError:
    return ValueError(
        f"{path} cannot be used ({reason}); restore it, or delete it and resume to repeat the run from its start"
    )


def read_header(path: Path) -> dict[str, Any]:
    """Return what a checkpoint says about itself. Raise ValueError if that is damaged, or is not a checkpoint's."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > path.stat().st_size:
                raise ValueError("it is truncated or not a safetensors file")
            header = parse(parse(file.read(length))["__metadata__"]["fedncv"])
            fault = _header_fault(header)
    except (OSError, ValueError) as error:
        raise unusable(path, error.strerror or "" if isinstance(error, OSError) else str(error)) from None
    except (KeyError, TypeError):
        fault = "it is not a fedncv checkpoint"
    if fault:
        raise unusable(path, fault)
    return {name: value for name, value in header.items() if name != SEAL}


def _header_fault(header: Any) -> str:
    if not isinstance(header, dict) or "check" not in header:
        return "it is not a fedncv checkpoint"
    if not is_intact(header) or ("metrics_check" in header and SEAL not in header):
        return "its checksum differs"
    kinds = {"numbers": dict, "config": str, "metrics_bytes": int, "check": int}
    kinds |= {name: kind for name, kind in {"metrics_check": int, "method": str}.items() if name in header}
    for name, kind in kinds.items():
        if type(header.get(name)) is not kind:
            return f"its {name} is {_short(header.get(name))}, which is not {KINDS[kind]}"
    done = header["numbers"].get("state.round")
    if type(done) is not int or done < 0 or header["metrics_bytes"] < 0:
        return f"its round is {_short(done)}, and its metrics_bytes {header['metrics_bytes']}"
    return ""


KINDS = {dict: "a dictionary", str: "a text", int: "a whole number"}


def checkpoint(folder: Path) -> dict[str, Any]:
    """Return what the latest checkpoint of a run says about itself; empty if there is none, or none of use."""
    try:
        return read_header(folder / STATE) if (folder / STATE).exists() else {}
    except ValueError:
        return {}


def header_config(folder: Path, header: dict[str, Any]) -> RunConfig:
    """Return the config that a checkpoint was written with."""
    try:
        values = tomllib.loads(header["config"])
    except (tomllib.TOMLDecodeError, RecursionError):
        raise unusable(folder / STATE, "its config is damaged") from None
    return from_dict(values, where=str(folder / STATE))


def metrics_fault(folder: Path, header: dict[str, Any]) -> str:
    """Return what is wrong with the rows of metrics.jsonl that the checkpoint refers to; empty: nothing."""
    path, length = folder / METRICS, header["metrics_bytes"]
    size = path.stat().st_size if path.exists() else 0
    if size < length:
        return f"was edited, or lacks rows that {STATE} refers to"
    if not length:
        return ""
    with path.open("rb") as file:
        file.seek(length - 1)
        if file.read(1) != b"\n":
            return f"was edited, or lacks rows that {STATE} refers to"
    if "metrics_check" in header and checksum(path, length) != header["metrics_check"]:
        return f"was edited or is damaged: its checksum differs from that in {STATE}"
    return ""


def unplanned(folder: Path, planned: int, rounds: int) -> str:
    """Return the message for a number of rounds that differs from the checkpoint's, but by no command; or nothing."""
    if planned == rounds or any((each.planned, each.rounds) == (planned, rounds) for each in extensions(folder)):
        return ""
    return (
        f"{folder / CONFIG} has rounds {rounds}, but the run was planned with {planned}; write rounds = {planned} into "
        f"it, and then extend the run with `fedncv resume {quote(str(folder))} --rounds {rounds}`"
    )


def _check_agreement(folder: Path, config: RunConfig) -> None:
    """Raise ValueError if config.toml differs from the checkpoint in a setting that changes the numbers."""
    header = checkpoint(folder)
    if not header:
        return
    theirs = header_config(folder, header)
    differing = differences(theirs, config, but=("rounds", "code", *named("machine", "measurement")))
    for name, (before, now) in list(differing.items()):  # the same, spelled differently, or own code that was checked
        if (own_object(str(before)) and own_object(str(now))) or (name == "method" and now == header.get("method")):
            differing.pop(name)
    if differing:
        words = ", ".join(f"{name} {before!r}, now {now!r}" for name, (before, now) in differing.items())
        raise ValueError(f"{folder / STATE} does not match {folder / CONFIG} ({words}); restore one of them")
    if fault := unplanned(folder, theirs.rounds, config.rounds):
        raise ValueError(fault)


def is_run(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def check_folder(folder: Path) -> None:
    """Raise ValueError if the folder does not exist, and suggest one with a similar name."""
    if folder.is_dir():
        return
    if folder.exists():
        raise ValueError(f"{folder} is a file; name a folder of runs, such as {folder.parent}")
    beside = folder.parent.iterdir() if folder.parent.is_dir() else iter(())
    close = difflib.get_close_matches(folder.name, [path.name for path in beside if path.is_dir()], n=1)
    remedy = f"did you mean {folder.parent / close[0]}?" if close else "fedncv run and fedncv study create one in runs/"
    raise ValueError(f"there is no folder {folder}; {remedy}")


def runs_in(folder: Path) -> list[Path]:
    """Return the folder itself if it is a run, otherwise the runs in it. Raise ValueError if there are none."""
    check_folder(folder)
    found = [folder] if is_run(folder) else sorted(path.parent for path in folder.glob(f"*/{CONFIG}"))
    if not found:
        deeper = sorted(path.parent.parent for path in folder.glob(f"*/*/{CONFIG}"))
        remedy = (
            f"; name a folder of runs, such as {deeper[0]}, or see fedncv report {quote(str(folder))}" if deeper else ""
        )
        raise ValueError(f"{folder} holds no run (no {CONFIG} in it or one level below){remedy}")
    return found


def read_config(folder: Path) -> RunConfig:
    if not is_run(folder):
        raise ValueError(f"{folder} is not a run: it has no {CONFIG}")
    return from_dict(read_toml(folder / CONFIG), where=str(folder / CONFIG))


def read_rows(folder: Path, *, within: int | None = None) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl, without a last line that a crash cut short. Raise ValueError if damaged.

    ``within`` is the number of bytes to read; None: all, and those of the latest checkpoint are compared with it.
    """
    path = folder / METRICS
    header = checkpoint(folder) if within is None else {}  # before the rows: a run in progress writes it after them
    if header and (fault := metrics_fault(folder, header)):
        raise ValueError(
            f"{path} {fault}; restore it, or run `fedncv resume {quote(str(folder))}` after you have deleted {STATE}, "
            "which repeats the run from its start"
        )
    if not path.exists():
        return []
    *lines, cut = path.read_bytes()[:within].split(b"\n")
    rows = [parse_row(path, number, line) for number, line in enumerate(lines, start=1)]
    check_cut(path, len(lines) + 1, cut)
    return rows


def parse_row(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """Return the row in a complete line of metrics.jsonl. Raise ValueError if it is damaged."""
    try:
        row = parse(line)
        fault = _fault(row)
    except ValueError:
        fault = "is not a row of metrics: it is not JSON"
    if fault:
        raise _damaged(path, number, fault)
    return dict(row)


def check_cut(path: Path, number: int, cut: bytes) -> None:
    """Raise ValueError if a last line without its end cannot be the beginning of a row."""
    if not cut.startswith(ROW_BEGINS[: len(cut)]):
        raise _damaged(path, number, "is not the beginning of a row")


def _damaged(path: Path, number: int, fault: str) -> ValueError:
    return ValueError(
        f"{path}, line {number}, {fault}; restore it, or run `fedncv resume {quote(str(path.parent))}`, which repeats "
        f"the rounds after the last checkpoint, or the whole run if you delete {STATE}"
    )


def _fault(row: Any) -> str:
    """Return what is wrong with a row of metrics; empty: nothing."""
    if not isinstance(row, dict) or "round" not in row:
        return "is not a row of metrics: it has no round"
    if type(row["round"]) is not int or row["round"] < 0:
        return f"has round {_short(row['round'])} instead of a whole number, at least 0"
    for name, value in row.items():
        if name in NO_NUMBERS:
            if not isinstance(value, NO_NUMBERS[name]):
                return f"has {name} {_short(value)}, a value of the wrong type"
        elif name.endswith(PER_CLIENT):
            if not isinstance(value, list) or not all(each is None or _is_number(each) for each in value):
                return f"has {name} {_short(value)} instead of a list of numbers"
        elif value is not None and not _is_number(value):
            return f"has {name} {_short(value)} instead of a finite number"
    return ""


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False


def _short(value: Any) -> str:
    """Return the value as JSON; of a long one only the beginning.

    >>> _short("0.5"), _short(float("nan")), _short([0.5] * 9)
    ('"0.5"', 'NaN', '[0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.…')
    """
    text = json.dumps(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def read_run(folder: Path) -> Run:
    """Return a run. Raise ValueError if its files are damaged or do not belong together."""
    config = read_config(folder)
    _check_agreement(folder, config)
    return Run(folder, config, read_rows(folder))


def read_runs(folders: list[Path]) -> tuple[list[Run], dict[Path, str]]:
    """Return the runs that can be read, and the error of each of the others."""
    runs: list[Run] = []
    unreadable: dict[Path, str] = {}
    for folder in folders:
        try:
            runs.append(read_run(folder))
        except ValueError as error:
            unreadable[folder] = str(error)
    return runs, unreadable


def by_method(runs: list[Run]) -> dict[str, list[Run]]:
    """Group runs that are seeds of one experiment: they share the method and every other setting of the protocol.

    A group is named by its method. If runs of one method differ in a setting, it is part of the name, so that only
    seeds are ever averaged: "fedavg, lr 0.1". Of runs with the same seed too, which are repetitions, the first counts.
    """
    repeated = {id(run) for run, _ in repetitions(runs)}
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        if id(run) not in repeated:
            groups.setdefault(_experiment(run), []).append(run)
    methods = short_names(group[0].config.method for group in groups.values())
    named_groups: dict[str, list[Run]] = {}
    for group in groups.values():
        method = group[0].config.method
        others = differing([run for run in runs if run.config.method == method])
        values = {name: words[getattr(group[0].config, name)] for name, words in others.items()}
        words = [f"{name} {value}" for name, value in values.items() if value]
        name = ", ".join([methods[method], *words])
        if name in named_groups:  # a method may be called "mine, lr 0.1" by its author
            own = own_object(method)
            name = f"{name} #{own.fingerprint}" if own else method
        while name in named_groups:
            name += "'"
        named_groups[name] = group
    return named_groups


def _experiment(run: Run) -> tuple[Any, ...]:
    return (*(getattr(run.config, name) for name in PROTOCOL), *code_marks(run.config).items())


def sampling_error(runs: list[Run], name: str) -> float | None:
    """Return the standard error that scoring samples of clients causes in the mean over runs of the last ``name``.

        sqrt( sum_i se_i^2 ) / number of runs

    because runs of different seeds have independent samples. A run in which all clients were scored has se_i = 0. None
    if this holds for all runs, or if a run does not know its error, because it scored a single client.
    """
    runs = [run for run in runs if run.last(name) is not None]
    if not any(run.sample for run in runs):
        return None
    errors = [run.last(name + STANDARD_ERROR) if run.sample else 0.0 for run in runs]
    return None if None in errors else math.sqrt(sum(error**2 for error in errors)) / len(errors)


def samples_of(runs: list[Run]) -> str:
    """Return how many clients were scored, in words; empty if all were, in all runs.

    In a federation, it is those that agreed to tell their scores.
    """
    told = list(dict.fromkeys(run.scorers for run in runs))
    if any(told):
        return ", or ".join(words or "by all clients" for words in told)
    found = dict.fromkeys(run.sample for run in runs)
    words = ", or on ".join(f"{each.scored:,} of {each.of:,} clients" for each in found if each is not None)
    return f"scored on {words}{', or on all clients' if None in found else ''}" if words else ""


def repetitions(runs: list[Run]) -> list[tuple[Run, Run]]:
    """Return every run whose protocol and seed are those of an earlier one, with that one."""
    first: dict[tuple[Any, ...], Run] = {}
    pairs = [(run, first.setdefault((*_experiment(run), run.config.seed), run)) for run in runs]
    return [(run, other) for run, other in pairs if run is not other]


def differing(runs: list[Run]) -> dict[str, dict[Any, str]]:
    """Return the settings of the protocol, other than method and seed, in which runs differ: each value in words.

    Runs differ in their code if they name one function, and its code was another one.
    """
    found = {}
    for name in PROTOCOL:
        values = list(dict.fromkeys(getattr(run.config, name) for run in runs))
        if len(values) > 1 and name != "method":
            words = short_names(values) if isinstance(values[0], str) else {value: f"{value:g}" for value in values}
            found[name] = {value: words[value] or "none" for value in values}
    if functions := changed_code(run.config for run in runs):
        found["code"] = {run.config.code: code_words(run.config, functions) for run in runs}
    return found


def code_words(config: RunConfig, functions: list[str]) -> str:
    """Return these functions of a run with their fingerprints; empty if the run names none of them."""
    marks = {name: mark for name, mark in code_marks(config).items() if name in functions}
    return " ".join(f"{short_name(name)} {f'#{mark}' if mark else 'unknown'}" for name, mark in marks.items())


def privacy_of(runs: list[Run]) -> dict[str, str]:
    """Return method -> its guarantee in words, for those with differential privacy."""
    found = {}
    for name, group in by_method(runs).items():
        if any(run.last("delta") is not None for run in group):
            spent = [run.last("epsilon") for run in group]
            largest = None if None in spent else max(spent)
            found[name] = (
                "no differential privacy, because there is no noise"
                if largest is None
                else f"epsilon {largest:.4g} at delta {group[0].last('delta'):g}, for a client as a whole"
            )
    return found


_STANDARD_ERROR = "; s.e. is the standard error that this sample causes"


def notes_on(runs: list[Run]) -> list[str]:
    """Return lines about the settings that not all runs share, runs that repeat others, and runs that were extended."""
    extended: dict[Extension, list[Path]] = {}
    for run in runs:
        for each in extensions(run.folder):
            extended.setdefault(each, []).append(run.folder)
    words = [f"{name} ({', '.join(filter(None, values.values()))})" for name, values in differing(runs).items()]
    sampled = samples_of(runs)
    return [
        *[f"note: {sampled}{_STANDARD_ERROR * any(run.sample for run in runs)}"] * bool(sampled),
        *[f"note: these runs differ in {', '.join(words)}"] * bool(words),
        *(f"note: {name}: {words}" for name, words in privacy_of(runs).items()),
        *(f"note: {run.folder} repeats {other.folder} and is not counted" for run, other in repetitions(runs)),
        *(
            f"note: {first}{f' and {len(others)} more were' if others else ' was'} planned with {planned} rounds and "
            f"extended to {rounds} at round {at}"
            for (at, planned, rounds), (first, *others) in extended.items()
        ),
    ]


def share_samples(runs: list[Run]) -> bool:
    """Return whether the clients of all runs hold the same samples, if their seeds are equal."""
    others = {own_functions(run.config).get("data") for run in runs} & set(changed_code(run.config for run in runs))
    return not others and not {*named("samples"), "clients"} & set(differing(runs))


def metrics_of(runs: list[Run]) -> list[str]:
    """Return the metrics that these runs measured beside the score, in the order of their rows.

    For each NAME a row has before_NAME (all samples together), before_NAME_client_mean, before_NAME_defined (number of
    clients in that mean) and before_NAME_clients; the same with after_.
    """
    end = "_defined"
    names = [key for run in runs for row in run.rows for key in row if key.endswith(end) and not key.startswith(UNSEEN)]
    return list(dict.fromkeys(name.removesuffix(end).partition("_")[2] for name in names))


def scalars(row: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a row by name, for a logger; lists, texts, missing values and the round are left out.

    >>> scalars({"round": 3, "before": 0.5, "before_auroc": None, "before_clients": [0.5], "replies": 2})
    {'before': 0.5, 'replies': 2.0}
    """
    return {name: float(value) for name, value in row.items() if name != "round" and _is_number(value)}


def points(runs: list[Run], name: str) -> Points:
    """Return the rounds at which the metric was measured, with the values of all runs."""
    found: Points = {}
    for run in runs:
        for row in run.rows:
            if row.get(name) is not None:
                found.setdefault(row["round"], []).append(row[name])
    return dict(sorted(found.items()))
