"""The object store behind one port: memory, a folder, S3, GCS or Azure. The only importer of obstore.

Invariants: an object appears whole or not at all, also through a kill -9 of its writer; of two creators of a key exactly
one wins. Whoever commits does it with a create-only key and compares after `AlreadyExists`.
"""

from everlong.storage.store import ObstoreStore, open_store

__all__ = ["ObstoreStore", "open_store"]
