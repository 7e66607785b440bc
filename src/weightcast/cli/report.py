"""`weightcast report URL -o FILE`"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from weightcast.cli.console import report as report_facts
from weightcast.cli.console import writing_to
from weightcast.cli.dashboard import ReadEvents, observer_of
from weightcast.cli.options import Force, TrustedKey, Url
from weightcast.cli.outputs import check_folder, check_output
from weightcast.cli.trusting import trust_of
from weightcast.disk.durable import replacing
from weightcast.view.dashboard import report_of


def report(
    url: Url,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to write the page.")],
    events: ReadEvents = None,
    force: Force = False,
    trust: TrustedKey = None,
) -> None:
    """Write the dashboard's page as one file, with what the channel is now. It opens without a server or a network."""
    check_folder(output)
    check_output(output, force, [Path(url), *([events] if events else [])])
    observer = observer_of(url, trust_of(trust), events)
    with closing(observer):
        while observer.look():
            pass
        if observer.trouble is not None:
            raise observer.trouble
        made = report_of(observer.journal)
    with writing_to(output), replacing(output) as file:
        written = file.write(made.html.encode())
    parts = observer.journal.since()["parts"]
    head, checks = parts["head"], parts.get("checks", {})
    report_facts(
        {
            "report": str(output),
            "bytes": written,
            "head": head["version"] if head else None,
            "replicas": parts["replicas"]["total"],
            "findings": checks.get("total", 0),
        }
    )
