"""Serve the live page over HTTP: two addresses, for reading only.

    GET /             the page
    GET /changes      what has changed since ?seen=TOKEN, as JSON

No file of the folder is served. The page may run only the scripts that came with it (Content-Security-Policy), so a
text from the folder is never executed even if it were not escaped. A request must name this machine in its Host
header: a page of somebody else's that points its own name here ("DNS rebinding") cannot read anything.
"""

import errno
import ipaddress
import json
import secrets
import socket
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fedncv.watch.live import LivePage

PORT = 8340
TRIES = 20  # ports that are tried if the first is in use
REQUEST_SECONDS = 10.0  # in which a browser must send its request, and take the answer
POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src-elem 'nonce-{nonce}'; style-src-attr 'unsafe-inline'; "
    "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def is_loopback(host: str) -> bool:
    """
    >>> is_loopback("localhost"), is_loopback("127.0.0.2"), is_loopback("::1"), is_loopback("0.0.0.0")
    (True, True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_ours(header: str, host: str) -> bool:
    """Return whether a Host header names this server, which listens on ``host``.

    Any port is right, because a tunnel may have another one. A server on other addresses than loopback may also be
    called by any IP address, which no name server can turn to us, and by the name of this machine.

    >>> is_ours("localhost:8340", "127.0.0.1"), is_ours("[::1]:80", "127.0.0.1"), is_ours("evil.example", "127.0.0.1")
    (True, True, False)
    >>> is_ours("192.168.0.7:8340", "0.0.0.0"), is_ours("192.168.0.7:8340", "127.0.0.1"), is_ours("", "0.0.0.0")
    (True, False, False)
    """
    try:
        name = urlsplit(f"//{header}").hostname or ""
        _ = urlsplit(f"//{header}").port
    except ValueError:
        return False
    if is_loopback(name) or name == host.lower():
        return True
    if is_loopback(host):
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in (socket.gethostname().lower(), socket.getfqdn().lower())
    return True


class Server(ThreadingHTTPServer):
    """Serves one page. Use as a context manager; ``serve_forever`` answers until ``shutdown``."""

    daemon_threads = True

    def __init__(self, page: LivePage, host: str, port: int) -> None:
        self.page, self.host = page, host
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        super().__init__((host, port), Handler)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        """The address for a browser on this machine."""
        host = self.host
        if host in ("", "0.0.0.0", "::"):  # all addresses
            host = "127.0.0.1" if self.address_family == socket.AF_INET else "::1"
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a browser that went away is no news."""

    def server_bind(self) -> None:
        """Bind without asking a name server for this machine's name, as ``HTTPServer`` does."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = self.host, self.port


def open_server(page: LivePage, host: str, port: int) -> Server:
    """Return a server on the port, or on the next free one. Raise ValueError with the reason if there is none."""
    last = min(port + TRIES - 1, 65535) if port else 0
    for at in range(port, last + 1):
        try:
            return Server(page, host, at)
        except socket.gaierror:
            raise ValueError(
                f"--host {host} is no address of this machine; use 127.0.0.1, or 0.0.0.0 for all its addresses"
            ) from None
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ValueError(
                    f"cannot listen on {host}, port {at}: {error.strerror}; choose another --host or --port"
                ) from None
    raise ValueError(f"ports {port} to {last} are in use; choose another --port, or 0 for a free one")


class Handler(BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "fedncv", ""
    timeout = REQUEST_SECONDS

    def do_GET(self) -> None:
        if not is_ours(self.headers.get("Host", ""), self.server.host):
            self._answer(403, "text/plain", "This name is not one of fedncv watch; use the address that it printed.\n")
            return
        asked = urlsplit(self.path)
        if asked.path == "/":
            nonce = secrets.token_urlsafe(16)
            self._answer(200, "text/html", self.server.page.document(nonce), POLICY.format(nonce=nonce))
        elif asked.path == "/changes":
            seen = parse_qs(asked.query).get("seen", [""])[0]
            self._answer(200, "application/json", json.dumps(self.server.page.changes(seen), separators=(",", ":")))
        else:
            self._answer(404, "text/plain", "fedncv watch serves only its page, at /.\n")

    do_HEAD = do_GET

    def _answer(self, status: int, kind: str, text: str, policy: str = "default-src 'none'") -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Content-Security-Policy": policy,
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what is no request for us in plain text."""
        self._answer(code, "text/plain", f"{message or 'This cannot be answered'}\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Write no log."""
