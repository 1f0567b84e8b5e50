"""What a client is told when it cannot have what it asked for, in OpenAI's shape."""

from __future__ import annotations

import re
from typing import Any

from runtime.errors import ExpertstreamError, UsageError

_FIELD = re.compile(r"([a-z_]+(?:\.\w+|\[[^\]]*\])*): ")


class ApiError(Exception):
    """An HTTP status and an error object. `param` names the field at fault, where one is.

    `retry_after`: seconds after which to try again. `close`: the connection cannot be used any more.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
        retry_after: int | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.kind = status, message, param, code, kind
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        if close:
            self.headers["Connection"] = "close"

    @property
    def body(self) -> dict[str, Any]:
        """The error as JSON."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def refused(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that cannot be honoured."""
    return ApiError(400, message, param=param, code=code)


def from_engine(error: ExpertstreamError) -> ApiError:
    """What the model, or the text around it, could not do. A message may begin with the field it is about."""
    message = str(error)
    if isinstance(error, UsageError):
        field = _FIELD.match(message)
        return refused(message, field and field[1])
    return ApiError(500, message, code=error.code, kind="server_error")
