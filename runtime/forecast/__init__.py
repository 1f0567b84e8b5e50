"""How fast a model would run from given drives, before anybody buys, copies or waits for anything.

The production scheduler runs under a virtual clock, barrier by barrier, over drives that exist as numbers
(`ladder.py`), on routes that were recorded or are drawn to be like recorded ones (`routes.py`), with copies that were
found on real drives or are drawn (`supply.py`). What is not modelled is named with every result: prefetch, the
arithmetic beyond one fixed time a token, several requests at once.
"""

from runtime.forecast.ladder import Reads, Rung, RungForecast, climb, sampled
from runtime.forecast.routes import (
    Cache,
    Usage,
    Window,
    counts,
    drawn_window,
    load_routes,
    recorded_window,
    served,
)
from runtime.forecast.supply import (
    Drawn,
    Figures,
    Holding,
    Supply,
    Uplinks,
    draw,
    parse_figured,
    parse_rung,
    with_share,
)

__all__ = [
    "Cache",
    "Drawn",
    "Figures",
    "Holding",
    "Reads",
    "Rung",
    "RungForecast",
    "Supply",
    "Uplinks",
    "Usage",
    "Window",
    "climb",
    "counts",
    "draw",
    "drawn_window",
    "load_routes",
    "parse_figured",
    "parse_rung",
    "recorded_window",
    "sampled",
    "served",
    "with_share",
]
