"""The report of a ladder that people can send: what the harness knows is filled in, what it cannot know is asked."""

from __future__ import annotations

from typing import Any

Record = dict[str, Any]

FORM = """# A drive ladder

{kind}.

## Please fill in

- How each drive is connected (slot, enclosure, hub, cable):
- What else ran meanwhile, and whether drives were hot:
- Anything odd:

## Filled in by the harness

| | |
|---|---|
| machine | {processor}, {processors} processors, {memory:.0f} GB, {platform} |
| model | fingerprint `{fingerprint}`: {layers} layers, {experts} experts of {expert_bytes:,} bytes |
| source | commit `{commit}`{dirty}, {started} |
| libraries | {libraries} |
| void arms | {voids} |

| drive | disk | model and serial number | file system | reads | probed | limit |
|---|---|---|---|---|--:|--:|
{drives}

```text
{text}```

Attach `4drive.json`, which has every arm with its command, settings and events, and `4drive-traces/`.
"""


def ladder_report(record: Record, text: str) -> str:
    """Markdown. text: the ladder's table."""
    machine, source, model = record["machine"], record["source"], record["model"]
    libraries = {name: version for name, version in record["versions"].items() if version}
    return FORM.format(
        kind=record["kind"],
        processor=machine["processor"],
        processors=machine["processors"],
        memory=machine["memory_bytes"] / 1e9,
        platform=machine["platform"],
        fingerprint=model["fingerprint"][:16],
        layers=model["layers"],
        experts=model["experts"],
        expert_bytes=model["expert_bytes"],
        commit=(source["commit"] or "unknown")[:12],
        dirty=", with changes" if source["dirty"] else "",
        started=record["started"],
        libraries=", ".join(f"{name} {version}" for name, version in libraries.items()),
        voids=sum(bool(arm["void"]) for arm in record["arms"]),
        drives="\n".join(_drive(name, facts) for name, facts in record["drives"].items()),
        text=text,
    )


def _drive(name: str, facts: Record) -> str:
    probe = facts["probe"]
    rates = [probe.get("bytes_per_s"), facts["limit_bytes_per_s"]]
    cells = [
        name,
        ", ".join(facts["disks"]) or "unknown",
        f"{facts['model']}, {facts['serial']}",
        facts["filesystem"],
        str(probe.get("mode", "–")),
        *("–" if rate is None else f"{rate / 1e6:.0f} MB/s" for rate in rates),
    ]
    return "| " + " | ".join(cells) + " |"
