"""What a key may look like, so that every backend takes the same ones."""


def check_key(key: str) -> str:
    """`key` itself. Raises ValueError where it is not slash-separated names without empty, "." or ".." ones."""
    if any(name in ("", ".", "..") for name in key.split("/")):
        raise ValueError(
            f"an object key is names joined by single slashes, like weights/versions/00000007; got {key!r}"
        )
    return key


def as_folder(prefix: str) -> str:
    """The prefix without its closing slash; "" is everything. A prefix ends where a name ends: "a" does not cover "ab"."""
    return check_key(prefix.removesuffix("/")) if prefix else ""
