"""Why a call gets no answer, in words that every dialect puts into its own shape."""

from __future__ import annotations

from everlong.contracts.errors import EverlongError


class Refusal(EverlongError):
    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry: bool = False,
    ) -> None:
        """`status`: of HTTP. `code`: a stable name. `param`: which part of the body is wrong."""
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.headers = {"x-should-retry": "true" if retry else "false"}
        """The official clients obey it; by themselves they try again after every 429 and 5xx."""


def invalid(message: str, *, code: str | None = None, param: str | None = None) -> Refusal:
    return Refusal(400, message, code=code, param=param)
