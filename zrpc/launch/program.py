"""Running a script or a module in this process as Python itself would run it.

``runpy.run_path`` is not used: it takes its module away again when the script has ended,
and threads, ``atexit`` functions and remote calls still look for things in ``__main__``.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import io
import os
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .process import limit_threads

_kept: list[Any] = []


class ProgramError(Exception):
    """There is nothing to run; the text is a sentence that says why."""


@dataclass(frozen=True)
class Script:
    """A script or a module, and its arguments.

    Args:
        name: the path of a script, folder or zip archive; or the name of a module.
        arguments: those of the program.
        is_module: whether ``name`` is a module's.
    """

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    def check(self) -> None:
        """Raise :class:`ProgramError` where there is no such script, or no right to read it."""
        if self.is_module:
            return
        if not os.path.exists(self.name):
            raise ProgramError(f"There is no script {self.name!r}.")
        if os.path.isdir(self.name) and not os.path.exists(os.path.join(self.name, "__main__.py")):
            raise ProgramError(f"The folder {self.name!r} has no __main__.py to run.")
        if not os.access(self.name, os.R_OK):
            raise ProgramError(f"The script {self.name!r} cannot be read: you have no right to.")

    def command(self) -> tuple[str, ...]:
        """The command that runs it in a fresh Python."""
        what = ("-m", self.name) if self.is_module else (self.name,)
        # Unbuffered: into a pipe, lines would be seen late or, after a crash, never.
        return (sys.executable, "-u", *what, *self.arguments)

    def run_in_rank(self, threads: int | None) -> int:
        """Run it in this process, which was forked for it; returns the exit code.

        Args:
            threads: how many to compute with; None for as many as it likes.
        """
        if threads is not None:
            limit_threads(threads)
        try:
            if self.is_module:
                run_module(self.name, self.arguments)
            else:
                run_script(self.name, self.arguments)
        except ProgramError as error:
            print(error, file=sys.stderr)
            return 1
        return 0


def run_script(path: str, arguments: Sequence[str]) -> None:
    """Run the script, folder or zip archive ``path`` as ``python path arguments...`` does."""
    sys.argv = [path, *arguments]
    if os.path.isdir(path) or (not path.endswith(".py") and _is_archive(path)):
        _set_first_path(path)
        spec = importlib.machinery.PathFinder.find_spec("__main__", [path])
        _run_spec(spec, path)
        return
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    full = os.path.abspath(path)
    with io.open_code(full) as file:
        code = compile(file.read(), full, "exec", dont_inherit=True)
    _run(
        code,
        __file__=full,
        __cached__=None,
        __package__=None,
        __spec__=None,
        __loader__=importlib.machinery.SourceFileLoader("__main__", full),
    )


def run_module(name: str, arguments: Sequence[str]) -> None:
    """Run the module ``name`` as ``python -m name arguments...`` does.

    Raises:
        ProgramError: there is no such module, or it cannot be run.
    """
    _set_first_path(os.getcwd())
    sys.argv = ["-m", *arguments]
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name = f"{name}.__main__"
            spec = importlib.util.find_spec(name)
    except ImportError as error:
        raise ProgramError(f"There is no module {name!r} to run: {error}.") from None
    _run_spec(spec, name)


def _run_spec(spec: importlib.machinery.ModuleSpec | None, what: str) -> None:
    get_code = getattr(spec.loader if spec is not None else None, "get_code", None)
    code = get_code(spec.name) if spec is not None and get_code is not None else None
    if spec is None or code is None:
        raise ProgramError(f"There is no module {what!r} to run.")
    if spec.origin and sys.argv[0] == "-m":
        sys.argv[0] = spec.origin
    _run(
        code,
        __file__=spec.origin,
        __cached__=spec.cached,
        __package__=spec.parent,
        __spec__=spec,
        __loader__=spec.loader,
    )


def _run(code: types.CodeType, **attributes: Any) -> None:
    module = types.ModuleType("__main__")
    vars(module).update(attributes, __builtins__=sys.modules["builtins"])
    # The one that goes would take its globals along, and somebody may still use them.
    _kept.append(sys.modules.get("__main__"))
    sys.modules["__main__"] = module
    exec(code, vars(module))


def _set_first_path(folder: str) -> None:
    if getattr(sys.flags, "safe_path", False):
        return
    sys.path[:1] = [folder]
    sys.path_importer_cache.pop(folder, None)


def _is_archive(path: str) -> bool:
    from zipfile import is_zipfile

    return is_zipfile(path)
