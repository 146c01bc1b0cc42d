"""The command line: one file per command. A user's mistake prints one clear line and exits with code 2."""

import errno
import importlib
import io
import os
import sys
from importlib.metadata import version

COMMANDS = {
    "run": "train a federation with one or more methods and seeds",
    "study": "train a grid of datasets, methods and seeds, such as the paper's Table 1",
    "report": "write the web page, figures and tables of a study or of runs",
    "watch": "serve that page while runs train, and keep it current",
    "resume": "resume runs that were stopped",
    "show": "print a table and a curve of finished or running runs",
    "export": "write a trained model as an ordinary state_dict",
    "variance": "measure the error of the aggregated update, method by method",
    "methods": "list the methods, their knobs, and what the server learns from a client",
    "datasets": "list the datasets, and where to put their files",
    "partition": "draw which client holds how many samples of each class",
    "federation": "train across machines that share no data, over Flower",
    "theory": "test the paper's propositions by enumeration",
}


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {meaning}" for name, meaning in COMMANDS.items()]
    return "\n".join(
        [
            "usage: fedncv COMMAND [OPTIONS]      (fedncv COMMAND --help lists the options)",
            "",
            "Federated learning in which gradient variance is measured, not assumed.",
            "",
            *lines,
            "",
            "Try:  fedncv run --recipe smoke",
        ]
    )


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    for stream in (sys.stdout, sys.stderr):  # names of files need not be text, and terminals not UTF-8
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if argv[0] in ("-V", "--version"):
        print(f"fedncv {version('fedncv')}")
        return 0
    try:
        return _command(argv[0], argv[1:])
    except (ValueError, ArithmeticError) as error:
        print(f"fedncv: {error}", file=sys.stderr)
    except BrokenPipeError:  # the reader of our output closed the pipe, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        remedy = "free some space" if error.errno == errno.ENOSPC else "choose another path, or change its permissions"
        print(f"fedncv: {error.filename or 'the system'}: {error.strerror}; {remedy}", file=sys.stderr)
    except KeyboardInterrupt:
        print("fedncv: stopped", file=sys.stderr)
        return 130
    return 2


def _command(name: str, argv: list[str]) -> int:
    if wrong := next((word for word in (name, *argv) if any(c < " " and c != "\t" for c in word)), None):
        raise ValueError(f"the argument {wrong!r:.200} holds a control character; leave it out, or rename the file")
    if name not in COMMANDS:
        from fedncv.spec import nearest

        raise ValueError(nearest(name, COMMANDS, what="command"))
    result: int = importlib.import_module(f"fedncv.cli.{name}").main(argv)
    return result
