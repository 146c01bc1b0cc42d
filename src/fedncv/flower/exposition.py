"""Health and metrics of a server's or a client's part, for this machine only.

    python -m fedncv.flower.exposition PART PORT

    http://127.0.0.1:PORT/metrics     Prometheus' text format
    http://127.0.0.1:PORT/healthz     200 and "ok", or 503 and the reason

It reads the files of the part at every request, and changes nothing. A client's metrics hold no loss and no score. Only
the loopback interface is served, and only requests that name it: a page in a browser cannot read it under another name.
It imports only the standard library, and never ends by itself: the keeper would restart the part.
"""

import contextlib
import json
import os
import socket
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

SILENT_SECONDS = 60.0  # without contact, a client is not healthy: a node sends a heartbeat every 23 s or sooner
RETRY_SECONDS = 5.0  # until a port is tried again that another process has
CONTENT = "text/plain; version=0.0.4; charset=utf-8"
WHAT = {
    "info": ("gauge", "Version of fedncv."),
    "up": ("gauge", "1 if the part is healthy, as /healthz says."),
    "processes": ("gauge", "Processes of this part."),
    "resident_memory_bytes": ("gauge", "Memory of these processes; shared pages count in each of them."),
    "open_files": ("gauge", "File descriptors of these processes."),
    "clients": ("gauge", "Clients whose keys are accepted."),
    "client_last_contact_timestamp_seconds": ("gauge", "When a client's last request came through the gate."),
    "last_contact_timestamp_seconds": ("gauge", "When the server last answered this client."),
    "run_round": ("gauge", "Finished rounds of a run."),
    "run_rounds": ("gauge", "Planned rounds of a run."),
    "run_phase": ("gauge", "1 for what the server of the run does now."),
    "run_asked": ("gauge", "Clients asked in this phase."),
    "run_replied": ("gauge", "Clients that have replied in this phase."),
    "run_round_seconds": ("gauge", "Duration of the last round."),
    "run_left_out_total": ("counter", "Replies that rounds lack, by reason."),
    "run_bytes_total": ("counter", "Bytes of the numbers in messages, by direction as clients see it."),
    "run_score": ("gauge", "Latest score of the clients that tell it, before or after local training."),
    "run_score_clients": ("gauge", "Clients whose scores it contains."),
    "audit_lines_total": ("counter", "Lines of the audit log."),
    "answers_total": ("counter", "Answers to the server, by kind."),
    "refusals_total": ("counter", "Answers that refuse a request, by code."),
}
"""Name without "fedncv_" -> kind, and what it is."""


class Sample(NamedTuple):
    name: str
    value: float
    labels: dict[str, str] = {}  # noqa: RUF012  (never changed)


def text_of(samples: Iterable[Sample]) -> str:
    """Return Prometheus' text format: the samples of a metric together, after its help and type.

    >>> print(text_of([Sample("up", 1), Sample("run_round", 3, {"run": 'a"b'})]), end="")
    # HELP fedncv_up 1 if the part is healthy, as /healthz says.
    # TYPE fedncv_up gauge
    fedncv_up 1
    # HELP fedncv_run_round Finished rounds of a run.
    # TYPE fedncv_run_round gauge
    fedncv_run_round{run="a\\\\"b"} 3
    """
    by_name: dict[str, list[Sample]] = {}
    for sample in samples:
        by_name.setdefault(sample.name, []).append(sample)
    lines = []
    for name, found in by_name.items():
        kind, meaning = WHAT[name]
        lines += [f"# HELP fedncv_{name} {meaning}", f"# TYPE fedncv_{name} {kind}"]
        for _, value, labels in found:
            said = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
            lines.append(f"fedncv_{name}{{{said}}} {value:.15g}" if said else f"fedncv_{name} {value:.15g}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class Part:
    """A part of a federation on this machine, as its files and processes show it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_server = (folder / "server.toml").is_file()
        self._counts: dict[tuple[str, str], int] = {}
        self._lines = self._read = 0  # of the audit log

    def fault(self) -> str:
        """Return why the part is not healthy; empty if it is."""
        if self.is_server:
            settings = tomllib.loads((self.folder / "server.toml").read_text(encoding="utf-8"))
            try:
                socket.create_connection(("127.0.0.1", settings["inner_port"]), timeout=2).close()
            except OSError:
                return "Flower's server does not answer"
            return ""
        last = self._last_contact()
        if last is None:
            return "no contact with the server yet"
        silent = time.time() - last
        return f"no contact with the server for {silent:.0f} s" if silent > SILENT_SECONDS else ""

    def samples(self) -> Iterator[Sample]:
        yield Sample("info", 1, {"version": version("fedncv"), "part": "server" if self.is_server else "client"})
        yield Sample("up", int(not self.fault()))
        yield from _processes(str(self.folder))
        yield from self._of_server() if self.is_server else self._of_client()
        self._count()
        yield Sample("audit_lines_total", self._lines)
        for (name, label), count in sorted(self._counts.items()):
            yield Sample(name, count, {"kind" if name == "answers_total" else "code": label})

    def _of_server(self) -> Iterator[Sample]:
        yield Sample("clients", len(list((self.folder / "keys").glob("client-*.pub"))))
        for u, last in _json(self.folder / "flower" / "contacts.json").items():
            yield Sample("client_last_contact_timestamp_seconds", float(last["time"]), {"client": u})
        for path in sorted((self.folder / "runs").glob("*/config.toml")):
            yield from _run(path.parent)

    def _of_client(self) -> Iterator[Sample]:
        if (last := self._last_contact()) is not None:
            yield Sample("last_contact_timestamp_seconds", last)
        for path in sorted((self.folder / "runs").glob("*/history.jsonl")):
            rows = _rows(path)
            if rows:
                yield Sample("run_round", rows[-1]["round"], {"run": path.parent.name})

    def _last_contact(self) -> float | None:
        found = [self.folder / "flower" / name for name in ("heartbeat", "worker")]
        return max((path.stat().st_mtime for path in found if path.exists()), default=None)

    def _count(self) -> None:
        """Count what was added to the audit log; a client's answers by kind."""
        path = self.folder / "audit.jsonl"
        if not path.exists():
            return
        if path.stat().st_size < self._read:  # it was moved away, and a new one begun
            self._lines = self._read = 0
        with path.open("rb") as file:
            file.seek(self._read)
            for text in file:
                if not text.endswith(b"\n"):
                    break
                self._read += len(text)
                self._lines += 1
                if not self.is_server and b'"answered"' in text:
                    with contextlib.suppress(ValueError, AttributeError, TypeError):
                        self._count_answer(json.loads(text))

    def _count_answer(self, line: dict[str, Any]) -> None:
        refused = line.get("refused")
        code = str(refused.get("code", "")) if refused else ""
        key = ("refusals_total", code) if refused else ("answers_total", str(line.get("kind")))
        self._counts[key] = self._counts.get(key, 0) + 1


def _run(folder: Path) -> Iterator[Sample]:
    label = {"run": folder.name}
    rows, now = _rows(folder / "metrics.jsonl"), _json(folder / "progress.json")
    yield Sample("run_rounds", tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))["rounds"], label)
    yield Sample("run_round", rows[-1]["round"] if rows else 0, label)
    if now:
        yield Sample("run_phase", 1, label | {"phase": str(now["phase"])})
        yield Sample("run_asked", now["asked"], label)
        yield Sample("run_replied", now["replied"], label)
    if timing := _rows(folder / "timing.jsonl"):
        yield Sample("run_round_seconds", timing[-1].get("seconds", 0.0), label)
    for reason in ("absent", "refused"):
        yield Sample("run_left_out_total", sum(len(row.get(reason, ())) for row in rows), label | {"reason": reason})
    if rows and "bytes_down" in rows[-1]:
        for way in ("down", "up"):
            yield Sample("run_bytes_total", rows[-1][f"bytes_{way}"], label | {"direction": way})
    for when in ("before", "after"):
        if told := [row for row in rows if when in row]:
            yield Sample("run_score", told[-1][when], label | {"when": when})
            yield Sample("run_score_clients", told[-1].get(f"{when}_by", 0), label | {"when": when})


def _rows(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a file; none if one is damaged."""
    try:
        return [json.loads(text) for text in path.read_bytes().split(b"\n")[:-1]]
    except (OSError, ValueError):
        return []


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError):
        return {}


def _processes(folder: str) -> Iterator[Sample]:
    """Count the processes whose command line names the part, with what they hold; nothing where there is no /proc."""
    count = memory = files = 0
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            words = (place / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if any(word == folder or word.startswith(f"{folder}/") for word in words):
                memory += int((place / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
                files += len(os.listdir(place / "fd"))
                count += 1
    if count:
        yield Sample("processes", count)
        yield Sample("resident_memory_bytes", memory)
        yield Sample("open_files", files)


# ---- HTTP -------------------------------------------------------------------------------------------------


def server_of(part: Part, port: int) -> ThreadingHTTPServer:
    """Return a server of the loopback interface. Raise OSError if the port is taken."""

    class Handler(BaseHTTPRequestHandler):
        timeout = 10  # seconds for a request
        server_version, sys_version = "fedncv", ""

        def do_GET(self) -> None:
            name = (self.headers.get("Host") or "").rpartition(":")[0]
            if name not in ("127.0.0.1", "localhost"):
                return self._answer(403, "only for this machine\n")
            try:
                if self.path == "/metrics":
                    return self._answer(200, text_of(part.samples()))
                if self.path == "/healthz":
                    fault = part.fault()
                    return self._answer(503 if fault else 200, f"{fault or 'ok'}\n")
            except Exception as error:  # a file that is being replaced, or is damaged
                return self._answer(500, f"{type(error).__name__}: {error}\n")
            return self._answer(404, "there are /metrics and /healthz\n")

        def _answer(self, status: int, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", CONTENT)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Say nothing: a request every few seconds is no news."""

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


def main(folder: str, port: str) -> None:
    said = False
    while True:
        try:
            server_of(Part(Path(folder)), int(port)).serve_forever()
        except OSError as error:
            if not said:
                print(f"fedncv: no metrics: port {port}: {error.strerror}; trying again", file=sys.stderr, flush=True)
            said = True
            time.sleep(RETRY_SECONDS)


if __name__ == "__main__":
    main(*sys.argv[1:3])
