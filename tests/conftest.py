"""What every test has: the leak check, and the server that ranks are forked from."""

from __future__ import annotations

pytest_plugins = ["support.leaks", "support.fixtures", "pytester"]
