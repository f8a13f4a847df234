"""Which bytes of the storages of a message's tensors travel, and as what.

Tensors of one storage must still share it when they arrive, and a small view must not drag a big
storage along.  So the bytes of a storage are chosen when all its views in the message are known:

* all views together span at most twice what they use: one segment;
* otherwise views that overlap one another form a cluster, and each cluster is a segment;
* a cluster of a single view that uses under half of what it spans (a column of a matrix) is
  copied together first, and arrives contiguous.

Whether two views overlap is judged by the span from first to last byte.  Two columns of one matrix
share no element and count as overlapping: telling them apart is not worth what it costs.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import torch

from .wire import ALIGNMENT, CPU, OUT_OF_BAND, Buffer

#: A dtype to copy elements as, by their size (bytes).
_INTEGERS: Final = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}


class View:
    """One tensor's claim on a storage: bytes ``start`` to ``end``, of which it uses ``used``."""

    __slots__ = ("end", "form", "start", "tensor", "used")

    def __init__(self, tensor: torch.Tensor, form: list[Any], start: int, end: int, used: int):
        self.tensor = tensor
        self.form = form
        self.start = start
        self.end = end
        self.used = used


class Storage:
    """A storage and its views in this message."""

    __slots__ = ("nbytes", "storage", "views")

    def __init__(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        self.storage = storage
        self.nbytes = nbytes
        self.views: list[View] = []


def plan(storages: list[Storage], buffers: list[Buffer]) -> list[bytes | int]:
    """Choose the segments, and write segment number and offset into each view's form.

    Args:
        storages: all storages of the message.
        buffers: receives the segments that travel out of band.

    Returns:
        the segments, for the table.
    """
    segments: list[bytes | int] = []
    for storage in storages:
        for cluster in _clusters(storage.views):
            start = min(view.start for view in cluster)
            end = max(view.end for view in cluster)
            if len(cluster) == 1 and _is_sparse(end - start, cluster[0].used):
                _add_compact(cluster[0], segments, buffers)
                continue
            start -= start % ALIGNMENT
            for view in cluster:
                form = view.form
                form[1] = len(segments)
                form[4] = (view.start - start) // view.tensor.element_size()
            segments.append(_memory(storage.storage, start, end - start, buffers))
    return segments


def _is_sparse(span: int, used: int) -> bool:
    # Below the limit the bytes go with the body whatever they are: strides are worth more.
    return span > 2 * used and span > OUT_OF_BAND


def _clusters(views: list[View]) -> list[list[View]]:
    if len(views) == 1:
        return [views]
    ordered = sorted(views, key=lambda view: view.start)
    clusters: list[list[View]] = []
    used = 0
    cluster_end = -1
    for view in ordered:
        if view.start < cluster_end:
            clusters[-1].append(view)
            # A second view of the same bytes adds nothing.
            used += max(0, view.end - cluster_end)
            cluster_end = max(cluster_end, view.end)
        else:
            clusters.append([view])
            used += min(view.used, view.end - view.start)
            cluster_end = view.end
    if _is_sparse(cluster_end - ordered[0].start, used):
        return clusters
    return [ordered]


def _add_compact(view: View, segments: list[bytes | int], buffers: list[Buffer]) -> None:
    """Copy the elements of one view together."""
    source = view.tensor.detach()
    # The bytes as they are: the form has the bits that say how to read them.
    if source.is_neg():
        source = torch._neg_view(source)
    if source.is_conj():
        source = source.conj()
    # As integers: torch copies not every dtype, and some copies change a NaN.
    integers = _INTEGERS[source.element_size()]
    tensor = torch.empty(source.shape, dtype=integers, device=CPU)
    tensor.copy_(source.view(integers))
    view.form[1] = len(segments)
    view.form[4] = 0
    view.form[5 + tensor.dim() :] = tensor.stride()
    storage = tensor.untyped_storage()
    segments.append(_memory(storage, 0, storage.nbytes(), buffers))


def _memory(
    storage: torch.UntypedStorage, start: int, length: int, buffers: list[Buffer]
) -> bytes | int:
    if length < OUT_OF_BAND:
        return ctypes.string_at(storage.data_ptr() + start, length)
    view = torch.empty(0, dtype=torch.uint8, device=CPU).set_(storage, start, (length,), (1,))
    buffers.append(view.numpy().data)
    return len(buffers) - 1
