"""The options that commands share: each is declared here, once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from runtime.units import parse_size, size_or_off

if TYPE_CHECKING:
    from runtime.commands.loading import Loading


def path(text: str) -> Path:
    """For options that name what is read, or a directory: an empty name would be this directory's."""
    if not text:
        raise typer.BadParameter("the name is empty: name a directory or a file")
    return Path(text)


Model = Annotated[
    Path | None, typer.Option(parser=path, help="Checkpoint directory. [default: the embedded small model]")
]
Effort = Literal["low", "high", "max"]
Drive = Annotated[
    list[str] | None,
    typer.Option("--drive", metavar="NAME=PATH", help="A directory with experts, or what convert made. Repeat."),
]
SimulatedDrive = Annotated[
    list[str] | None,
    typer.Option(
        "--simulate-drive",
        metavar="NAME=400MB/s[,latency=0.2ms]",
        help="The model directory behind limits, instead of itself. Repeat.",
    ),
]
Trunk = Annotated[
    Literal["bf16", "int8"],
    typer.Option(help="Weights that are no routed expert: as released, or halved, which is not weight-exact."),
]
Memory = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Total of this process, such as 24G. [default: what is free]")
]
Stats = Annotated[bool, typer.Option("--stats", help="A line per token and a table, on stderr.")]


@dataclass(frozen=True)
class EngineOptions:
    """What every command that loads a model lets people choose about the engine, as typed; see `with_engine`."""

    context: Annotated[
        int | None, typer.Option(help="Tokens of prompt and answer together. [default: at most 8192]")
    ] = None
    backend: Annotated[
        Literal["cpu", "mlx", "reference"] | None, typer.Option(help="Arithmetic. [default: mlx with a GPU, else cpu]")
    ] = None
    trunk: Trunk = "bf16"
    memory: Memory = None
    expert_cache: Annotated[
        str | None,
        typer.Option(metavar="SIZE|off", help="Experts kept between tokens. [default: what --memory leaves]"),
    ] = None
    prefill_chunk: Annotated[
        int | None, typer.Option(help="Prompt tokens computed together. [default: all, up to 8192, as memory allows]")
    ] = None
    threads: Annotated[int | None, typer.Option(help="Threads of the cpu backend. [default: all processors]")] = None
    drive: Drive = None
    simulate_drive: SimulatedDrive = None
    verify_reads: Annotated[
        Literal["off", "first", "all"],
        typer.Option("--verify-reads", help="Which reads of experts are compared with the manifest."),
    ] = "first"
    no_prefetch: Annotated[bool, typer.Option("--no-prefetch", help="Read no expert before it is routed.")] = False
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="Write down every read, for `trace report`.")
    ] = None

    def loading(self, model: Path | None) -> Loading:
        """The same, understood. Raises UsageError."""
        from runtime.commands.drives import parse_drives
        from runtime.commands.loading import Loading

        cache = size_or_off(self.expert_cache, "--expert-cache")
        return Loading(
            model=model,
            backend=self.backend,
            trunk=self.trunk,
            threads=self.threads,
            context=self.context,
            prefill_chunk=self.prefill_chunk,
            memory=None if self.memory is None else parse_size(self.memory, "--memory"),
            expert_cache=cache or None,
            reuse=cache != 0,
            layout=parse_drives(self.drive or (), self.simulate_drive or ()),
            trace=self.trace,
            verify_reads=self.verify_reads,
            prefetch=False if self.no_prefetch else None,
        )


def with_engine(command: Callable[..., None]) -> Callable[..., None]:
    """For a command with a keyword `engine: EngineOptions`: Typer sees the options themselves, where it stands."""
    own = signature(command, eval_str=True)
    types = get_type_hints(EngineOptions, include_extras=True)
    options = [
        Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=types[field.name])
        for field in fields(EngineOptions)
    ]

    @wraps(command)
    def unfolded(**given: Any) -> None:
        command(engine=EngineOptions(**{option.name: given.pop(option.name) for option in options}), **given)

    parameters = [one for each in own.parameters.values() for one in (options if each.name == "engine" else [each])]
    unfolded.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    return unfolded
