"""The folder for what one user's processes leave on this machine: logs of workers, brokers' secrets."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


class RunFolderError(Exception):
    """The folder cannot be used; the text is a sentence that says why."""


def run_folder() -> Path:
    """The run folder, made if need be, readable by its owner only.

    Returns:
        ``$ZRPC_RUN_DIR``, else ``$XDG_RUNTIME_DIR/zrpc``, else ``<tempdir>/zrpc-<uid>``.

    Raises:
        RunFolderError: it cannot be made, belongs to somebody else, or others may write there.
    """
    given = os.environ.get("ZRPC_RUN_DIR")
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if given:
        folder = Path(given)
    elif runtime:
        folder = Path(runtime) / "zrpc"
    else:
        folder = Path(tempfile.gettempdir()) / f"zrpc-{os.getuid()}"
    remedy = "Set ZRPC_RUN_DIR to a folder of your own."
    try:
        folder.mkdir(mode=0o700, parents=bool(given), exist_ok=True)
        # Not through a link: in a folder that everybody writes to, it may be anybody's.
        status = os.lstat(folder) if not given else os.stat(folder)
    except OSError as error:
        raise RunFolderError(
            f"The run folder {folder} cannot be made: {error.strerror}. {remedy}"
        ) from None
    if not stat.S_ISDIR(status.st_mode):
        raise RunFolderError(f"The run folder {folder} is not a folder. {remedy}")
    if status.st_uid != os.getuid():
        raise RunFolderError(
            f"The run folder {folder} belongs to somebody else (user {status.st_uid}), who could "
            f"read and change what is put there. {remedy}"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise RunFolderError(
            f"Others may write to the run folder {folder}. Run `chmod 700 {folder}`, or set "
            "ZRPC_RUN_DIR to another one."
        )
    return folder
