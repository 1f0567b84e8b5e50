"""From token ids to token ids: a loaded model, and sessions that prefill a prompt and decode.

A session's tokens depend on its prompt alone. It can be stopped at any time; what it had computed up to the last
whole pass stays, so a prompt that extends it costs only the new part.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from runtime.checkpoint import Checkpoint
from runtime.config import ModelConfig
from runtime.drives.trace import TraceLog
from runtime.drives.waits import NOTHING, Waited
from runtime.errors import CheckpointError, UsageError
from runtime.generate.plan import MemoryPlan, Supply, Wanted, element_size, make_plan
from runtime.generate.sampling import Choose, Logits, greedy
from runtime.generate.snapshots import Snapshot
from runtime.model.k3 import K3
from runtime.model.state import State, state_nbytes
from runtime.model.timeline import TimedK3, Timeline
from runtime.ops import Ops, make_ops
from runtime.progress import Progress
from runtime.text.tokenizer import Tokenizer
from runtime.weights.checks import ReadChecks, VerifyReads
from runtime.weights.experts import ExpertStore
from runtime.weights.heat import Heat
from runtime.weights.layout import PLAIN_BYTES, Drives, Layout, open_drives
from runtime.weights.prefetch import Prefetch
from runtime.weights.reads import PlainReads, Reads
from runtime.weights.trunk import Precision, Trunk

GUESSED_LAYERS = 4
"""As many experts as so many layers' top-k may be guessed at once."""


Announce = Callable[[Checkpoint, MemoryPlan, "Drives | None", ReadChecks], None]
"""Told what is about to be loaded, and how."""


@dataclass(frozen=True)
class Step:
    """One generated token. `seconds` is the pass that chose it; counts are of that pass alone, and so is what part of
    the time it waited for reads."""

    token_id: int
    logits_sha256: str | None
    seconds: float
    expert_hits: int
    expert_misses: int
    bytes_read: int
    finish_reason: str | None
    waited: Waited = NOTHING


@dataclass
class PrefillStats:
    """What the prompt took. `distinct_experts` counts an expert once per layer and chunk that routed to it."""

    rows: int = 0
    layer_passes: int = 0
    expert_reads: int = 0
    distinct_experts: int = 0
    seconds: float = 0.0


def default_backend() -> str:
    """`mlx` where it has a GPU, else `cpu`."""
    try:
        import mlx.core as mx
    except ImportError:
        return "cpu"
    return "mlx" if mx.default_device().type == mx.gpu else "cpu"


def default_threads() -> int:
    """The processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def logits_digest(logits: npt.NDArray[np.floating]) -> str:
    """SHA-256 of the V logits as little-endian float32, or float64 where the backend computes in it."""
    return hashlib.sha256(logits.astype(logits.dtype.newbyteorder("<"), copy=False).tobytes()).hexdigest()


def resolve_context(config: ModelConfig, context: int | None) -> int:
    """The tokens a session may have: as asked for, else 8192 or the model's limit. Raises UsageError past it."""
    limit = config.max_position_embeddings
    if context is None:
        return min(8192, limit)
    if not 1 <= context <= limit:
        raise UsageError(f"a context of {context:,} tokens was asked for; this model's is 1 to {limit:,}")
    return context


def check_request(prompt: Sequence[int], max_new: int, config: ModelConfig, context: int) -> None:
    """Raise UsageError for a prompt or a number of new tokens that cannot be honoured."""
    if max_new < 1:
        raise UsageError(f"at least one new token must be asked for, not {max_new}: give --max-new 1 or more")
    if not prompt:
        raise UsageError("the prompt is empty: at least one token is needed to continue from")
    for position, token in enumerate(prompt):
        if not 0 <= token < config.vocab_size:
            raise UsageError(
                f"token id {token} at position {position} is outside the vocabulary 0..{config.vocab_size - 1}"
            )
    if len(prompt) > context:
        longest = config.max_position_embeddings
        advice = f"raise --context, up to {longest:,}" if len(prompt) <= longest else f"this model takes {longest:,}"
        raise UsageError(f"the prompt has {len(prompt):,} tokens, the context holds {context:,}: {advice}")


def chunks(start: int, stop: int, size: int, ends: Collection[int] = ()) -> Iterator[tuple[int, int]]:
    """(start, stop) of each pass over a prompt: at most `size` tokens, none across one of `ends`."""
    while start < stop:
        end = min([start + size, stop, *(end for end in ends if end > start)])
        yield start, end
        start = end


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer | None:
    """The checkpoint's tokenizer, None when it has none. Raises CheckpointError when it is another model's."""
    if not os.path.lexists(checkpoint.path / "tiktoken.model"):
        return None
    tokenizer, config = Tokenizer.load(checkpoint.path), checkpoint.config
    if tokenizer.n_vocab > config.vocab_size:
        raise CheckpointError(
            f"{checkpoint.path}: tiktoken.model and its special tokens make {tokenizer.n_vocab:,} ids, config.json "
            f"says vocab_size {config.vocab_size:,}: one of the two files is another model's"
        )
    if tokenizer.end_of_msg_id not in config.eos_token_id:
        raise CheckpointError(
            f"{checkpoint.path}: the tokenizer's <|end_of_msg|> is id {tokenizer.end_of_msg_id}, config.json says "
            f"eos_token_id {', '.join(map(str, config.eos_token_id))}: one of the two files is another model's"
        )
    return tokenizer


def _why_not(checkpoint: Checkpoint, drives: Drives | None, reuse: bool, prefetch: bool | None) -> str:
    """Why no expert is read on a guess, or ""."""
    if prefetch is False:
        return "as asked"
    if drives is None:
        return "experts are read plainly"
    if not reuse:
        return "there is no expert cache"
    if prefetch is None and checkpoint.expert_nbytes < PLAIN_BYTES:
        return "experts are small"
    return ""


@dataclass
class Engine:
    """A checkpoint, loaded: serves any number of sessions, one after the other."""

    checkpoint: Checkpoint
    ops: Ops
    model: K3
    experts: ExpertStore
    tokenizer: Tokenizer | None
    plan: MemoryPlan
    context: int
    chunk: int
    load_seconds: float
    checks: ReadChecks
    drives: Drives | None = None
    """None when experts are read plainly from the model directory."""
    prefetch: str = "off"
    """`on`, or `off` with the reason."""

    @classmethod
    def load(
        cls,
        path: Path | str,
        *,
        backend: str | None = None,
        threads: int | None = None,
        trunk: Precision = "bf16",
        context: int | None = None,
        chunk: int | None = None,
        memory: int | None = None,
        expert_cache: int | None = None,
        reuse: bool = True,
        snapshots: int | None = 0,
        layout: Layout | None = None,
        trace: TraceLog | None = None,
        timeline: Timeline | None = None,
        verify_reads: VerifyReads = "first",
        prefetch: bool | None = None,
        prompt: Callable[[Checkpoint, Tokenizer | None], int | None] | None = None,
        announce: Announce | None = None,
        progress: Progress | None = None,
    ) -> Engine:
        """Open the checkpoint at `path`, ask `prompt`, plan the memory, tell `announce`, then compile, read the trunk.

        `prompt` says how many tokens the only prompt has, None when there will be others, and refuses in time what can
        be refused from the checkpoint's head alone. chunk: prompt tokens computed together; None: as many as the
        memory allows.
        `trunk`: "int8" is not weight-exact. `context` bounds a session's tokens. `memory`, `expert_cache` and
        `snapshots`, what is set aside for those, are bytes (None: the default); `reuse` off keeps no expert between
        tokens. `layout`: where experts are, beside the model directory; `verify_reads`: which reads of them are
        compared with the manifest; `trace`: what notes every read; `timeline`: what notes what is computed when.
        `prefetch`: whether experts are read on a guess; None: where they are large, which is where it can pay.
        Raises CheckpointError, DoesNotFitError, StorageError, UsageError.
        """
        started = time.perf_counter()
        if chunk is not None and chunk < 1:
            raise UsageError(f"a prefill chunk has at least one token, not {chunk}: give --prefill-chunk 1 or more")
        layout = layout or Layout()
        checkpoint = Checkpoint.open(path, experts_elsewhere=bool(layout.directories))
        drives = ops = None
        try:
            context = resolve_context(checkpoint.config, context)
            backend = backend or default_backend()
            tokenizer = load_tokenizer(checkpoint)
            tokens = None if prompt is None else prompt(checkpoint, tokenizer)
            drives = open_drives(checkpoint, layout, trace, trunk)
            checks = ReadChecks.open(checkpoint, verify_reads, layout.paths(checkpoint.path))
            unguided = _why_not(checkpoint, drives, reuse, prefetch)
            guesses = 0 if unguided else checkpoint.config.num_experts_per_token * GUESSED_LAYERS
            threads = default_threads() if threads is None else threads
            wanted = Wanted(backend, threads, context, tokens, chunk, memory, expert_cache, trunk, reuse, snapshots)
            reading = checks.nbytes + (0 if timeline is None else timeline.nbytes)
            supply = Supply(reading=reading)
            if drives is not None:
                reading += drives.extra_bytes
                converted = drives.converted is not None
                supply = Supply(drives.unit_bytes, reading, True, drives.alignment, drives.hedges, converted)
            plan = make_plan(checkpoint, wanted, supply)
            if announce is not None:
                announce(checkpoint, plan, drives, checks)
            ops = make_ops(backend, threads)
            if drives is None:
                reads: Reads = PlainReads(checkpoint, checks)
            else:
                verify = checks if checks.active else None
                reads = drives.start(plan["expert_cache"], verify, guesses, plan.trunk.buffer_bytes, ops.memory)
            experts = ExpertStore(checkpoint, ops, plan["expert_cache"], reuse, reads, Heat.load(checkpoint))
            if guesses and not experts.guess_limit:
                unguided = "the expert cache holds one layer's experts and no more"
            division = plan.trunk
            weights = Trunk(
                checkpoint,
                ops,
                trunk,
                progress,
                None if drives is None else drives.trunk_reads(verify_reads),
                division.streamed,
                division.room_bytes,
                division.block_bytes,
            )
        except BaseException:
            if drives is not None:
                drives.close()
            if ops is not None:
                ops.close()
            checkpoint.close()
            raise
        prefetcher = None if unguided else Prefetch(checkpoint.config, experts)
        if timeline is None:
            model = K3(checkpoint.config, ops, weights, experts, prefetcher)
        else:
            model = TimedK3(checkpoint.config, ops, weights, experts, prefetcher, timeline)
            experts.waits.hear = timeline.waited
        seconds = time.perf_counter() - started
        told = f"off: {unguided}" if unguided else "on"
        return cls(checkpoint, ops, model, experts, tokenizer, plan, context, plan.chunk, seconds, checks, drives, told)

    def close(self) -> None:
        """Keep what was learned of the experts, close drives, backend and files. Generating afterwards is an error."""
        if self.experts.heat is not None:
            self.experts.heat.save()
        if self.drives is not None:
            self.drives.close()
        self.ops.close()
        self.checkpoint.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def config(self) -> ModelConfig:
        """The checkpoint's config."""
        return self.checkpoint.config

    def session(self) -> Session:
        """A new conversation, empty."""
        return Session(self)

    def resume(self, snapshot: Snapshot) -> Session:
        """A session that goes on from there; the snapshot stays as it is."""
        return Session(self, list(snapshot.ids), _state=snapshot.state.copy(), _logits=snapshot.logits)

    def snapshot_nbytes(self, tokens: int) -> int:
        """Bytes of a snapshot after so many tokens."""
        element = element_size(self.ops.name)
        return state_nbytes(self.config, tokens, element) + element * self.config.vocab_size


@dataclass
class Session:
    """One conversation: the state of the tokens processed so far."""

    engine: Engine
    processed: list[int] = field(default_factory=list)
    prefill: PrefillStats = field(default_factory=PrefillStats)
    _state: State | None = None
    _logits: Logits | None = None
    """Those that follow what is processed, where they were computed."""

    def snapshot(self) -> Snapshot | None:
        """What is processed, to go on from later; None where that is nothing."""
        if self._state is None or not self.processed:
            return None
        nbytes = self.engine.snapshot_nbytes(len(self.processed))
        return Snapshot(tuple(self.processed), self._state.copy(), self._logits, nbytes)

    def generate(
        self,
        prompt: Sequence[int],
        max_new: int,
        *,
        choose: Choose = greedy,
        logits_hash: bool = False,
        stop_ids: Sequence[int] | None = None,
        cancelled: Callable[[], bool] | None = None,
        prefilled: Callable[[int, int], None] | None = None,
        passed: Callable[[int], None] | None = None,
        ends: Collection[int] = (),
    ) -> Iterator[Step]:
        """Yield up to `max_new` tokens that follow `prompt`, each as `choose` has it.

        Ends after an id of `stop_ids` (default: the config's eos), which is yielded too, or when the context is
        full. `prefilled(done, total)` hears of each prompt chunk, and a chunk ends at each of `ends`; `passed(layers)`
        hears of each layer of a pass.
        Raises UsageError for a prompt that cannot be processed, Cancelled when `cancelled()` says so.
        """
        check_request(prompt, max_new, self.engine.config, self.engine.context)
        stops = frozenset(self.engine.config.eos_token_id if stop_ids is None else stop_ids)
        room = min(max_new, self.engine.context - len(prompt) + 1)
        waits, waited = self.engine.experts.waits, self.engine.experts.waits.so_far
        started, before = time.perf_counter(), self._counts()
        logits = self._prefill(list(prompt), cancelled, prefilled, passed, ends)
        for count in range(1, room + 1):
            if np.isnan(logits[np.argmax(logits)]):  # argmax finds one if there is any
                raise CheckpointError(
                    f"after {len(self.processed)} tokens the logits are not numbers: the weights of "
                    f"{self.engine.checkpoint.path} are damaged; compare its files with the released checksums"
                )
            token = choose(logits, len(self.processed))
            digest = logits_digest(logits) if logits_hash else None
            seconds, after = time.perf_counter() - started, self._counts()
            hits, misses, nbytes = (b - a for a, b in zip(before, after, strict=True))
            reason = "stop" if token in stops else "length" if count == room else None
            yield Step(token, digest, seconds, hits, misses, nbytes, reason, waits.so_far - waited)
            if reason is not None:
                return
            waited = waits.so_far
            started, before = time.perf_counter(), self._counts()
            logits = self._advance([token], cancelled, passed)

    def _prefill(
        self,
        prompt: list[int],
        cancelled: Callable[[], bool] | None,
        prefilled: Callable[[int, int], None] | None,
        passed: Callable[[int], None] | None,
        ends: Collection[int],
    ) -> Logits:
        """Process what the state has not seen of the prompt; the logits [V] of its last token."""
        kept = len(self.processed)
        known = prompt[:kept] == self.processed and (kept < len(prompt) or self._logits is not None)
        if self._state is None or not known:
            self._state, self._logits = self.engine.model.new_state(self.engine.context), None
            self.processed = []
            kept = 0
        config, stats, started = self.engine.config, PrefillStats(), time.perf_counter()
        self.prefill = stats
        experts = self.engine.experts.stats
        wanted, reads = experts.wanted, experts.reads
        for start, stop in chunks(kept, len(prompt), self.engine.chunk, ends):
            self._advance(prompt[start:stop], cancelled, passed, head=stop == len(prompt))
            stats.rows += stop - start
            stats.layer_passes += config.num_hidden_layers
            if prefilled is not None:
                prefilled(stop, len(prompt))
        stats.expert_reads = experts.reads - reads
        stats.distinct_experts = experts.wanted - wanted
        stats.seconds = time.perf_counter() - started
        assert self._logits is not None
        return self._logits

    def _advance(
        self,
        ids: list[int],
        cancelled: Callable[[], bool] | None,
        passed: Callable[[int], None] | None,
        head: bool = True,
    ) -> Logits:
        """One pass over `ids`; the logits [V] of the last, or an empty array without `head`."""
        assert self._state is not None
        drives = self.engine.drives
        if drives is not None and drives.trace is not None:
            drives.trace.begin_pass(len(self.processed), len(ids))
        out = self.engine.model.forward(
            np.array(ids, np.int64),
            self._state,
            logits="last" if head else "none",
            tap=None if passed is None else lambda layer, _: passed(layer + 1),
            cancelled=cancelled,
        )
        self.processed.extend(ids)
        self._logits = None if out is None else self.engine.ops.numpy(out)[0]
        return np.empty(0) if self._logits is None else self._logits

    def _counts(self) -> tuple[int, int, int]:
        stats = self.engine.experts.stats
        return stats.hits, stats.misses, stats.bytes_read + self.engine.model.trunk.streamed_bytes
