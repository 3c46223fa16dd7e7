"""Which codec a tensor gets: the one that makes it smallest, of those that are worth a try."""

from __future__ import annotations

import numpy as np

from everlong.weights.manifest import Codec, TensorEntry
from everlong.weights.sparse import encode_sparse
from everlong.weights.tensors import RawTensor
from everlong.weights.whole import encode_full


def encode_tensor(
    name: str, tensor: RawTensor, old: RawTensor | None, anchor: bool, checksum: str
) -> tuple[TensorEntry, bytes]:
    """The tensor's entry, still without a place, and its payload: whole in an anchor and where `old` has another layout."""
    if old is not None and not old.same_layout(tensor):
        old = None
    num_changed = tensor.size if old is None else count_changed(old, tensor)
    if anchor or old is None:
        codec, payload = Codec.FULL, encode_full(tensor)
    elif num_changed:
        codec, payload = _smaller(old, tensor)
    else:
        codec, payload = Codec.SAME, b""
    entry = TensorEntry(
        name=name,
        dtype=tensor.dtype,
        shape=tuple(tensor.shape),
        codec=codec,
        checksum=checksum,
        num_changed=num_changed,
    )
    return entry, payload


def count_changed(old: RawTensor, new: RawTensor) -> int:
    """Values whose bits differ; 0.0 and -0.0 differ."""
    return int(np.count_nonzero(old.bits != new.bits))


def _smaller(old: RawTensor, new: RawTensor) -> tuple[Codec, bytes]:
    sparse = encode_sparse(old, new)
    # Trained weights never compress fourfold as a whole, so the second coding is only tried where it can win.
    if 4 * len(sparse) <= new.bits.nbytes:
        return Codec.SPARSE, sparse
    full = encode_full(new)
    return (Codec.SPARSE, sparse) if len(sparse) <= len(full) else (Codec.FULL, full)
