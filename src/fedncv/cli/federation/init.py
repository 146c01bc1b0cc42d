"""fedncv federation init: write a federation's folder."""

from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from fedncv.cli.arguments import parse
from fedncv.cli.federation.shared import OF_INIT, Folder
from fedncv.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class Init:
    """Write a federation's folder: certificates, keys, settings, and a dataset divided among the clients."""

    folder: Folder
    """A new folder. Copy server/ to the server's machine, clients/0/ to client 0's, and so on."""
    host: str = "127.0.0.1"
    """Name or address at which clients reach the server; written into the certificate."""
    listen: str = ""
    """Address the server listens on; empty: the host. 0.0.0.0: every address of the machine."""
    port: int = 0
    """Port of the server; 0: a free one."""
    clients: int = 2
    """Number of clients, at least 1."""
    data: str = RunConfig.data
    """Dataset name, or your own data as for `fedncv run`; `fedncv datasets` lists them. Real clients replace their part
    with their own samples."""
    data_dir: str = RunConfig.data_dir
    """Folder with the datasets' files; empty: $FEDNCV_DATA, then the cache folder."""
    partition: str = RunConfig.partition
    """Division of samples among clients: dirichlet:alpha=0.1,min_samples=10 or iid. `fedncv partition` draws it."""
    test_share: float = RunConfig.test_share
    """Share of each client's samples kept for testing, at least 0 and below 1."""
    seed: int = RunConfig.seed
    """Seed of the partition and the split; 0 to 2^64 - 1."""


def main(argv: list[str]) -> int:
    from fedncv.flower.folder import init as write
    from fedncv.flower.folder import read_server_settings

    chosen = parse(Init, argv, command="federation init", default=None)
    config = RunConfig(**{name: getattr(chosen, name) for name in ("clients", *OF_INIT, "seed")}, per_round=1)
    folder = Path(chosen.folder)
    write(folder, config, host=chosen.host, port=chosen.port, listen=chosen.listen or chosen.host)
    port = read_server_settings(folder / "server").port
    print(
        f"{folder}: a server at {chosen.host}:{port} and {config.clients} clients\n"
        f"all on this machine    fedncv federation up {quote(str(folder))}\n"
        f"the server's machine   fedncv federation server {quote(f'{folder}/server')}\n"
        f"each client's machine  fedncv federation client {quote(f'{folder}/clients/0')}"
    )
    return 0
