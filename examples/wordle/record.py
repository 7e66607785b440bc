"""What all boxes reported in a run, joined by version."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from examples.wordle.boxes import Message
from examples.wordle.evaluation import Evaluation

Fields = dict[str, Any]
RECENT = 20
"""Steps that running means are taken over."""


@dataclass
class Version:
    """When each phase of a version ended, from the trainer's step to the first rollout; seconds since the epoch."""

    stepped: float | None = None
    committed: float | None = None
    live: dict[str, float] = field(default_factory=dict)
    """By replica."""
    rolled: float | None = None
    """The first answer that was made with it reached a player."""
    changed: float = 0.0
    nbytes: int = 0


@dataclass
class ReplicaRecord:
    """What one replica reported."""

    version: int | None = None
    updates: int = 0
    nbytes: int = 0
    pauses: list[float] = field(default_factory=list)
    joined: int | None = None
    """The first version it had."""


@dataclass
class Record:
    """The whole run."""

    elements: int = 0
    full: int = 0
    """Bytes of the model on the wire."""
    steps: int = 0
    of: int = 0
    head: int | None = None
    versions: dict[int, Version] = field(default_factory=dict)
    replicas: dict[str, ReplicaRecord] = field(default_factory=dict)
    staleness: Counter[int] = field(default_factory=Counter)
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    wins: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    curve: list[tuple[int, float]] = field(default_factory=list)
    """Step and mean reward of its games."""
    games: int = 0
    dropped: int = 0
    """Games that were too old to learn from."""
    before: Evaluation | None = None
    after: Evaluation | None = None
    digest: str | None = None
    """Of the last version, once the trainer is done."""
    exact: bool | None = None
    """Whether it is the digest of the trainer's own weights, computed by other means."""
    page: str | None = None
    """Where the dashboard is: an address while it runs, then a file."""
    news: deque[str] = field(default_factory=lambda: deque(maxlen=5))

    def take(self, message: Message) -> None:
        """Add what a box reported; what it does not know is nothing that the view or the summary show."""
        box, fields = message.box, message.fields
        match fields["event"]:
            case "begin":
                self._begin(box, fields)
            case "evaluation":
                self._evaluation(fields)
            case "step":
                self._step(fields)
            case "commit":
                self._commit(fields)
            case "version":
                self._live(box, fields)
            case "first":
                version = self._version(fields["version"])
                version.rolled = version.rolled or fields["time"]
            case "rollouts":
                self.games += fields["games"]
            case "dropped":
                self.dropped += fields["games"]
            case "listening":
                self.page = fields["url"]
            case "trouble":
                self.news.append(f"{box}: {fields['text'][:100]}")
            case "end" if "digest" in fields:  # an agent reports its end too
                self.head, self.digest, self.exact = fields["version"], fields["digest"], fields.get("exact")

    def _begin(self, box: str, fields: Fields) -> None:
        if "elements" in fields:
            self.elements, self.full, self.head = fields["elements"], fields["nbytes"], fields["version"]
        self.news.append(f"{box} is up")

    def _evaluation(self, fields: Fields) -> None:
        names = ("version", "games", "wins", "low", "high", "reward")
        setattr(self, fields["when"], Evaluation(**{name: fields[name] for name in names}))

    def _step(self, fields: Fields) -> None:
        self.steps, self.of = fields["step"], fields["of"]
        self.staleness[fields["staleness"]] += 1
        self.rewards.append(fields["reward"])
        if fields["wins"] is not None:  # TRL reports rewards alone
            self.wins.append(fields["wins"])
        self.curve.append((fields["step"], fields["reward"]))

    def _commit(self, fields: Fields) -> None:
        self.head = fields["version"]
        version = self._version(fields["version"])
        version.committed = fields.get("committed", fields["time"])
        version.changed, version.nbytes = fields["changed"], fields["nbytes"]
        version.stepped = fields["stepped"]

    def _live(self, box: str, fields: Fields) -> None:
        replica = self.replicas.setdefault(box, ReplicaRecord())
        replica.version = fields["version"]
        replica.updates += 1
        replica.nbytes += fields.get("nbytes", 0)
        if replica.joined is None:
            replica.joined = fields["version"]
        if fields["version"] > 0 and replica.updates > 1:  # the first brings a whole model, and nobody waits for it
            replica.pauses.append(fields["pause"])
        self._version(fields["version"]).live.setdefault(box, fields["time"])

    def _version(self, number: int) -> Version:
        return self.versions.setdefault(number, Version())
