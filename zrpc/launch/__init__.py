"""Starting many processes on one machine and ending them: ``zrpc worker`` and ``zrpc run``.

The command is the *supervisor*.  It has imported torch and zrpc, and runs one thread: so
it can fork its children (8 ms each, where a fresh Python with torch takes seconds), and
fork them again when they die.

* :mod:`.group` decides: which child is started, signalled, started again, and when all
  ends.  Pure: events and times in, actions out.
* :mod:`.backoff`: how long a dead one waits.
* :mod:`.output`: what children print, a line at a time, under their names.
* :mod:`.process`: a child between ``fork`` and its program.
* :mod:`.program`: running a script as Python itself would.
* :mod:`.supervisor`: the loop over pipes and signals that carries out what ``group`` says.
* :mod:`.serve`: what a worker child does.

Choices, and what was rejected:

* *Fork from the command itself* rather than from a server process: children are its own,
  so their end is seen at once, and PR_SET_PDEATHSIG ties their lives to it.
* *A loop rather than a thread for each pipe*: a process with threads must not fork.
* *Children stay in the supervisor's process group*, so Ctrl-C and Ctrl-Z at the terminal
  reach all, as for any job of a shell.  What they leave behind comes back to the
  supervisor (PR_SET_CHILD_SUBREAPER), which ends it too.
* *A forked child ends with os._exit* after it has done what Python does at its end
  (threads, atexit, flush): unwinding would run the supervisor's own ``finally`` clauses.
"""
