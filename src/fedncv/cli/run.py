"""fedncv run: train a federation once for every method and seed."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from shlex import quote
from typing import Literal

from fedncv import notes, store
from fedncv.cli.arguments import check_out, check_words, parse
from fedncv.cli.progress import RunProgress, unfinished
from fedncv.cli.settings_file import early, listed, read_settings_file, settings_file, with_settings
from fedncv.cli.summary import print_table
from fedncv.config import Settings
from fedncv.data import owners_note
from fedncv.engine.check import anchored
from fedncv.engine.choose import decide
from fedncv.engine.problem import Problem, build, start
from fedncv.methods import in_full
from fedncv.recipes import RECIPES, Recipe
from fedncv.results import read_runs
from fedncv.runner import reasons, run_folders
from fedncv.spec import nearest
from fedncv.study import FILE, data_folder_name, folder_name
from fedncv.termination import STATUS, Terminated, saving_on_sigterm

MANY = 10_000  # clients; to score so many takes minutes


@dataclass(frozen=True, kw_only=True)
class Arguments(Settings):
    """Train a federation once for every method and seed.

    A recipe sets the defaults, a config file replaces some of them, and options replace both.
    """

    method: tuple[str, ...] = ("fedavg",)
    """One or more methods, with optional knobs and switches: --method fedavg fedprox:mu=0.1 scaffold+prior; or
    your own: my.module:function:mu=0.1. `fedncv methods` lists them."""
    seeds: tuple[int, ...] = (0,)
    """One or more seeds: --seeds 0 1 2. A seed decides the partition, the initial model and every draw."""
    recipe: Literal["protocol", "smoke"] = "protocol"
    """Named settings: protocol (the paper's) or smoke (a quick run on the built-in digits)."""
    config: str = ""
    """TOML file with settings, named like these options with _ instead of -; method and seeds are lists."""
    print_config: bool = False
    """Print all settings as such a file, with recipe, file and options in place, and stop."""
    out: str = ""
    """Folder for the runs, with one subfolder per run; empty: runs/DATA-RECIPE."""
    overwrite: bool = False
    """Repeat existing runs from the start, replacing their results."""


def main(argv: list[str]) -> int:
    recipe_name, recipe = _defaults(argv)
    default = Arguments(
        **vars(recipe.settings),
        method=recipe.methods,
        seeds=recipe.seeds,
        recipe=recipe_name,  # type: ignore[arg-type]  # _defaults has checked it
    )
    arguments = parse(Arguments, argv, command="run", default=default)
    settings = Settings(**{f.name: getattr(arguments, f.name) for f in fields(Settings)})
    configs = Recipe(settings, arguments.method, arguments.seeds).configs()
    if not configs:
        raise ValueError("nothing to run: give at least one method and one seed")
    check_words("--method", arguments.method)
    configs = [anchored(config) for config in configs]
    _check_different(dict.fromkeys(config.method for config in configs))
    if arguments.print_config:
        shared = {f.name: getattr(configs[0], f.name) for f in fields(Settings)}
        print(settings_file("run", {"method": arguments.method, "seeds": arguments.seeds} | shared), end="")
        return 0
    for config in {config.method: config for config in configs}.values():
        problem = build(config)  # check data, partition, model, device and method before a folder is made
        start(problem)
        decide([problem])  # and engine and layers
    if note := owners_note(problem.dataset, settings.partition, settings.clients):
        notes.note(note)
    if note := scores_note(problem):
        notes.note(note)
    out = Path(arguments.out or f"runs/{data_folder_name(configs[0].data)}-{recipe_name}")
    folders = [out / folder_name(config) for config in configs]
    if len(set(folders)) < len(folders):
        twice = next(folder for folder in folders if folders.count(folder) > 1)
        raise ValueError(f"{twice.name} is named twice; give every method and every seed once")
    if not arguments.overwrite:
        store.refuse_runs(folders)
    check_out(out)
    if (out / FILE).exists():
        raise ValueError(f"{out} holds a study, whose runs follow its {FILE}; choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    for folder, config in zip(folders, configs, strict=True):
        store.create(folder, config, overwrite=arguments.overwrite)
    return train(out, folders)


def scores_note(problem: Problem) -> str:
    """Return a line if so many clients are scored that this takes longer than to train; otherwise an empty text."""
    clients = len(problem.scored)
    if clients < MANY:
        return ""
    return (
        f"note: all {clients:,} clients are scored, and train once more for the scores after the last round; "
        "--eval-clients 1000 scores a sample"
    )


def _check_different(methods: Iterable[str]) -> None:
    """Raise ValueError if two texts name the same method, such as one with a knob at its default."""
    known: dict[str, str] = {}
    for method in methods:
        if (other := known.setdefault(in_full(method), method)) != method:
            raise ValueError(f"{other} and {method} are the same method; give every method once")


def train(out: Path, folders: list[Path]) -> int:
    """Train the runs to their end; then print a table, draw a picture, and list the runs that failed."""
    try:
        with saving_on_sigterm(), RunProgress("run", folders, unfinished(folders)) as progress:
            failures = run_folders(folders, progress.watch)
    except (KeyboardInterrupt, Terminated) as why:
        print(f"\nstopped; nothing is lost. Resume with:  fedncv resume {quote(str(out))}", file=sys.stderr)
        return STATUS if isinstance(why, Terminated) else 130
    runs, _ = read_runs(folders)  # a damaged one was reported while training
    if runs:
        from fedncv.figures import curves

        print_table(runs)
        picture = curves([run.folder for run in runs], out / "curves.png")
        print(f"\nruns     {out}\npicture  {picture}\nagain    fedncv show {quote(str(out))}")
    for reason in reasons(failures):
        print(f"fedncv: {reason}", file=sys.stderr)
    return 2 if failures else 0


def _defaults(argv: list[str]) -> tuple[str, Recipe]:
    """Return the recipe of --recipe, with the values of the --config file in place."""
    known = early(argv, recipe="protocol", config="")
    name, path = known["recipe"], known["config"]
    if name not in RECIPES:
        raise ValueError(nearest(name, RECIPES, what="recipe"))
    recipe = RECIPES[name]()
    if not path:
        return name, recipe
    values = read_settings_file(path, others=("seeds",), command="run")
    if "seed" in values and "seeds" in values:
        raise ValueError(f"{path} has both seed and seeds; leave one out")
    methods = listed(values.pop("method", list(recipe.methods)), str, "method", path)
    seeds = listed(values.pop("seeds", values.pop("seed", list(recipe.seeds))), int, "seeds", path)
    return name, Recipe(with_settings(values, recipe.settings, where=path), methods, seeds)
