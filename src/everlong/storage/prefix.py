"""A view on the part of a store that lies below a prefix."""

from everlong.contracts.ports import ObjectStore
from everlong.storage.keys import as_folder, check_key


class PrefixStore:
    """The keys below `prefix`, named without it.

    Example: PrefixStore(store, "runs/first").put("ledger/7", data) puts the object runs/first/ledger/7.
    """

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        folder = as_folder(prefix)
        self._store, self._prefix = store, f"{folder}/" if folder else ""

    def create(self, key: str, data: bytes) -> None:
        self._store.create(self._prefix + check_key(key), data)

    def put(self, key: str, data: bytes) -> None:
        self._store.put(self._prefix + check_key(key), data)

    def get(self, key: str) -> bytes:
        return self._store.get(self._prefix + check_key(key))

    def list(self, prefix: str = "") -> list[str]:
        return [key.removeprefix(self._prefix) for key in self._store.list(self._prefix + as_folder(prefix))]

    def delete(self, key: str) -> None:
        self._store.delete(self._prefix + check_key(key))
