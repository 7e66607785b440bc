"""Errors of huggingface_hub and hf_xet, translated into one sentence and a remedy.

hf_xet has few classes of errors: the status of an answer and the cause of a broken connection are only in the text,
which is searched here and never shown.
"""

from __future__ import annotations

import re

from weightcast.errors import AccessError, MissingError, StoreError, UnreachableError

_STATUS = re.compile(r"HTTP status \w+ error \((\d{3})")
_NOT_THERE = re.compile(r"not found|no such|does not exist|doesn't exist", re.IGNORECASE)

_LOGIN = "Run `hf auth login`, or set HF_TOKEN. A private bucket of someone else gives the same error."
_WRITE = "Set HF_TOKEN, or run `hf auth login`, with a token that has write permission on this bucket."

_CAUSES: list[tuple[str, str, str]] = [  # a pattern of the text, the problem, the remedy
    ("certificate", "the Hub's certificate is not trusted", "Set SSL_CERT_FILE to the certificates of your authority."),
    ("refused", "nothing answers at the Hub's address", "Check the link, and HF_ENDPOINT if it is set."),
    (
        "not known|dns error|name resolution",
        "the Hub's name cannot be resolved",
        "Check the name server, and HF_ENDPOINT if it is set.",
    ),
    ("sending request", "the Hub cannot be reached", "Check the link, the proxy, and HF_ENDPOINT if it is set."),
    ("internal error", "the connection to the Hub broke", "Try again."),  # hf_xet's, when one of its tasks failed
    ("timed out", "the Hub did not answer in time", "Check the link and the proxy."),
]


def is_not_there(error: Exception) -> bool:
    """Whether a batch failed only because what it should delete was not there."""
    failures: list[dict[str, str]] = getattr(error, "failures", [])
    return bool(failures) and all(_NOT_THERE.search(str(failure.get("error", ""))) for failure in failures)


def translated(error: Exception, verb: str, url: str, key: str | None) -> StoreError:
    """The same error as one of ours. ``verb`` is what was tried; if the bucket is missing, the error has no key."""
    if _is_no_bucket(error):
        name = "/".join(url.removeprefix("hf://buckets/").split("/")[:2])
        create = f"Check its name and your token, or create it: `hf buckets create {name} --private`."
        return MissingError("the bucket does not exist", url=url, hint=create)
    kind, problem, hint = _meaning(error, verb)
    return kind(problem, url=url, key=key, hint=hint)


def _status_of(error: Exception) -> int | None:
    """The HTTP status of the answer."""
    response = getattr(error, "response", None)
    if response is not None:
        return int(response.status_code)
    found = _STATUS.search(str(error))
    return int(found[1]) if found else None


def _is_no_bucket(error: Exception) -> bool:
    if _status_of(error) != 404 or _is_second_hand(error):
        return False
    response = getattr(error, "response", None)
    if response is not None:
        return bool(response.headers.get("X-Error-Code") == "RepoNotFound")
    return bool(re.search(r"/xet-\w+-token", str(error)))  # the first thing that hf_xet requests


def _is_second_hand(error: Exception) -> bool:
    """Whether it reports another download's failure: one that fails ends all of its group."""
    return "Previous task error" in str(error)


def _meaning(error: Exception, verb: str) -> tuple[type[StoreError], str, str | None]:
    if _is_second_hand(error):
        return UnreachableError, "the connection to the Hub broke", "Try again."
    if failures := getattr(error, "failures", None):
        said = re.sub(r"\s+", " ", str(failures[0].get("error", "")))[:100]
        return StoreError, f"the Hub did not {verb} it: {said}", None
    status = _status_of(error)
    if status == 401 or isinstance(error, PermissionError):
        return AccessError, "the Hub does not accept the token, or got none", _LOGIN
    if status == 403:
        return AccessError, f"this token may not {verb} here", _WRITE if verb in ("write", "delete") else _LOGIN
    if status == 404 or isinstance(error, FileNotFoundError):
        return MissingError, "no such object", None
    if status == 429:
        return UnreachableError, "the Hub limits the rate of requests", "Try again later."
    if status in (408, 409, 425) or (status or 0) >= 500:
        return UnreachableError, f"the Hub cannot answer now ({status})", "Try again later."
    if status is not None:
        return StoreError, f"the Hub refuses the request ({status})", None
    return _silence(error)


def _silence(error: Exception) -> tuple[type[StoreError], str, str | None]:
    """For no answer, or an answer that is not understood."""
    name, text = type(error).__name__, str(error).lower()
    if name == "OfflineModeIsEnabled":
        return StoreError, "huggingface_hub is in offline mode", "Unset HF_HUB_OFFLINE."
    for mark, problem, hint in _CAUSES:
        if re.search(mark, text):
            return UnreachableError, problem, hint
    if name.endswith("Timeout"):
        return UnreachableError, "the Hub did not answer in time", "Check the link and the proxy."
    others = OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError
    if isinstance(error, ConnectionError) or not isinstance(error, others):
        return UnreachableError, "the connection to the Hub broke", "Try again."
    return StoreError, f"the Hub's answer is not understood ({name})", "Check HF_ENDPOINT, and update huggingface_hub."
