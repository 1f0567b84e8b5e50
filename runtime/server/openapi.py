"""The server's description of itself, from the models that check its requests."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

import runtime
from runtime.server.schema import ChatRequest, CompletionRequest

ERRORS = {
    "400": "cannot be honoured: the error names the field",
    "401": "the key is missing or wrong",
    "403": "from a page or under a name that may not",
    "404": "no such model",
    "408": "the body did not come in time",
    "413": "the body is too large",
    "415": "the body is compressed",
    "429": "the queue is full",
    "500": "storage failed",
    "503": "loading, or stopping",
}


def description(model: str) -> dict[str, Any]:
    """OpenAPI 3.1, of a server with this model."""
    _, schemas = models_json_schema(
        [(ChatRequest, "validation"), (CompletionRequest, "validation")], ref_template="#/components/schemas/{model}"
    )
    for request in (schemas["$defs"]["ChatRequest"], schemas["$defs"]["CompletionRequest"]):
        request["properties"]["model"] = {"const": model}
    paths = {
        "/health": {"get": _get("How the server and its drives are", extra={"503": {"description": "loading"}})},
        "/metrics": {"get": _get("Counters, in the Prometheus text format", "text/plain")},
        "/v1/models": {"get": _get("The model")},
        "/v1/models/{model}": {
            "get": _get("The model", extra=_errors("404"))
            | {"parameters": [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]}
        },
        "/v1/chat/completions": {"post": _post("ChatRequest", "Answer a conversation")},
        "/v1/completions": {"post": _post("CompletionRequest", "Continue a prompt")},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "expertstream", "version": runtime.__version__},
        "paths": paths,
        "components": {"schemas": {**schemas["$defs"], "Error": _ERROR}},
    }


_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def _get(summary: str, media: str = "application/json", extra: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"summary": summary, "responses": {"200": {"description": "OK", "content": {media: {}}}, **(extra or {})}}


def _errors(*statuses: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {status: {"description": ERRORS[status], "content": content} for status in statuses}


def _post(model: str, summary: str) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{model}"}
    answer: dict[str, Any] = {"application/json": {}, "text/event-stream": {}}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {"200": {"description": "The answer", "content": answer}, **_errors(*ERRORS)},
    }
