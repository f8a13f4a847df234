"""The data router on real sockets, in one process."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from broker.protocol import Flag, Header, Kind, pack_session
from broker.router import Router

LIMIT = 5000


class Net:
    """A router and the sockets of some workers."""

    def __init__(self, high_water_mark: int = 1000) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        socket = self.context.socket(zmq.ROUTER)
        for option in (zmq.ROUTER_MANDATORY, zmq.ROUTER_HANDOVER):
            socket.setsockopt(option, 1)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, high_water_mark)
        self.endpoint = f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.router = Router(socket)
        self.sockets = [socket]

    def dealer(self, identity: bytes) -> Any:
        socket = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.ROUTING_ID, identity)
        socket.connect(self.endpoint)
        self.sockets.append(socket)
        return socket

    def worker(self, session: int, *, receives: bool = True) -> tuple[Any, Any]:
        tx, rx = b"t%015d" % session, b"r%015d" % session
        self.router.set_routes(session, tx, rx)
        pair = self.dealer(tx), self.dealer(rx) if receives else None
        if receives:
            # Until its own echo has come back, a fresh socket cannot be reached.
            for _ in range(100):
                pair[0].send_multipart([pack_session(session), Header(Kind.ECHO).pack()])
                self.route()
                if pair[1].poll(20):
                    break
            while pair[1].poll(30):
                pair[1].recv_multipart()
            # Echoes that could not be handed on, or returned, yet.
            self.router.dropped.clear()
            self.router.returned = 0
        return pair

    def route(self, wait: int = 200) -> None:
        if self.router.socket.poll(wait):
            while self.router.drain(100):
                pass

    def received(self, socket: Any) -> list[bytes]:
        for _ in range(LIMIT // 50):
            self.route(10)
            if socket.poll(50):
                return list(socket.recv_multipart())
        raise AssertionError("nothing arrived")

    def close(self) -> None:
        self.context.destroy(0)


@pytest.fixture
def net() -> Iterator[Net]:
    made = Net()
    yield made
    made.close()


def request(**fields: Any) -> bytes:
    return Header(Kind.REQUEST, **fields).pack()


def test_a_message_reaches_its_destination_under_its_senders_name(net: Net) -> None:
    tx, _ = net.worker(1)
    _, rx = net.worker(2)
    tx.send_multipart([pack_session(2), request(call=5), b"body", b"buffer"])
    assert net.received(rx) == [pack_session(1), request(call=5), b"body", b"buffer"]


def test_a_large_message_arrives_whole(net: Net) -> None:
    tx, _ = net.worker(1)
    _, rx = net.worker(2)
    header, data = request(call=5, flags=Flag.LARGE), bytes(range(256)) * 16384
    tx.send_multipart([pack_session(2), header, b"body", data])
    assert net.received(rx) == [pack_session(1), header, b"body", data]


def test_a_session_that_is_not_there_gives_the_header_back(net: Net) -> None:
    tx, rx = net.worker(1)
    tx.send_multipart([pack_session(9), request(call=5), b"body"])
    assert net.received(rx) == [b"!" + pack_session(9), request(call=5)]
    assert net.router.returned == 1


def test_a_session_whose_socket_has_gone_gives_the_header_back(net: Net) -> None:
    tx, rx = net.worker(1)
    net.worker(2, receives=False)
    tx.send_multipart([pack_session(2), request(call=5), b"body"])
    assert net.received(rx) == [b"!" + pack_session(2), request(call=5)]


def test_a_session_that_was_removed_is_cut_off_both_ways(net: Net) -> None:
    tx, rx = net.worker(1)
    other_tx, _ = net.worker(2)
    net.router.remove_routes(2)
    tx.send_multipart([pack_session(2), request(), b"x"])
    assert net.received(rx)[0] == b"!" + pack_session(2)
    other_tx.send_multipart([pack_session(1), request(), b"x"])
    net.route()
    assert not rx.poll(100)
    assert sum(net.router.dropped.values()) == 1


@pytest.fixture
def small_net() -> Iterator[Net]:
    made = Net(high_water_mark=10)
    yield made
    made.close()


def test_a_full_queue_gives_the_header_back_and_loses_nothing_else(small_net: Net) -> None:
    net = small_net
    tx, rx = net.worker(1)
    slow = net.context.socket(zmq.DEALER)
    slow.setsockopt(zmq.LINGER, 0)
    slow.setsockopt(zmq.RCVHWM, 1)
    slow.setsockopt(zmq.RCVBUF, 4096)
    slow.setsockopt(zmq.ROUTING_ID, b"slow")
    slow.connect(net.endpoint)
    net.sockets.append(slow)
    net.router.set_routes(2, b"slow-tx", b"slow")
    assert slow.poll(100) == 0
    body = bytes(200_000)
    returned: list[list[bytes]] = []

    def collect() -> set[int]:
        while rx.poll(0):
            returned.append(rx.recv_multipart())
        return {Header.unpack(frames[1]).call for frames in returned}

    for call in range(200):
        tx.send_multipart([pack_session(2), request(call=call), body])
        net.route(50)
        collect()
    arrived: set[int] = set()
    for _ in range(LIMIT // 20):
        net.route(10)
        while slow.poll(10):
            arrived.add(Header.unpack(slow.recv_multipart()[1]).call)
        if len(collect() | arrived) == 200:
            break
    assert any(frames[0] == b"?" + pack_session(2) for frames in returned)
    assert collect() | arrived == set(range(200)) and not collect() & arrived


HOSTILE = {
    "one frame": [b"x"],
    "two frames": [pack_session(2), b""],
    "empty frames": [b"", b"", b""],
    "a short header": [pack_session(2), request()[:-1], b"body"],
    "a long header": [pack_session(2), request() + b"x", b"body"],
    "another version": [pack_session(2), b"\x63" + request()[1:], b"body"],
    "garbage": [pack_session(2), b"\xff" * 56, b"body"],
    "a destination of the wrong size": [pack_session(2) + b"x", request(), b"body"],
    "too many frames": [pack_session(2), request(), *[b"x"] * 1100],
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_message_that_breaks_the_protocol_disturbs_nobody(
    net: Net, kind: str, caplog: Any
) -> None:
    tx, _ = net.worker(1)
    _, rx = net.worker(2)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            tx.send_multipart(HOSTILE[kind])
        tx.send_multipart([pack_session(2), request(call=6), b"good"])
        assert net.received(rx) == [pack_session(1), request(call=6), b"good"]
    assert sum(net.router.dropped.values()) == 5
    assert len(caplog.records) == 1, "logged once a peer"


def test_a_routing_id_that_no_session_has_gets_nothing_through(net: Net, caplog: Any) -> None:
    _, rx = net.worker(2)
    stranger = net.dealer(b"stranger")
    for _ in range(10):
        stranger.send_multipart([pack_session(2), request(), b"body"])
    net.route()
    net.route()
    assert not rx.poll(100)
    assert net.router.dropped["a routing id that no session has"] == 10
    assert len(caplog.records) == 1
