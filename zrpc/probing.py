"""What became of call N?  Asked when messages may have been lost, answered, repaired.  Pure.

The data channel loses nothing while its connections live.  When one was cut, or the
broker died, either side may have lost any of its messages, in the middle too.  Then the
caller asks, for each call that it waits for and has sent as a whole, and the callee
answers with a :class:`~zrpc.pair.Stage`:

* unknown: the request never came; it is sent again (it has not run: ids are kept from
  the mark up, so a second copy never runs);
* receiving: the pieces that are missing are named, and sent again;
* queued, running: nothing to do;
* done: the reply was lost; it is sent again, or the pieces that the caller names.

Asking too often costs a message and repairs nothing that is whole, so anybody who suspects
a loss just asks.  A side that has only served asks to be asked (``Flag.ASK_BACK``).  A
question is repeated until it is answered.

Every message also repeats positions (:mod:`zrpc.pair`): an answered probe so gives back
the credit of all that was lost before it, in both directions.

Rejected: sending everything again after a cut (gigabytes that have arrived); sequence
numbers and gaps (the last message of a burst has no gap behind it).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgpack

from broker.protocol import ProtocolError

from .pair import Pair, Stage

if TYPE_CHECKING:
    from .transfer import Outgoing

#: Calls asked about, and pieces named, in one message.
BATCH = 4096
#: Seconds until an unanswered question is repeated, at first and at most.
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 1.0

Piece = tuple[int, int]  # buffer, offset


def questions(pair: Pair) -> list[bytes]:
    """The bodies of the messages that ask after all calls to this peer; at least one.

    A row is ``[number]``, or ``[number, [[buffer, offset]...]]`` with what is missing of a
    reply that has begun to arrive.
    """
    waiting_to_leave = {id(outgoing) for outgoing in (*pair.outbox, *pair.streams)}
    rows: list[list[Any]] = []
    for number, call in pair.waiting.items():
        outgoing = call.outgoing
        if outgoing is None or not outgoing.started or id(outgoing) in waiting_to_leave:
            continue
        assembly = pair.assemblies.get(number)
        rows.append([number] if assembly is None else [number, assembly.missing_pieces(BATCH)])
    bodies = [msgpack.packb(rows[i : i + BATCH]) for i in range(0, len(rows), BATCH)]
    return bodies or [msgpack.packb([])]


def question(number: int) -> bytes:
    """The body of a message that asks after one call."""
    return bytes(msgpack.packb([[number]]))


def answer(pair: Pair, body: Any) -> tuple[bytes, list[tuple[Outgoing, list[Piece] | None]]]:
    """The callee's answer, and which replies it sends again: whole, or these pieces.

    A row of the answer is ``[number, 0 for unknown, else stage + 1]``, with the missing
    pieces of a request that has begun to arrive.

    Raises:
        ProtocolError: the body is no question.
    """
    rows: list[list[Any]] = []
    again: list[tuple[Outgoing, list[Piece] | None]] = []
    for number, *named in _rows(body):
        missing = _pieces(named[0]) if named else None
        served = pair.served.get(number)
        if served is None:
            rows.append([number, 0])
            continue
        row: list[Any] = [number, served.stage + 1]
        rows.append(row)
        if served.stage == Stage.RECEIVING and served.assembly is not None:
            row.append(served.assembly.missing_pieces(BATCH))
        elif served.stage == Stage.DONE and served.reply is not None:
            again.append((served.reply, missing))
    return bytes(msgpack.packb(rows)), again


def read_answer(body: Any) -> list[tuple[int, int, list[Piece]]]:
    """The rows of an answer: number, 0 or stage + 1, missing pieces.

    Raises:
        ProtocolError: the body is no answer.
    """
    result = []
    for row in _rows(body):
        if len(row) < 2 or type(row[1]) is not int:
            raise ProtocolError("an answer to a probe without a stage")
        result.append((row[0], row[1], _pieces(row[2]) if len(row) > 2 else []))
    return result


def send_again(pair: Pair, outgoing: Outgoing, pieces: list[Piece] | None) -> None:
    """Put a lost request or reply, or pieces of it, where it waits to be sent."""
    if outgoing.cancelled or not outgoing.started or outgoing in pair.outbox:
        return
    if pieces is None:
        if outgoing in pair.streams:
            return  # it is still being sent for the first time
        outgoing.restart()
        pair.outbox.append(outgoing)
    elif pieces and outgoing.add_again(pieces) and outgoing not in pair.streams:
        pair.streams.append(outgoing)


def _rows(body: Any) -> list[list[Any]]:
    try:
        rows = msgpack.unpackb(body)
    except Exception as error:
        raise ProtocolError(f"an unreadable probe: {error}") from None
    if not isinstance(rows, list) or not all(
        isinstance(row, list) and row and type(row[0]) is int for row in rows
    ):
        raise ProtocolError("a probe that is no list of rows")
    return rows


def _pieces(value: Any) -> list[Piece]:
    if not isinstance(value, list) or not all(
        isinstance(item, list) and len(item) == 2 and all(type(part) is int for part in item)
        for item in value
    ):
        raise ProtocolError("a probe whose missing pieces are no pairs of integers")
    return [(item[0], item[1]) for item in value]
