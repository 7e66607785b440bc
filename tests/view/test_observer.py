"""What a page is told of a channel: exact, bounded, only what is new, and nothing is written."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from cli_world import flip, run, tree
from scripted_store import ScriptedStore
from signed_channel import SignedChannel
from watched import Watched, lengthen, make_long, make_watched, observed, state_of, watcher

import weightcast as wc
from weightcast.channel.chain import Chain
from weightcast.channel.heartbeats import put_heartbeat
from weightcast.channel.keys import manifest_key
from weightcast.channel.records import Heartbeat
from weightcast.errors import UsageError
from weightcast.store import open_store
from weightcast.view.event_tail import EventTail
from weightcast.view.journal import Journal
from weightcast.view.objects import read_patch
from weightcast.view.observer import HEAT, RECENT, Observer


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return make_watched(tmp_path / "channel")


def rows_of(state: dict[str, Any], kind: str) -> dict[int, Any]:
    return dict(state["rows"][kind]["new"])


def problems(state: dict[str, Any]) -> dict[str, str]:
    return dict(state["parts"]["checks"]["findings"])


# -- what is seen ------------------------------------------------------------------------------------------------------


def test_versions_are_those_of_the_manifests_and_nothing_is_written(watched: Watched) -> None:
    before = tree(watched.url)
    state = state_of(watched.url)
    versions = rows_of(state, "versions")
    assert tree(watched.url) == before
    assert sorted(versions) == list(range(6))
    for version in range(1, 6):
        manifest = watched.chain.manifest(version)
        assert (versions[version]["bytes"], versions[version]["changed"]) == (manifest.nbytes, manifest.changed)
    assert versions[0]["anchor"]
    assert state["parts"]["head"]["version"] == 5
    assert state["parts"]["checks"] == {
        "findings": [],
        "total": 0,
        "manifests": 6,
        "objects": 5,
        "bytes": sum(watched.delta(version).stat().st_size for version in range(1, 6)),
    }


def test_shares_of_the_map_are_those_of_the_weights(watched: Watched) -> None:
    state = state_of(watched.url)
    axes, shares = state["parts"]["axes"], rows_of(state, "heat")[5]["shares"]
    by_layer, by_kind = (dict(zip(axes[kind], shares[kind], strict=True)) for kind in ("layers", "kinds"))
    rows, columns = watched.weights["model.embed_tokens.weight"].shape
    moved = -(-rows // 7) * columns / (rows * columns)
    assert by_kind["norm"] == 0
    assert by_kind["q_proj"] == by_kind["model.embed_tokens.weight"] == pytest.approx(moved, rel=1e-2)
    assert by_layer["layer 1"] == pytest.approx(2 / 3 * moved, rel=1e-2)
    assert axes["inLayers"] == [3, 3]


def test_replica_is_shown_with_its_lag_pause_and_error(watched: Watched) -> None:
    watched.report("slow", 2, pause=0.25)
    watched.report("broken", 5, "no room")
    replicas = state_of(watched.url)["parts"]["replicas"]
    assert [(row["name"], row["lag"], row["error"], row["pause"]) for row in replicas["rows"]] == [
        ("broken", 0, "no room", 0.004),
        ("slow", 3, None, 0.25),
    ]
    assert (replicas["total"], replicas["upToDate"], replicas["failing"], replicas["worst"]) == (2, 1, 1, 3)


def test_versions_after_a_report_do_not_make_a_replica_late(watched: Watched) -> None:
    watched.report("a", 5)
    watched.report("b", 4)
    watched.publish(2)
    rows = {row["name"]: row for row in state_of(watched.url)["parts"]["replicas"]["rows"]}
    assert {name: (row["lag"], row["behind"]) for name, row in rows.items()} == {"a": (2, 0), "b": (3, 1)}


def test_arrival_is_the_time_from_commit_to_heartbeat_once_it_was_watched(watched: Watched) -> None:
    watched.report("a", 4)
    observer = observed(watched.url)
    assert observer.journal.since()["parts"]["arrivals"] == {"source": "heartbeats", "rows": []}
    assert observer.journal.since()["news"] == [], "who was there before has not joined"
    watched.report("a", 5)
    observer.look()
    ((version, count, least, median, most),) = observer.journal.since()["parts"]["arrivals"]["rows"]
    observer.close()
    assert (version, count) == (5, 1)
    assert 0 <= least == median == most < 600


def test_squashes_and_anchors_are_shown_and_new_ones_are_news(tmp_path: Path) -> None:
    watched = make_watched(tmp_path / "channel", 9)
    observer = observed(watched.url)
    assert run("squash", watched.url, "--anchor").code == 0
    watched.publish()
    while observer.look():
        pass
    state = observer.journal.since()
    observer.close()
    ((base, result, nbytes),) = state["parts"]["squashes"]
    assert (base, result, nbytes) == (0, 8, next((watched.url / "squashes").iterdir()).stat().st_size)
    assert [anchor[0] for anchor in state["parts"]["anchors"]] == [0, 9]
    assert [item["text"] for item in state["news"]] == ["a new squash of versions 0 to 8", "a new anchor at 9"]


# -- damage ------------------------------------------------------------------------------------------------------------


def test_flipped_bit_is_found_by_sha256(watched: Watched) -> None:
    flip(watched.delta(3), -1)
    found = problems(state_of(watched.url))
    assert found == {watched.chain.manifest(3).objects[0].key: "its SHA-256 is not the one in the manifest"}


def test_missing_and_short_objects_are_found_by_the_listing(watched: Watched) -> None:
    watched.delta(2).unlink()
    short = watched.delta(4)
    short.write_bytes(short.read_bytes()[:-5])
    found = problems(state_of(watched.url))
    assert len(found) == 2
    assert "missing" in found[watched.chain.manifest(2).key] or "no such" in found[watched.chain.manifest(2).key]
    assert "bytes" in found[watched.chain.manifest(4).key]


def test_short_object_of_an_older_version_is_found_without_reading_it(tmp_path: Path) -> None:
    made = make_long(tmp_path / "channel", HEAT + 8, 0)
    short = made.delta(3)
    short.write_bytes(short.read_bytes()[:-5])
    made.delta(4).unlink()
    found = problems(state_of(made.url))
    assert found.keys() == {made.chain.manifest(3).key, made.chain.manifest(4).key}


@pytest.mark.parametrize("version", [3, 5])
@pytest.mark.parametrize("is_foreign", [False, True])
def test_damaged_manifest_is_found_and_the_rest_is_shown(watched: Watched, version: int, is_foreign: bool) -> None:
    path = watched.url / manifest_key(version)
    foreign = path.read_text().replace(watched.chain.channel.id, "f" * len(watched.chain.channel.id))
    path.write_text(foreign if is_foreign else "{}")
    state = state_of(watched.url)
    assert manifest_key(version) in problems(state)
    assert state["parts"]["head"]["version"] == (4 if version == 5 else 5)


def test_damaged_file_of_an_anchor_is_found(watched: Watched) -> None:
    (file,) = (watched.url / "anchors").rglob("model*.safetensors")
    file.write_bytes(file.read_bytes()[:-8])
    assert any("anchors/" in key for key in problems(state_of(watched.url)))


def test_damage_that_was_repaired_is_no_longer_shown(watched: Watched) -> None:
    delta = watched.delta(3)
    data = delta.read_bytes()
    flip(delta, -1)
    observer = observed(watched.url)
    assert observer.journal.since()["parts"]["checks"]["total"] == 1
    delta.write_bytes(data)
    watched.publish()
    while observer.look():
        pass
    assert observer.journal.since()["parts"]["checks"]["total"] == 0
    observer.close()


# -- bounds ------------------------------------------------------------------------------------------------------------


def test_answer_and_requests_do_not_grow_with_the_number_of_versions(tmp_path: Path) -> None:
    sizes, requests = [], []
    for versions in (RECENT + 100, RECENT + 1200):
        made = make_long(tmp_path / str(versions), versions, replicas=50)
        store = ScriptedStore(open_store(str(made.url)))
        observer = watcher(lambda store=store: Chain.open(store))
        observer.look()
        requests.append(store.count("get"))
        while observer.look():
            pass
        state = observer.journal.since()
        observer.close()
        sizes.append(len(json.dumps(state)))
        assert sorted(rows_of(state, "versions")) == list(range(versions - RECENT + 1, versions + 1))
        assert sum(group[2] for group in state["parts"]["groups"]) == versions - RECENT, "older ones in groups"
        assert len(state["parts"]["groups"]) <= 257
        assert len(rows_of(state, "heat")) == HEAT
    assert requests[0] == requests[1]
    assert sizes[1] < 1.2 * sizes[0] < 400_000


def test_version_that_is_no_longer_recent_goes_into_a_group(tmp_path: Path) -> None:
    made = make_long(tmp_path / "channel", RECENT + 2, 0)
    observer = observed(made.url)
    before = observer.journal.since()
    lengthen(made, RECENT + 5)
    while observer.look():
        pass
    new = observer.journal.since(before["epoch"], before["revision"])
    observer.close()
    assert list(rows_of(new, "versions")) == list(range(RECENT + 3, RECENT + 6))
    assert new["rows"]["versions"]["oldest"] == 6
    assert sum(group[2] for group in new["parts"]["groups"]) == 5
    assert sorted(rows_of(observer.journal.since(), "versions")) == list(range(6, RECENT + 6))


def test_only_what_is_new_is_told(watched: Watched) -> None:
    observer = observed(watched.url)
    first = observer.journal.since()
    again = observer.journal.since(first["epoch"], first["revision"])
    assert (again["whole"], again["parts"], again["rows"], again["news"]) == (False, {}, {}, [])
    watched.publish()
    while observer.look():
        pass
    new = observer.journal.since(first["epoch"], first["revision"])
    assert list(rows_of(new, "versions")) == list(rows_of(new, "heat")) == [6]
    assert "axes" not in new["parts"]
    assert observer.journal.since("other", first["revision"])["whole"]
    observer.close()


def test_object_that_is_too_large_is_read_only_in_its_tables(watched: Watched) -> None:
    chain = watched.chain
    read = read_patch(chain.store, chain.manifest(3), whole_up_to=100)
    assert read.checked == 0, "nothing is claimed of what was not read"
    assert read.changed == read_patch(chain.store, chain.manifest(2)).changed


def test_version_of_many_objects_is_not_read_and_the_page_says_so(watched: Watched) -> None:
    chain = watched.chain
    read = read_patch(chain.store, chain.manifest(5), most=0)
    assert read.changed is None
    assert "more objects than the 0" in (read.unread or "")


def test_texts_are_cut(watched: Watched) -> None:
    watched.report("r", 5, "x" * 1000)
    (row,) = state_of(watched.url)["parts"]["replicas"]["rows"]
    assert len(row["error"]) == 300


# -- a bucket that is away, a channel that is another ------------------------------------------------------------------


def test_bucket_that_is_away_is_said_with_when_it_began(watched: Watched, tmp_path: Path) -> None:
    observer = observed(watched.url)
    began = time.time()
    watched.url.rename(tmp_path / "away")
    assert not observer.look()
    away = observer.journal.since()["parts"]["away"]
    assert away["since"] >= began - 1
    observer.look()
    assert observer.journal.since()["parts"]["away"] == away
    assert observer.journal.since()["parts"]["head"]["version"] == 5
    (tmp_path / "away").rename(watched.url)
    observer.look()
    assert observer.journal.since()["parts"]["away"] is None
    observer.close()


def test_channel_that_was_reset_is_a_new_epoch(watched: Watched, tmp_path: Path) -> None:
    observer = observed(watched.url)
    epoch = observer.journal.since()["epoch"]
    watched.url.rename(tmp_path / "gone")
    make_watched(watched.url, 1)
    while observer.look():
        pass
    state = observer.journal.since(epoch, 1)
    assert state["whole"]
    assert sorted(rows_of(state, "versions")) == [0, 1]
    observer.close()


@pytest.mark.parametrize("damage", ["overwritten", "deleted", "replaced"])
def test_newest_version_that_is_not_what_it_was_is_read_anew(watched: Watched, damage: str) -> None:
    observer = observed(watched.url)
    epoch, path = observer.journal.since()["epoch"], watched.url / manifest_key(5)
    if damage == "deleted":
        path.unlink()
    else:
        path.write_text("{}" if damage == "overwritten" else path.read_text().replace('"step":null', '"step":999'))
    while observer.look():
        pass
    state = observer.journal.since(epoch, 1)
    observer.close()
    assert state["whole"]
    assert state["parts"]["away"] is None
    assert state["parts"]["head"]["version"] == (5 if damage == "replaced" else 4)
    assert (manifest_key(5) in problems(state)) == (damage == "overwritten")
    if damage == "replaced":
        assert rows_of(state, "versions")[5]["step"] == state["parts"]["head"]["step"] == 999


def test_channel_without_a_version_is_shown(tmp_path: Path) -> None:
    table = wc.Arrays({"w": make_watched(tmp_path / "other", 0).weights["model.embed_tokens.weight"]}).table
    Chain.create(open_store(str(tmp_path / "channel")), table)
    assert state_of(tmp_path / "channel")["parts"]["head"] is None


# -- events ------------------------------------------------------------------------------------------------------------


def line(**changes: Any) -> bytes:
    fields = {"format": 1, "phase": "fetch", "role": "replica", "name": "r", "channel": "c", "version": 3}
    return json.dumps({**fields, "digest": "", "began": 1.0, "seconds": 0.5, "bytes": 7, **changes}).encode() + b"\n"


def test_phases_of_events_are_shown_by_version_and_name(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_bytes(line() + line(phase="encode", role="trainer", name="t") + line(channel="other", version=9))
    tail = EventTail(file)
    assert not tail.read("c")
    assert tail.as_json() == [
        {
            "version": 3,
            "rows": [
                {"role": "trainer", "name": "t", "spans": [["encode", 1.0, 0.5, 7]]},
                {"role": "replica", "name": "r", "spans": [["fetch", 1.0, 0.5, 7]]},
            ],
        }
    ]
    with file.open("ab") as more:
        more.write(line(version=4)[:20])
    tail.read("c")
    with file.open("ab") as more:
        more.write(line(version=4)[20:])
    tail.read("c")
    assert [one["version"] for one in tail.as_json()] == [3, 4]


def test_events_say_when_a_version_was_live(watched: Watched, tmp_path: Path) -> None:
    chain, file = watched.chain, tmp_path / "events.jsonl"
    committed, channel = chain.manifest(5).time, chain.channel.id
    told = [
        (name, phase, {"began": committed + after, "version": 5})
        for name, phase, after in (("a", "apply", 1.0), ("b", "fetch", 0.1), ("b", "apply", 2.5), ("a", "apply", 60.0))
    ]
    file.write_bytes(b"".join(line(name=name, phase=phase, channel=channel, **when) for name, phase, when in told))
    observer = Observer(lambda: chain, chain, EventTail(file))
    while observer.look():
        pass
    arrivals = observer.journal.since()["parts"]["arrivals"]
    observer.close()
    assert arrivals == {"source": "events", "rows": [[5, 2, 1.5, 2.25, 3.0]]}, "the first time counts"


@pytest.mark.parametrize(
    "bad",
    [
        b"no json\n",
        b"[1]\n",
        b"[" * 100_000 + b"\n",
        line(phase="<script>"),
        line(role=7),
        line(role={}),
        line(phase=[]),
        line(version="3"),
        line(version=True),
        line(version=-1),
        line(version=10**12),
        line(began=float("nan")),
        line(seconds=-1),
        line(seconds=10**400),
        line(name={}),
        line(format=2),
    ],
)
def test_line_that_is_no_event_is_left_out(tmp_path: Path, bad: bytes) -> None:
    file = tmp_path / "events.jsonl"
    file.write_bytes(bad)
    tail = EventTail(file)
    tail.read("c")
    assert tail.as_json() == []


def test_events_are_bounded(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_bytes(b"".join(line(version=v, name=f"{n}" * 500) for v in range(40) for n in range(20)))
    tail = EventTail(file)
    while tail.read("c"):
        pass
    found = tail.as_json()
    assert [one["version"] for one in found] == list(range(24, 40))
    assert all(len(one["rows"]) == 12 for one in found)
    file.write_bytes(line(version=50))
    tail.read("c")
    assert tail.as_json()[-1]["version"] == 50, "a file that was cut off is read from its beginning"


def test_file_of_events_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        EventTail(tmp_path / "none")


# -- the journal -------------------------------------------------------------------------------------------------------


def test_news_are_bounded_and_come_once() -> None:
    journal = Journal(lambda: 1.0)
    for i in range(300):
        journal.tell("", str(i))
    state = journal.since()
    assert [item["text"] for item in state["news"]] == [str(i) for i in range(200, 300)]
    assert journal.since(state["epoch"], state["revision"])["news"] == []


def test_observer_with_a_key_shows_only_what_it_vouches_for(tmp_path: Path) -> None:
    signed = SignedChannel(tmp_path, 3)
    position = signed.chain().manifest(3).position
    put_heartbeat(Chain.open(signed.store), Heartbeat("forged", position, time.time()))
    signed.rewrite(manifest_key(2), writer="somebody else")
    observer = watcher(signed.chain)
    while observer.look():
        pass
    state = observer.journal.since()
    observer.close()
    assert state["parts"]["channel"]["signed"]
    assert state["parts"]["replicas"]["rows"] == []
    assert set(problems(state)) == {manifest_key(2)}
    assert rows_of(state, "versions")[2] is None
