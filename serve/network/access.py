"""Who may use a server: its API keys, and the host names that it answers to."""

from __future__ import annotations

import os
import socket
from hashlib import blake2b
from ipaddress import ip_address
from pathlib import Path

from outrider.errors import UsageError

LOOPBACK = ("localhost", "127.0.0.1", "::1")
KEYS = "OUTRIDER_API_KEYS"


def allowed_hosts(host: str, keys: bool, no_auth: bool) -> tuple[str, ...]:
    """Return the host names that requests may use; empty if they may use any.

    Raises:
        UsageError: others can reach the address, and there are neither API keys nor --no-auth.
    """
    if keys and no_auth:
        raise UsageError("--no-auth cannot be combined with API keys", "leave out one of them")
    if keys:
        return ()
    try:
        addresses = {str(each[4][0]) for each in socket.getaddrinfo(host, None)}
    except OSError as error:
        raise UsageError(f"{host!r} is not an address of this machine: {error.strerror}", "choose another --host") from error
    if all(ip_address(each).is_loopback for each in addresses):
        return tuple(dict.fromkeys((host, *LOOPBACK)))
    if not no_auth:
        raise UsageError(
            f"others can reach {host}, and there are no API keys",
            f"pass keys with --api-key-file or ${KEYS}, or add --no-auth to serve everyone",
        )
    return ()


def read_keys(path: Path | None) -> tuple[str, ...]:
    """Return the API keys from the file and the environment."""
    keys = os.environ.get(KEYS, "").split(",")
    if KEYS in os.environ and not any(key.strip() for key in keys):
        raise UsageError(f"${KEYS} is set but contains no key", "add keys, or unset it to serve everyone")
    if path is not None:
        try:
            lines = path.read_text(encoding="utf-8-sig").splitlines()  # some editors write a byte-order mark
            keys += [line for line in lines if not line.lstrip().startswith("#")]
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read {path}: {error}", "use a file with one key per line") from error
        if not any(key.strip() for key in keys):
            raise UsageError(f"{path} contains no key", "write one key per line")
    return tuple(key.strip() for key in keys if key.strip())


def owner_of(key: str) -> str:
    """Return the owner of the requests with an API key, whatever other keys there are: a memory may outlast them."""
    return f"key {blake2b(key.encode(), digest_size=16).hexdigest()}"
