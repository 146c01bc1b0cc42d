"""fedncv variance: measure the error of the aggregated update, method by method, at the same frozen models."""

import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated

import tyro
from rich.progress import TimeRemainingColumn

from fedncv.cli.arguments import check_words, parse
from fedncv.cli.progress import bar
from fedncv.config import RunConfig, Settings
from fedncv.engine.check import check as check_config
from fedncv.files import write_atomically
from fedncv.notes import note
from fedncv.observatory.compare import OWN, check, rows_of
from fedncv.observatory.table import Row, print_tables, read_rows
from fedncv.results import is_run, read_config
from fedncv.store import append

ROWS = "variance.jsonl"


@dataclass(frozen=True, kw_only=True)
class Arguments(Settings):
    """Compare estimators of the update at the same frozen models of one reference run.

    At some rounds of the reference run, train all clients and compare every method's aggregated update over the draw
    of clients with full participation: error, bias, variance, and the part that its memory removes. Each method
    updates its memory in shadow along the reference run. Print tables, write the rows and draw five pictures.
    """

    what: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="METHOD ...")]
    """Methods, with optional knobs. If a run's folder comes first, its settings and method are the reference's."""
    seeds: tuple[int, ...] = (0,)
    """One or more seeds; each has its own reference run."""
    at: tuple[int, ...] = ()
    """Rounds after which the models are frozen: --at 20 40; empty: five rounds, evenly spaced up to the last."""
    reference: str = "fedavg"
    """The method whose run the others follow; own: every method follows its own run."""
    draws: int = 2000
    """Number of draws of clients, if too many to list and the estimator is a ratio; at least 10."""
    within: bool = True
    """Train all clients a second time, to separate mini-batch noise from differences between clients."""
    show: str = ""
    """Train nothing; print the tables and draw the pictures of the rows in this file."""
    out: str = "runs/variance"
    """Folder for rows and pictures."""
    overwrite: bool = False
    """Replace existing rows."""


def main(argv: list[str]) -> int:
    arguments = parse(Arguments, argv, command="variance", default=_defaults(argv))
    out = Path(arguments.out)
    if arguments.show:
        return _show(read_rows(Path(arguments.show)), out)
    config, methods = _asked(arguments)
    at = arguments.at or tuple(sorted({max(1, round(config.rounds * k / 5)) for k in range(1, 6)}))
    _check(arguments, config, at)
    check(config, methods, arguments.reference)
    path = out / ROWS
    if path.exists() and not arguments.overwrite:
        raise ValueError(f"{path} already exists; --show {path} shows it, --overwrite replaces it")
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(path, b"")
    rows: list[Row] = []
    stopped = False
    with _Progress(len({*methods, *({arguments.reference} - {OWN})}) * max(at)) as progress:
        found = rows_of(
            [replace(config, seed=seed) for seed in arguments.seeds], methods, reference=arguments.reference, at=at,
            num_draws=arguments.draws, within=arguments.within, tell=progress.tell,
        )  # fmt: skip
        try:
            for row in found:
                rows.append(row)
                append(out, ROWS, row)
                progress.row(row)
        except KeyboardInterrupt:
            stopped = True
    if stopped:
        print(f"stopped; the {len(rows)} rows so far are in {path}", file=sys.stderr)
    if rows:
        _show(rows, out)
    return 130 if stopped else 0


def _defaults(argv: list[str]) -> Arguments:
    """Return the options' defaults: the protocol's, or those of the run that is named first."""
    if argv and not argv[0].startswith("-") and is_run(Path(argv[0])):
        config = read_config(Path(argv[0]))
        settings = {f.name: getattr(config, f.name) for f in fields(Settings)}
        return Arguments(**settings, what=(), seeds=(config.seed,), reference=config.method)
    return Arguments(what=())


def _asked(arguments: Arguments) -> tuple[RunConfig, tuple[str, ...]]:
    methods = arguments.what
    if methods and Path(methods[0]).is_dir():
        if not is_run(Path(methods[0])):
            raise ValueError(f"{methods[0]} is a folder but not a run; name a run's folder, or methods")
        methods = methods[1:] or (read_config(Path(methods[0])).method,)
    if not methods:
        raise ValueError("name a run's folder or one or more methods, as in: fedncv variance fedavg fedvarp fedncv")
    check_words("fedncv variance", methods)
    if len(set(methods)) < len(methods) or len(set(arguments.seeds)) < len(arguments.seeds):
        raise ValueError("a method or a seed is named twice; name each once")
    return RunConfig(**{f.name: getattr(arguments, f.name) for f in fields(Settings)}), methods


def _check(arguments: Arguments, config: RunConfig, at: tuple[int, ...]) -> None:
    if not arguments.seeds:
        raise ValueError("give at least one seed: --seeds 0")
    if config.rounds == 0:
        raise ValueError("rounds is 0: there is no path to follow; give at least one round")
    check_config(config)
    if arguments.draws < 10:
        raise ValueError(f"--draws must be at least 10, not {arguments.draws}")
    for t in at:
        if not 0 <= t <= config.rounds:
            raise ValueError(f"--at {t}: the run has rounds 0 to {config.rounds}")


def _show(rows: list[Row], out: Path) -> int:
    from fedncv.observatory.figures import draw_all

    print_tables(rows)
    for picture in draw_all(rows, out):
        print(f"picture  {picture}")
    return 0


class _Progress:
    """Show a bar over all rounds in a terminal; elsewhere print a line for every row."""

    def __init__(self, total: int) -> None:
        self._bar = bar(TimeRemainingColumn())
        self._task = self._bar.add_task("", total=total)
        self._done, self._now = 0, ""

    def __enter__(self) -> "_Progress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def tell(self, what: str, round: int, rounds: int) -> None:
        if what != self._now:
            self._done, self._now = self._done + (rounds if self._now else 0), what
        if not self._bar.disable:
            self._bar.update(self._task, description=f"{what}  round {round}/{rounds}", completed=self._done + round)

    def row(self, row: Row) -> None:
        if self._bar.disable:
            words = f"{row['method']}  seed {row['seed']}  round {row['round']}"
            note(f"{words}  error {row['mse'] / row['full2']:.3f}  bias² {row['bias2'] / row['full2']:.3f}")
