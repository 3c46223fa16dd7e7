"""Versions of the policy as bytes, without torch: exact deltas, manifests, who publishes and who reads.

Invariants: base plus deltas equals the full checkpoint bit for bit; checksums are verified after a delta is applied, on
what will be used; the manifest is written last, under a create-only key, so a version is there whole or not at all.
The object store is the only source of truth. Where adapters train, versions hold them alone; what is frozen below them lies
in the store once, and checksums cover both.
"""

from everlong.weights.publisher import WeightPublisher
from everlong.weights.reader import WeightReader
from everlong.weights.tensors import RawTensor, WeightSet, fingerprint

__all__ = ["RawTensor", "WeightPublisher", "WeightReader", "WeightSet", "fingerprint"]
