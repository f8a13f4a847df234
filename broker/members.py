"""Who is there: jobs, sessions, names, ranks, and what became of them.  Pure.

:class:`Membership` takes events (a hello, a goodbye, the end of a process, a
connection that no longer answers) with the time ``now``, and returns actions for the
shell in :mod:`broker.server`: messages to send, routes to set, processes to watch.

Choices:

* A session is announced (can be resolved) only once it is *ready*: its own echo has come
  back through every router, so a call to it cannot be lost on the way.
* Resolve is subscribe.  Nobody gets the list of all members but who asks for it, so that
  joining costs the same at 10 and at 10 000.
* Fates come from three events only: goodbye, the end of a process on this machine, and
  a grace that ran out.  A worker that is silent while its connection lives may hold the
  GIL for a minute: it is not lost.
* Meetings (:mod:`broker.gathers`) are apart; they are told who ended.
* A broker that was started again knows nobody: what it cannot answer is held until those
  who were there before have come back (:mod:`broker.recovery`).

Rejected: leases that a worker renews (a busy interpreter misses them); broadcasting
membership changes (quadratic).
"""

from __future__ import annotations

import difflib
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from . import messages
from .member import (
    Action,
    Job,
    Member,
    RemoveRoutes,
    Send,
    SessionEnded,
    SetRoutes,
    WatchProcess,
)
from .messages import Message
from .protocol import PROTOCOL_MAXIMUM, PROTOCOL_MINIMUM, ProtocolError
from .recovery import Recovery

_NAME = re.compile(r"^[A-Za-z0-9\-_:]{1,127}$")
#: Seconds that the holder of a name has to answer before another may take it.
NAME_CHECK = 1.0
_LEFT = "has left"
#: Sessions whose end is remembered.
REMEMBERED = 1000
#: Names that an error text lists.
NAMES_SHOWN = 20


def ticket_words(job: str, worker: str, session: int, tx: list[bytes], rx: bytes) -> bytes:
    """What a ticket signs: to whom a session belongs."""
    parts = [job.encode(), worker.encode(), session.to_bytes(8, "big"), *tx, rx]
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


class Membership:
    """All jobs of a broker.

    Args:
        epoch: 31 random bits, the high half of session numbers.
        new_id: makes a routing id of 16 bytes, the first not 0.
        routers: number of data routers.
        ports: their ports, for the welcome.
        machine: this broker's :func:`~broker.machine.machine_identity`.
        heartbeat: seconds, told in the welcome.
        grace: seconds that a member may be unreachable before it is lost.
        make_ticket: signs the words of a session, for the welcome.
        check_ticket: whether a ticket is the signature of these words; default: anybody who
            knows the routing ids may take up a session.
    """

    def __init__(
        self,
        epoch: int,
        new_id: Callable[[], bytes],
        ports: list[str],
        *,
        machine: str = "",
        heartbeat: float = 10.0,
        grace: float = 10.0,
        make_ticket: Callable[[bytes], bytes] | None = None,
        check_ticket: Callable[[bytes, bytes], bool] | None = None,
    ) -> None:
        self._make_ticket = make_ticket
        self._check_ticket = check_ticket
        self.epoch = epoch
        self.ports = ports
        self.machine = machine
        self.heartbeat = heartbeat
        self.grace = grace
        self.jobs: dict[str, Job] = {}
        self.members: dict[int, Member] = {}
        self.by_connection: dict[bytes, Member] = {}
        self.ever_joined = 0
        self._new_id = new_id
        self._counter = 0
        self._fates: OrderedDict[int, messages.Fate] = OrderedDict()
        self._actions: list[Action] = []
        self._recovery = Recovery()

    # ------------------------------------------------------------ joining

    def hello(self, connection: bytes, hello: messages.Hello, now: float) -> list[Action]:
        """A worker asks to become a member."""
        if hello.resume:
            self._resume(connection, hello, now)
        else:
            self._join(connection, hello, now)
        return self._done()

    def _refuse(self, connection: bytes, hello: messages.Hello, code: str, text: str) -> None:
        self._send(connection, messages.Refused(code, text))
        job = self.jobs.get(hello.job)
        if (
            job is not None
            and hello.world_size
            and job.world_size == hello.world_size
            and not job.started
        ):
            # The world cannot come about; nobody shall wait for it until their time is out.
            for member in list(job.by_name.values()):
                self._send(
                    member.connection,
                    messages.StartFailed(
                        f"the world of {job.world_size} cannot come together, since worker "
                        f"{hello.worker!r} (rank {hello.rank}, process {hello.pid} on {hello.host}) was "
                        f"refused: {text}"
                    ),
                )
                self._end(member, "left", "its world could not come together")

    def _join(self, connection: bytes, hello: messages.Hello, now: float) -> None:
        problem = self._problem(hello)
        if problem is not None:
            self._refuse(connection, hello, *problem)
            return
        job = self.jobs.get(hello.job)
        if job is None:
            job = self.jobs[hello.job] = Job(hello.job, hello.world_size)
        if bool(job.world_size) != bool(hello.world_size):
            self._refuse(
                connection,
                hello,
                "mixed",
                "RPC group mixes statically and dynamically initialized members which is not supported. "
                f"Job {job.name!r} {'has a world of fixed size' if job.world_size else 'has none'}; "
                "give each run a job of its own (tcp://host:port/job, or ZRPC_JOB).",
            )
            return
        if job.world_size != hello.world_size:
            self._refuse(
                connection,
                hello,
                "world",
                f"job {job.name!r} is a world of {job.world_size}, and this worker says {hello.world_size}. "
                "All must say the same; give each run a job of its own.",
            )
            return
        holder = job.by_name.get(hello.worker)
        if holder is None and hello.rank >= 0:
            holder = job.by_rank.get(hello.rank)
        if holder is not None:
            self._contend(holder, connection, hello, now)
            return
        self._admit(job, connection, hello, now)

    def _problem(self, hello: messages.Hello) -> tuple[str, str] | None:
        if hello.protocol_minimum > PROTOCOL_MAXIMUM or hello.protocol_maximum < PROTOCOL_MINIMUM:
            older = "worker" if hello.protocol_maximum < PROTOCOL_MINIMUM else "broker"
            return "protocol", (
                f"the worker speaks protocol versions {hello.protocol_minimum} to "
                f"{hello.protocol_maximum}, this broker {PROTOCOL_MINIMUM} to {PROTOCOL_MAXIMUM}. "
                f"Upgrade zrpc on the {older}'s side."
            )
        if not _NAME.match(hello.worker):
            return "name", (
                "Worker name must match ^[A-Za-z0-9-_:]*$, and must be non-empty and shorter than 128 "
                f"chars, but got {hello.worker!r:.200}"
            )
        if not 0 <= hello.world_size < 1 << 20 or not -1 <= hello.rank < 1 << 31:
            return "rank", f"rank {hello.rank} or world size {hello.world_size} is out of range."
        if hello.world_size and not 0 <= hello.rank < hello.world_size:
            return "rank", (
                f"rank {hello.rank} does not fit a world of {hello.world_size}: ranks go from 0 to "
                f"{hello.world_size - 1}."
            )
        return None

    def _contend(
        self, holder: Member, connection: bytes, hello: messages.Hello, now: float
    ) -> None:
        """A name or rank that somebody holds: theirs, if they answer."""
        if holder.watched and holder.suspect_since is None:
            self._refuse(connection, hello, *self._taken(holder, hello))
            return
        holder.contenders.append((now + NAME_CHECK, connection, hello))
        self._send(holder.connection, messages.Ping(1))

    def _taken(self, holder: Member, hello: messages.Hello) -> tuple[str, str]:
        who = f"process {holder.hello.pid} on host {holder.hello.host}"
        if holder.name == hello.worker:
            return "name", (
                f"RPC worker name {hello.worker!r} is not unique: {who} has it in job {hello.job!r} "
                f"and is alive. Give this worker another name."
            )
        return "rank", (
            f"rank {hello.rank} is taken by worker {holder.name!r} ({who}) in job {hello.job!r}. "
            "Give this worker another rank."
        )

    def _admit(self, job: Job, connection: bytes, hello: messages.Hello, now: float) -> Member:
        old = self.by_connection.get(connection)
        if old is not None:
            self._end(old, "replaced", "its connection has said hello again")
            job = self.jobs.setdefault(job.name, job)
        self._counter += 1
        session = (self.epoch << 32) | self._counter
        rank = hello.rank
        if rank < 0:
            rank = 0
            while rank in job.by_rank:
                rank += 1
        member = Member(
            session,
            connection,
            hello,
            rank,
            [self._new_id() for _ in self.ports],
            self._new_id(),
            now,
        )
        self._enter(job, member)
        return member

    def _enter(self, job: Job, member: Member) -> None:
        self.by_connection[member.connection] = member
        self._actions.append(SetRoutes(member.session, member.tx, member.rx))
        self._register(job, member)
        self._welcome(member)

    def _register(self, job: Job, member: Member) -> None:
        self.ever_joined += 1
        job.joined += 1
        job.by_name[member.name] = member
        job.by_rank[member.rank] = member
        job.ended.pop(member.name, None)
        self.members[member.session] = member
        if self.machine and member.hello.machine == self.machine and member.hello.pid > 0:
            member.watched = True
            self._actions.append(WatchProcess(member.session, member.hello.pid))

    def _welcome(self, member: Member) -> None:
        self._send(
            member.connection,
            messages.Welcome(
                session=member.session,
                epoch=self.epoch,
                rank=member.rank,
                tx=member.tx,
                rx=member.rx,
                data=self.ports,
                heartbeat=self.heartbeat,
                grace=self.grace,
                ticket=self._make_ticket(
                    ticket_words(
                        member.hello.job, member.name, member.session, member.tx, member.rx
                    )
                )
                if self._make_ticket is not None
                else b"",
                heard=member.sequence,
            ),
        )

    def _resume(self, connection: bytes, hello: messages.Hello, now: float) -> None:
        member = self.members.get(hello.resume)
        problem = None
        if not self._may_resume(hello):
            problem = (
                "its ticket was not signed by this broker, so the session cannot be taken up. "
                "Call init_rpc again."
            )
        if member is not None and not member.ghost:
            if member.rx != hello.resume_rx or member.tx != hello.resume_tx:
                problem = "this session belongs to another worker."
            if problem is None:
                self._take_up(member, connection)
                return
        elif member is None and hello.resume in self._fates:
            reason = self._fates[hello.resume].reason
            text = f"this session was ended: {reason}. Call init_rpc again."
            self._send(connection, messages.Refused("lost", text))
            return
        if problem is not None:
            self._send(connection, messages.Refused("identity", problem))
            return
        self._come_back(member, connection, hello, now)

    def _may_resume(self, hello: messages.Hello) -> bool:
        """Is it who it says it is?  The welcome gave it a ticket that only a broker can write."""
        if self._check_ticket is None:
            return True
        words = ticket_words(
            hello.job, hello.worker, hello.resume, hello.resume_tx, hello.resume_rx
        )
        return self._check_ticket(words, hello.ticket)

    def _take_up(self, member: Member, connection: bytes) -> None:
        """It lives here, and its connection was made anew; what it said meanwhile may be lost."""
        self.by_connection.pop(member.connection, None)
        member.connection = connection
        member.suspect_since = None
        member.announcing.clear()
        self.by_connection[connection] = member
        self._welcome(member)

    def _come_back(
        self, ghost: Member | None, connection: bytes, hello: messages.Hello, now: float
    ) -> None:
        """A session that a broker before this one has made."""
        problem = self._problem(hello)
        job = self.jobs.get(hello.job) or Job(hello.job, hello.world_size, started=True)
        holders = [
            holder
            for holder in (job.by_name.get(hello.worker), job.by_rank.get(hello.rank))
            if holder is not None and holder is not ghost
        ]
        ids = [*hello.resume_tx, hello.resume_rx]
        if (
            problem is not None
            or holders
            or len(hello.resume_tx) != len(self.ports)
            or any(len(item) != 16 or item[:1] == b"\0" for item in ids)
            or hello.resume >> 32 == self.epoch
        ):
            text = (
                problem[1]
                if problem
                else (
                    f"the session of worker {hello.worker!r} cannot be taken up. Call init_rpc again."
                )
            )
            self._send(connection, messages.Refused("lost", text))
            return
        self.jobs[job.name] = job
        member = Member(
            hello.resume, connection, hello, hello.rank, hello.resume_tx, hello.resume_rx, now
        )
        member.sequence = -1
        if ghost is not None:
            member.subscribers, member.contenders = ghost.subscribers, ghost.contenders
        self._recovery.begin(now)
        self._enter(job, member)
        if hello.was_ready:
            self._set_ready(job, member)
            self._ask_again(now)

    def announced(self, member: Member, parts: list[messages.Announce], now: float) -> list[Action]:
        """It has said what it knows: whom it has met, and how its last meetings ended."""
        member.sequence = parts[-1].sequence
        job = self.jobs[member.hello.job]
        for part in parts:
            for key, values in part.gathers:
                if not isinstance(key, str) or not isinstance(values, dict):
                    raise ProtocolError("an announced meeting that is not [key, values]")
                self._meetings(job.gathers.finished(key, values))
            if self._recovery.is_on(now):
                for peer in part.peers:
                    self._enter_ghost(job, peer, now)
        return self._done()

    def _enter_ghost(self, job: Job, peer: dict[str, Any], now: float) -> None:
        """Another that was there before: waited for as one whose connection was cut."""
        try:
            session, name, rank = peer["session"], peer["worker"], peer["rank"]
            hello = messages.Hello(
                worker=name,
                job=job.name,
                rank=rank,
                world_size=job.world_size,
                **{key: peer[key] for key in ("pid", "host", "machine", "clock", "script")},
            )
            messages.encode(hello)
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"an announced peer that cannot be read: {error}") from None
        if (
            session in self.members
            or session in self._fates
            or session >> 32 == self.epoch
            or self._problem(hello) is not None
            or name in job.by_name
            or rank in job.by_rank
        ):
            return
        ghost = Member(session, b"", hello, rank, [], b"", now, ready=True, ghost=True)
        ghost.suspect_since = now
        self._register(job, ghost)

    def _ask_again(self, now: float) -> None:
        """Take up what could not be answered while the others had not come back."""
        for session, message in self._recovery.take():
            member = self.members.get(session)
            if member is None:
                continue
            if isinstance(message, messages.Resolve):
                self._resolve(member, message, now)
            elif isinstance(message, messages.Gather):
                self._gather(member, message, now)
            elif isinstance(message, messages.Watch):
                for other in message.sessions:
                    self.watch_one(member, other, now)

    # ------------------------------------------------------------ ready

    def ready(self, member: Member) -> list[Action]:
        """Its echo has come back through every router."""
        job = self.jobs[member.hello.job]
        self._set_ready(job, member)
        return self._done()

    def _set_ready(self, job: Job, member: Member) -> None:
        member.ready = True
        if not job.world_size or job.started:
            self._send(member.connection, messages.Started())
            return
        if len(job.by_rank) == job.world_size and all(m.ready for m in job.by_rank.values()):
            job.started = True
            for other in job.by_rank.values():
                self._send(other.connection, messages.Started())

    # ------------------------------------------------------------ requests

    def resolve(self, member: Member, request: messages.Resolve, now: float) -> list[Action]:
        """Who is it?"""
        self._resolve(member, request, now)
        return self._done()

    def _resolve(self, member: Member, request: messages.Resolve, now: float) -> None:
        job = self.jobs[member.hello.job]
        found: Member | None
        if request.session:
            found = self.members.get(request.session)
            if found is not None and found.hello.job != job.name:
                found = None
        elif request.worker:
            found = job.by_name.get(request.worker)
        else:
            found = job.by_rank.get(request.rank)
        if found is None or not (found.ready or found is member or request.session):
            if not self._recovery.hold(member.session, request, now):
                self._send(member.connection, self._unknown(job, request))
        else:
            self._subscribe(member, found)
            self._send(member.connection, messages.Answer(request.request, found.as_map()))

    def _unknown(self, job: Job, request: messages.Resolve) -> messages.Failure:
        names = sorted(m.name for m in job.by_name.values() if m.ready)
        if request.session:
            fate = self._fates.get(request.session)
            text = f"session {request.session:016x} is not there"
            return messages.Failure(
                request.request, "unknown", f"{text}: {fate.reason}" if fate else text
            )
        wanted = f"name {request.worker!r}" if request.worker else f"rank {request.rank}"
        near = difflib.get_close_matches(request.worker, names, n=3) if request.worker else []
        ordered = [*near, *(name for name in names if name not in near)]
        text = f"could not find destination {wanted} in job {job.name!r}"
        ended = job.ended.get(request.worker)
        if ended is not None and ended != _LEFT:
            return messages.Failure(request.request, "lost", ended, ordered[:NAMES_SHOWN])
        if ended is not None:
            text += f"; it was here and {ended}"
        return messages.Failure(request.request, "unknown", text, ordered[:NAMES_SHOWN])

    def watch(self, member: Member, sessions: Iterable[int], now: float) -> list[Action]:
        """Tell ``member`` the fate of these."""
        for session in sessions:
            self.watch_one(member, session, now)
        return self._done()

    def watch_one(self, member: Member, session: int, now: float) -> None:
        """The same for one, as part of another event; its actions come with that one's."""
        other = self.members.get(session)
        if other is None or other.hello.job != member.hello.job:
            fate = self._fates.get(session)
            if fate is None and self._recovery.hold(member.session, messages.Watch([session]), now):
                return
            if fate is None and session not in self.members:
                # It was there before a restart of this broker, and has not come back.
                reason = "it did not come back after the restart of the broker"
                fate = messages.Fate(session, "lost", reason)
                self._remember(fate)
                self._actions.append(
                    SessionEnded(member.hello.job, session, f"{session:016x}", "lost", reason)
                )
            self._send(
                member.connection,
                fate or messages.Fate(session, "lost", "it belongs to another job"),
            )
        else:
            self._subscribe(member, other)

    def _subscribe(self, member: Member, other: Member) -> None:
        if other is not member:
            other.subscribers.add(member.session)
            member.watching.add(other.session)

    def list_members(self, member: Member, request: messages.ListMembers) -> list[Action]:
        """All members of its job that are ready."""
        job = self.jobs[member.hello.job]
        found = [m.as_map() for m in job.by_name.values() if m.ready]
        self._send(member.connection, messages.Answer(request.request, found))
        return self._done()

    def who_is_missing(self, member: Member, request: messages.WhoIsMissing) -> list[Action]:
        """Ranks that have not come, or names that have not come to a gather."""
        job = self.jobs[member.hello.job]
        missing: list[Any]
        if request.key:
            missing = sorted(job.gathers.missing(request.key))
        else:
            missing = [
                rank
                for rank in range(job.world_size)
                if rank not in job.by_rank or not job.by_rank[rank].ready
            ]
        self._send(member.connection, messages.Answer(request.request, missing[:1000]))
        return self._done()

    def gather(self, member: Member, request: messages.Gather, now: float) -> list[Action]:
        """It comes to a meeting."""
        self._gather(member, request, now)
        return self._done()

    def _gather(self, member: Member, request: messages.Gather, now: float) -> None:
        job = self.jobs[member.hello.job]
        complete = job.world_size and len(job.by_rank) == job.world_size
        absent = any(other.ghost for other in job.by_name.values())
        if (absent or not complete) and self._recovery.hold(
            member.session, request, now, patience=self.grace if job.world_size else 0.0
        ):
            return  # who takes part is not known yet
        if request.workers:
            wanted = set(request.workers)
        elif job.world_size:
            # Those who have left or were lost are no longer in by_name, and nobody waits for them.
            wanted = set(job.by_name)
        else:
            wanted = {m.name for m in job.by_name.values() if m.ready}
        gone = {name for name in wanted if name not in job.by_name and name in job.ended}
        unknown = {name for name in wanted if name not in job.by_name} - gone
        if unknown and job.started:
            self._send(
                member.connection,
                messages.Failure(
                    request.request,
                    "unknown",
                    f"{sorted(unknown)} are no members of job {job.name!r}",
                    sorted(job.by_name)[:NAMES_SHOWN],
                ),
            )
            return
        results = job.gathers.come(
            request.key,
            member.name,
            request.value,
            wanted,
            tolerant=request.tolerant,
            token=(member.session, request.request),
        )
        for name in sorted(gone):
            results += job.gathers.gone(name, job.ended[name])
        self._meetings(results)

    def leave_gather(self, member: Member, key: str) -> list[Action]:
        """It no longer waits there."""
        self.jobs[member.hello.job].gathers.leave(key, member.name)
        return self._done()

    def _meetings(self, results: list[Any]) -> None:
        for (session, request), outcome in results:
            member = self.members.get(session)
            if member is None:
                continue
            if isinstance(outcome, dict):
                self._send(member.connection, messages.Answer(request, outcome))
            else:
                names, text = outcome
                self._send(member.connection, messages.Failure(request, "lost", text, names))

    def linger(self, member: Member, request: messages.Linger) -> list[Action]:
        """It stays only for the others."""
        member.lingering = request.request
        self._check_lingering(self.jobs[member.hello.job])
        return self._done()

    def _check_lingering(self, job: Job) -> None:
        if not job.world_size and job.joined < 2:
            return  # nobody has come yet for whom it stays
        if all(member.lingering for member in job.by_name.values()):
            for member in job.by_name.values():
                self._send(member.connection, messages.Answer(member.lingering, None))

    # ------------------------------------------------------------ ends

    def goodbye(self, member: Member, message: messages.Goodbye) -> list[Action]:
        """It leaves by its own will."""
        self._send(member.connection, messages.Farewell())
        self._end(
            member, "left", "it has left" + (f" ({message.reason})" if message.reason else "")
        )
        return self._done()

    def process_ended(self, session: int) -> list[Action]:
        """A process on this machine has ended without a goodbye."""
        member = self.members.get(session)
        if member is not None:
            self._end(
                member, "lost", f"its process {member.hello.pid} on {member.hello.host} has ended"
            )
        return self._done()

    def unreachable(self, connection: bytes, now: float) -> list[Action]:
        """A message could not be delivered to it: its grace begins."""
        member = self.by_connection.get(connection)
        if member is not None and member.suspect_since is None:
            member.suspect_since = now
        return self._done()

    def heard(self, member: Member) -> list[Action]:
        """Anything came from it."""
        member.suspect_since = None
        if member.contenders:
            contenders, member.contenders = member.contenders, []
            for _, connection, hello in contenders:
                self._refuse(connection, hello, *self._taken(member, hello))
        return self._done()

    def due(self, now: float) -> list[Action]:
        """Graces and name checks that have run out."""
        for member in list(self.members.values()):
            if member.session not in self.members:
                continue
            if member.contenders and member.contenders[0][0] <= now:
                _, connection, hello = member.contenders.pop(0)
                self._end(
                    member,
                    "replaced",
                    f"it did not answer, and another worker has taken its name {member.name!r}",
                )
                self._join(connection, hello, now)
            elif member.suspect_since is not None and now - member.suspect_since >= self.grace:
                self._end(
                    member,
                    "lost",
                    f"its connection closed and it did not come back within {self.grace:g} s",
                )
        if self._recovery.is_over(now):
            self._ask_again(now)
        return self._done()

    def next_due(self) -> float | None:
        """When :meth:`due` has something to do."""
        moments = [] if self._recovery.due is None else [self._recovery.due]
        moments += [
            member.contenders[0][0]
            if member.contenders
            else (member.suspect_since or 0) + self.grace
            for member in self.members.values()
            if member.contenders or member.suspect_since is not None
        ]
        return min(moments, default=None)

    def _end(self, member: Member, ending: str, reason: str) -> None:
        job = self.jobs[member.hello.job]
        self.members.pop(member.session, None)
        if self.by_connection.get(member.connection) is member:
            del self.by_connection[member.connection]
        if job.by_name.get(member.name) is member:
            del job.by_name[member.name]
        if job.by_rank.get(member.rank) is member:
            del job.by_rank[member.rank]
        verb = _LEFT if ending == "left" else f"was {ending}: {reason}"
        job.ended[member.name] = verb
        while len(job.ended) > REMEMBERED:
            job.ended.popitem(last=False)
        fate = messages.Fate(member.session, ending, reason)
        self._remember(fate)
        self._actions.append(RemoveRoutes(member.session))
        for session in member.subscribers:
            other = self.members.get(session)
            if other is not None:
                other.watching.discard(member.session)
                self._send(other.connection, fate)
        for session in member.watching:
            watched = self.members.get(session)
            if watched is not None:
                watched.subscribers.discard(member.session)
        self._actions.append(SessionEnded(job.name, member.session, member.name, ending, reason))
        self._meetings(job.gathers.gone(member.name, verb))
        for _, connection, hello in member.contenders:
            self._join(connection, hello, member.since)
        member.contenders = []
        if not job.by_name:
            # All have gone: a new run may use the name.
            self.jobs.pop(job.name, None)
        else:
            self._check_lingering(job)

    # ------------------------------------------------------------ inside

    def _remember(self, fate: messages.Fate) -> None:
        self._fates[fate.session] = fate
        while len(self._fates) > REMEMBERED:
            self._fates.popitem(last=False)

    def _send(self, connection: bytes, message: Message) -> None:
        self._actions.append(Send(connection, message))

    def _done(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions
