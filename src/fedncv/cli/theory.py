"""``fedncv theory``: test every statement by enumeration and print whether it holds."""

import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from fedncv.cli.arguments import parse
from fedncv.files import read_text, write_atomically
from fedncv.notes import level
from fedncv.theory import STATEMENTS, Statement, Verdict, evaluate

Row = tuple[Statement, Verdict]
WIDTH = 110
BEGIN, END = "<!-- verdicts: fedncv theory --markdown docs/theory.md -->\n", "<!-- end of verdicts -->"


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Test the propositions of Chen et al. and the identities that fedncv uses, one by one, by exact enumeration.

    A statement holds if no case violates it by more than rounding; otherwise the smallest counterexample is printed.
    Derivations: docs/theory.md.
    """

    only: str = ""
    """Test only the statements that contain this text."""
    markdown: str = ""
    """Also write the verdicts as a Markdown table into this file, between its markers if it has them."""


def main(argv: list[str]) -> int:
    arguments = parse(Arguments, argv, command="theory")
    wanted = [s for s in STATEMENTS if arguments.only.lower() in f"{s.name} {s.claim} {s.source}".lower()]
    if not wanted:
        raise ValueError(f"no statement mentions {arguments.only!r}; fedncv theory without --only prints them all")
    rows = _print_table(wanted) if sys.stdout.isatty() else _print_lines(wanted)
    held = sum(verdict.holds for _, verdict in rows)
    print(f"{len(rows)} statements: {held} hold, {len(rows) - held} do not.")
    if arguments.markdown:
        path = Path(arguments.markdown)
        page = read_text(path) if path.exists() else ""
        write_atomically(path, into_page(page, markdown(rows)).encode())
    return 0


def markdown(rows: list[Row]) -> str:
    """Return the table of docs/theory.md: the same verdicts, without the sizes of rounding errors."""
    lines = ["| verdict | statement | where | cases | smallest counterexample |", "|---|---|---|---|---|"]
    for statement, verdict in rows:
        cells = [_word(verdict), f"{statement.name}: {statement.claim}", statement.source]
        cells += [str(verdict.num_cases), verdict.counterexample]
        lines.append("| " + " | ".join(cell.replace("|", r"\|").replace("*", r"\*") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def into_page(page: str, table: str) -> str:
    """Return the page with the table between its markers, or the table alone if the page has none."""
    if BEGIN not in page:
        return table
    before, rest = page.split(BEGIN)
    return before + BEGIN + table + END + rest.split(END)[1]


def _print_lines(statements: list[Statement]) -> list[Row]:
    """Print each statement as soon as it is tested, for logs and pipes."""
    rows = []
    for statement in statements:
        rows.append((statement, evaluate(statement)))
        for line in _lines(*rows[-1]):
            print(line, flush=True)
    return rows


def _lines(statement: Statement, verdict: Verdict) -> Iterator[str]:
    numbers = f"{verdict.num_cases:4} cases, largest gap {verdict.largest_gap:.1e}"
    yield f"{_word(verdict):6} {statement.name:42} {numbers}   {statement.source}"
    yield f"       {statement.claim}"
    if verdict.counterexample:
        words = f"counterexample: {verdict.counterexample}"
        yield textwrap.fill(words, WIDTH, initial_indent=" " * 7, subsequent_indent=" " * 9)


def _print_table(statements: list[Statement]) -> list[Row]:
    """Print a table, for a terminal."""
    console = Console()
    table = Table("verdict", "statement", Column("cases", justify="right"), "largest gap", box=box.SIMPLE_HEAD)
    rows: list[Row] = []
    with Console(stderr=True, quiet=level() == "quiet").status("enumerating") as status:
        for statement in statements:
            status.update(f"{len(rows) + 1}/{len(statements)} {statement.name}")
            verdict = evaluate(statement)
            rows.append((statement, verdict))
            mark = Text(_word(verdict), style="green" if verdict.holds else "red")
            words = Text.assemble((statement.name, "bold"), (f"  {statement.source}", "dim"), f"\n{statement.claim}")
            if verdict.counterexample:
                words.append(f"\n{verdict.counterexample}", style="italic")
            table.add_row(mark, words.append("\n"), str(verdict.num_cases), f"{verdict.largest_gap:.1e}")
    console.print(table)
    return rows


def _word(verdict: Verdict) -> str:
    return "holds" if verdict.holds else "fails"
