"""The OpenAI-compatible server: requests in, one engine behind a bounded queue, answers out as they come.

`schema` says what a request may be, `tasks` what it asks of the model, `worker` runs one task after the other on a
thread of its own, `answers` turns tokens into parts of an answer there, `replies` gives those the OpenAI shape, and
`app` is the routes. docs/server.md is the reference.
"""
