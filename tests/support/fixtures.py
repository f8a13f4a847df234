"""Fixtures that start processes, and the logs of those with the tests that fail."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest

from . import logs
from .cluster import Cluster, ForkServer, broker_process, close_shared_server, shared_server


@pytest.fixture(scope="session")
def fork_server() -> ForkServer:
    """The process that ranks are forked from, with more to it than ``run_ranks``."""
    return shared_server()


def pytest_unconfigure() -> None:
    close_shared_server()


@pytest.fixture(scope="module")
def broker() -> Iterator[str]:
    """The address of a broker that runs as long as the module's tests."""
    with broker_process() as address:
        yield address


@pytest.fixture(scope="module")
def cluster_of(fork_server: ForkServer, broker: str) -> Iterator[Callable[..., Cluster]]:
    """``cluster_of("w0", "w1")``: workers at the module's broker, to the end of the module."""
    with contextlib.ExitStack() as stack:
        yield lambda *names, **options: stack.enter_context(
            Cluster(fork_server, names, broker=broker, **options)
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    if report.failed:
        report.sections.extend((f"log of {name}", text) for name, text in logs.current())
    return report
