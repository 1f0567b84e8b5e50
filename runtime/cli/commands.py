"""The commands and their options, nothing done here: heavy imports wait until a command needs them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

import runtime
from runtime.cli.options import (
    Drive,
    Effort,
    EngineOptions,
    Memory,
    Model,
    SimulatedDrive,
    Stats,
    Trunk,
    path,
    with_engine,
)
from runtime.commands.arguments import parse_passes, prompt_source
from runtime.commands.terminal import write
from runtime.errors import UsageError
from runtime.units import parse_size, size_or_off

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"]},
)

drives_app = typer.Typer(help="Look at drives: what they are, what they can do.", rich_markup_mode=None)
app.add_typer(drives_app, name="drives")
trace_app = typer.Typer(help="Read what `run --trace` wrote.", rich_markup_mode=None)
app.add_typer(trace_app, name="trace")


@app.callback(invoke_without_command=True)
def _program(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Run Kimi K3, far larger than memory, from ordinary SSDs."""
    if version:
        write(f"expertstream {runtime.__version__}\n")
    elif context.invoked_subcommand is None:
        write(context.get_help() + "\n")


@app.command()
@with_engine
def run(
    *,
    model: Model = None,
    prompt: Annotated[str | None, typer.Option(help="Text to continue, or to answer with --chat.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(parser=path, help="The same from a UTF-8 file, nothing trimmed.")
    ] = None,
    prompt_ids: Annotated[str | None, typer.Option(metavar="1,2,3", help="The same as token ids.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a message.")] = False,
    system: Annotated[str | None, typer.Option(help="System message, with --chat.")] = None,
    reasoning_effort: Annotated[Effort | None, typer.Option(help="With --chat. [default: max]")] = None,
    max_new: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 256,
    engine: EngineOptions,
    timeline: Annotated[
        Path | None,
        typer.Option(
            "--timeline", metavar="FILE.svg|FILE.json", help="What was computed, read and waited for, and when."
        ),
    ] = None,
    timeline_passes: Annotated[
        str | None,
        typer.Option(
            metavar="0,3-5|all", help="Of which passes. [default: the prompt's last, and a token of median time]"
        ),
    ] = None,
    stats: Stats = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON record instead of text.")] = False,
    logits_hash: Annotated[bool, typer.Option("--logits-hash", help="SHA-256 of the logits of each token.")] = False,
) -> None:
    """Continue a prompt, or answer a message.

    The text goes to stdout, everything else to stderr.
    """
    from dataclasses import replace

    from runtime.commands.run import Request
    from runtime.commands.run import run as command

    source = prompt_source(prompt, prompt_file, prompt_ids, chat)
    if not chat and (system is not None or reasoning_effort is not None):
        option = "--system" if system is not None else "--reasoning-effort"
        raise UsageError(f"{option} is part of a message: add --chat, or leave it out")
    effort = (reasoning_effort or "max") if chat else None
    loading = engine.loading(model)
    if timeline_passes is not None:
        if timeline is None:
            raise UsageError("--timeline-passes says what --timeline shows: add it, or leave this out")
        loading = replace(loading, timeline_passes=parse_passes(timeline_passes))
    inputs = {} if prompt_file is None else {"--prompt-file": prompt_file}
    loading = replace(loading, timeline=timeline, inputs=inputs)
    command(loading, Request(source, max_new, chat, system, effort, stats, as_json, logits_hash))


@app.command()
@with_engine
def chat(
    *,
    model: Model = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    reasoning_effort: Annotated[Effort, typer.Option(help="How much to think before answering.")] = "max",
    max_new: Annotated[int, typer.Option(help="Tokens of an answer at most.")] = 2048,
    engine: EngineOptions,
    stats: Stats = False,
) -> None:
    """Talk with the model, one line a message.

    /reset forgets the conversation, /exit or ^D leaves, ^C stops an answer. From a pipe, every line is a message.
    """
    from runtime.commands.chat import chat as command

    command(engine.loading(model), system, reasoning_effort, max_new, stats)


@app.command()
def doctor(
    model: Model = None,
    drive: Drive = None,
    trunk: Trunk = "bf16",
    memory: Memory = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
) -> int:
    """Say what a run would use on this machine, and why, and what stands in its way. Nothing is loaded.

    The exit status is the one that such a run would end with.
    """
    from runtime.commands.doctor import doctor as command

    return command(model, drive or (), trunk, memory, as_json)


@app.command()
def verify(
    model: Model = None,
    drive: Drive = None,
    build: Annotated[bool, typer.Option("--build", help="Make the manifest anew: what is there is right.")] = False,
    manifest: Annotated[Path | None, typer.Option(parser=path, help="Compare with this one, and keep it.")] = None,
) -> None:
    """Read every copy of every expert and compare it with the manifest, which is made where there is none.

    Converted trunks on these drives are compared with their own checksums. Copies that are not what they should be are
    named, and the exit status is 4. Nothing is written to any drive.
    """
    from runtime.commands.drives import parse_drives
    from runtime.commands.verify import verify as command

    command(model, parse_drives(drive or (), ()), build=build, named=manifest)


@app.command()
def replicate(
    to: Annotated[
        Path, typer.Option(parser=path, metavar="DIR", help="Where the copies go: a directory on another drive.")
    ],
    budget: Annotated[str, typer.Option(metavar="SIZE|all", help="What it may hold of them, such as 500G.")],
    model: Model = None,
    source: Annotated[
        list[str] | None, typer.Option("--from", metavar="NAME=PATH", help="Read from here, too. Repeat.")
    ] = None,
    usage: Annotated[
        Path | None, typer.Option(parser=path, help="How often experts are used: layer,expert,count or routes in .npy.")
    ] = None,
    floor: Annotated[str, typer.Option(metavar="SIZE", help="What is to stay free on that drive.")] = "20G",
    allow_same_device: Annotated[bool, typer.Option("--allow-same-device", help="Although no read is faster.")] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Write anew what others have left wrong.")] = False,
) -> None:
    """Copy the hottest experts to another drive, which a run then names with --drive.

    Every copy is read back and compared before it gets its name. What is there and right is kept, nothing is removed,
    and what was stopped goes on when the same command is given again.
    """
    from runtime.commands.drives import parse_drives
    from runtime.commands.replicate import Request
    from runtime.commands.replicate import replicate as command

    nbytes = None if budget.lower() == "all" else parse_size(budget, "--budget", "or all")
    request = Request(to, nbytes, parse_size(floor, "--floor", least=0), usage, allow_same_device, replace)
    command(model, parse_drives(source or (), (), "--from"), request)


@app.command()
def convert(
    trunk: Annotated[Literal["int8"], typer.Option(help="What it becomes, which is not weight-exact.")],
    out: Annotated[
        Path, typer.Option(parser=path, metavar="DIR", help="Where it goes: a directory, on any drive but in no model.")
    ],
    model: Model = None,
) -> None:
    """Write the trunk in int8 once, so that runs with --trunk int8 and --drive NAME=DIR read half the bytes.

    What is written is read back and compared before it gets its name. One that is there already is compared. Copies of
    the file in directories on several drives are read together.
    """
    from runtime.commands.convert import convert as command

    command(model, out)


@app.command()
@with_engine
def serve(
    *,
    model: Model = None,
    host: Annotated[str, typer.Option(help="Where to listen; the default is this machine alone.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes one that is free.")] = 8000,
    model_name: Annotated[str | None, typer.Option(help="What clients call it. [default: the directory's]")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="EXPERTSTREAM_API_KEY", help="Clients must send it.", show_envvar=True)
    ] = None,
    allow_origin: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="Pages of this origin may use the server. Repeat.")
    ] = None,
    queue: Annotated[int, typer.Option(help="Requests that may wait; more are refused.")] = 8,
    connections: Annotated[int, typer.Option(help="Connections at one time.")] = 128,
    max_body: Annotated[str, typer.Option(metavar="SIZE", help="Largest request.")] = "8M",
    heartbeat: Annotated[float, typer.Option(help="Seconds after which a silent stream says a comment.")] = 10.0,
    snapshots: Annotated[
        str | None, typer.Option(metavar="SIZE|off", help="Memory for earlier conversations. [default: two of them]")
    ] = None,
    snapshots_dir: Annotated[
        Path | None,
        typer.Option(parser=path, help="Where they go that memory lets go, and at the end. [default: nowhere]"),
    ] = None,
    snapshots_disk: Annotated[str, typer.Option(metavar="SIZE", help="At most, in that directory.")] = "20G",
    log_requests: Annotated[bool, typer.Option("--log-requests", help="A line per request, without its text.")] = False,
    engine: EngineOptions,
) -> None:
    """Serve the model to OpenAI-compatible clients, until ^C.

    /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics, and a page at /.
    """
    from dataclasses import replace

    from runtime.commands.serve import Serving
    from runtime.commands.serve import serve as command

    serving = Serving(
        *(host, port, model_name, api_key, allow_origin or (), queue, connections, heartbeat),
        *(parse_size(max_body, "--max-body"), log_requests, snapshots_dir),
        parse_size(snapshots_disk, "--snapshots-disk"),
    )
    loading = engine.loading(model)
    command(replace(loading, snapshots=size_or_off(snapshots, "--snapshots")), serving)


@app.command()
def synth(
    shape: Annotated[Literal["tiny", "ladder", "slice", "k3"], typer.Option(help="Which dimensions.")],
    out: Annotated[Path, typer.Option(parser=path, help="New or empty directory.")],
    layers: Annotated[int | None, typer.Option(help="Instead of the shape's own.")] = None,
    experts: Annotated[int | None, typer.Option(help="Per layer, instead of the shape's own.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Experts per token, instead of the shape's own.")] = None,
    vocab: Annotated[int | None, typer.Option(help="Instead of the shape's own.")] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same bytes.")] = 0,
) -> None:
    """Write a synthetic checkpoint with random weights in the released format.

    tiny is for tests; ladder has released experts over a small trunk (2.5 GB); slice has the released dimensions
    in 3 layers (36 GB); k3 has all of them (1.56 TB).
    """
    from runtime.commands.synth import synth as command

    command(shape, out, layers=layers, experts=experts, top_k=top_k, vocab=vocab, seed=seed)


@drives_app.command("map")
def drives_map(
    model: Annotated[
        Path | None, typer.Option(parser=path, help="Checkpoint directory, to hold the drives against.")
    ] = None,
    drive: Drive = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Show each drive: what it is, how it is connected and read, what it holds, and which names are one device.

    With nothing named, it is every drive that is mounted.
    """
    from runtime.commands.drives import parse_drives
    from runtime.commands.map import map_drives

    map_drives(model, parse_drives(drive or (), ()), as_json)


@drives_app.command("probe")
def drives_probe(
    model: Model = None,
    drive: Drive = None,
    simulate_drive: SimulatedDrive = None,
    depths: Annotated[str, typer.Option(metavar="N,N", help="Reads in flight to try.")] = "1,2,4,8",
    rounds: Annotated[int, typer.Option(help="How often all is measured; the median counts.")] = 3,
    amount: Annotated[str, typer.Option(metavar="SIZE", help="A measurement reads no more.")] = "512Mi",
    seconds: Annotated[float, typer.Option(help="A measurement takes no longer.")] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Measure what each drive can do, alone and all together, past every cache.

    Reads large files in the model's directory and the drives', whatever they hold; never writes there. What is
    found is remembered, and later runs begin with it.
    """
    from runtime.commands.drives import parse_drives
    from runtime.commands.probe import Amount, parse_depths, probe_drives

    how_much = Amount(parse_depths(depths), rounds, parse_size(amount, "--amount"), seconds)
    probe_drives(model, parse_drives(drive or (), simulate_drive or ()), how_much, as_json)


@app.command()
def forecast(
    k3: Annotated[bool, typer.Option("--k3", help="Kimi K3's dimensions.")] = False,
    config: Annotated[Path | None, typer.Option(parser=path, help="The dimensions in this config.json.")] = None,
    model: Annotated[
        Path | None, typer.Option(parser=path, help="Checkpoint directory, looked through; it is the drive model.")
    ] = None,
    drive: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=RATE[,…]|PATH",
            help="A drive in figures, 7.1GB/s[,latency=0.2ms][,depth=4][,group=hub:7.1GB/s][,share=0.9|rest][,holds=N],"
            " or, with --model, a directory with experts. Repeat.",
        ),
    ] = None,
    rate: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=RATE[,…]", help="What the drive of a directory can do. Repeat."),
    ] = None,
    rung: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:SHARE],…", help="Drives that read together. Repeat. [default: the first, the first two, …]"
        ),
    ] = None,
    routes: Annotated[
        Path | None,
        typer.Option(
            parser=path, metavar="FILE.npy", help="Recorded routes. [default: drawn to be like recorded ones]"
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to simulate.")] = 8,
    fixed_s: Annotated[float, typer.Option(help="Seconds a token beside the reads.")] = 0.0,
    expert_cache: Annotated[
        str | None, typer.Option(metavar="SIZE|off", help="Experts kept between tokens. [default: off]")
    ] = None,
    prompt: Annotated[int, typer.Option(metavar="N", help="Tokens before the first one; 0 for no first token.")] = 512,
    prefill_chunk: Annotated[int, typer.Option(help="Prompt tokens computed together.")] = 512,
    seed: Annotated[int, typer.Option(help="Same seed, same forecast.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON record instead of tables.")] = False,
) -> None:
    """Tell how fast a model would run from given drives, reading nothing.

    The scheduler that runs real drives is run over these, on a clock that exists only as a number.
    """
    from runtime.commands.forecast import Request
    from runtime.commands.forecast import forecast as command
    from runtime.commands.outlook import Settings

    settings = Settings(routes, tokens, fixed_s, prompt, prefill_chunk, seed)
    command(Request(k3, config, model, drive or (), rate or (), rung or (), expert_cache, settings), as_json)


@drives_app.command("monitor")
def drives_monitor(
    model: Annotated[
        Path | None, typer.Option(parser=path, help="Checkpoint directory; it is the drive model.")
    ] = None,
    drive: Drive = None,
    interval: Annotated[str, typer.Option(metavar="TIME", help="Between two samples, 1ms to 1s.")] = "10ms",
    seconds: Annotated[float | None, typer.Option(help="Watch for so long. [default: until ^C]")] = None,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Keep every sample.")] = None,
    pid: Annotated[int | None, typer.Option(help="Watch this process, too, and only as long as it is there.")] = None,
) -> None:
    """Watch the disks below the drives: bytes, reads, latency, what is in flight, and what is written, by anybody.

    With nothing named, it is every disk. ^C ends it with a summary.
    """
    from runtime.commands.drives import parse_drives
    from runtime.commands.monitor import monitor

    layout = parse_drives(drive or (), ())
    monitor(model, layout, interval=interval, seconds=seconds, csv_file=csv, pid=pid)


@trace_app.command("report")
def trace_report(
    file: Annotated[Path, typer.Argument(help="What `run --trace` or `chat --trace` wrote.")],
    layer: Annotated[int | None, typer.Option(help="Only what was read for this layer.")] = None,
    top: Annotated[int, typer.Option(help="Layers, barriers and panels shown.")] = 10,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the worst barriers.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Which drive landed last, how far behind the next, what waits were made of, what guesses were worth."""
    from runtime.commands.trace import trace_report as command

    command(file, as_json=as_json, layer=layer, top=top, svg=svg)
