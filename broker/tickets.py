"""Tickets: who shows one takes up a session again, also with a broker that was started anew.

A ticket is an HMAC (RFC 2104, SHA-256) over job, name, session and routing ids, under the
broker's secret.  The secret outlives the broker: one that listens at a given port keeps
it in a file of the run folder, readable by its user only; one that a worker has started
gets it from that worker in an environment variable, each time.

Rejected: a list of sessions on disk (written at each join, and stale after a crash).
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
import secrets
import stat
from pathlib import Path

from .run_folder import RunFolderError, run_folder

#: Where a worker hands its broker the secret.
VARIABLE = "ZRPC_BROKER_SECRET"
SIZE = 32


class Tickets:
    """Writes and checks tickets.

    Args:
        secret: the broker's, 32 bytes.

    Example:
        >>> tickets = Tickets(b"s" * 32)
        >>> ticket = tickets.make(b"to whom")
        >>> tickets.check(b"to whom", ticket), tickets.check(b"another", ticket)
        (True, False)
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def make(self, words: bytes) -> bytes:
        """The ticket for these words."""
        return hmac.new(self._secret, words, hashlib.sha256).digest()

    def check(self, words: bytes, ticket: bytes) -> bool:
        """Is it the ticket for these words?"""
        return hmac.compare_digest(self.make(words), ticket)


def handed_secret() -> bytes | None:
    """The secret that the worker which has started this broker handed over, if one did."""
    text = os.environ.pop(VARIABLE, "")
    return bytes.fromhex(text) if re.fullmatch(r"[0-9a-f]{64}", text) else None


def kept_secret(endpoint: str) -> bytes:
    """The secret of the broker at that address, made if need be.

    Raises:
        RunFolderError: it cannot be kept; the text says why.
    """
    name = re.sub(r"[^A-Za-z0-9.]+", "-", endpoint).strip("-")
    path = run_folder() / f"broker-{name}.secret"
    try:
        found = _read(path)
        if found is None:
            new = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "wb") as file:
                file.write(secrets.token_bytes(SIZE))
            with contextlib.suppress(FileExistsError):
                os.link(new, path)
            new.unlink()
            found = _read(path)
    except OSError as error:
        raise RunFolderError(f"The secret {path} cannot be kept: {error.strerror}.") from None
    if found is None:
        raise RunFolderError(f"The secret {path} cannot be read. Remove it.")
    return found


def _read(path: Path) -> bytes | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if status.st_uid != os.getuid() or status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise RunFolderError(f"Others may read the secret {path}. Remove it, or chmod 600 it.")
        data = file.read(SIZE + 1)
    return data if len(data) == SIZE else None
