"""Read the address of a server as a user writes it.

Invariant: two ways to write one address give the same text, and no text holds a password.
"""

import ipaddress
from urllib.parse import urlsplit

_EXAMPLE = "http://127.0.0.1:8000"


def server_url(given: str) -> str:
    """Return the address without what follows it in other clients: a slash, or `/v1`.

    Without a scheme it is taken for `http://`, if it names a port.

    Raises:
        ValueError: it is no address of a server; says what is wrong.
    """
    if not isinstance(given, str):
        raise _wrong(repr(given), "is no text")
    text = given.strip()
    has_scheme = "://" in text
    try:
        parts = urlsplit(text if has_scheme else f"http://{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        raise _wrong(repr(text.rpartition("@")[2]), "can't be read") from None
    if "@" in parts.netloc:
        raise ValueError(
            f"`base_urls` must not hold credentials, got some for {host}: addresses are logged. "
            "Pass `api_key=`, or set VLLM_API_KEY."
        )
    if parts.scheme not in ("http", "https"):
        raise _wrong(repr(given), f"has the scheme {parts.scheme}, not http or https")
    if not host or any(character.isspace() for character in text):
        raise _wrong(repr(given), "names no host")
    if port is None and not has_scheme:
        raise _wrong(repr(given), "has neither a scheme nor a port")
    if parts.query or parts.fragment:
        raise _wrong(repr(given), "has a part after `?` or `#`")
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return f"{parts.scheme}://{parts.netloc.lower()}{path}"


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server that listens on that host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _wrong(shown: str, what: str) -> ValueError:
    return ValueError(
        f'`base_urls` must be addresses such as "{_EXAMPLE}", got {shown}, which {what}.'
    )
