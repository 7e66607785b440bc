"""The dashboard: one page over what an `Observer` sees, as a small server or as a file.

    GET /                              the page
    GET /state?epoch=E&since=N         what is new since revision N of epoch E

It only reads. A request must name this server by an address or by `localhost`: a page of another site can have its own
name lead here (DNS rebinding), but not an address.
"""

from __future__ import annotations

import ipaddress
import json
from typing import Any
from urllib.parse import parse_qs, urlsplit

from weightcast.engine.bounded_http import ARRIVAL, BoundedRequests, BoundedServer, is_number
from weightcast.view.journal import Journal
from weightcast.view.page import Page, page

_SCRIPTS, _STYLES = ("dashboard.js",), ("dashboard.css",)

_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


_OTHER_HOST = b'{"error":"open this page by an IP address, or name this host in --listen HOST:PORT"}'


def report_of(journal: Journal) -> Page:
    """The page as one file, with all that is known now."""
    return page("weightcast report", scripts=_SCRIPTS, styles=_STYLES, data={"state": journal.since()})


class Dashboard(BoundedServer):
    """Serves the page and what a journal knows, until it is closed."""

    def __init__(self, journal: Journal, host: str, port: int, *, arrival: float = ARRIVAL):
        self.journal = journal
        self.page = page("weightcast", scripts=_SCRIPTS, styles=_STYLES, live=True)
        self.host = host
        super().__init__((host, port), _Requests, None, arrival=arrival, is_public=True)

    @property
    def url(self) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}/" if ":" in host else f"http://{host}:{self.port}/"

    def answers_for(self, host: str) -> bool:
        """Whether a request that names this host is meant for us."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if name in ("localhost", self.host.lower()):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


class _Requests(BoundedRequests):
    server: Dashboard
    server_version, sys_version = "weightcast", ""

    def do_GET(self) -> None:  # noqa: N802 -- http.server calls it
        self._reply(with_body=True)

    def do_HEAD(self) -> None:  # noqa: N802 -- http.server calls it
        self._reply(with_body=False)

    def _reply(self, *, with_body: bool) -> None:
        if not self.server.let_in(self.connection):
            return  # the connection has made way already
        try:
            url = urlsplit(self.path)
        except ValueError:
            self.send_error(400)
            return
        if len(self.headers.get_all("Host", [])) != 1 or not self.server.answers_for(self.headers["Host"]):
            self._send(403, "application/json", _OTHER_HOST, with_body)
        elif url.path == "/":
            made = self.server.page
            policy = f"{made.policy}; frame-ancestors 'none'"
            self._send(200, "text/html; charset=utf-8", made.html.encode(), with_body, policy)
        elif url.path == "/state":
            state = json.dumps(self._state(parse_qs(url.query)), separators=(",", ":"), allow_nan=False)
            self._send(200, "application/json", state.encode(), with_body)
        else:
            self._send(404, "application/json", b'{"error":"there are / and /state"}', with_body)

    def _state(self, query: dict[str, list[str]]) -> dict[str, Any]:
        epoch, since = (query.get(key, [""])[0] for key in ("epoch", "since"))
        return self.server.journal.since(epoch, int(since) if is_number(since, 15) else 0)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What http.server refuses by itself, such as another method: without a word of the request."""
        self.close_connection = True
        status = 405 if code == 501 else code
        problem = b"only GET and HEAD" if status == 405 else b"this is not a request"
        self._send(status, "application/json", b'{"error":"' + problem + b'"}', with_body=True)

    def _send(self, status: int, kind: str, body: bytes, with_body: bool, policy: str | None = None) -> None:
        self.send_response(status)
        headers = {"Content-Type": kind, "Content-Length": str(len(body)), **_HEADERS}
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Security-Policy", policy or "default-src 'none'; frame-ancestors 'none'")
        self.end_headers()
        if with_body:
            self.wfile.write(body)
