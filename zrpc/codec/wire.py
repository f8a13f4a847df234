"""The marks and limits of the codec's format, and its errors.

A body is one msgpack document: the value itself, or ``[TABLE, value]`` where it holds tensors,
arrays or pickles.  Two kinds of extension types say what msgpack has no word for:

* *atoms* hold their whole value in the extension's data (a big integer, a complex number);
* *marks* have no data and stand first in a list, and tell what the rest of the list is
  (``[TUPLE, 1, 2]``).  So a tuple costs three bytes and no packing of its own, and a body is
  packed in one pass.

Things that can be met twice (tensors, arrays) and pickles live in the table, in front of the
value; the value holds their number.  The table is plain msgpack without extensions::

    [segments, objects, pickles]

    segments: memory of tensors: bytes, or the number of a buffer.
    objects:  one list for each tensor or array (see ``tensors.py`` and ``arrays.py``).
    pickles:  [bytes or number of a buffer, [number of each buffer that the pickle uses]].

Rejected: a msgpack document inside each extension (a packer for each tuple: 1 us each, and
nested copies of large data); msgpack-numpy's maps in the value (a hook for each map that is
met, and a user's own map with such a key is read as an array); one pickle for all (no value
could be sent to a worker that does not open pickles).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from msgpack import ExtType

Buffer = bytes | bytearray | memoryview

#: Arrays and tensor segments from this size (bytes) on travel out of band, without a copy.
OUT_OF_BAND: Final = 4096
#: ``bytes``, ``bytearray`` and pickles from this size (bytes) on travel out of band.
BYTES_OUT_OF_BAND: Final = 65536
#: A packed body above this size (bytes) is itself moved to a buffer, so that bodies stay small.
LARGEST_BODY: Final = 262144
#: Containers inside one another, before the whole value is pickled instead.  msgpack's C code
#: ends at 511; a form takes one more level than the value that it stands for.
DEEPEST: Final = 400
#: Segments start at a multiple of this (bytes), the largest alignment that a dtype asks for.
ALIGNMENT: Final = 16

#: Named wherever a tensor is made: ``torch.set_default_device`` changes what is meant without.
CPU: Final = torch.device("cpu")

# Atoms.
BIG_INT: Final = 1
BYTEARRAY: Final = 2
COMPLEX: Final = 3
CONSTANT: Final = 4
OBJECT: Final = 5
PICKLE: Final = 6
LARGE_BYTES: Final = 7
LARGE_BYTEARRAY: Final = 8
TABLE: Final = 9
LARGE_BODY: Final = 10
TORCH_NAME: Final = 11
DEVICE: Final = 12
NUMPY_STR: Final = 13
NUMPY_BYTES: Final = 14

# Marks.
FIRST_MARK: Final = 32
TUPLE: Final = 32
SET: Final = 33
FROZENSET: Final = 34
RANGE: Final = 35
SLICE: Final = 36
SIZE: Final = 37
ORDERED_DICT: Final = 38
REFERENCE: Final = 39
NUMPY_SCALAR: Final = 40
NUMPY_ITEM: Final = 41
NUMPY_DTYPE: Final = 42
LAST_MARK: Final = 42

MARKS: Final = {code: ExtType(code, b"") for code in range(FIRST_MARK, LAST_MARK + 1)}

#: Single objects, by the one byte that stands for them.
CONSTANTS: Final[dict[bytes, Any]] = {
    b"t": (),
    b"e": Ellipsis,
    b"n": NotImplemented,
}


@dataclass(slots=True)
class Encoded:
    """A value as it travels.

    Attributes:
        body: one msgpack document.
        buffers: what is large, in order: views of the sender's own memory where that can be
            (and that memory is kept alive by them); one-dimensional, of bytes, contiguous.
    """

    body: bytes
    buffers: list[Buffer]


class Hooks(Protocol):
    """What the codec asks of the agent for values that mean something to it."""

    def encode_reference(self, rref: Any) -> Any:
        """Return what stands for ``rref`` on the wire: tuples, lists, bytes, int, str."""

    def decode_reference(self, data: Any) -> Any:
        """Return the RRef for what ``encode_reference`` gave at the sender."""


class EncodeError(TypeError, RuntimeError):
    """A value cannot be sent.  The text says where in the message it is, its type, and why."""


class DecodeError(ValueError, RuntimeError):
    """A body that cannot be read: truncated, lying or garbage, or a pickle that fails to open."""


class PickleRefusedError(TypeError, RuntimeError):
    """A value needs a pickle, and pickles are off (``allow_pickle=False``)."""


class Unsendable(Exception):
    """Carries the value that cannot be sent up to where its path is looked for."""

    def __init__(self, value: Any, reason: str, *, refused: bool = False) -> None:
        super().__init__(reason)
        self.value = value
        self.reason = reason
        self.refused = refused


def number(value: int) -> bytes:
    """An index as the data of an atom."""
    return value.to_bytes(4, "little")


def checked_index(value: Any, items: Sequence[Any], what: str) -> int:
    """``value`` if it is an index into ``items``."""
    if type(value) is not int or not 0 <= value < len(items):
        raise DecodeError(f"The message names {what} {value!r}, and has {len(items)}.")
    return value
