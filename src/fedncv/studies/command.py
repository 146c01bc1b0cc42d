"""The command that makes a study, however many commands it was made by."""

import shlex

from fedncv.config import options
from fedncv.studies import STUDIES
from fedncv.study import Study, Tuning


def command(study: Study) -> str:
    """Return `fedncv study NAME` with the options that differ from the named study; without --out."""
    plain = STUDIES[study.name]()
    words = ["fedncv", "study", study.name]
    for name in ("datasets", "methods"):
        if getattr(study, name) != getattr(plain, name):
            words += [f"--{name}", *getattr(study, name)]
    theirs = {data: number for data, number in plain.num_seeds.items() if data in study.datasets}
    if study.seeds != plain.seeds or study.num_seeds != theirs:
        words += ["--seeds", str(len(study.seeds))]
    if _clients(study) != _clients(plain):
        words += ["--clients", *map(str, _clients(study))]
    words += options(study.settings, plain.settings, but=("data", "clients"))
    if study.tuning is not None:
        words += ["--tune", *budget(study.tuning)]
    return shlex.join(words)


def budget(tuning: Tuning) -> list[str]:
    """Return the options that give this tuning."""
    words = ["--tuning-trials", str(tuning.trials)] if tuning.trials else ["--tuning-lr", *map(repr, tuning.grid)]
    words += ["--tuning-seeds", str(len(tuning.seeds))]
    words += ["--tuning-rounds", str(tuning.rounds)] if tuning.rounds else []
    words += ["--tune-by", tuning.by] if tuning.by != Tuning().by else []
    return words + (["--tuned-on", *tuning.on] if tuning.on else [])


def _clients(study: Study) -> tuple[int, ...]:
    return study.clients or (study.settings.clients,)
