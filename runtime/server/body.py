"""A request's body: whole, in time, not too large, JSON that could be written again, and an object.

JSON is read more strictly than Python does: no NaN, no endless numbers, no half characters, no field given twice. What
is refused here names the field where there is one.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.requests import ClientDisconnect, Request

from runtime.errors import UsageError
from runtime.server.errors import ApiError, refused
from runtime.text.tokenizer import check_unicode

MAX_VALUES = 2_000_000
"""In a body: more than a prompt of a million token ids needs."""
MAX_FIELDS = 10_000
"""Of one object."""
MAX_DIGITS = 1000
"""Of one whole number: more than any field takes, and far from what takes long to read."""
NAMES = {list: "an array", str: "a text", bool: "a truth value", int: "a number", float: "a number", type(None): "null"}


class Bodies:
    """Reads bodies of at most `limit_bytes` each, within `seconds` each, of at most `total_bytes` at one time."""

    def __init__(self, limit_bytes: int, seconds: float, total_bytes: int) -> None:
        self._limit_bytes, self._seconds, self._left_bytes = limit_bytes, seconds, total_bytes

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """The bytes, which count until the block ends.

        Raises ApiError: 413 beyond the limit, 408 when they do not come in time, 503 when there are too many others.
        What of a refused body is still to come is dropped by the connection, which stays open for it: a client that is
        still sending would not see the answer before a closed one.
        """
        body = bytearray()
        try:
            await self._read(request, body)
            yield bytes(body)
        finally:
            self._left_bytes += len(body)

    async def _read(self, request: Request, body: bytearray) -> None:
        coding = request.headers.get("content-encoding", "identity")
        if coding.strip().lower() != "identity":
            message = f"Content-Encoding {coding}: this server takes bodies as they are, not compressed"
            raise ApiError(415, message)
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > self._limit_bytes:
            raise _too_large(self._limit_bytes)
        try:
            async with asyncio.timeout(self._seconds):
                async for part in request.stream():
                    body += part
                    self._left_bytes -= len(part)
                    if len(body) > self._limit_bytes:
                        raise _too_large(self._limit_bytes)
                    if self._left_bytes < 0:
                        busy = "other requests of this size are being read: try again"
                        raise ApiError(503, busy, code="busy", kind="server_error", retry_after=1)
        except TimeoutError:
            raise ApiError(408, f"the body has not come within {self._seconds:g} s", close=True) from None
        except ClientDisconnect:
            raise ApiError(400, "the connection was closed before the end of the body", close=True) from None


def _too_large(limit_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit_bytes:,} bytes, which this server takes")


def parse_object(body: bytes) -> dict[str, Any]:
    """The object that the body is. Raises ApiError 400."""
    try:
        value = json.loads(body.decode(), parse_constant=_no_number, parse_int=_whole, object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise refused(f"the body is not UTF-8: byte 0x{body[error.start]:02x} at offset {error.start}") from None
    except RecursionError:
        raise refused("the body is nested too deeply") from None
    except ValueError as error:
        raise refused(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise refused(f"the body is JSON, but not an object: wanted {{…}}, found {NAMES[type(value)]}")
    try:
        _check(value)
    except RecursionError:
        raise refused("the body is nested too deeply") from None
    return value


def _no_number(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON number")


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number has {len(digits):,} digits, more than {MAX_DIGITS:,}")
    return int(digits)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        twice = next(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        raise ValueError(f"the field {json.dumps(twice)} is given twice in one object")
    return value


def _check(body: dict[str, Any]) -> None:
    """Raise ApiError where a text or a number could not be written as JSON again, and where there is too much."""
    left = MAX_VALUES

    def look(value: Any, path: str) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise refused(f"the body has more than {MAX_VALUES:,} values")
        if isinstance(value, str):
            try:
                check_unicode(value, path)
            except UsageError as error:
                raise refused(str(error), path) from None
        elif isinstance(value, float) and not math.isfinite(value):
            raise refused(f"{path}: a number beyond what can be computed with", path)
        elif isinstance(value, dict):
            if len(value) > MAX_FIELDS:
                raise refused(f"{path or 'the body'} has more than {MAX_FIELDS:,} fields", path or None)
            for key, item in value.items():
                look(key, join(path, "?"))
                look(item, join(path, key))
        elif isinstance(value, list):
            for index, item in enumerate(value):
                look(item, f"{path}[{index}]")

    look(body, "")


def join(path: str, key: str) -> str:
    """The path of a key below a path."""
    return f"{path}.{key}" if path else key
