"""`weightcast verify URL`, `weightcast verify FOLDER URL`, `weightcast verify --engine http://host:port URL`"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from weightcast.channel.chain import Chain
from weightcast.channel.keys import CHANNEL, Position
from weightcast.cli.console import (
    FOUND,
    AsJson,
    Threads,
    code_of,
    fail,
    fields_of,
    head_of,
    open_chain,
    say,
    tell,
    working,
    writing_to,
)
from weightcast.cli.text import Text
from weightcast.cli.wording import one_line
from weightcast.cli.words import count, natural
from weightcast.cli.words import report as print_report
from weightcast.disk.durable import Report, scratch
from weightcast.disk.staged import fingerprint_of
from weightcast.engine.client import HttpEngine
from weightcast.engine.proof import prove, version_of
from weightcast.errors import ChannelError, FormatError, UsageError, VersionError, WeightcastError
from weightcast.follow.mirror_reader import reading_held
from weightcast.format.digest import Fingerprint
from weightcast.format.workers import Workers
from weightcast.upkeep import verify as whole

_MOST_NAMES = 20


def verify(
    places: Annotated[
        list[str],
        typer.Argument(metavar="[FOLDER] URL", help="The channel; before it, the folder to check if there is one."),
    ],
    deep: Annotated[bool, typer.Option("--deep", help="Fetch and decode every object, and check its digests.")] = False,
    scratch: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where --deep may keep a copy of the weights for a while.")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(metavar="URL", help="Check the live parameters of the engine at http://host:port.")
    ] = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Check that a channel is intact, or that a folder or a running engine holds the bits of one of its versions.

    Digests detect mistakes and corruption, not an attacker who can write to the bucket.
    """
    with working(threads, as_json, kernels=deep or len(places) == 2) as (workers, report):
        if engine is not None:
            if len(places) != 1 or deep or scratch:
                raise UsageError("--engine takes a channel and nothing else")
            good = _verify_engine(engine, open_chain(places[0]), as_json)
        elif len(places) == 1:
            good = _verify_channel(places[0], deep, scratch, workers, report, as_json)
        else:
            folder, url = _folder_and_url(places)
            if deep or scratch:
                raise UsageError("--deep and --scratch are for a channel, not for a folder")
            good = _verify_folder(folder, open_chain(url), workers, report, as_json)
        if not good:
            raise typer.Exit(FOUND)


def _open(url: str) -> Chain:
    """The channel; the error for a folder of weights says how to check one."""
    try:
        return open_chain(url)
    except ChannelError:
        if not Path(url).is_dir():
            raise
        hint = "To check its weights, name the channel too: `weightcast verify FOLDER URL`."
        raise UsageError("this folder is not a channel", file=url, hint=hint) from None


def _folder_and_url(places: list[str]) -> tuple[Path, str]:
    if len(places) != 2:
        raise UsageError("verify takes a channel, or a folder and a channel")
    folder = Path(places[0])
    if "://" in places[0] or (folder / CHANNEL).exists():
        raise UsageError("the folder comes first, then the channel", file=places[0])
    return folder, places[1]


# -- a channel ---------------------------------------------------------------------------------------------------------


@dataclass
class _Result:
    """What was found, up to an error that ended the search."""

    findings: list[whole.Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    head: int | None = None
    proven: int | None = None
    """Objects that were fetched and decoded, and are what their digests say; None if that was not asked for."""
    stopped: WeightcastError | None = None

    def add(self, finding: whole.Finding) -> None:
        if finding not in self.findings:
            self.findings.append(finding)


def _verify_channel(
    url: str, deep: bool, scratch: Path | None, workers: Workers, report: Report, as_json: bool
) -> bool:
    if scratch is not None and not scratch.is_dir():
        raise UsageError("there is no such folder", file=str(scratch), hint="Make it first.")
    result = _Result()
    try:
        chain = _open(url)
    except VersionError:
        raise  # of a newer release: not damaged
    except FormatError as error:
        result.add(whole.Finding.of(CHANNEL, error))
    else:
        _check(chain, deep, scratch, workers, report, result)
    _tell(result) if as_json else _print(result)
    if result.stopped is not None and not as_json:
        fail(result.stopped, as_json)
    if result.stopped is not None:
        raise typer.Exit(code_of(result.stopped))
    return not result.findings


def _check(chain: Chain, deep: bool, scratch: Path | None, workers: Workers, report: Report, result: _Result) -> None:
    """Everything that can be checked; an error that ends it is kept beside what was found until then."""
    try:
        for finding in whole.verify(chain):
            result.add(finding)
        result.notes += whole.changed_companions(chain)
        try:
            result.head = head_of(chain).position.version
        except FormatError:
            if not result.findings:
                raise
            return  # where nothing can begin
        if not deep:
            return
        result.proven = 0
        with _scratch(scratch) as folder:
            for _, wrong in whole.verify_deep(chain, folder / "weights", workers, report):
                result.proven += wrong is None
                if wrong is not None:
                    result.add(wrong)
    except WeightcastError as error:
        if not result.findings:
            raise
        result.stopped = error


@contextmanager
def _scratch(folder: Path | None) -> Iterator[Path]:
    """A temporary folder, in ``folder`` if that is given."""
    with ExitStack() as opened:
        with writing_to(folder or Path(tempfile.gettempdir())):
            made = opened.enter_context(scratch(folder))
        yield made


def _tell(result: _Result) -> None:
    values: dict[str, Any] = {
        "head": result.head,
        "proven_objects": result.proven,
        "findings": [asdict(finding) for finding in result.findings],
        "notes": result.notes,
    }
    tell(values | ({"error": fields_of(result.stopped)} if result.stopped else {}))


def _print(result: _Result) -> None:
    for finding in result.findings:
        say(Text.assemble((one_line(finding.key), "red"), f"  {one_line(finding.problem)}"))
    for note in result.notes:
        say(f"note: {note}")
    if result.findings:
        say(count(len(result.findings), "finding"))
    elif result.proven is not None:
        say(f"intact up to version {result.head}: {count(result.proven, 'object')} decoded, and all digests agree")
    else:
        say(f"intact up to version {result.head}: records and sizes agree; --deep reads the bits, too")


# -- a folder ----------------------------------------------------------------------------------------------------------


def _verify_folder(folder: Path, chain: Chain, workers: Workers, report: Report, as_json: bool) -> bool:
    head = head_of(chain)
    with reading_held(folder, chain.channel.table, chain.channel.id) as found:
        fingerprint, remembered = fingerprint_of(found.weights, workers, report), found.fingerprint
        files_at, log_at, claim = found.files_at, found.log_at, found.position
    version = version_of(fingerprint.digest, chain)
    damaged = _differing(fingerprint, remembered) if remembered is not None else []
    values: dict[str, Any] = {
        "folder": str(folder),
        "digest": fingerprint.digest,
        "version": version,
        "behind": head.position.version - version if version is not None else None,
        "claimed": claim.version if claim else None,
        "files_at": files_at.version if files_at else None,
        "log_leads_to": log_at.version if log_at else None,
    }
    if as_json:
        tell(values | {"differing": damaged})
    else:
        print_report(values, as_json=False)
        _print_verdict(version, claim, damaged)
        if files_at is not None and log_at is not None:
            say(f"tools that load the files get version {files_at.version}: `weightcast pull` folds the log in")
    return version is not None and not damaged


def _differing(fingerprint: Fingerprint, remembered: Fingerprint) -> list[str]:
    """Tensors that are not what the mirror says."""
    pairs = zip(fingerprint.table, fingerprint.digests, remembered.digests, strict=True)
    return [spec.name for spec, found, claimed in pairs if found != claimed]


def _print_verdict(version: int | None, claim: Position | None, damaged: list[str]) -> None:
    if claim is not None and damaged:
        differ = "tensor differs" if len(damaged) == 1 else "tensors differ"
        say(Text(f"{len(damaged):,} {differ} from version {claim.version}:", "red"))
        for name in sorted(damaged, key=natural)[:_MOST_NAMES]:
            say(f"  {one_line(name)}")
        if len(damaged) > _MOST_NAMES:
            say(f"  and {len(damaged) - _MOST_NAMES:,} more; --json lists all")
        say("`weightcast pull` repairs it")
    elif version is None:
        say(Text("no version of this channel has these bits", "red"))
    else:
        say(f"every tensor has the digest that it has in version {version}")


# -- an engine ---------------------------------------------------------------------------------------------------------


def _verify_engine(url: str, chain: Chain, as_json: bool) -> bool:
    proof = prove(HttpEngine(url), chain)
    values: dict[str, Any] = {
        "engine": url,
        "claimed": proof.claimed.version if proof.claimed else None,
        "version": proof.version,
        "tensors": proof.tensors,
    }
    if as_json:
        tell(values | proof.as_json())
        return proof.holds
    print_report(values, as_json=False)
    for name, problem in [*proof.wrong.items()][:_MOST_NAMES]:
        say(Text.assemble((one_line(name), "red"), f"  {one_line(problem)}"))
    for name, reason in [*proof.unproven.items()][:_MOST_NAMES]:
        say(f"{one_line(name)}  unproven: {one_line(reason)}")
    say(Text(one_line(proof.verdict), "" if proof.holds else "red"))
    return proof.holds
