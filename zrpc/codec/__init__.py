"""Values to bytes and back: msgpack, tensors and large memory out of band, pickles for the rest.

:func:`encode` turns a value into an :class:`Encoded`; :func:`decode` gives back an equal value of
the same type.  What both promise, and what they do not, is in their docstrings; the format is
described in ``zrpc/codec/wire.py``.

>>> import torch
>>> message = encode(("step", (torch.ones(2), 1), {"rate": 0.1}))
>>> decode(message.body, message.buffers)
('step', (tensor([1., 1.]), 1), {'rate': 0.1})
"""

from __future__ import annotations

from .decoder import decode
from .encoder import encode
from .pickling import register_reducer
from .wire import Buffer, DecodeError, Encoded, EncodeError, Hooks, PickleRefusedError

__all__ = [
    "Buffer",
    "DecodeError",
    "EncodeError",
    "Encoded",
    "Hooks",
    "PickleRefusedError",
    "decode",
    "encode",
    "register_reducer",
]
