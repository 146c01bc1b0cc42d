"""fedncv watch: serve the page of a running study, run or federation, and keep it current."""

import sys
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from fedncv.cli.arguments import parse
from fedncv.results import check_folder
from fedncv.watch.server import PORT, is_loopback


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Serve the report of a folder as a page that follows its runs: progress, time left, curves, failures.

    Start it as soon as the folder exists, while or after runs train. It only reads, and takes no lock. Ctrl-C ends it;
    the training does not notice. `fedncv report` writes the same page to a file.
    """

    folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """A study, a run, a folder of runs, or a federation."""
    port: int = PORT
    """Port of the page. If it is in use, the next free one is taken and said; 0: any free one."""
    host: str = "127.0.0.1"
    """Address to listen on. The default can be reached only from this machine; another address lets everybody who
    can reach it see the page, without a password. From elsewhere, `ssh -L 8340:localhost:8340 MACHINE` is safer."""
    open: bool = False
    """Open the page in a browser."""


def main(argv: list[str]) -> int:
    arguments = parse(Arguments, argv, command="watch")
    if not 0 <= arguments.port < 65536:
        raise ValueError(f"--port must be from 1 to 65535, or 0 for a free one, not {arguments.port}")
    folder = Path(arguments.folder)
    check_folder(folder)
    from fedncv.watch.live import LivePage  # imported late: it loads scipy
    from fedncv.watch.server import open_server

    with open_server(LivePage(folder), arguments.host, arguments.port) as server:
        if arguments.port not in (0, server.port):
            print(f"port {arguments.port} is in use, so the page is at port {server.port}", file=sys.stderr)
        if not is_loopback(arguments.host):
            print(
                f"warning: everybody who can reach {arguments.host}:{server.port} sees this page without a password: "
                "settings, scores, folder names, errors, and a federation's clients and log",
                file=sys.stderr,
            )
        print(f"page    {server.url}\nfolder  {folder}\nCtrl-C ends it; runs go on", flush=True)
        if arguments.open:
            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0
