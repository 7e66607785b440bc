"""Errors of obstore, translated into one sentence and a remedy.

obstore gives few classes of errors and long texts: the status, the server's error code and the cause of a broken
connection are only in the text, which is searched here and never shown.
"""

from __future__ import annotations

import re

from weightcast.errors import AccessError, MissingError, StoreError, UnreachableError

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,60})</Code>|\"(?:code|reason|error)\": ?\"(\w{1,60})\"")

Meaning = tuple[type[StoreError], str, str]
"""The kind of error, the problem, the remedy."""

_NO_BUCKET: Meaning = (MissingError, "the bucket does not exist", "Create it, or check its name and the endpoint.")
_REGION: Meaning = (AccessError, "the bucket is in another region", "Set AWS_REGION to the bucket's region.")
_BUSY: Meaning = (UnreachableError, "the store limits the rate of requests", "Try again later.")

_CODES: list[tuple[str, Meaning]] = [
    ("NoSuchBucket ContainerNotFound ContainerBeingDeleted", _NO_BUCKET),
    ("PermanentRedirect AuthorizationHeaderMalformed IllegalLocationConstraintException", _REGION),
    ("SlowDown RequestTimeout ServerBusy OperationAborted ConditionalRequestConflict", _BUSY),
    ("ExpiredToken TokenRefreshRequired", (AccessError, "these credentials have expired", "Renew them.")),
    (
        "InvalidAccessKeyId",
        (AccessError, "the store does not know this access key", "Check AWS_ACCESS_KEY_ID and AWS_ENDPOINT_URL."),
    ),
    (
        "SignatureDoesNotMatch",
        (AccessError, "the secret key does not belong to this access key", "Check AWS_SECRET_ACCESS_KEY."),
    ),
    ("InvalidToken", (AccessError, "the store does not know this session token", "Check AWS_SESSION_TOKEN.")),
    ("AuthenticationFailed", (AccessError, "the store does not accept these credentials", "Check the account's key.")),
    (
        "RequestTimeTooSkewed",
        (
            AccessError,
            "this machine's clock is too far from the store's",
            "Set it by a time server.",
        ),
    ),
    ("QuotaExceeded", (AccessError, "the bucket's quota is used up", "Free some space, or raise the quota.")),
    ("EntityTooLarge", (StoreError, "the store does not accept objects of this size", "Make the parts smaller.")),
    ("InvalidBucketName", (StoreError, "the store does not accept this name for a bucket", "Check the name.")),
]
_MEANINGS = {code: meaning for codes, meaning in _CODES for code in codes.split()}

_CAUSES: list[tuple[str, str, str]] = [
    ("dns error", "the endpoint's name cannot be resolved", "Check the endpoint and the name server."),
    ("ConnectionRefused", "nothing answers at the endpoint", "Check host and port, and whether the server runs."),
    (
        "InvalidCertificate",
        "the endpoint's certificate is not trusted",
        "Set SSL_CERT_FILE to the certificates of your authority.",
    ),
    ("InvalidContentType", "the endpoint does not speak TLS", "Check `http` or `https` in the endpoint."),
    ("kind: Timeout|TimedOut", "the store did not answer in time", "Check the link, the endpoint and the proxy."),
    ("NetworkUnreachable", "no route to the endpoint's network", "Check the link."),
]

_LOGIN_FAILURES = (
    "169.254.169.254",
    "169.254.170.2",
    "/latest/api/token",
    "/latest/meta-data/",
    "metadata.google.internal",
    "token request",
    "MissingAccount",
)


def status_of(error: Exception) -> int | None:
    """The HTTP status that the store answered with."""
    found = _STATUS.search(str(error))
    return int(found[1]) if found else None


def translated(error: Exception, verb: str, url: str, key: str | None, login: str) -> StoreError:
    """The same error as one of ours. ``verb`` is what was tried, ``login`` how to provide credentials."""
    kind, problem, hint = _meaning(error, verb, login)
    about_all = (kind, problem, hint) == _NO_BUCKET
    return kind(problem, url=url, key=None if about_all else key, hint=hint)


def _meaning(error: Exception, verb: str, login: str) -> tuple[type[StoreError], str, str | None]:
    text = str(error)
    status, found = status_of(error), _CODE.search(text)
    code = (found[1] or found[2]) if found else ""
    if any(mark in text for mark in _LOGIN_FAILURES):
        return AccessError, "no credentials were found", login
    if code in _MEANINGS:
        return _MEANINGS[code]
    if "BareRedirect" in text or status in (301, 307):
        return _REGION
    if isinstance(error, FileNotFoundError) or status == 404:
        return MissingError, "no such object", None
    if status in (401, 403) or type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError"):
        return (
            AccessError,
            f"these credentials may not {verb} here",
            "Grant the permission, or check whose credentials these are.",
        )
    if status in (408, 409, 425, 429) or (status or 0) >= 500:
        return UnreachableError, f"the store cannot answer now ({status})", "Try again later."
    if status is not None:
        return StoreError, f"the store refuses the request ({status}{' ' + code if code else ''})", None
    for mark, problem, hint in _CAUSES:
        if re.search(mark, text):
            return UnreachableError, problem, hint
    if "HTTP error" in text or "HttpError" in text:
        return UnreachableError, "the connection to the store broke", "Try again."
    return StoreError, f"the store failed ({type(error).__name__})", login
