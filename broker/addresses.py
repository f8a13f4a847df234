"""Addresses: ``tcp://host:port``, ``tcp://host:port/job``, ``ipc:///path``."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

_JOB = re.compile(r"^[A-Za-z0-9_.:\-]{1,127}$")


class AddressError(ValueError):
    """An address that cannot be used; the text says why."""


@dataclass(frozen=True)
class Address:
    """A parsed address.

    Attributes:
        endpoint: what ZeroMQ dials or binds, without the job.
        job: the job in it, or "".
        host: host name, "" for ipc.
        port: port, 0 for "any" and for ipc.
    """

    endpoint: str
    job: str = ""
    host: str = ""
    port: int = 0

    @property
    def is_loopback(self) -> bool:
        """Can it be reached from this machine only?"""
        if not self.host:
            return True
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return False

    def with_port(self, port: int) -> str:
        """The endpoint of the same host at another port."""
        return f"tcp://{self.host}:{port}"


def parse_address(text: str) -> Address:
    """Read an address.

    Raises:
        AddressError: it is of no known form.

    Example:
        >>> parse_address("tcp://127.0.0.1:5555/digits").job
        'digits'
    """
    scheme, separator, rest = text.partition("://")
    if not separator or scheme not in ("tcp", "ipc"):
        raise AddressError(
            f"{text!r} is no address: it has the form tcp://host:port or tcp://host:port/job."
        )
    if scheme == "ipc":
        if not rest:
            raise AddressError(f"{text!r} names no path.")
        return Address(text)
    place, _, job = rest.partition("/")
    host, colon, number = place.rpartition(":")
    if not colon or not host:
        raise AddressError(f"{text!r} names no port: an address has the form tcp://host:port.")
    if number == "*":
        number = "0"
    if not number.isdigit() or int(number) > 65535:
        raise AddressError(f"{text!r} has the port {number!r}; a port is a number up to 65535.")
    if job and not _JOB.match(job):
        raise AddressError(f"{text!r} has the job {job!r}; a job is of letters, digits and - _ . :")
    return Address(f"tcp://{host}:{number}", job, host, int(number))
