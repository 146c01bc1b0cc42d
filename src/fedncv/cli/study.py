"""fedncv study: run one of the paper's tables or figures, or a quick study, as a folder of runs."""

import contextlib
import itertools
import math
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.console import Console
from rich.table import Table

from fedncv import notes, store
from fedncv.cli.arguments import check_out, check_words, parse
from fedncv.cli.progress import RunProgress
from fedncv.cli.settings_file import early, listed, read_settings_file, settings_file, with_settings
from fedncv.cli.summary import print_table
from fedncv.config import Settings
from fedncv.data import owners_note
from fedncv.data.table import markdown
from fedncv.engine.choose import decide
from fedncv.engine.problem import build, find_device
from fedncv.machine import versions
from fedncv.report.names import duration
from fedncv.results import CONFIG, read_run
from fedncv.runner import Watch, alike, reasons, refused, run_folders
from fedncv.spec import nearest
from fedncv.studies import STUDIES
from fedncv.studies.cells import anchored_study, check_study, failures, prepare, write_partition
from fedncv.studies.cluster import Place, calibrate, joined, run_on_cluster, with_token
from fedncv.studies.command import command
from fedncv.studies.cost import costs, seconds_of, time_on
from fedncv.studies.jobs import JobError, run_groups
from fedncv.studies.tuning import trial_cells, tune
from fedncv.study import BY, FILE, Cell, Study, Tuning, extend, read_study, to_toml
from fedncv.termination import STATUS, Terminated, saving_on_sigterm

Train = Callable[[list[Path], Watch], None]
MOST_SEEDS = 10_000
TRIALS_EACH = 8  # of every method, if --tune does not say more
NAMED = 5  # unfinished runs that a message names
FILE_KEYS: dict[str, type] = {  # of --config, besides the settings
    "name": str, "datasets": str, "methods": str, "seeds": int, "clients": int, "tune": bool, "tuning_lr": float,
    "tuning_seeds": int, "tuning_trials": int, "tuning_rounds": int, "tune_by": str, "tuned_on": str,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Arguments(Settings):
    """Run a study: datasets x methods x seeds, each once. The same command again resumes it.

    Studies: table1, fig1, fig2, fig3, table2, ablation, robustness, resnet18, unseen, and smoke (quick, on the
    built-in digits).
    """

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """The study. Its settings are the defaults below."""
    datasets: tuple[str, ...] = ()
    """One or more datasets; each is a column of the table. Your own are named as for --data of `fedncv run`."""
    methods: tuple[str, ...] = ()
    """One or more methods, with optional knobs."""
    seeds: int = 1
    """Number of seeds: 5 runs seeds 0 to 4. A larger number later runs only the missing seeds. 0: the study's own
    numbers, if its datasets have several."""
    clients: tuple[int, ...] = ()  # type: ignore[assignment]  # several make a column each
    """Number of clients. Each of several numbers is a column, and per_round grows in proportion."""
    tune: bool = False
    """First choose each method's learning rate and other knobs by trials, as many for every method, on seeds that are
    not reported (docs/studies.md)."""
    tuning_trials: int = TRIALS_EACH
    """--tune: number of trials of every method. The first is the method as it is named; the others are random."""
    tuning_seeds: int = len(Tuning().seeds)
    """--tune: number of seeds of a trial; they start at 1000."""
    tuning_rounds: int = 0
    """--tune: rounds of a trial; 0: as many as the study has."""
    tuning_lr: tuple[float, ...] = ()
    """--tune: try only these learning rates, and the methods as they are named."""
    tune_by: Literal["before", "after", "mean", "each"] = "before"
    """--tune: choose by the score before local training, after it, or by the mean of both; each: one choice for before
    and one for after, each with runs and a column of its own."""
    tuned_on: tuple[str, ...] = ()
    """--tune: columns that are not tuned themselves. COLUMN=OTHER: COLUMN takes what was tuned on OTHER; OTHER alone:
    all columns do."""
    cluster: str = ""
    """Train on the machines of a Ray cluster: HOST:PORT, or auto, the one that runs on this machine. Every group (the
    seeds of one method) trains on a CPU or a GPU of its own. With engine=ray one group after the other trains on the
    whole cluster. Empty: this machine."""
    jobs: int = 1
    """Methods to train at the same time, each in its own process. One does not fill an H200: we used 7. With --cluster:
    for each GPU."""
    tensorboard: bool = False
    """Also write TensorBoard event files into each run's folder."""
    config: str = ""
    """TOML file with these options, named with _ instead of -; name, the study's, may be one of them."""
    print_config: bool = False
    """Print all options as such a file, with file and options in place, and stop."""
    dry_run: bool = False
    """Print the cost of the study, estimated from one round of each method, and stop."""
    out: str = ""
    """The study's folder; empty: runs/NAME."""
    data: tyro.conf.Suppress[str] = ""


def main(argv: list[str]) -> int:
    path = early(argv, config="")["config"]
    study, values = _named(argv, path)
    if any(word.partition("=")[0] == "--data" for word in argv):
        raise ValueError("a study takes --datasets, one or more, not --data")
    _check_seeds(argv)
    arguments = parse(Arguments, argv, command="study", default=_defaults(study, values, path))
    check_words("--methods", arguments.methods)
    check_words("--datasets", arguments.datasets)
    study = _asked(study, arguments)
    out = Path(arguments.out or f"runs/{study.name}")
    if not STUDIES[study.name]().methods:
        return _datasets_only(study, out)
    if not study.methods:
        raise ValueError("nothing to run: give at least one value to --methods")
    if arguments.print_config:
        study = anchored_study(study)
        check_study(study)
        print(settings_file("study", _options(study, arguments)), end="")
        return 0
    if (out / FILE).exists():
        old = read_study(out)
        known = study.settings.code_dir or old.settings.code_dir
        study = replace(study, settings=replace(study.settings, code_dir=known))
        study = extend(old, anchored_study(study), where=out)
    else:
        study = anchored_study(study)
    check_study(study)
    if arguments.jobs < 1:
        raise ValueError(f"--jobs must be at least 1, not {arguments.jobs}")
    if arguments.cluster and arguments.engine == "ray" and arguments.jobs > 1:
        raise ValueError("engine=ray trains one group at a time on all workers of the cluster; leave out --jobs")
    if arguments.cluster and arguments.engine != "ray":
        with joined(arguments.cluster, _all_cells(study), arguments.jobs) as place:
            if arguments.dry_run:
                return _dry_run(study, out, place)
            return _run(study, out, arguments.tensorboard, place=place)
    if not arguments.dry_run or torch.cuda.is_available():  # a dry run also works without the GPU
        find_device(arguments.device)
    if arguments.dry_run:
        return _dry_run(study, out)
    return _run(study, out, arguments.tensorboard, jobs=arguments.jobs)


def _named(argv: list[str], path: str) -> tuple[Study, dict[str, Any]]:
    """Return the study that is named first, or in the file, and the file's values.

    --help without a name shows the defaults of smoke.
    """
    values = read_settings_file(path, others=FILE_KEYS, command="study") if path else {}
    named, name = values.pop("name", ""), argv[0] if argv and not argv[0].startswith("-") else ""
    if named and name and named != name:
        raise ValueError(f"{path} is for the study {named}, not {name}; name one of them")
    name = name or named
    if not isinstance(name, str):
        raise ValueError(f"{path}: name must be the name of a study, not {name!r}")
    if not name:
        if not {"-h", "--help"} & set(argv):
            raise ValueError(f"name a study first: fedncv study NAME, one of {', '.join(STUDIES)}")
        name = "smoke"
    if name not in STUDIES:
        raise ValueError(nearest(name, STUDIES, what="study"))
    return STUDIES[name](), values


def _defaults(study: Study, values: dict[str, Any], path: str) -> Arguments:
    """Return the options' defaults: the study's, with the values of the --config file in place."""
    values, found = dict(values), dict[str, Any]()
    for name, kind in FILE_KEYS.items():
        if name not in values:
            continue
        value = values.pop(name)
        if name in ("datasets", "methods", "clients", "tuning_lr", "tuned_on"):
            found[name] = listed(value, kind, name, path)
        elif type(value) is kind:
            found[name] = value
        else:
            raise ValueError(f"{path}: {name} must be {kind.__name__}, not {value!r}")
    if wrong := {"data", "method", "seed", "code"} & set(values):
        raise ValueError(f"{path}: a study has no {min(wrong)}, but datasets, methods and the number of seeds")
    settings = with_settings(values, study.settings, where=path)
    defaults = {
        "clients": study.clients or (study.settings.clients,),
        "datasets": study.datasets,
        "methods": study.methods,
        "seeds": 0 if study.num_seeds else len(study.seeds),
    }
    return Arguments(**vars(settings) | defaults | found | {"data": ""}, name=study.name)


def _options(study: Study, arguments: Arguments) -> dict[str, Any]:
    """Return the options that shape the study, with its settings as they are checked."""
    ours = {name: getattr(arguments, name) for name in FILE_KEYS if name != "name"}
    theirs = {f.name: getattr(study.settings, f.name) for f in fields(Settings) if f.name not in ("data", *ours)}
    return {"name": study.name} | ours | theirs


def _check_seeds(argv: list[str]) -> None:
    """Raise ValueError for a list of seeds, which only `fedncv run` takes."""
    given = argv[argv.index("--seeds") + 1 :] if "--seeds" in argv else []
    seeds = list(itertools.takewhile(str.isdecimal, given))
    if len(seeds) > 1:
        raise ValueError(f"--seeds {' '.join(seeds)}: a study takes the number of seeds; --seeds 3 means 0, 1 and 2")


def _asked(study: Study, arguments: Arguments) -> Study:
    """Return the study with the values of the options in place."""
    own = not arguments.seeds and bool(study.num_seeds)
    if arguments.seeds < 1 and not own:
        raise ValueError(f"--seeds, the number of seeds, must be at least 1, not {arguments.seeds}")
    for name in ("seeds", "tuning_seeds"):
        if (number := getattr(arguments, name)) > MOST_SEEDS:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option}, the number of seeds, must be at most {MOST_SEEDS:,}, not {number}")
    if not arguments.clients:
        raise ValueError("--clients needs at least one number")
    settings = {f.name: getattr(arguments, f.name) for f in fields(Settings)}
    several = len(arguments.clients) > 1
    settings["clients"] = study.settings.clients if several else arguments.clients[0]
    settings["data"] = arguments.datasets[0] if arguments.datasets else ""
    if arguments.engine != "ray":  # the runs are those of one machine, wherever they train
        settings["cluster"] = ""
    tuning = _tuning(study, arguments)
    num_seeds = study.num_seeds if own else {}
    return replace(
        study,
        settings=Settings(**settings),
        datasets=arguments.datasets,
        methods=arguments.methods,
        seeds=study.seeds if own else tuple(range(arguments.seeds)),
        clients=arguments.clients if several else (),
        tuning=tuning,
        num_seeds={data: number for data, number in num_seeds.items() if data in arguments.datasets},
        lr={} if arguments.tune or arguments.lr != study.settings.lr else study.lr,  # a given lr holds for all methods
    )


def _tuning(study: Study, arguments: Arguments) -> Tuning | None:
    """Return the tuning that the options ask for. Raise ValueError if they contradict each other."""
    if not arguments.tune:
        if arguments.tuned_on:
            raise ValueError(f"--tuned-on {' '.join(arguments.tuned_on)} needs --tune")
        return None
    if arguments.tuning_lr and arguments.tuning_trials != TRIALS_EACH:
        raise ValueError("--tuning-lr tries these learning rates only; leave it or --tuning-trials out")
    if arguments.tuning_trials < 1:
        raise ValueError(f"--tuning-trials must be at least 1, not {arguments.tuning_trials}")
    if arguments.tune_by not in BY:
        raise ValueError(f"--tune-by must be one of {', '.join(BY)}, not {arguments.tune_by!r}")
    seeds = tuple(range(1000, 1000 + arguments.tuning_seeds))
    tuning = Tuning(
        arguments.tuning_lr, seeds, arguments.tune_by, 0 if arguments.tuning_lr else arguments.tuning_trials,
        arguments.tuning_rounds, arguments.tuned_on or _transfers(study, arguments),
    )  # fmt: skip
    for lr in tuning.grid:
        if not 0 < lr < math.inf:
            raise ValueError(f"--tuning-lr must be above 0 and finite, such as 0.01, not {lr:g}")
    if len(set(tuning.grid)) < len(tuning.grid):
        raise ValueError(f"--tuning-lr repeats a value: {' '.join(f'{lr:g}' for lr in tuning.grid)}")
    return tuning


def _transfers(study: Study, arguments: Arguments) -> tuple[str, ...]:
    """Return the study's own transfers of tuned settings between the datasets that are asked for."""
    if len(arguments.clients) > 1 or study.variants:  # columns are not datasets
        return ()
    datasets = set(arguments.datasets)
    return tuple(f"{data}={other}" for data, other in study.transfers.items() if {data, other} <= datasets)


def _all_cells(study: Study) -> list[Cell]:
    """Return the reported runs, and those that choose the learning rates."""
    return study.cells() + trial_cells(study)


def _run(study: Study, out: Path, tensorboard: bool, *, jobs: int = 1, place: Place | None = None) -> int:
    check_out(out)
    if alone := next(out.glob(f"*/{CONFIG}"), None):
        raise ValueError(f"{alone.parent} is a single run, not part of a study; choose another --out")
    config = study.cells()[0].config
    problem = build(replace(config, device="cpu") if place else config)
    decide([problem._replace(config=config)])  # check data, model, device and engine before a folder is made
    if note := owners_note(problem.dataset, problem.config.partition, problem.config.clients):
        notes.note(note)
    for column, settings in study.columns().items():
        write_partition(out / column, replace(study.cells()[0].config, **vars(settings)))
    save = partial(_save, out)
    save(study)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(saving_on_sigterm())
            train: Train = partial(_run_side_by_side, jobs) if jobs > 1 else _run_here
            where = ""
            if place is not None:
                place, line = stack.enter_context(with_token(place, out))
                train, where = partial(_run_on_cluster, place), f"{config.device} of the cluster"
                notes.note(line)
            study = tune(study, out, partial(_run_all, "tuning", out, train, where, tensorboard), save)
            _run_all("run", out, train, where, tensorboard, study.cells())
    except (KeyboardInterrupt, Terminated) as why:
        print("\nstopped; nothing is lost. Resume with the same command.", file=sys.stderr)
        return STATUS if isinstance(why, Terminated) else 130
    for column in study.columns():
        print_table([read_run(out / cell.folder) for cell in study.cells() if cell.folder.parent == Path(column)])
    print(f"\nstudy  {out}\npage   fedncv report {shlex.quote(str(out))}")
    failed = failures(out, study.cells())
    for each in failed:
        print(f"fedncv: {each}", file=sys.stderr)
    return 2 if failed else 0


def _run_all(what: str, out: Path, train: Train, where: str, tensorboard: bool, cells: list[Cell]) -> None:
    left = prepare(out, cells)
    with RunProgress(what, [out / cell.folder for cell in cells], left, where=where) as progress:
        watch = progress.watch
        if tensorboard:
            from fedncv.tensorboard import beside

            watch = beside(watch)
        train(left, watch)


def _run_here(folders: list[Path], watch: Watch) -> None:
    if failed := refused(run_folders(folders, watch)):
        raise ValueError("\n".join(reasons(failed)))


def _run_side_by_side(jobs: int, folders: list[Path], watch: Watch) -> None:
    _run_apart(folders, lambda: run_groups(alike(folders), jobs, watch))


def _run_on_cluster(place: Place, folders: list[Path], watch: Watch) -> None:
    _run_apart(folders, lambda: run_on_cluster(alike(folders), place, watch))


def _run_apart(folders: list[Path], run: Callable[[], None]) -> None:
    """Train every run to its end. Raise ValueError if a process failed, with the unfinished runs and the remedy."""
    try:
        run()
    except JobError as error:
        why = str(error)
        runs = [run for run in map(read_run, folders) if run.status == "unfinished"]
        left = [f"{run.folder} after round {run.rounds} of {run.config.rounds}" for run in runs[:NAMED]]
        more = f" and {len(runs) - NAMED} more" if len(runs) > NAMED else ""
        killed = " (-9 means killed, usually out of memory: use fewer --jobs)" if "code -9" in why else ""
        raise ValueError(
            f"{why}{killed}. {len(runs)} of {len(folders)} runs are unfinished: {', '.join(left)}{more}; "
            "the same command resumes them"
        ) from None


def _save(out: Path, study: Study) -> None:
    """Write study.toml, with the command and the versions it was made with."""
    words = {"made_with": {"command": command(study)} | versions(study.settings.device)}
    store.write_atomically(out / FILE, to_toml(study, words).encode(), name="study")


def _datasets_only(study: Study, out: Path) -> int:
    """Write the table of the datasets. A study without methods trains nothing."""
    text = markdown()
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{study.name}.md"
    store.write_atomically(path, text.encode(), name="table")
    print(f"{text}\n{path}")
    return 0


def _dry_run(study: Study, out: Path, place: Place | None = None) -> int:
    cells = study.cells()
    trials = _all_cells(study)[len(cells) :]
    done = [cell for cell in cells + trials if (out / cell.folder / "state.safetensors").exists()]
    lines = calibrate(cells + trials, place) if place else costs(cells + trials)
    print(f"{study.title}: {len(cells)} runs, {len(trials)} more for tuning; {len(done)} of them started or finished")
    table = Table()
    for heading in ("column", "method", "runs", "samples", "bytes", "time"):
        table.add_column(heading, justify="left" if heading in ("column", "method") else "right")
    for column, method, runs, cost, _ in lines:
        table.add_row(column, method, str(runs), *_totals([(runs, cost.samples, cost.bytes, cost.seconds)]))
    table.add_section()
    total = [(runs, cost.samples, cost.bytes, cost.seconds) for _, _, runs, cost, _ in lines]
    table.add_row("total", "", str(len(cells) + len(trials)), *_totals(total))
    console = Console() if Console().is_terminal else Console(width=140)
    console.print(table)
    where = "a worker of the cluster" if place else "this machine"
    print(f"time: estimated from one round of each method on {where}, its seeds together; scoring comes on top")
    if place:
        seconds = seconds_of(cells + trials, lines)
        print(_on_cluster([time_on(place.slots, each, seconds, out) for each in (trials, cells)], place))
    for why in dict.fromkeys(why for *_, why in lines if why):
        print(f"unknown: {why}")
    return 0


def _on_cluster(phases: list[float | None], place: Place) -> str:
    """Return how long the rest of the study takes on the cluster, tuning first, and what this assumes."""
    known = [each for each in phases if each is not None]
    long = duration(sum(known)) if len(known) == len(phases) else "unknown"
    sharing = ", groups on one GPU do not slow each other down" if place.share.gpus not in (0, 1) else ""
    return (
        f"on the cluster: {long} for what is left, {place.slots} groups at a time, the longest first. Assumed: "
        f"all workers are as fast as the one that was measured{sharing}, and nobody else uses the cluster"
    )


def _totals(parts: list[tuple[int, float, float | None, float | None]]) -> list[str]:
    samples = sum(runs * each for runs, each, _, _ in parts)
    traffic = [None if each is None else runs * each for runs, _, each, _ in parts]
    seconds = [None if each is None else runs * each for runs, _, _, each in parts]
    words = [f"{samples:,.0f}"]
    words.append("unknown" if None in traffic else f"{sum(filter(None, traffic)) / 1e9:,.2f} GB")
    words.append("unknown" if None in seconds else duration(sum(filter(None, seconds))))
    return words
