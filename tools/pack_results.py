"""Join the parts of a study, run on one machine or several, into one small archive for docs/results/.

    python tools/pack_results.py docs/results/table1.tar.xz PART…
    python tools/pack_results.py docs/results/fig3.tar.xz PART… --seeds 5 --methods fedavg fedavgm …
    tar xf docs/results/table1.tar.xz -C runs && fedncv report runs/table1

A part is a study's folder. All parts must have the same protocol, and the first gives the name. --seeds and --methods
select from parts that hold more. The archive has configs, study.toml and metrics, without states. Single clients'
scores are kept only in the last row of a run. Configs have no data folder, because it describes the machine, not the
data.
"""

import argparse
import io
import json
import shlex
import tarfile
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from fedncv.config import RunConfig, Settings, read_toml, write_toml
from fedncv.results import CONFIG, METRICS, read_config, read_rows
from fedncv.studies import STUDIES
from fedncv.studies.command import budget
from fedncv.study import FILE, PARTITION, TRIALS, Study, extend, folder_name, read_study, read_trials, to_toml


def joined(parts: list[Path]) -> Study:
    """Return the study that the parts belong to."""
    whole, *others = (read_study(part) for part in parts)
    for part, study in zip(parts[1:], others, strict=True):
        rates = {c: whole.lr.get(c, {}) | study.lr.get(c, {}) for c in {**whole.lr, **study.lr}}
        tuned = {c: whole.tuned.get(c, {}) | study.tuned.get(c, {}) for c in {**whole.tuned, **study.tuned}}
        both = [(c, m) for c in whole.lr for m in whole.lr[c] if m in study.lr.get(c, {})]
        for column, method in [pair for pair in both if whole.chosen(*pair) != study.chosen(*pair)]:
            raise SystemExit(f"{part} has other tuned settings of {method} on {column} than an earlier part")
        whole = replace(extend(whole, study, where=part), lr=rates, tuned=tuned)
    order = {method: i for i, method in enumerate(STUDIES[whole.name]().methods)}
    methods = tuple(sorted(whole.methods, key=lambda method: order.get(method, len(order))))
    return replace(
        whole, methods=methods, seeds=tuple(sorted(whole.seeds)), settings=replace(whole.settings, data_dir="")
    )


def made_with(parts: list[Path]) -> dict[str, dict[str, str]]:
    """Return versions and machine; exit if the parts differ in them."""
    found: list[dict[str, str]] = [read_toml(part / FILE).get("made_with", {}) for part in parts]
    same = [{name: words[name] for name in words if name != "command"} for words in found]
    if any(words != same[0] for words in same):
        raise SystemExit(f"the parts were not made with the same versions: {same}")
    return {"made_with": same[0]}


def command(study: Study) -> str:
    """Return the command that makes the whole study at once."""
    plain = STUDIES[study.name]().settings
    words = ["fedncv", "study", study.name, "--datasets", *study.datasets, "--methods", *study.methods]
    words += ["--seeds", str(len(study.seeds)), "--clients", *map(str, study.clients or (study.settings.clients,))]
    if study.tuning is not None:
        words += ["--tune", *budget(study.tuning)]
    for field in fields(Settings):
        value = getattr(study.settings, field.name)
        if field.name not in ("data", "data_dir", "clients") and value != getattr(plain, field.name):
            words += [f"--{field.name.replace('_', '-')}", str(value)]
    return shlex.join(words)


def slim(rows: list[dict[str, Any]]) -> bytes:
    """Return the rows, with single clients' scores only in the last."""
    kept = [{k: v for k, v in row.items() if not isinstance(v, list)} for row in rows[:-1]] + rows[-1:]
    return "".join(json.dumps(row) + "\n" for row in kept).encode()


def is_of(folder: Path, methods: Sequence[str]) -> bool:
    """Return whether the run is of one of these methods: its folder has the name that the study gives it."""
    return any(folder.name.startswith(folder_name(RunConfig(method=method)).removesuffix("0")) for method in methods)


def contents(parts: list[Path], seeds: int | None = None, methods: Sequence[str] = ()) -> dict[str, bytes]:
    """Return path in the archive -> bytes."""
    study = joined(parts)
    wanted = tuple(method for method in study.methods if method in (methods or study.methods))
    rates = {c: {m: lr for m, lr in chosen.items() if m in wanted} for c, chosen in study.lr.items()}
    tuned = {c: {m: each for m, each in chosen.items() if m in wanted} for c, chosen in study.tuned.items()}
    study = replace(study, seeds=study.seeds[:seeds], methods=wanted, lr=rates, tuned=tuned)
    tuned_on = study.tuning.seeds if study.tuning is not None else ()
    words = made_with(parts)
    words["made_with"]["command"] = command(study)
    found, trials = {FILE: to_toml(study, words).encode()}, list[dict[str, Any]]()
    for part in parts:
        for config in sorted(part.rglob(CONFIG)):
            folder = config.parent
            run: RunConfig = replace(read_config(folder), data_dir="")
            where = folder.relative_to(part).as_posix()
            if not is_of(folder, methods=study.methods) or run.seed not in (*study.seeds, *tuned_on):
                continue
            files = {f"{where}/{CONFIG}": write_toml(run).encode(), f"{where}/{METRICS}": slim(read_rows(folder))}
            if any(found.get(name, data) != data for name, data in files.items()):
                raise SystemExit(f"{folder} is also in an earlier part, with other numbers; remove one")
            found |= files
        lines = [row for row in read_trials(part) if row["method"] in study.methods]
        trials += [row for row in lines if row not in trials]
        for path in sorted(part.rglob(PARTITION)):
            found[path.relative_to(part).as_posix()] = path.read_bytes()
    return found | ({TRIALS: "".join(json.dumps(row) + "\n" for row in trials).encode()} if trials else {})


def main(archive: Path, parts: list[Path], seeds: int | None = None, methods: Sequence[str] = ()) -> None:
    with tarfile.open(archive, "w:xz") as tar:
        for name, data in sorted(contents(parts, seeds, methods).items()):
            info = tarfile.TarInfo(f"{archive.name.removesuffix('.tar.xz')}/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    print(f"{archive}: {archive.stat().st_size / 1e3:,.0f} kB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path)
    parser.add_argument("parts", type=Path, nargs="+")
    parser.add_argument("--seeds", type=int, help="only the first SEEDS seeds")
    parser.add_argument("--methods", nargs="+", default=(), help="only these")
    main(**vars(parser.parse_args()))
