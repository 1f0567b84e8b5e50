"""A request's body: whole, in time, not too large, JSON that could be written again, and an object.

JSON is read more strictly than Python does: no NaN, no endless numbers, no half characters. What is refused here
names the field where there is one.
"""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

from starlette.requests import ClientDisconnect, Request

from runtime.errors import UsageError
from runtime.server.errors import ApiError, refused
from runtime.text.tokenizer import check_unicode


async def read_body(request: Request, limit_bytes: int, seconds: float) -> bytes:
    """The bytes. Raises ApiError 413 beyond the limit, 408 when they do not come in time."""
    declared = request.headers.get("content-length", "")
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            if declared.isdigit() and int(declared) > limit_bytes:
                raise _too_large(limit_bytes)
            async for part in request.stream():
                body += part
                if len(body) > limit_bytes:
                    raise _too_large(limit_bytes)
    except TimeoutError:
        raise ApiError(408, f"the body has not come within {seconds:g} s", close=True) from None
    except ClientDisconnect:
        raise ApiError(400, "the connection was closed before the end of the body", close=True) from None
    return bytes(body)


def _too_large(limit_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit_bytes:,} bytes, which this server takes", close=True)


def parse_object(body: bytes) -> dict[str, Any]:
    """The object that the body is. Raises ApiError 400."""
    try:
        value = json.loads(body.decode(), parse_constant=_no_number)
    except UnicodeDecodeError as error:
        raise refused(f"the body is not UTF-8: byte 0x{body[error.start]:02x} at offset {error.start}") from None
    except RecursionError:
        raise refused("the body is nested too deeply") from None
    except ValueError as error:
        raise refused(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise refused(f"the body is JSON, but not an object: wanted {{…}}, found {type(value).__name__}")
    try:
        _check(value, "")
    except RecursionError:
        raise refused("the body is nested too deeply") from None
    return value


def _no_number(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON number")


def _check(value: Any, path: str) -> None:
    """Raise ApiError where a text or a number could not be written as JSON again."""
    if isinstance(value, str):
        try:
            check_unicode(value, path)
        except UsageError as error:
            raise refused(str(error), path) from None
    elif isinstance(value, float) and not math.isfinite(value):
        raise refused(f"{path}: a number beyond what can be computed with", path)
    elif isinstance(value, dict):
        for key, item in value.items():
            _check(key, join(path, "?"))
            _check(item, join(path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check(item, f"{path}[{index}]")


def join(path: str, key: str) -> str:
    """The path of a key below a path."""
    return f"{path}.{key}" if path else key
