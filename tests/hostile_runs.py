"""A folder whose every text tries to be a script."""

import json
from dataclasses import replace
from pathlib import Path

from made_up_runs import made_up_study, write_run, write_study

from fedncv import heartbeat
from fedncv.config import RunConfig

EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"
MARKS = ("<script>alert", "<img src=x")  # of unescaped text


def hostile_folder(out: Path) -> Path:
    """Runs, finished, failed and unfinished, whose names, methods, models, numbers and reasons are hostile."""
    root = out / f"{EVIL.replace('/', '')}"
    config = RunConfig(clients=20, per_round=5, rounds=20, eval_every=2, model=EVIL, data=EVIL, partition=EVIL)
    for seed, method in enumerate((EVIL, f"fedavg:{EVIL}=1", f"custom:{EVIL}#123456")):
        write_run(root / f"<b>{seed}</b>", replace(config, method=method, seed=seed), 0.5, until=20 - 5 * seed)
        heartbeat.write(root / f"<b>{seed}</b>", "failed", EVIL)
        for name in ("machine.jsonl",):
            (root / f"<b>{seed}</b>" / name).write_text(
                json.dumps(dict.fromkeys(("date", "processor", EVIL), EVIL)) + "\n"
            )
        path = root / f"<b>{seed}</b>" / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            row |= {"score_name": EVIL, f"before_{EVIL}": 0.5, f"before_{EVIL}_defined": 3, f"variance_{EVIL}": 0.5}
            row |= {"counted": [0, EVIL, [1]], "refused": {"1": EVIL, EVIL: [EVIL]}, "clipped": {"0": [EVIL]}}
        rows[0] |= {"sizes": [5] * 20, "barred": {"3": EVIL}}
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (root / f"<b>{seed}</b>" / "log.txt").write_text(EVIL)
        (root / f"<b>{seed}</b>" / "partition.json").write_text(
            json.dumps(
                {"data": EVIL, "partition": EVIL, "seed": seed, "classes": [EVIL, EVIL], "counts": [[1, 2], [3, 4]]}
            )
        )
    with (root / "<b>2</b>" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"round": 11, "failed": EVIL}) + "\n")
    (root / "<i>broken" / "x").mkdir(parents=True)
    (root / "<i>broken" / "x" / "config.toml").write_text(f"method = {EVIL}")
    return root


def hostile_study(out: Path) -> Path:
    study = made_up_study(name=EVIL, title=EVIL, methods=(EVIL, "fedavg"), variants={EVIL.replace("/", ""): {}})
    write_study(out, study, skip=[str(study.cells()[0].folder)])
    path = out / "study.toml"
    path.write_text(path.read_text().replace('torch = "2"', f"torch = {json.dumps(EVIL)}"))
    return out
