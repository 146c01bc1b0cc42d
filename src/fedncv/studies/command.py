"""The command that makes a study, however many commands it was made by."""

import shlex

from fedncv.config import options
from fedncv.studies import STUDIES
from fedncv.study import Study


def command(study: Study) -> str:
    """Return `fedncv study NAME` with the options that differ from the named study; without --out."""
    plain = STUDIES[study.name]()
    words = ["fedncv", "study", study.name]
    for name in ("datasets", "methods"):
        if getattr(study, name) != getattr(plain, name):
            words += [f"--{name}", *getattr(study, name)]
    if study.seeds != plain.seeds:
        words += ["--seeds", str(len(study.seeds))]
    if _clients(study) != _clients(plain):
        words += ["--clients", *map(str, _clients(study))]
    words += options(study.settings, plain.settings, but=("data", "clients"))
    if study.tuning is not None:
        grid, seeds = study.tuning.grid, study.tuning.seeds
        words += ["--tune", "--tuning-lr", *map(repr, grid), "--tuning-seeds", str(len(seeds))]
    return shlex.join(words)


def _clients(study: Study) -> tuple[int, ...]:
    return study.clients or (study.settings.clients,)
