"""One engine on one thread, and the requests that wait for it.

The thread loads the engine, then takes one job after the other. A job has one place in a bounded queue, leaves it as
soon as its client has gone, and can be stopped between two layers once it runs; whatever ends it, the engine is ready
for the next. What a job has to say goes to its `tell`, on this thread: `Read`, `Said` and, last and once, `Ended` or
`Failed`. Nothing here knows HTTP.

What was computed for one job serves the next one whose prompt begins with the same tokens: snapshots are kept where
an answer begins and where one ends, finished or not, and where a message ends after which two prompts parted.
"""

from __future__ import annotations

import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from runtime.errors import Cancelled, ExpertstreamError
from runtime.generate import Disk, Engine, Session, Snapshots
from runtime.server.errors import ApiError, from_engine
from runtime.server.metrics import Metrics
from runtime.server.tasks import Task
from runtime.text.channels import Event

GUESS_S = 10.0
"""How long a request takes, before one has shown it."""


@dataclass(frozen=True)
class Usage:
    """Tokens of the prompt, of those the ones that were known already, and of the answer."""

    prompt: int
    cached: int
    completion: int


@dataclass(frozen=True)
class Read:
    """So much of the prompt is read."""

    done: int
    total: int


@dataclass(frozen=True)
class Said:
    """Parts of the answer, as they came."""

    events: list[Event]


@dataclass(frozen=True)
class Ended:
    """The answer is complete."""

    reason: str
    usage: Usage


@dataclass(frozen=True)
class Failed:
    """There is no (further) answer."""

    error: ApiError


News: TypeAlias = Read | Said | Ended | Failed


@dataclass(frozen=True)
class Running:
    """How far the job is that runs: `layer` of `layers` are done of the pass under way."""

    phase: Literal["prefill", "decode"]
    prompt_tokens: int
    prompt_done: int
    cached_tokens: int
    completion_tokens: int = 0
    layer: int = 0
    layers: int = 0


@dataclass(eq=False)
class Job:
    """A task under way. `cancel` it from any thread: it leaves the queue, or stops before the next layer."""

    task: Task
    tell: Callable[[News], None]
    worker: Worker
    _gone: threading.Event = field(default_factory=threading.Event)

    @property
    def gone(self) -> bool:
        """Nobody waits for it."""
        return self._gone.is_set()

    def cancel(self) -> None:
        """Nobody waits for it any more. Without effect once it has ended."""
        self._gone.set()
        self.worker.forget(self)


class Worker:
    """`start` it, `submit` tasks, `stop` it. `failure` says why it stopped, where nobody has asked for it."""

    def __init__(
        self,
        load: Callable[[], Engine],
        queue: int,
        metrics: Metrics,
        disk: Callable[[Engine], Disk] | None = None,
        ready: Callable[[Engine], Callable[[Ended | Failed], None] | None] = lambda engine: None,
    ) -> None:
        """`load`, `disk`, where snapshots go, and `ready`, when tasks are taken, are called on the worker's thread.

        What `ready` returns is called there too, after each job with its end. `queue` jobs may wait.
        """
        self._state: Literal["loading", "ready", "stopped"] = "loading"
        self.failure: BaseException | None = None
        self.running: Running | None = None
        self.current: Job | None = None
        self.limit = queue
        self.snapshots = Snapshots(0)
        self.metrics = metrics
        self._load, self._disk, self._ready = load, disk, ready
        self._engine: Engine | None = None
        self._waiting: deque[Job] = deque()
        self._stopping = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._live, name="engine", daemon=True)
        self._typical_s = GUESS_S

    def start(self) -> None:
        """Begin to load."""
        self._thread.start()

    def stop(self, seconds: float | None = None) -> None:
        """End what runs before its next layer, refuse what waits, and wait for the thread to be done."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(seconds)

    @property
    def state(self) -> Literal["loading", "ready", "failed", "stopped"]:
        """Failed: the engine is there, but its drives can be read no more; `broken` says why."""
        return "failed" if self._state == "ready" and self.broken else self._state

    @property
    def broken(self) -> str:
        """Why nothing can be read any more, until the server is started again; "" while it can."""
        drives = None if self._engine is None else self._engine.drives
        return "" if drives is None or drives.reader is None else drives.reader.broken

    @property
    def engine(self) -> Engine:
        """The engine. Raises ApiError 503 while it is not there, or is there for nothing."""
        state = self.state
        if self._engine is None or state != "ready":
            what, code, retry = {
                "loading": ("the model is being loaded", "not_ready", 5),
                "failed": (f"{self.broken}; start the server again", "engine_failed", None),
            }.get(state, ("the server is stopping", "not_ready", None))
            raise ApiError(503, what, code=code, kind="server_error", retry_after=retry)
        return self._engine

    @property
    def waiting(self) -> int:
        """Jobs that wait."""
        return len(self._waiting)

    def submit(self, task: Task, tell: Callable[[News], None]) -> Job:
        """Have the task done. Raises ApiError 429 when the queue is full, 503 when there is no engine."""
        job = Job(task, tell, self)
        with self._changed:
            if self._stopping or self._state != "ready":
                raise ApiError(503, "the server is stopping", code="not_ready", kind="server_error")
            if len(self._waiting) >= self.limit + (self.current is None):
                self.metrics.requests.labels("refused").inc()
                raise ApiError(
                    429,
                    f"one request is being answered and {len(self._waiting)} wait, which is all this server takes",
                    code="rate_limit_exceeded",
                    kind="rate_limit_error",
                    retry_after=self._retry_after(),
                )
            self._waiting.append(job)
            self._changed.notify_all()
        return job

    def forget(self, job: Job) -> None:
        """Take the job out of the queue, if it is there."""
        with self._changed:
            if job in self._waiting:
                self._waiting.remove(job)
                self.metrics.requests.labels("cancelled").inc()

    def _retry_after(self) -> int:
        """Seconds until a place may be free: what a request took of late."""
        return max(1, min(600, math.ceil(self._typical_s)))

    # -- the engine's thread ------------------------------------------------------------------------------------

    def _live(self) -> None:
        try:
            with self._load() as engine:
                self._engine, self.snapshots = engine, self._memory(engine)
                self._state = "ready"
                after = self._ready(engine)
                while (job := self._next()) is not None:
                    last = self._do(job)
                    if after is not None:
                        after(last)
                self.snapshots.put_down()
        except BaseException as error:  # whoever runs the server raises it again
            self.failure = error
        finally:
            with self._changed:
                self._state, self._stopping = "stopped", True
                left, self._waiting = list(self._waiting), deque()
            for job in left:
                job.tell(Failed(ApiError(503, "the server is stopping", code="not_ready", kind="server_error")))

    def _memory(self, engine: Engine) -> Snapshots:
        """Within the plan. With a disk, room for one as long as the context is for those on their way there or back."""
        budget = engine.plan["snapshots"]
        if self._disk is None:
            return Snapshots(budget)
        return Snapshots(max(0, budget - engine.snapshot_nbytes(engine.context)), self._disk(engine))

    def _next(self) -> Job | None:
        with self._changed:
            self.current = None
            while not self._waiting and not self._stopping:
                self._changed.wait()
            if self._stopping:
                return None
            self.current = self._waiting.popleft()
            return self.current

    def _do(self, job: Job) -> Ended | Failed:
        """Run the job to whatever end, free its place, tell it. Nothing that happens in it ends the thread."""
        started = time.monotonic()
        outcome = "failed"
        last: Ended | Failed
        try:
            last = self._run(self.engine, job)
            outcome = "answered"
        except ApiError as error:  # the engine broke while the job waited
            last = Failed(error)
        except Cancelled:
            outcome = "cancelled"
            last = Failed(ApiError(503, "the server is stopping", code="not_ready", kind="server_error"))
        except ExpertstreamError as error:
            last = Failed(from_engine(error))
        except Exception:  # a bug: it costs this answer, and the operator is told
            traceback.print_exc()
            last = Failed(ApiError(500, "the engine failed; the server's log says how", kind="server_error"))
        finally:
            self.metrics.requests.labels(outcome).inc()
            if outcome == "answered":
                self._typical_s += (time.monotonic() - started - self._typical_s) / 4
            with self._changed:
                self.running = self.current = None
        job.tell(last)
        return last

    def _run(self, engine: Engine, job: Job) -> Ended:
        """Generate the answer and tell its parts. Raises what generating raises."""
        task, started = job.task, time.monotonic()
        known = self.snapshots.longest(task.prompt)
        session = engine.session() if known is None else engine.resume(known)
        cached, total = len(session.processed), len(task.prompt)
        assert engine.tokenizer is not None
        branch = self.snapshots.branch(task.prompt, engine.tokenizer.end_of_msg_id)
        now = Running("prefill", total, cached, cached, layers=engine.config.num_hidden_layers)
        self.running = now

        def read(done: int, total: int) -> None:
            nonlocal now
            self.running = now = replace(now, prompt_done=done)
            if done == branch:
                self._keep(engine, session)
            job.tell(Read(done, total))

        def passed(layers: int) -> None:
            self.running = replace(now, layer=layers)

        steps = session.generate(
            task.prompt,
            task.max_new,
            choose=task.choose,
            cancelled=lambda: job.gone or self._stopping,
            prefilled=read,
            passed=passed,
            ends=() if branch is None else (branch,),
        )
        count = 0
        try:
            with closing(steps):  # type: ignore[type-var]
                for count, step in enumerate(steps, 1):
                    if count == 1:
                        self.metrics.first_token.observe(time.monotonic() - started)
                        self._keep(engine, session)
                    self.running = now = replace(now, phase="decode", prompt_done=total, completion_tokens=count)
                    if events := task.answer.feed(step):
                        job.tell(Said(events))
                    if task.answer.reason is not None:
                        break
        finally:
            self._keep(engine, session)
            self.metrics.prompt_tokens.inc(max(0, min(len(session.processed), total) - cached))
            self.metrics.cached_tokens.inc(cached)
            self.metrics.completion_tokens.inc(count)
        assert task.answer.reason is not None
        return Ended(task.answer.reason, Usage(total, cached, count))

    def _keep(self, engine: Engine, session: Session) -> None:
        """Remember what is processed, where the budget allows it at all."""
        if session.processed and self.snapshots.fits(engine.snapshot_nbytes(len(session.processed))):
            snapshot = session.snapshot()
            assert snapshot is not None
            self.snapshots.keep(snapshot)
