"""fedncv federation renew: renew the certificates."""

from dataclasses import dataclass
from pathlib import Path

from fedncv.cli.arguments import parse
from fedncv.cli.federation.shared import Folder


@dataclass(frozen=True, kw_only=True)
class Renew:
    """Renew the certificates of the server and of the authority. Run it where authority/ is."""

    folder: Folder
    """The folder that `fedncv federation init` wrote."""


def main(argv: list[str]) -> int:
    from fedncv.flower import members

    folder = Path(parse(Renew, argv, command="federation renew").folder)
    old = members.renew(folder)
    until = members.expires(folder / "server" / "server.crt")
    print(
        f"{folder}: certificates valid until {until:%Y-%m-%d}\n"
        "1. if the server is on another machine, copy server.crt and ca.crt from server/ there; restart the server\n"
        f"2. copy authority/ca.crt to every client before {old:%Y-%m-%d}, as ca.crt in its part; restart the client"
    )
    return 0
