"""Real vLLM on the CPU: its OpenAI server, started for a test and gone after it."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.message import Message
from pathlib import Path
from typing import Any, NamedTuple

SITE = Path(__file__).parent / "site"
KV_BYTES = 64 << 20
START_SECONDS = 240
ANSWER_SECONDS = 120
TRACKER_SECONDS = 10


class EngineError(Exception):
    """An engine that does not start, or ends by itself; the message holds the end of its log."""


class StatusError(Exception):
    """An answer with an HTTP status that tells of an error."""

    def __init__(self, status: int, body: str):
        super().__init__(f"HTTP {status}: {body}")
        self.status, self.body = status, body


class Generated(NamedTuple):
    """The most likely continuation of a prompt, and how likely the engine holds each of its tokens."""

    tokens: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Engine:
    """A server that runs. All its processes are of one session, which no other process is in."""

    url: str
    model: str
    log: Path
    process: subprocess.Popen[bytes] = field(repr=False)

    @property
    def pid(self) -> int:
        """The process that answers HTTP."""
        return self.process.pid

    def get(self, path: str, **query: object) -> Any:
        """What a route answers: parsed if it is JSON, the text itself if not, None if empty."""
        return _ask(urllib.request.Request(self._address(path, query)))

    def post(self, path: str, json: object = None, **query: object) -> Any:
        """Post a body, or none, to a route; the answer as `get` has it. Raises StatusError."""
        return _ask(_post(self._address(path, query), json))

    def generate(self, prompt_token_ids: Sequence[int], max_tokens: int) -> Generated:
        """Continue a prompt greedily by exactly so many tokens."""
        return self.generate_named(prompt_token_ids, max_tokens)[1]

    def generate_named(self, prompt_token_ids: Sequence[int], max_tokens: int) -> tuple[str, Generated]:
        """The same, and the version, or versions, that the answer names."""
        request = {
            "model": self.model,
            "prompt": list(prompt_token_ids),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
        }
        headers, answer = _send(_post(self._address("/v1/completions", {}), request))
        choice = answer["choices"][0]
        return headers["x-weight-version"], Generated(choice["token_ids"], choice["logprobs"]["token_logprobs"])

    def pids(self) -> list[int]:
        """All processes of the engine that still run."""
        return _session(self.pid)

    def worker_pids(self) -> list[int]:
        """The processes that hold the weights, in the order of their ranks."""
        names = {pid: _title(pid) for pid in self.pids()}
        return sorted((pid for pid, name in names.items() if "::Worker" in name), key=names.__getitem__)

    def tail(self, lines: int = 150) -> str:
        """The end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def kill(self) -> None:
        """Kill every process of the engine at once (SIGKILL); returns when none is left.

        Python's resource tracker alone may end by itself: it then removes the shared memory of the others.
        """
        patience = time.monotonic() + TRACKER_SECONDS
        while alive := self.pids():
            spared = time.monotonic() < patience
            for pid in alive:
                if not (spared and "resource_tracker" in _title(pid)):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        self.process.wait()

    def _address(self, path: str, query: Mapping[str, object]) -> str:
        return f"{self.url}{path}?{urllib.parse.urlencode(query)}" if query else f"{self.url}{path}"


@contextmanager
def serving(
    model_folder: Path | str,
    *,
    tensor_parallel: int = 1,
    ranks: int | None = None,
    backend: str | None = "weightcast",
    port: int | None = None,
    extra_args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Iterator[Engine]:
    """A server for a model, with a weight-transfer backend or None, for as long as the context lasts.

    ``ranks`` is the number of its workers, if that is not ``tensor_parallel``.

    It listens on 127.0.0.1 and is killed at the end, whatever comes; also when this process is killed itself.
    """
    port = port or free_port()
    command = _command(str(model_folder), port, tensor_parallel, backend, extra_args)
    with running(command, _environment(ranks or tensor_parallel, env or {}), str(model_folder), port) as engine:
        yield engine


@contextmanager
def running(command: Sequence[str], env: Mapping[str, str], model: str, port: int) -> Iterator[Engine]:
    """What a command starts: a server for a model on a port, as `serving` has it."""
    with tempfile.TemporaryDirectory(prefix="weightcast-vllm-", ignore_cleanup_errors=True) as folder:
        log = Path(folder) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                env={**env, "TMPDIR": folder},  # vLLM's sockets, which nobody removes after a kill
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        engine = Engine(f"http://127.0.0.1:{port}", model, log, process)
        with _guard(process.pid):
            try:
                _wait_for(engine)
                _give_way(engine.pid)
                yield engine
            finally:
                engine.kill()


def _command(model: str, port: int, tensor_parallel: int, backend: str | None, extra_args: Sequence[str]) -> list[str]:
    transfer = [] if backend is None else ["--weight-transfer-config", json.dumps({"backend": backend})]
    if backend == "weightcast":
        transfer += ["--middleware", "weightcast_vllm.Middleware"]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--host", "127.0.0.1", "--port", str(port), "--tensor-parallel-size", str(tensor_parallel)]
    command += ["--dtype", "bfloat16", "--max-model-len", "256", "--enforce-eager"]
    command += ["--kv-cache-memory-bytes", str(KV_BYTES), "--max-num-seqs", "8", "--max-num-batched-tokens", "256"]
    return [*command, *transfer, *extra_args]


def _environment(ranks: int, more: Mapping[str, str]) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "PYTEST_"))}
    return {
        **inherited,
        "PYTHONPATH": python_path(),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
        # The sampler is compiled even with --enforce-eager: 19 s in the first request on a fresh machine.
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": _cores(ranks),
        "VLLM_NO_USAGE_STATS": "1",
        "WEIGHTCAST_RUNTIME_DIR": runtime_folder(),
        **more,
    }


def runtime_folder() -> str:
    """Where engines of these tests leave their records, and agents find them."""
    return os.environ.setdefault("WEIGHTCAST_RUNTIME_DIR", tempfile.mkdtemp(prefix="wc-"))


def python_path() -> str:
    """The plug-ins for tests, before whatever this process has."""
    return os.pathsep.join([str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])])


def _cores(ranks: int) -> str:
    """Where vLLM binds its ranks: each to a core of its own; one alone to none, so that two engines share well."""
    if ranks == 1:
        return "nobind"
    cores = sorted(os.sched_getaffinity(0))
    return "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))


@contextmanager
def _guard(session: int) -> Iterator[None]:
    """Have a process group killed as soon as this process is gone: a shell waits for the end of a pipe."""
    script = 'read -r _; kill -s KILL -- "-$1"'
    guard = subprocess.Popen(
        ["sh", "-c", script, "sh", str(session)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        guard.kill()
        guard.communicate()


def _give_way(session: int) -> None:
    """Let trainer and agent run beside ranks that spin: Linux weighs sessions, and left those two 5 % of two cores."""
    with suppress(FileNotFoundError):  # a kernel without automatic groups
        Path(f"/proc/{session}/autogroup").write_text("19")


def _wait_for(engine: Engine) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if engine.process.poll() is not None:
            raise EngineError(f"vLLM ended with {engine.process.returncode}:\n{engine.tail()}")
        with suppress(OSError, http.client.HTTPException, StatusError):
            engine.get("/health")
            return
        time.sleep(0.1)
    raise EngineError(f"vLLM does not answer after {START_SECONDS} s:\n{engine.tail()}")


def _post(url: str, body: object) -> urllib.request.Request:
    data = b"" if body is None else json.dumps(body).encode()
    # Else an engine without an agent would let a request wait for a version.
    headers = {"Content-Type": "application/json", "x-weight-version-wait": "0"}
    return urllib.request.Request(url, data, headers, method="POST")


def _ask(request: urllib.request.Request) -> Any:
    return _send(request)[1]


def _send(request: urllib.request.Request) -> tuple[Message, Any]:
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            request, timeout=ANSWER_SECONDS
        ) as answer:
            return answer.headers, _parsed(answer.read().decode())
    except urllib.error.HTTPError as error:
        with error:
            raise StatusError(error.code, error.read().decode(errors="replace")) from None


def _parsed(text: str) -> Any:
    try:
        return json.loads(text) if text else None
    except json.JSONDecodeError:
        return text


def _session(leader: int) -> list[int]:
    """The processes of a session, zombies left out."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, _, session, *_ = stat.read_text(errors="replace").rpartition(")")[2].split()
            if int(session) == leader and state not in "ZX":
                found.append(int(stat.parent.name))
    return sorted(found)


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def free_port() -> int:
    """One that no outgoing connection takes meanwhile, as it may those that the system itself hands out."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", random.randrange(12_000, 30_000)))
            return int(probe.getsockname()[1])
