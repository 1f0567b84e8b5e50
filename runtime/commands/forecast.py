"""`forecast`: how fast a model would run from given drives, rung by rung. What is printed is in `outlook`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from runtime.checkpoint import Checkpoint
from runtime.checkpoint.inventory import expert_inventory, trunk_inventory
from runtime.commands.drives import parse_drives
from runtime.commands.outlook import Facts, Fleet, Outlook, Settings, record, text
from runtime.commands.terminal import Interrupts, progress, say, write
from runtime.config import ModelConfig
from runtime.drives.identity import Identity, identify
from runtime.drives.real import open_drive
from runtime.drives.remembered import recall
from runtime.errors import CheckpointError, UsageError
from runtime.forecast import (
    Drawn,
    Figures,
    Holding,
    Reads,
    Rung,
    Supply,
    Uplinks,
    Usage,
    climb,
    counts,
    draw,
    drawn_window,
    load_routes,
    parse_figured,
    parse_rung,
    recorded_window,
    sampled,
    with_share,
)
from runtime.progress import Progress
from runtime.setup.shapes import shape_config
from runtime.units import is_rate, size_or_off
from runtime.weights.experts import check_budget
from runtime.weights.placement import MODEL, ExpertFiles, Holder, Shards

MAX_DRIVES = 12


@dataclass(frozen=True)
class Request:
    """What `forecast` lets people choose, as they wrote it."""

    k3: bool
    config: Path | None
    model: Path | None
    drives: Sequence[str]
    rates: Sequence[str]
    rungs: Sequence[str]
    expert_cache: str | None
    settings: Settings

    def check(self) -> None:
        """Raise UsageError for what makes no forecast."""
        self.settings.check()
        if sum((self.k3, self.config is not None, self.model is not None)) != 1:
            raise UsageError("say which model: one of --k3, --config FILE and --model DIR")
        if self.rates and self.model is None:
            raise UsageError(
                "--rate is of a directory, and without --model none is looked through: give --drive a rate"
            )


def forecast(request: Request, as_json: bool) -> None:
    """Simulate and print. Raises UsageError, CheckpointError, DoesNotFitError, StorageError, Cancelled."""
    request.check()
    with Interrupts() as stop, progress("simulating") as report:
        facts, checkpoint = _model(request)
        fleet = _fleet(request, checkpoint)
        outlook = _simulate(request, facts, fleet, stop.stoppable("simulating", report))
    for note in fleet.notes:
        say(f"note     {note}")
    write(json.dumps(record(outlook)) + "\n" if as_json else text(outlook))


def _model(request: Request) -> tuple[Facts, Checkpoint | None]:
    checkpoint = None
    if request.model is not None:
        with Checkpoint.open(request.model, experts_elsewhere=True) as checkpoint:
            config, name = checkpoint.config, str(request.model)
    elif request.config is not None:
        config, name = ModelConfig.load(request.config), str(request.config)
    else:
        config, name = ModelConfig.from_dict(shape_config("k3")), "Kimi K3"
    if not config.moe_layers:
        raise CheckpointError(f"{name} has no routed experts: there is nothing to forecast")
    expert, trunk = (sum(s.nbytes for s in specs(config).values()) for specs in (expert_inventory, trunk_inventory))
    return Facts(name, config.moe_layers, config.num_experts, config.num_experts_per_token, expert, trunk), checkpoint


def _fleet(request: Request, checkpoint: Checkpoint | None) -> Fleet:
    """The drives of the command line; with --model its directory comes first."""
    uplinks = Uplinks()
    told = {f.name: f for f, _ in (parse_figured(t, uplinks, "--rate", held=False) for t in request.rates)}
    drawn: dict[str, Figures] = {}
    holdings: dict[str, Holding] = {}
    found: dict[str, Holder] = {}
    paths: dict[str, Path] = {}
    names: list[str] = []
    if checkpoint is not None:
        names.append(MODEL)
        found[MODEL], paths[MODEL] = Shards(MODEL, checkpoint), checkpoint.path
    for given in request.drives:
        if checkpoint is None or is_rate(given.partition("=")[2].partition(",")[0]):
            figures, holding = parse_figured(given, uplinks, "--drive")
            names.append(figures.name)
            drawn[figures.name], holdings[figures.name] = figures, holding
        else:
            ((name, path),) = parse_drives([given], ()).directories
            names.append(name)
            found[name], paths[name] = ExpertFiles(name, path, checkpoint), path
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"the drive name {twice[0]!r} is taken: give every drive a name of its own")
    if stray := told.keys() - found.keys():
        raise UsageError(f"--rate names {min(stray)!r}, which is none of the directories {', '.join(found)}")
    if not 1 <= len(names) <= MAX_DRIVES:
        raise UsageError(f"{len(names)} drives were given: name from 1 to {MAX_DRIVES} with --drive")
    uplinks.check()
    real, probed, notes = _figures_of(paths, told, uplinks)
    notes += [note for holder in found.values() for note in holder.notes]
    return Fleet({name: (drawn | real)[name] for name in names}, holdings, found, uplinks.rates, probed, notes)


def _figures_of(
    paths: dict[str, Path], told: dict[str, Figures], uplinks: Uplinks
) -> tuple[dict[str, Figures], dict[str, str], list[str]]:
    """What the drives of directories can do, as told, else as a probe has found, and when; and notes.

    Drives that are one device, or share something whose rate is not known, count as no faster than one of them.
    Raises UsageError when nobody knows a drive's rate, StorageError when it cannot be read.
    """
    identities: dict[str, Identity] = {}
    modes: dict[str, str] = {}
    for name, path in paths.items():
        device = open_drive(name, path)
        modes[name] = device.mode
        device.close()
        with suppress(OSError):
            identities[name] = identify(path)
    recalled = recall(identities, modes)
    figures, probed = {}, {}
    for name in paths:
        if name in told:
            figures[name] = told[name]
        elif (known := recalled.known.get(name)) is not None:
            figures[name] = Figures(name, known.bytes_per_s, known.latency_s, known.depth)
            probed[name] = known.at
        else:
            raise UsageError(
                f"how fast the drive {name!r} reads is not known: measure it with `drives probe`, or give "
                f"--rate {name}=7.1GB/s"
            )
    for group, (names, rate) in recalled.groups.items():
        free = [name for name in names if figures[name].group is None]
        figures.update({name: replace(figures[name], group=group) for name in free})
        uplinks.rates[group] = rate or max(figures[name].rate for name in names)
    return figures, probed, recalled.notes


def _rungs(request: Request, fleet: Fleet, facts: Facts, usage: npt.NDArray[np.float64]) -> list[Rung]:
    """Those asked for; else the first drive, the first two, and so on."""
    names = list(fleet.figures)
    asked = [parse_rung(rung, names) for rung in request.rungs]
    rungs = []
    for shares in asked or [dict.fromkeys(names[: n + 1]) for n in range(len(names))]:
        for name in fleet.found:
            if shares.get(name) is not None:
                raise UsageError(f"--rung: {name!r} is a directory and holds what it holds: leave its share out")
        holdings = {n: with_share(fleet.holdings[n], share) for n, share in shares.items() if n in fleet.holdings}
        real = [fleet.found[name].here for name in shares if name in fleet.found]
        tables = draw(holdings, real, usage, request.settings.seed)
        copies = {n: Drawn(n, tables[n], facts.expert_nbytes) if n in tables else fleet.found[n] for n in shares}
        rungs.append(Rung(tuple(Supply(fleet.figures[n], copies[n]) for n in shares), fleet.uplinks))
    return rungs


def _simulate(request: Request, facts: Facts, fleet: Fleet, report: Progress) -> Outlook:
    settings = request.settings
    generator = Usage(len(facts.layers), facts.experts, facts.k, settings.seed)
    slots = _slots(request, facts)
    if settings.routes is None:
        positions, usage = None, generator.weights
        window = drawn_window(generator, settings.tokens, slots)
    else:
        routes = load_routes(settings.routes, len(facts.layers), facts.experts, facts.k)
        positions, usage = len(routes), counts(routes, facts.experts, settings.seed)
        window = recorded_window(routes, facts.experts, settings.tokens, slots)
    rungs = _rungs(request, fleet, facts, usage)
    whole = [rung for rung in rungs if rung.held.all()]
    if not whole:
        missing = np.count_nonzero(~rungs[-1].held)
        kind = UsageError if request.model is None else CheckpointError
        raise kind(
            f"{missing:,} of {usage.size:,} experts have no holder among {', '.join(rungs[-1].names)}: "
            "name a drive that has them, or one with share=rest"
        )
    passes = _passes(settings, generator)
    done, total = 0, len(whole) * (len(window.reads) * len(facts.layers) + sum(len(sampled(r)) for _, r in passes))

    def advanced() -> None:
        nonlocal done
        done += 1
        report(done, total)

    forecasts = climb(
        rungs, facts.layers, facts.expert_nbytes, window.reads, passes, fixed_s=settings.fixed_s, advanced=advanced
    )
    return Outlook(settings, facts, fleet, slots, window, positions, passes, forecasts)


def _slots(request: Request, facts: Facts) -> int:
    """Experts that a cache has room for; none without one. Raises DoesNotFitError as `run` does."""
    nbytes = size_or_off(request.expert_cache, "--expert-cache")
    if not nbytes:
        return 0
    check_budget(nbytes, facts.k, facts.k * facts.expert_nbytes)
    return nbytes // facts.expert_nbytes


def _passes(settings: Settings, generator: Usage) -> list[tuple[int, Reads]]:
    """(how often, what is read) for the chunks of the prompt: whole ones, all alike, and the rest."""
    times, rest = divmod(settings.prompt, settings.prefill_chunk)
    passes: list[tuple[int, Reads]] = [(times, generator.unions(settings.prefill_chunk, stream=1))] if times else []
    return passes + ([(1, generator.unions(rest, stream=2))] if rest else [])
