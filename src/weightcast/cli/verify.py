"""`weightcast verify URL`, `weightcast verify FOLDER URL`, `weightcast verify --engine http://host:port URL`"""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from weightcast import verify as whole
from weightcast.chain import Chain
from weightcast.cli.console import FOUND, AsJson, Threads, facts, head_of, open_chain, say, tell, working
from weightcast.cli.held import Claim, held
from weightcast.cli.wording import one_line
from weightcast.digest import Fingerprint
from weightcast.engines.client import HttpEngine
from weightcast.engines.proof import prove, version_of
from weightcast.errors import FormatError, UsageError
from weightcast.files import Report
from weightcast.keys import CHANNEL
from weightcast.stage import standing_of
from weightcast.workers import Workers

_MOST_NAMES = 20


def verify(
    places: Annotated[
        list[str],
        typer.Argument(metavar="[FOLDER] URL", help="The channel, behind the folder to check if there is one."),
    ],
    deep: Annotated[bool, typer.Option("--deep", help="Fetch, decode and prove every object.")] = False,
    scratch: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where --deep may put a copy of the weights for a while.")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(metavar="URL", help="Check the live parameters of the engine at http://host:port.")
    ] = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Check that a channel is whole, or that a folder or a running engine holds one of its versions to the last bit."""
    with working(threads, as_json, kernels=deep or len(places) == 2) as (workers, report):
        if engine is not None:
            if len(places) != 1 or deep or scratch:
                raise UsageError("--engine takes a channel, and nothing else")
            good = _verify_engine(engine, open_chain(places[0]), as_json)
        elif len(places) == 1:
            chain = _open(places[0])
            good = _verify_channel(chain, deep, scratch, workers, report, as_json)
        else:
            folder, url = _folder_and_url(places)
            if deep or scratch:
                raise UsageError("--deep and --scratch are for a channel, not for a folder")
            good = _verify_folder(folder, open_chain(url), workers, report, as_json)
        if not good:
            raise typer.Exit(FOUND)


def _open(url: str) -> Chain:
    """The channel; who meant a folder of weights is told how to say so."""
    folder = Path(url)
    if folder.is_dir() and not (folder / CHANNEL).exists():
        hint = "Name the channel that its weights are from, too: `weightcast verify FOLDER URL`."
        raise UsageError("this folder is no channel", file=url, hint=hint)
    return open_chain(url)


def _folder_and_url(places: list[str]) -> tuple[Path, str]:
    if len(places) != 2:
        raise UsageError("verify takes a channel, or a folder and a channel")
    folder = Path(places[0])
    if "://" in places[0] or (folder / CHANNEL).exists():
        raise UsageError("the folder comes first, the channel behind it", file=places[0])
    return folder, places[1]


# -- a channel ---------------------------------------------------------------------------------------------------------


def _verify_channel(
    chain: Chain, deep: bool, scratch: Path | None, workers: Workers, report: Report, as_json: bool
) -> bool:
    if scratch is not None and not scratch.is_dir():
        raise UsageError("there is no such folder", file=str(scratch), hint="Make it first.")
    findings = list(whole.verify(chain))
    try:
        head = head_of(chain).position.version
    except FormatError as error:
        head, deep = None, False  # where nothing can begin
        if not findings:
            raise error
    proven = 0
    if deep:
        with tempfile.TemporaryDirectory(prefix="weightcast-", dir=scratch) as folder:
            for _, finding in whole.verify_deep(chain, Path(folder) / "weights", workers, report):
                proven += finding is None
                findings += [finding] if finding is not None and finding not in findings else []
    if as_json:
        found = [asdict(finding) for finding in findings]
        tell({"head": head, "proven_objects": proven if deep else None, "findings": found})
        return not findings
    for finding in findings:
        say(Text.assemble((one_line(finding.key), "red"), f"  {one_line(finding.problem)}"))
    checked = f"{proven:,} objects proven bit by bit" if deep else "records and sizes agree; --deep reads the bits too"
    say(f"{len(findings):,} findings" if findings else f"whole up to version {head}: {checked}")
    return not findings


# -- a folder ----------------------------------------------------------------------------------------------------------


def _verify_folder(folder: Path, chain: Chain, workers: Workers, report: Report, as_json: bool) -> bool:
    head = head_of(chain)
    with held(folder, chain.channel) as found:
        standing, claim = standing_of(found.weights, workers, report), found.claim
    version = version_of(standing.position, chain)
    damaged = _differing(standing, claim) if claim is not None else []
    values: dict[str, Any] = {
        "folder": str(folder),
        "digest": standing.position,
        "version": version,
        "behind": head.position.version - version if version is not None else None,
        "claimed": claim.version if claim else None,
    }
    if as_json:
        tell(values | {"differing": damaged})
    else:
        facts(values, as_json=False)
        _print_verdict(version, claim, damaged)
    return version is not None and not damaged


def _differing(standing: Fingerprint, claim: Claim) -> list[str]:
    """Tensors that are not what the mirror says."""
    pairs = zip(standing.table, standing.digests, claim.standing.digests, strict=True)
    return [spec.name for spec, found, claimed in pairs if found != claimed]


def _print_verdict(version: int | None, claim: Claim | None, damaged: list[str]) -> None:
    if claim is not None and damaged:
        say(Text(f"{len(damaged):,} tensors differ from version {claim.version}:", "red"))
        for name in damaged[:_MOST_NAMES]:
            say(f"  {one_line(name)}")
        if len(damaged) > _MOST_NAMES:
            say(f"  and {len(damaged) - _MOST_NAMES:,} more")
        say("`weightcast pull` mends it")
    elif version is None:
        say(Text("no version of this channel has these bits", "red"))
    else:
        say(f"version {version} to the last bit")


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
        tell(values | {"wrong": dict(proof.wrong), "unproven": dict(proof.unproven)})
        return proof.holds
    facts(values, as_json=False)
    for name, problem in [*proof.wrong.items()][:_MOST_NAMES]:
        say(Text.assemble((one_line(name), "red"), f"  {one_line(problem)}"))
    for name, reason in [*proof.unproven.items()][:_MOST_NAMES]:
        say(f"{one_line(name)}  unproven: {one_line(reason)}")
    if proof.wrong:
        say(Text(f"{len(proof.wrong):,} tensors of the live engine are not what they should be", "red"))
    elif proof.version is None:
        say(Text("no version of this channel has these bits", "red"))
    else:
        say(f"version {proof.version} to the last bit, live on all workers")
    return proof.holds
