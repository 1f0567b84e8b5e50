"""`serve`: the engine behind the OpenAI-compatible server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime.checkpoint import Checkpoint
from runtime.commands.arguments import output_file
from runtime.commands.drives import Failures
from runtime.commands.loading import Loading
from runtime.commands.terminal import Interrupts, say
from runtime.commands.tracing import Tracing
from runtime.errors import Cancelled, UsageError
from runtime.generate import Engine, Spill
from runtime.generate.spill import SUFFIX
from runtime.server.app import Settings, make_app
from runtime.server.metrics import Metrics
from runtime.server.run import bind, serve_until
from runtime.server.safety import is_loopback
from runtime.server.worker import Ended, Failed, Worker
from runtime.text.tokenizer import Tokenizer

EMBEDDED = "expertstream-embedded"


@dataclass(frozen=True)
class Serving:
    """What people may choose about the server. `model`: the name clients use; None: the directory's."""

    host: str = "127.0.0.1"
    port: int = 8000
    model: str | None = None
    api_key: str | None = None
    origins: Sequence[str] = ()
    queue: int = 8
    connections: int = 128
    heartbeat_s: float = 10.0
    body_bytes: int = 8_000_000
    log_requests: bool = False
    snapshots_dir: Path | None = None
    snapshots_disk: int = 20_000_000_000

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise UsageError(f"--port {self.port}: a port is 0 to 65535, 0 for any that is free")
        for option, value, least in (("--queue", self.queue, 0), ("--connections", self.connections, 1)):
            if value < least:
                raise UsageError(f"{option} {value}: at least {least} is needed")
        if not self.heartbeat_s > 0:
            raise UsageError(f"--heartbeat {self.heartbeat_s}: seconds, more than 0")
        if self.api_key is not None and not self.api_key.strip():
            raise UsageError("--api-key is empty: anybody could give it; leave it out for a server without a key")

    def name(self, loading: Loading) -> str:
        """What the model is called."""
        return self.model or (EMBEDDED if loading.model is None else loading.model.resolve().name or "model")


def serve(loading: Loading, serving: Serving) -> None:
    """Serve until interrupted. The socket is bound before anything is loaded; what loading raises is raised."""
    directory = serving.snapshots_dir
    if directory is not None:
        if not directory.is_dir():
            raise UsageError(f"--snapshots-dir {directory}: there is no such directory")
        output_file(directory / SUFFIX, "--snapshots-dir", loading.sources)
    disk = None if directory is None else lambda engine: Spill(directory, serving.snapshots_disk, engine, say)
    listener = bind(serving.host, serving.port)
    loopback = is_loopback(listener.getsockname()[0])
    if not loopback and serving.api_key is None:
        say(f"warning  bound to {serving.host} without --api-key: whoever reaches this machine can use the model")
    host = f"[{serving.host}]" if ":" in serving.host else serving.host
    url = f"http://{host}:{listener.getsockname()[1]}"
    metrics = Metrics()
    with listener, Interrupts() as stop, Tracing(loading) as tracing:

        def ready(checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> None:
            if tokenizer is None:
                raise UsageError("this checkpoint has no tiktoken.model, so it cannot be served: it reads no text")

        def load() -> Engine:
            say(f"listening at {url}")
            return tracing.load(stop, ready)

        def serving_now(engine: Engine) -> Callable[[Ended | Failed], None]:
            say(f"serving  {serving.name(loading)} at {url}/v1")
            failures = Failures(engine)

            def after(last: Ended | Failed) -> None:
                lost = last.error.message if isinstance(last, Failed) and last.error.status == 500 else None
                failures.tell(made_good=lost is None)
                if lost is not None:
                    say(f"failed   {lost}")

            return after

        worker = Worker(load, serving.queue, metrics, disk, serving_now)
        metrics.watch(worker)
        settings = Settings(
            serving.name(loading),
            api_key=serving.api_key,
            origins=tuple(serving.origins),
            loopback=loopback,
            heartbeat_s=serving.heartbeat_s,
            body_bytes=serving.body_bytes,
            log=say if serving.log_requests else None,
        )
        serve_until(make_app(worker, settings), listener, worker, stop.cancelled, serving.connections)
        if worker.failure is not None:
            raise worker.failure
        raise Cancelled("stopped, as asked")
