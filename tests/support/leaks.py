"""A pytest plugin: no test leaves a process, thread, descriptor or shared memory behind.

Every test is checked when its own fixtures have ended, every module when its fixtures have
ended, and the whole run at its end.  What a fixture of wider scope has made is not held
against the tests that use it, but against the module (or run) that it belongs to.

* A process that descends from one of a module's fixtures may be new after a test (a worker
  that was started again); it must be gone with the module.
* In a test or module marked ``leaks_checked_by_module`` threads and descriptors may grow: an
  agent of the module's own that lives in this process takes threads when it needs them.
* A leak has ``leak_grace`` seconds (an ini option) to end by itself.
* In a test that has failed anyway, a leak is only shown: its traceback keeps things alive.

Left-over processes and segments are ended, so that only the test that left them is blamed.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Generator, Iterator
from typing import Any

import pytest

from . import resources
from .resources import Descriptor, Process, Resource, Segment, Thread

_failed = pytest.StashKey[bool]()
_check = pytest.StashKey["LeakCheck"]()


class LeakCheck:
    """Keeps the account of one test run.

    Args:
        grace: seconds that a leak has to end by itself.
    """

    def __init__(self, grace: float) -> None:
        self.grace = grace
        #: What may be there when the module, when the test ends.
        self.module: set[Resource] = set()
        self.test: set[Resource] = set()
        #: Processes of fixtures of the module, whose descendants may come and go.
        self.module_processes: set[int] = set()

    def allow(self, made: set[Resource], scope: str) -> None:
        """A fixture of ``scope`` has made these; they may stay until that scope ends."""
        self.test |= made
        if scope in ("session", "package"):
            self.module |= made
        else:
            self.module_processes |= {r.pid for r in made if isinstance(r, Process)}

    def new(self, allowed: set[Resource], *, marked: bool) -> set[Resource]:
        """What is there beyond ``allowed``."""
        return resources.holdings(marked=marked).all() - allowed

    def leaks(
        self, allowed: set[Resource], *, kinds: tuple[type, ...], in_module: bool, grace: float
    ) -> list[Resource]:
        """What is still there beyond ``allowed`` when the grace is over.

        Args:
            allowed: what may be there.
            kinds: the classes of resources that count.
            in_module: the module goes on, so what its processes have started may stay.
            grace: seconds to wait.
        """
        end = time.monotonic() + grace
        pause = 0.001
        while True:
            found = {
                resource
                for resource in self.new(allowed, marked=not in_module)
                if isinstance(resource, kinds) and not (in_module and self._of_module(resource))
            }
            if not found or time.monotonic() >= end:
                break
            if pause == 0.001:
                gc.collect()
            time.sleep(pause)
            pause = min(pause * 2, 0.05)
        return sorted(
            (r for r in found if not (isinstance(r, Segment) and resources.of_others(r))), key=str
        )

    def _of_module(self, resource: Resource) -> bool:
        return isinstance(resource, Process) and not self.module_processes.isdisjoint(
            resource.ancestors()
        )

    def report(self, who: str, leaks: list[Resource], *, failed: bool) -> None:
        """End what can be ended; then fail, or (where the test has failed anyway) only tell."""
        if not leaks:
            return
        text = f"{who} left behind:\n" + "\n".join(f"  {leak}" for leak in leaks)
        for leak in leaks:
            if isinstance(leak, Process | Segment):
                leak.end()
        if failed:
            print(text, file=sys.stderr)
        else:
            pytest.fail(text, pytrace=False)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("leak_grace", "seconds that a leak has to end by itself", default="5")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "leaks_checked_by_module: threads and descriptors may grow in this test; "
        "they must be gone when its module ends",
    )
    resources.mark()
    config.stash[_check] = LeakCheck(float(config.getini("leak_grace")))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    if report.failed:
        item.stash[_failed] = True
    return report


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, Any, Any]:
    if fixturedef.scope == "function" or fixturedef.argname.startswith("_leaks_"):
        return (yield)
    check = request.config.stash[_check]
    before = resources.holdings().all()
    try:
        return (yield)
    finally:
        check.allow(resources.holdings().all() - before, fixturedef.scope)


@pytest.fixture(scope="session", autouse=True)
def _leaks_of_run(request: pytest.FixtureRequest) -> Iterator[None]:
    check = request.config.stash[_check]
    resources.start_singletons()
    before = resources.holdings(marked=True).all()
    yield
    # Session fixtures were set up after this one, so they have ended by now.
    # Threads and descriptors are left to the modules: libraries keep some.
    leaks = check.leaks(before, kinds=(Process, Segment), in_module=False, grace=check.grace)
    check.report("The tests", leaks, failed=False)


@pytest.fixture(scope="module", autouse=True)
def _leaks_of_module(request: pytest.FixtureRequest, _leaks_of_run: None) -> Iterator[None]:
    check = request.config.stash[_check]
    check.module_processes = set()
    check.module = resources.holdings(marked=True).all()
    yield
    leaks = check.leaks(
        check.module,
        kinds=(Process, Thread, Descriptor, Segment),
        in_module=False,
        grace=check.grace,
    )
    check.report(f"The module {request.node.name}", leaks, failed=False)


@pytest.fixture(autouse=True)
def _leaks_of_test(request: pytest.FixtureRequest, _leaks_of_module: None) -> Iterator[None]:
    check = request.config.stash[_check]
    check.test = resources.holdings().all()
    yield
    kinds: tuple[type, ...] = (Process, Thread, Descriptor, Segment)
    if request.node.get_closest_marker("leaks_checked_by_module"):
        kinds = (Process, Segment)
    failed = request.node.stash.get(_failed, False)
    leaks = check.leaks(
        check.test,
        kinds=kinds,
        in_module=True,
        grace=min(check.grace, 0.5) if failed else check.grace,
    )
    # Told once is enough: the module is not blamed for it again.
    check.module |= set(leaks)
    check.report(f"The test {request.node.name}", leaks, failed=failed)
