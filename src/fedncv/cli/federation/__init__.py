"""fedncv federation: run a real federation over Flower, with TLS and authenticated nodes. One file per action."""

import importlib
from importlib.util import find_spec

from fedncv.portable import need_posix
from fedncv.spec import nearest

ACTIONS = {
    "init": "write certificates, keys, settings and data for a server and its clients",
    "up": "start all of them on this machine, to try it out",
    "run": "train a method on the federation",
    "resume": "resume a run after its last finished round",
    "stop": "stop a run; it can be resumed",
    "status": "show the processes, the connected clients and the progress of runs",
    "down": "stop everything that was started on this machine",
    "server": "run the server in the foreground",
    "client": "run one client in the foreground",
    "add": "add a client",
    "revoke": "shut a client out",
    "rotate": "give a client a new key",
    "renew": "renew the certificates",
    "audit": "verify the audit logs",
}


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        raise SystemExit(0)
    if argv[0] not in ACTIONS:
        raise ValueError(nearest(argv[0], ACTIONS, what="action of federation"))
    need_posix("a federation")
    if find_spec("flwr") is None:
        raise ValueError("a federation needs Flower, which is not installed; pip install 'fedncv[flower]'")
    from fedncv.flower.private import private_files

    action = importlib.import_module(f"fedncv.cli.federation.{argv[0]}")
    with private_files():  # other users of this machine see nothing of what is written
        result: int = action.main(argv[1:])
    return result


def usage() -> str:
    width = max(map(len, ACTIONS))
    return "\n".join(
        [
            "usage: fedncv federation ACTION FOLDER [OPTIONS]      (fedncv federation ACTION --help lists the options)",
            "",
            *(f"  {name:{width}}  {meaning}" for name, meaning in ACTIONS.items()),
            "",
            "Try:  fedncv federation init trial && fedncv federation up trial &&",
            "      fedncv federation run trial --method scaffold --rounds 3 --epochs 1 && fedncv federation down trial",
        ]
    )
