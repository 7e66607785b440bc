"""`weightcast verify URL`, `weightcast verify FOLDER URL`, `weightcast verify --engine http://127.0.0.1:PORT URL`"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from weightcast.channel.chain import Chain
from weightcast.channel.keys import CHANNEL, Position
from weightcast.channel.trust import Trust
from weightcast.cli.channels import head_of
from weightcast.cli.console import FOUND, UNPROVEN, code_of, computing, fail, fields_of, report, say, tell
from weightcast.cli.engines import engine_named
from weightcast.cli.options import Scratch, Threads, TrustedKey
from weightcast.cli.outputs import scratch_folder
from weightcast.cli.settings import settings
from weightcast.cli.text import Text
from weightcast.cli.trusting import open_trusted, trust_of
from weightcast.cli.wording import count, natural
from weightcast.disk.durable import Report
from weightcast.disk.staged import fingerprint_of
from weightcast.engine.proof import prove
from weightcast.errors import ChannelError, FormatError, UsageError, VersionError, WeightcastError
from weightcast.follow.mirror_reader import reading_held
from weightcast.format.digest import Fingerprint
from weightcast.format.workers import Workers
from weightcast.upkeep import verify as whole
from weightcast.upkeep.findings import Finding

_MOST_NAMES = 20


def verify(
    places: Annotated[
        list[str],
        typer.Argument(metavar="[FOLDER] URL", help="The channel; before it, the folder to check if there is one."),
    ],
    deep: Annotated[bool, typer.Option("--deep", help="Fetch and decode every object, and check its digests.")] = False,
    scratch: Scratch = None,
    engine: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Check the live parameters of the engine at http://127.0.0.1:PORT."),
    ] = None,
    threads: Threads = None,
    trust: TrustedKey = None,
) -> None:
    """Check that a channel is intact, or that a folder or a running engine holds the bits of one of its versions.

    Digests detect mistakes and corruption, not an attacker who can write to the bucket.
    """
    if len(places) > 2:
        raise UsageError("verify takes a channel, or a folder and a channel")
    if engine is not None and (len(places) != 1 or deep or scratch):
        raise UsageError("--engine takes a channel and nothing else")
    if len(places) == 2 and (deep or scratch):
        raise UsageError("--deep and --scratch are for a channel, not for a folder")
    with computing(threads, kernels=deep or len(places) == 2) as (workers, progress):
        code = FOUND
        if engine is not None:
            code = _verify_engine(engine, open_trusted(places[0], trust_of(trust)))
            good = not code
        elif len(places) == 1:
            good = _verify_channel(places[0], trust_of(trust), deep, scratch, workers, progress)
        else:
            good = _verify_folder(places[0], places[1], trust, workers, progress)
    if not good:
        raise typer.Exit(code)


# -- a channel ---------------------------------------------------------------------------------------------------------


@dataclass
class _Result:
    """What was found, up to an error that ended the search."""

    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    head: int | None = None
    proven: int | None = None
    """Objects that were fetched and decoded, and are what their digests say; None if that was not asked for."""
    stopped: WeightcastError | None = None
    signed: bool = False
    """Whether signatures were checked, too."""

    def add(self, finding: Finding) -> None:
        if finding not in self.findings:
            self.findings.append(finding)


def _verify_channel(
    url: str, trust: Trust | None, deep: bool, scratch: Path | None, workers: Workers, progress: Report
) -> bool:
    result = _Result()
    with scratch_folder(scratch) if deep else nullcontext() as folder:
        try:
            chain = _open(url, trust)
        except VersionError:
            raise  # of a newer release: not damaged
        except FormatError as error:
            result.add(Finding.of(CHANNEL, error))
        else:
            result.signed = chain.guard is not None
            _check(chain, folder, workers, progress, result)
    stopped = result.stopped
    values: dict[str, Any] = {
        "head": result.head,
        "proven_objects": result.proven,
        "findings": [asdict(finding) for finding in result.findings],
        "notes": result.notes,
    }
    tell(values | ({"error": fields_of(stopped)} if stopped else {}))
    _print(result)
    if stopped is not None:
        if settings.as_json:
            raise typer.Exit(code_of(stopped))
        fail(stopped)
    return not result.findings


def _open(url: str, trust: Trust | None) -> Chain:
    """The channel; the error for a folder of weights says how to check one."""
    try:
        return open_trusted(url, trust)
    except ChannelError:
        if not Path(url).is_dir():
            raise
        hint = "To check its weights, name the channel too: `weightcast verify FOLDER URL`."
        raise UsageError("this folder is not a channel", file=url, hint=hint) from None


def _check(chain: Chain, folder: Path | None, workers: Workers, progress: Report, result: _Result) -> None:
    """Check everything, with ``folder`` every bit; an error that ends it is kept beside what was found until then."""
    try:
        for finding in whole.verify(chain):
            result.add(finding)
        result.notes += whole.changed_companions(chain)
        try:
            result.head = head_of(chain).position.version
        except FormatError:
            if not result.findings:
                raise
            return  # without a head there is nothing to replay
        if folder is None:
            return
        result.proven = 0
        for _, wrong in whole.verify_deep(chain, folder / "weights", workers, progress):
            result.proven += wrong is None
            if wrong is not None:
                result.add(wrong)
    except WeightcastError as error:
        if not result.findings:
            raise
        result.stopped = error


def _print(result: _Result) -> None:
    for finding in result.findings:
        say(Text.assemble((finding.key, "red"), f"  {finding.problem}"))
    for note in result.notes:
        say(f"note: {note}")
    if result.findings:
        remedy = "`weightcast repair` restores channel.json, `weightcast publish --anchor` a lost newest version"
        say(f"{count(len(result.findings), 'finding')}; {remedy}")
    elif result.proven is not None:
        what = "digests and signatures" if result.signed else "digests"
        say(f"intact up to version {result.head}: {count(result.proven, 'object')} decoded, and all {what} agree")
    else:
        what = "records, sizes and signatures" if result.signed else "records and sizes"
        say(f"intact up to version {result.head}: {what} agree; --deep reads the bits, too")


# -- a folder ----------------------------------------------------------------------------------------------------------


def _verify_folder(place: str, url: str, trust: str | None, workers: Workers, progress: Report) -> bool:
    folder = Path(place)
    if "://" in place or (folder / CHANNEL).exists():
        hint = "Write `weightcast verify FOLDER URL`."
        raise UsageError("the folder comes first, then the channel", file=place, hint=hint)
    chain = open_trusted(url, trust_of(trust, folder), folder)
    head = head_of(chain)
    with reading_held(folder, chain.channel.table, chain.channel.id) as found:
        fingerprint, remembered = fingerprint_of(found.weights, workers, progress), found.fingerprint
        files_at, log_at, claim = found.files_at, found.log_at, found.position
    version = chain.find(fingerprint.digest, head)
    damaged = _differing(fingerprint, remembered) if remembered is not None else []
    values: dict[str, Any] = {
        "folder": place,
        "digest": fingerprint.digest,
        "version": version,
        "lag": head.position.version - version if version is not None else None,
        "claimed": claim.version if claim else None,
        "files_at": files_at.version if files_at else None,
        "log_leads_to": log_at.version if log_at else None,
    }
    report(values, differing=damaged)
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
            say(f"  {name}")
        if len(damaged) > _MOST_NAMES:
            say(f"  and {len(damaged) - _MOST_NAMES:,} more; --json lists all")
        say("`weightcast pull` repairs it")
    elif version is None:
        say(Text("no version of this channel has these bits", "red"))
    else:
        say(f"every tensor has the digest that it has in version {version}")


# -- an engine ---------------------------------------------------------------------------------------------------------


def _verify_engine(url: str, chain: Chain) -> int:
    """The exit code."""
    proof = prove(engine_named(url), chain)
    values = {
        "engine": url,
        "claimed": proof.claimed.version if proof.claimed else None,
        "version": proof.version,
        "tensors": proof.tensors,
    }
    report(values, **proof.as_json())
    for name, problem in [*proof.wrong.items()][:_MOST_NAMES]:
        say(Text.assemble((name, "red"), f"  {problem}"))
    for name, reason in [*proof.unproven.items()][:_MOST_NAMES]:
        say(f"{name}  unproven: {reason}")
    say(Text(proof.verdict, "" if proof.holds else "red"))
    return 0 if proof.holds else UNPROVEN if proof.holds_but_for is not None else FOUND
