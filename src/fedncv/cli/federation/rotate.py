"""fedncv federation rotate: give a client a new key."""

from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from fedncv.cli.arguments import parse
from fedncv.cli.federation.shared import Folder, when


@dataclass(frozen=True, kw_only=True)
class Rotate:
    """Give a client a new key, also one that was revoked. If client and server are on two machines, run it on both."""

    folder: Folder
    """The folder that contains server/; or, on a client's machine, the client's part."""
    client: int = -1
    """Number of the client; not needed for a client's part."""
    key: str = ""
    """File with the client's new public key, its node.pub; empty: make a new key in FOLDER/clients/NUMBER."""


def main(argv: list[str]) -> int:
    from fedncv.flower import members
    from fedncv.flower.folder import read_client_settings

    chosen = parse(Rotate, argv, command="federation rotate")
    folder = Path(chosen.folder)
    if (folder / "client.toml").is_file():
        u = read_client_settings(folder).client
        if chosen.key or chosen.client not in (-1, u):
            option = f"--key {chosen.key}" if chosen.key else f"--client {chosen.client}"
            raise ValueError(f"{folder} is the part of client {u}; leave {option} out")
        public = members.rotate_here(folder)
        print(
            f"{folder}: client {u} has a new key, which the server must get. Copy {public} to the server's machine, "
            f"and run there:\nfedncv federation rotate FOLDER --client {u} --key node.pub\n"
            f"Then restart the client here: fedncv federation client {quote(str(folder))}"
        )
        return 0
    told = members.rotate(folder, chosen.client, Path(chosen.key) if chosen.key else None)
    print(
        f"{folder}: the new key of client {chosen.client} is accepted, and its old one refused, {when(told)}. A run in "
        "progress goes on without the client until it is stopped and resumed"
    )
    return 0
