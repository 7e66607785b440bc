"""File systems that lack something: in this process, and as code for another one."""

from __future__ import annotations

import os
from typing import NoReturn, Protocol

STORE = """
import errno, os, sys
from weightcast.store.file import FileStore
store = FileStore(sys.argv[1])
"""
NO_LINKS = f"""{STORE}
def link(*arguments, **options):
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
os.link = link
"""


class Refusal(Protocol):
    def __call__(self, *arguments: object, **options: object) -> NoReturn: ...


def refuse(code: int) -> Refusal:
    """What takes the place of a call of the system that fails."""

    def call(*arguments: object, **options: object) -> NoReturn:
        raise OSError(code, os.strerror(code))

    return call
