"""Small real servers on loopback: a folder over http, and sockets that misbehave in one way each."""

from __future__ import annotations

import http.server
import re
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Web:
    """A web server on a folder; what it was asked is in ``log``."""

    folder: Path
    url: str = ""
    ranges: bool = True
    compressed: bool = False
    statuses: dict[str, int] = field(default_factory=dict)
    redirects: dict[str, str] = field(default_factory=dict)
    log: list[tuple[str, str | None]] = field(default_factory=list)


class _Answers(http.server.SimpleHTTPRequestHandler):
    web: Web

    def __init__(self, *arguments: object):
        super().__init__(*arguments, directory=str(self.web.folder))  # type: ignore[arg-type]

    def log_message(self, *arguments: object) -> None:  # type: ignore[override]
        pass

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.web.log.append((self.path, wanted))
        if self.path in self.web.redirects:
            self.send_response(302)
            self.send_header("Location", self.web.redirects[self.path])
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif self.path in self.web.statuses:
            self.send_error(self.web.statuses[self.path])
        elif self.web.ranges or self.web.compressed:
            self._answer(wanted if self.web.ranges else None)
        else:
            super().do_GET()

    def _answer(self, wanted: str | None) -> None:
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            return self.send_error(404)
        content = path.read_bytes()
        start, end = 0, len(content)
        if wanted:
            first, last = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted).groups()  # type: ignore[union-attr]
            start, end = int(first), min(int(last or len(content)) + 1, len(content))
            if start >= len(content):
                return self.send_error(416)
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
        if self.web.compressed:
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        self.wfile.write(content[start:end])
        return None


@contextmanager
def serving_folder(folder: Path, certificate: tuple[Path, Path] | None = None) -> Iterator[Web]:
    """A web server with ranges; behind TLS with a (certificate, key)."""
    web = Web(folder)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Answers", (_Answers,), {"web": web}))
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        server.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients that do not trust us
    web.url = f"http{'s' * bool(certificate)}://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield web
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def answering(answer: bytes | Callable[[socket.socket], None]) -> Iterator[str]:
    """A socket that gives the same bytes to everyone and hangs up, or does with a connection what it is told."""
    listening = socket.create_server(("127.0.0.1", 0))
    open_ones: list[socket.socket] = []

    def accept() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            open_ones.append(connection)
            threading.Thread(target=one, args=(connection,), daemon=True).start()

    def one(connection: socket.socket) -> None:
        if callable(answer):
            return answer(connection)
        try:
            connection.recv(1 << 16)
            connection.sendall(answer)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):  # or what is unread would reset the connection, answer and all
                pass
        except OSError:
            return None
        connection.close()
        return None

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join()
        for connection in open_ones:
            connection.close()


def hanging() -> object:
    """A server that takes connections and never says a word."""
    return answering(lambda connection: None)


def certificate(folder: Path) -> tuple[Path, Path, Path]:
    """An authority of our own, and a (certificate, key) for 127.0.0.1 that it signed."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    openssl("req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=authority")
    openssl("req", *new_key, "-keyout", "host.key", "-out", "host.csr", "-subj", "/CN=host")
    (folder / "host.ext").write_text("subjectAltName=IP:127.0.0.1\nbasicConstraints=CA:FALSE\n")
    openssl(
        *["x509", "-req", "-in", "host.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2"],
        *["-extfile", "host.ext", "-out", "host.pem"],
    )
    return folder / "ca.pem", folder / "host.pem", folder / "host.key"
