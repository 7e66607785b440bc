"""Which tests run in one process, when there are several.

xdist's own marker `xdist_group` has no effect with pytest 9: it renames tests where pytest no longer reads names.
"""

from collections.abc import Collection
from pathlib import PurePosixPath
from typing import Any

from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling


class ModulesTogether(LoadScopeScheduling):
    """Tests of these modules run in one process each; every other test goes to whichever is free."""

    def __init__(self, config: Any, log: Producer, together: Collection[str]):
        super().__init__(config, log)
        self._together = together

    def _split_scope(self, nodeid: str) -> str:
        module = PurePosixPath(nodeid.partition("::")[0]).stem
        return module if module in self._together else nodeid
