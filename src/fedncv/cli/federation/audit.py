"""fedncv federation audit: verify the audit logs."""

import sys
from dataclasses import dataclass
from pathlib import Path

from fedncv.cli.arguments import parse
from fedncv.cli.federation.shared import Folder


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Verify the audit logs in a folder: the chain of every log, and that it holds the hashes that the files of runs
    note. Exit code 2: a log was changed, or its end was cut; the first line that does not fit is named."""

    folder: Folder
    """The folder that `fedncv federation init` wrote; or one part of it: the server's or a client's."""
    head: str = ""
    """Hash of a line that you noted before, at least 16 digits: the log of the part must still hold it."""


def main(argv: list[str]) -> int:
    from fedncv.flower import audit

    chosen = parse(Audit, argv, command="federation audit")
    folder = Path(chosen.folder)
    if chosen.head and (len(chosen.head) < 16 or set(chosen.head) - set("0123456789abcdef")):
        raise ValueError(f"--head {chosen.head} is not a hash: give at least its first 16 digits, 0-9 and a-f")
    parts = _parts(folder)
    if chosen.head and len(parts) > 1:
        raise ValueError(
            f"--head is of one log, and {folder} has {len(parts)} parts; name the part, such as {parts[0]}"
        )
    there = [part for part in parts if (part / audit.AUDIT).exists() or audit.anchors(part)]
    if not there:
        print(f"{folder}: no audit log yet; the first run begins it")
    wrong = 0
    for part in there:
        try:
            found, noted = audit.check(part, head=chosen.head)
        except ValueError as error:
            print(f"fedncv: {error}", file=sys.stderr)
            wrong += 1
            continue
        torn = f", {found.torn} of them cut short by a kill" if found.torn else ""
        print(f"{part / audit.AUDIT}: whole, {found.lines} lines{torn}, the last of {found.last}")
        print(f"  head {found.head}; the {noted} hashes that the runs note are there")
        for old in audit.renamed(part):
            print(f"  {old.name} was renamed by somebody, and is not verified")
    return 2 if wrong else 0


def _parts(folder: Path) -> list[Path]:
    if (folder / "server.toml").is_file() or (folder / "client.toml").is_file():
        return [folder]
    found = [folder / "server"] if (folder / "server" / "server.toml").is_file() else []
    found += sorted(path.parent for path in (folder / "clients").glob("*/client.toml"))
    if not found:
        raise ValueError(f"{folder} is no folder of a federation: it has neither server/ nor clients/")
    return found
