"""Showing URLs, and messages that mention them, without the passwords and keys that they hold."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, quote, quote_plus, unquote, unquote_plus

HIDDEN = "***"
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[\w.-]*)(:\d{1,5})?")
_PLAIN_VALUE = 4  # letters: shorter parts, such as the number of a database, are no secrets unless named so
_SECRET_NAME = re.compile(r"pass|user|secret|token|key|sig|cred|auth|pwd", re.IGNORECASE)


def redact_url(url: str) -> str:
    """Return a URL without user, password and the values of its query."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return url if _HOST.fullmatch(url) or not re.search(r"[@?=:]", url) else HIDDEN
    base, mark, query = _split(rest)
    if "@" in query:  # either a password has a question mark or a value has an at sign: which one cannot be known
        return f"{scheme}://{HIDDEN}"
    _, at, place = base.rpartition("@")
    host, slash, path = place.partition("/")
    user = f"{HIDDEN}@" if at else ""
    shown = host if _HOST.fullmatch(host) else HIDDEN
    values = parse_qsl(query, keep_blank_values=True)
    names = "&".join(f"{name}={HIDDEN}" if value else HIDDEN for name, value in values) or HIDDEN
    return f"{scheme}://{user}{shown}{slash}{path}" + (f"?{names}" if mark else "")


def redact_secrets(text: str, url: str) -> str:
    """Return a message about a URL without the URL's secrets, however they are written in it."""
    text = text.replace(url, redact_url(url))
    for secret in sorted(_secrets(url), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text


def redact_repr(value: object) -> str:
    """Return repr(value); if it is a URL, as text or bytes, its secrets are hidden."""
    text = value.decode(errors="replace") if isinstance(value, bytes) else value
    return repr(redact_url(text)) if isinstance(text, str) and "://" in text else repr(value)


def _split(rest: str) -> tuple[str, str, str]:
    """Return what stands before the query or the fragment, the mark between, and the rest."""
    found = re.search(r"[?#]", rest)
    return (rest, "", "") if found is None else (rest[: found.start()], found.group(), rest[found.end() :])


def _secrets(url: str) -> set[str]:
    """Return all that may be a secret of a URL, in each way to write it."""
    rest = url.partition("://")[2]
    base, _, query = _split(rest)
    user, _, password = rest.rpartition("@")[0].partition(":")
    host = base.rpartition("@")[2].partition("/")[0]
    found = {user, password, *([] if _HOST.fullmatch(host) else [host, host.lstrip(":")])}
    # Clients cut a password that is not quoted where they see the end of a part.
    found |= {piece for piece in re.split(r"[/?#@:]", user + ":" + password) if len(piece) >= _PLAIN_VALUE}
    for name, value in parse_qsl(query.replace("#", "&"), keep_blank_values=True):
        if len(value) >= _PLAIN_VALUE or _SECRET_NAME.search(name):
            found.add(value)
        elif not value:
            found.add(name)
    for secret in list(found):
        found |= {unquote(secret), unquote_plus(secret), quote(secret, safe=""), quote_plus(secret)}
    return found - {""}
