"""One store for all tests that need a store to misbehave: it counts requests and follows a script of rules.

    store = ScriptedStore()                                 # its own memory; ScriptedStore(other) wraps any store
    store.fail("put create", "deltas/")                     # until the rule ends: UnreachableError
    store.fail("get", "manifests/", AccessError, times=2)   # the first two of these requests
    store.fail("create", lost=True, times=1)                # takes effect, but its answer is lost
    held = store.hang("put")                                # until held.end(); held.reached says that one waits
    store.before("delete", "anchors/", lambda request: ..., times=1)
    store.after("put", "anchors/", lambda request: clock.wait(stopped, 8.0))
    store.answer("get", "HEAD", lambda data: data[:-1])     # a lie about content, or about a listing
    store.hide("manifests/000000000003.json")

A rule applies to the verbs it names ("" for all) and to keys that begin with a prefix (one, or a tuple), or for which a
function is true. It lets the first ``skip`` of these requests pass, then applies to one in ``every``, at most ``times``
times. It is a context manager: it ends with its block. Rules nest in the order in which they were added.

``now`` is a clock of the store's own, in place of the wrapped store's: time passes when a test sets it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from weightcast.errors import MissingError, StoreError, UnreachableError
from weightcast.store.base import Data, Listed, Store
from weightcast.store.memory import MemoryStore

Keys = str | tuple[str, ...] | Callable[[str], bool]


@dataclass(frozen=True)
class Request:
    """What is asked of the store; the key of a listing is its prefix."""

    verb: str
    key: str
    start: int = 0
    length: int | None = None
    data: Data = b""
    number: int = 0
    """Of all requests to the store, from 1."""


Action = Callable[[Request, Callable[[], Any]], Any]
"""Called with a request and with what carries it out; returns the answer, or raises."""


@dataclass
class Rule:
    """What happens to some requests, until `end`."""

    act: Action
    verbs: str = ""
    keys: Keys = ""
    skip: int = 0
    every: int = 1
    times: int | None = None
    seen: int = 0
    """Requests that matched while the rule was on."""
    hits: int = 0
    """Those that the rule applied to."""
    on: bool = True
    reached: threading.Event = field(default_factory=threading.Event)
    """Set once the rule applied to a request."""
    ended: threading.Event = field(default_factory=threading.Event)

    def takes(self, request: Request) -> bool:
        """Whether the rule applies to this request; counts it."""
        matches = self.keys(request.key) if callable(self.keys) else request.key.startswith(self.keys)
        if not self.on or not matches or (self.verbs and request.verb not in self.verbs.split()):
            return False
        self.seen += 1
        if self.seen <= self.skip or (self.seen - self.skip - 1) % self.every or self.hits == self.times:
            return False
        self.hits += 1
        self.reached.set()
        return True

    def end(self) -> None:
        """The rule applies to nothing any more, and releases the requests that hang."""
        self.on = False
        self.ended.set()

    def __enter__(self) -> Rule:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class ScriptedStore:
    """A store that counts requests and follows rules; without rules it answers as the wrapped store does."""

    def __init__(self, store: Store | None = None, *, now: float | None = None):
        self.store: Store = MemoryStore("scripted") if store is None else store
        self.now = now
        self.times: dict[str, float] = {}
        """When objects were written, where that is not what the wrapped store says."""
        self.calls: list[tuple[str, str]] = []
        """Verb and key of each request, in order; a listing counts when it is asked for."""
        self._rules: list[Rule] = []
        self._lock = threading.RLock()

    # -- the script --------------------------------------------------------------------------------------------------

    def on(self, verbs: str, keys: Keys, act: Action, **which: int) -> Rule:
        """``act`` in place of these requests; the other rules are shorter ways to say this."""
        rule = Rule(act, verbs, keys, **which)
        with self._lock:
            self._rules.append(rule)
        return rule

    def fail(
        self,
        verbs: str = "",
        keys: Keys = "",
        error: Exception | type[StoreError] = UnreachableError,
        *,
        lost: bool = False,
        **which: int,
    ) -> Rule:
        """They fail, and have no effect; with ``lost`` they take effect first."""

        def act(request: Request, proceed: Callable[[], Any]) -> Any:
            if lost:
                proceed()
            raise error if isinstance(error, Exception) else error("no answer", url=self.url, key=request.key)

        return self.on(verbs, keys, act, **which)

    def hang(self, verbs: str = "", keys: Keys = "", **which: int) -> Rule:
        """They wait until the rule ends, and are carried out then."""

        def act(request: Request, proceed: Callable[[], Any]) -> Any:
            if not rule.ended.wait(120):
                raise TimeoutError(f"the test never released {request.verb} {request.key}")
            return proceed()

        rule = self.on(verbs, keys, act, **which)
        return rule

    def before(self, verbs: str, keys: Keys, hook: Callable[[Request], object], **which: int) -> Rule:
        """``hook`` runs before they are carried out."""

        def act(request: Request, proceed: Callable[[], Any]) -> Any:
            hook(request)
            return proceed()

        return self.on(verbs, keys, act, **which)

    def after(self, verbs: str, keys: Keys, hook: Callable[[Request], object], **which: int) -> Rule:
        """``hook`` runs after they were carried out, before they return."""

        def act(request: Request, proceed: Callable[[], Any]) -> Any:
            answer = proceed()
            hook(request)
            return answer

        return self.on(verbs, keys, act, **which)

    def answer(self, verbs: str, keys: Keys, change: Callable[[Any], Any], **which: int) -> Rule:
        """They answer with ``change`` of the true answer: bytes, a list of `Listed`, or whether it was created."""
        return self.on(verbs, keys, lambda request, proceed: change(proceed()), **which)

    def hide(self, key: str) -> None:
        """The object is neither listed nor found by `get`, but `create` still meets it."""
        self.fail("get", key, MissingError)
        self.answer("list", "", lambda found: [listed for listed in found if listed.key != key])

    def overwrite(self) -> Rule:
        """`create` replaces what is there and returns True, as on a server that ignores the condition."""

        def act(request: Request, proceed: Callable[[], Any]) -> bool:
            self.put(request.key, request.data)
            return True

        return self.on("create", "", act)

    def behave(self) -> None:
        """All rules end."""
        for rule in self._rules:
            rule.end()

    # -- what happened -----------------------------------------------------------------------------------------------

    def count(self, verbs: str = "", keys: str | tuple[str, ...] = "") -> int:
        """How many requests there were."""
        return len(self.asked(verbs, keys))

    def asked(self, verbs: str = "", keys: str | tuple[str, ...] = "") -> list[str]:
        """The keys of requests, in order."""
        wanted = verbs.split()
        return [key for verb, key in self.calls if (not wanted or verb in wanted) and key.startswith(keys)]

    def keys(self, prefix: str = "") -> set[str]:
        """The keys of the objects there are. This is no request."""
        return {listed.key for listed in self.store.list(prefix)}

    def age(self, seconds: float) -> None:
        """All objects become older."""
        for listed in self._listed("", ""):
            self.times[listed.key] = listed.modified - seconds

    # -- a store -----------------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return self.store.url

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        data: bytes = self._perform(Request("get", key, start, length), lambda: self.store.get(key, start, length))
        return data

    def put(self, key: str, data: Data) -> None:
        def put() -> None:
            self.store.put(key, data)
            self._written(key)

        self._perform(Request("put", key, data=data), put)

    def create(self, key: str, data: Data) -> bool:
        def create() -> bool:
            made = self.store.create(key, data)
            if made:
                self._written(key)
            return made

        made: bool = self._perform(Request("create", key, data=data), create)
        return made

    def list(self, prefix: str, after: str = "") -> Iterator[Listed]:
        return iter(self._perform(Request("list", prefix), lambda: self._listed(prefix, after)))

    def delete(self, key: str) -> None:
        self._perform(Request("delete", key), lambda: self.store.delete(key))

    def _written(self, key: str) -> None:
        if self.now is None:
            self.times.pop(key, None)
        else:
            self.times[key] = self.now

    def _listed(self, prefix: str, after: str) -> list[Listed]:
        """By the store's own clock, an object that it did not write is as old as the first listing that shows it."""
        found = []
        for listed in self.store.list(prefix, after):
            if self.now is not None:
                self.times.setdefault(listed.key, self.now)
            found.append(replace(listed, modified=self.times.get(listed.key, listed.modified)))
        return found

    def _perform(self, request: Request, proceed: Callable[[], Any]) -> Any:
        with self._lock:
            self.calls.append((request.verb, request.key))
            request = replace(request, number=len(self.calls))
            rules = [rule for rule in self._rules if rule.takes(request)]
        for rule in reversed(rules):
            proceed = _nested(rule.act, request, proceed)
        return proceed()


def _nested(act: Action, request: Request, proceed: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: act(request, proceed)
