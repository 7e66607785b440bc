"""A channel at work for minutes: a writer, three followers and upkeep, each a process of its own; nothing may grow.

    python benchmarks/soak.py [--url URL] [--versions 2000] [--minutes 4] [--params 400000]

The writer publishes ``--versions`` steps, spread over ``--minutes``. One follower keeps arrays at the newest version,
one a mirror, looking rarely and telling where it is, one takes every version. Meanwhile `weightcast squash`, now and
then with an anchor, and `weightcast gc` with short times run in turn. All must end at the head within three times the
minutes, with digests that are read again from their weights; no process may have failed, and the follower of every
version must not have missed one.

Twice a second, each process is looked at: resident memory, open files, threads, and the files in its temporary folder
and its mirror. After the first third, a straight line says how much grew in the time measured; that must be
less than ``--slack`` MB of memory, 5 % of it, and 40 files, since a mirror's log and history rise and fall. The
short-lived processes of the upkeep count with their peaks. In the end, no temporary file may be left. Without ``--url``
the bucket is a temporary folder.

The table goes to stderr, one JSON object to stdout; the exit code is 1 if a condition fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from catchup import Training, table

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.follow.subscriber import Subscriber
from weightcast.upkeep.collect import reset

WARM_UP = 1 / 3
"""Part of the time in which memory may grow."""

GROWING_PART, GROWING_FILES = 0.05, 40.0
"""A mirror's log rises to a fold and falls: a line through a saw has a slope of its own."""

EVERY = {"newest": 0.02, "mirror": 2.0, "every": 0.02}
"""Seconds between two looks of each follower that find nothing; one in no hurry rests when it found something, too."""

RETENTION = ("--window", "30s", "--grace", "10s", "--patience", "10m")


# -- the processes ---------------------------------------------------------------------------------------------------


def publish(url: str, versions: int, seconds: float, params: int) -> dict[str, Any]:
    """Train, and publish each step as a version, at an even pace."""
    training = Training(params)
    begin = time.monotonic()
    with wc.Publisher(url, training.weights) as publisher:
        for version in range(1, versions + 1):
            training.step()
            publisher.publish(step=version).result()
            time.sleep(max(0.0, begin + seconds * version / versions - time.monotonic()))
        position = publisher.position
    return {"version": position.version, "digest": wc.fingerprint(training.weights).digest}


def follow(role: str, url: str, versions: int, params: int, folder: Path) -> dict[str, Any]:
    """Follow until the last version; what was seen on the way."""
    weights = Training(params).weights
    holds = folder / "mirror" if role == "mirror" else weights
    policy: wc.Newest | wc.Every = wc.Every() if role == "every" else wc.Newest()
    errors: list[str] = []
    seen: list[int] = []
    with Subscriber(url, holds, policy, replica=role) as subscriber:
        for update in subscriber.follow(EVERY[role], lambda error: errors.append(str(error))):
            seen.append(update.position.version)
            if update.position.version >= versions:
                break
            if role == "mirror":
                time.sleep(EVERY[role])
        subscriber.fold()
    return {"version": seen[-1], "digest": _digest(holds), "seen": len(seen), "gaps": _gaps(seen), "errors": errors}


def _digest(holds: wc.Arrays | Path) -> str:
    """Where the weights stand, by reading them."""
    if isinstance(holds, wc.Arrays):
        return wc.fingerprint(holds).digest
    with wc.reading(holds) as checkpoint:
        return wc.fingerprint(checkpoint).digest


def _gaps(seen: list[int]) -> int:
    return sum(b != a + 1 for a, b in pairwise(seen))


# -- look at them ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """A process at one moment."""

    when: float
    rss: float
    """Resident memory in MB."""
    peak: float
    descriptors: int
    threads: int
    files: int
    """In its own folder."""


def look(pid: int, folder: Path, when: float) -> Sample | None:
    """None if it has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
        descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    if "VmRSS" not in fields:
        return None  # ended, and not waited for yet
    rss, peak = (int(fields[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM"))
    return Sample(
        when,
        rss,
        peak,
        descriptors,
        int(fields["Threads"]),
        len(_files(folder)),
    )


def _files(folder: Path) -> list[Path]:
    return [Path(at) / name for at, _, names in os.walk(folder) for name in names]


@dataclass(frozen=True)
class Trend:
    """How a number went after the warm-up."""

    least: float
    most: float
    per_minute: float
    growth: float
    """Over the time looked at, by a straight line."""

    @classmethod
    def of(cls, samples: list[Sample], number: Callable[[Sample], float]) -> Trend:
        if not samples:
            return cls(0.0, 0.0, 0.0, 0.0)
        first, last = samples[0].when, samples[-1].when
        late = [s for s in samples if s.when >= first + WARM_UP * (last - first)]
        when, values = np.array([s.when for s in late]), np.array([number(s) for s in late], np.float64)
        slope = float(np.polyfit(when - when[0], values, 1)[0]) if len(late) > 2 else 0.0
        return cls(float(values.min()), float(values.max()), 60 * slope, slope * float(when[-1] - when[0]))


@dataclass
class Watched:
    """A role: its process, or one after the other, and what was seen of them."""

    folder: Path
    samples: list[Sample] = field(default_factory=list)
    running: subprocess.Popen[bytes] | None = None
    runs: int = 0
    failures: list[str] = field(default_factory=list)

    def start(self, *command: str) -> None:
        """Start a process whose temporary files lie in this role's folder."""
        (self.folder / "tmp").mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "TMPDIR": str(self.folder / "tmp")}
        with (self.folder / "out").open("wb") as out, (self.folder / "err").open("wb") as err:
            self.running = subprocess.Popen(command, stdout=out, stderr=err, env=environment)
        self.runs += 1

    def ended(self) -> bool:
        """Whether nothing of it runs; a failure is kept."""
        if self.running is None or (code := self.running.poll()) is None:
            return self.running is None
        if code:
            self.failures.append(f"exit code {code}: {(self.folder / 'err').read_text(errors='replace')[-500:]}")
        self.running = None
        return True

    def look(self, when: float) -> Sample | None:
        return look(self.running.pid, self.folder, when) if self.running else None

    def result(self) -> dict[str, Any]:
        """What its last process said; nothing if there was none, or it was killed."""
        out = self.folder / "out"
        found: dict[str, Any] = json.loads(out.read_text() or "{}") if out.exists() else {}
        return found


class Soak:
    """All processes of a run."""

    def __init__(self, url: str, folder: Path, versions: int, seconds: float, params: int):
        self.url, self.folder, self.versions, self.seconds = url, folder, versions, seconds
        self.long = {role: Watched(folder / role) for role in ("publisher", *EVERY)}
        self.short = {verb: Watched(folder / verb) for verb in ("squash", "gc")}
        self._script = [__file__, "--url", url, "--versions", str(versions), "--params", str(params)]
        self._script += ["--minutes", str(seconds / 60)]
        self._began = time.monotonic()
        self._next_look = self._began
        self._turn = 0

    def run(self) -> bool:
        """Whether all came to an end by themselves."""
        for role, watched in self.long.items():
            watched.start(sys.executable, *self._script, "--role", role, "--folder", str(watched.folder))
        pause = self.seconds / 24
        upkeep = self._began + pause
        while not self._ended(self.long):
            now = time.monotonic()
            if now > self._began + 3 * self.seconds + 30:
                return self._stop()
            if now >= upkeep and self._ended(self.short):
                self._keep_up()
                upkeep = now + pause
            self._look(now)
            time.sleep(0.1)
        while not self._ended(self.short):
            time.sleep(0.1)
        return True

    def _ended(self, these: dict[str, Watched]) -> bool:
        return all(watched.ended() for watched in these.values())

    def _stop(self) -> bool:
        for watched in (*self.long.values(), *self.short.values()):
            if watched.running is not None:
                watched.running.kill()
                watched.running.wait()
        return False

    def _keep_up(self) -> None:
        """Squash and collect in turn, and with every third squash cut an anchor."""
        verb = ("squash", "gc")[self._turn % 2]
        options = {"squash": ["--folder", str(self.folder / "squash" / "kept")], "gc": list(RETENTION)}[verb]
        if self._turn % 6 == 4:
            options.append("--anchor")
        self.short[verb].start(sys.executable, "-m", "weightcast", verb, self.url, "--json", *options)
        self._turn += 1

    def _look(self, now: float) -> None:
        if now >= self._next_look:
            self._next_look = now + 0.5
            for watched in self.long.values():
                if sample := watched.look(now - self._began):
                    watched.samples.append(sample)
        for watched in self.short.values():
            if sample := watched.look(now - self._began):
                # Of each run, the last look counts: it has the peak.
                if len(watched.samples) == watched.runs:
                    watched.samples.pop()
                watched.samples.append(sample)


# -- judge -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """What was seen of one role, and what is wrong with it."""

    role: str
    runs: int
    memory: Trend
    descriptors: Trend
    threads: Trend
    files: Trend
    left: int
    """Temporary files in the end."""
    result: dict[str, Any]
    faults: list[str]


def judge(role: str, watched: Watched, slack: float, head: tuple[int, str] | None) -> Verdict:
    """``head`` is where it must have ended: version and digest; None for upkeep, which holds nothing."""
    short = head is None
    memory = Trend.of(watched.samples, lambda s: s.peak if short else s.rss)
    descriptors, threads, files = (
        Trend.of(watched.samples, number)
        for number in (lambda s: float(s.descriptors), lambda s: float(s.threads), lambda s: float(s.files))
    )
    left = len(_files(watched.folder / "tmp")) + len(_files(watched.folder / "mirror/.weightcast/staged"))
    result = watched.result() if not watched.failures else {}
    faults = list(watched.failures)
    if memory.growth > max(slack, GROWING_PART * memory.most):
        faults.append(f"memory grew by {memory.growth:.1f} MB")
    grown = {"descriptors": descriptors, "threads": threads} | ({} if short else {"files": files})
    faults += [f"{name} grew by {trend.growth:.1f}" for name, trend in grown.items() if trend.growth > GROWING_FILES]
    if left:
        faults.append(f"{left} temporary files are left")
    if head is not None:
        faults += _wrong(role, result, head)
    return Verdict(role, watched.runs, memory, descriptors, threads, files, left, result, faults)


def _wrong(role: str, result: dict[str, Any], head: tuple[int, str]) -> list[str]:
    faults = [f"error: {error}" for error in result.get("errors", [])]
    if (result.get("version"), result.get("digest")) != head:
        faults.append(f"it ended at {result.get('version')} {str(result.get('digest'))[:12]}, not at the head")
    if role == "every" and result.get("gaps"):
        faults.append(f"{result['gaps']} times it skipped versions")
    return faults


def judge_all(soak: Soak, url: str, slack: float) -> tuple[list[Verdict], list[str]]:
    newest = Chain.open(wc.open_store(url)).head()
    head = (newest.position.version, newest.position.digest) if newest else (-1, "")
    verdicts = [judge(role, watched, slack, head) for role, watched in soak.long.items()]
    verdicts += [judge(verb, watched, slack, None) for verb, watched in soak.short.items()]
    faults = [f"{verdict.role}: {fault}" for verdict in verdicts for fault in verdict.faults]
    if head[0] != soak.versions:
        faults.append(f"the head is version {head[0]}")
    if "://" not in url and (stray := _files(Path(url) / ".tmp")):
        faults.append(f"{len(stray)} temporary files are left in the bucket")
    whole = subprocess.run([sys.executable, "-m", "weightcast", "verify", url], capture_output=True, text=True)
    return verdicts, faults + ([f"verify: {whole.stdout}{whole.stderr}"] if whole.returncode else [])


def row_of(verdict: Verdict) -> dict[str, object]:
    memory = verdict.memory
    return {
        "process": verdict.role + (f" × {verdict.runs}" if verdict.runs > 1 else ""),
        "versions taken": verdict.result.get("seen", verdict.result.get("version", "")),
        "memory, least – most MB": f"{memory.least:.0f} – {memory.most:.0f}",
        "MB per minute": f"{memory.per_minute:+.2f}",
        "open files": f"{verdict.descriptors.least:.0f} – {verdict.descriptors.most:.0f}",
        "threads": f"{verdict.threads.least:.0f} – {verdict.threads.most:.0f}",
        "files": f"{verdict.files.least:.0f} – {verdict.files.most:.0f}",
        "files left": verdict.left,
        "in order": "NO" if verdict.faults else "yes",
    }


# -- run -------------------------------------------------------------------------------------------------------------


def soak(url: str, folder: Path, args: argparse.Namespace) -> int:
    """Run it all and report; the exit code."""
    load = os.getloadavg()[0]
    wc.init(url, Training(args.params).weights)
    running = Soak(url, folder, args.versions, 60 * args.minutes, args.params)
    begin = time.monotonic()
    done = running.run()
    took = time.monotonic() - begin
    verdicts, faults = judge_all(running, url, args.slack)
    if not done:
        faults.insert(0, "it did not end in time")
    store = "a folder" if "://" not in url else url.partition("://")[0]
    title = f"{store}, {args.versions} versions of {args.params:,} parameters in {took:.0f} s, load {load:.1f}"
    print(f"{title}\n\n{table([row_of(verdict) for verdict in verdicts])}\n", file=sys.stderr)
    for fault in faults:
        print(f"FAILED: {fault}", file=sys.stderr)
    facts = {"store": store, "versions": args.versions, "params": args.params, "seconds": took, "load": load}
    print(json.dumps(facts | {"processes": [asdict(v) for v in verdicts], "faults": faults}, indent=1))
    return 1 if faults else 0


def play(role: str, args: argparse.Namespace) -> dict[str, Any]:
    """Be one of the processes."""
    if role == "publisher":
        return publish(args.url, args.versions, 60 * args.minutes, args.params)
    return follow(role, args.url, args.versions, args.params, args.folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="where the channel is made; default: a temporary folder")
    parser.add_argument("--versions", type=int, default=2000)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--params", type=int, default=400_000)
    parser.add_argument("--slack", type=float, default=8.0, help="MB by which a process may grow")
    parser.add_argument("--role", choices=("publisher", *EVERY), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    wc.warm_up()
    if args.role:
        print(json.dumps(play(args.role, args)))
        return 0
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weightcast-soak-")))
        url = args.url or str(folder / "bucket")
        if args.url:
            stack.callback(lambda: reset(wc.open_store(url)))
        return soak(url, folder, args)


if __name__ == "__main__":
    sys.exit(main())
