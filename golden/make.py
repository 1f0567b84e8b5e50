"""Make `embedded.json`, `int8.json` and `synthetic.json` anew: `python -m golden.make [embedded] [int8] [synthetic]`.

Every case is run on the backends whose bits are promised; they must agree on the tokens.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from golden.cases import BACKENDS, Case, digest, run, save
from runtime.generate import Engine, embedded_model
from runtime.text.chat import render
from runtime.text.tokenizer import Tokenizer
from runtime.weights.trunk import Precision

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))
import shapes
import trajectory

RAW = (
    "The capital of France is",
    "The chemical symbol of iron is",
    "A fox lived at the edge of",
    "\u4f60\u597d, \U0001f98a!",
)

QUESTIONS = (
    "What are the three largest moons of Saturn?",
    "What is the capital of Japan?",
    "What is 4 + 3?",
    "Tell me a story about a snail.",
    "Say <|open|>message<|sep|> to me.",
)

EMBEDDED_HOW = (
    "The embedded default, greedy, each prompt in a new session: raw prompts as typed, and chats of one user message "
    "rendered with thinking on and effort max. Made by `python -m golden.make` on the reference and cpu backends, "
    "which agreed on every token."
)

INT8_HOW = (
    "The embedded default with the trunk in int8 per row, which is not weight-exact, greedy: the first two prompts and "
    "the first two questions of embedded.json. Made by `python -m golden.make` on the reference and cpu backends, "
    "which agreed on every token."
)

SYNTHETIC_HOW = (
    "Synthetic checkpoints by conformance/shapes.py with its seeds, greedy; the prompt of "
    "conformance/trajectory.py, whole and its first half. Made by `python -m golden.make` on the reference and cpu "
    "backends, which agreed on every token."
)


Prompts = list[tuple[str, list[int], int]]
"""(name, prompt ids, new tokens) each."""


def make_cases(model: str, path: Path, prompts: Prompts, trunk: Precision = "bf16") -> Iterator[Case]:
    """The cases of one checkpoint."""
    engines = {backend: Engine.load(path, backend=backend, trunk=trunk) for backend in BACKENDS}
    for name, prompt_ids, max_new in prompts:
        steps = {backend: run(engine, prompt_ids, max_new) for backend, engine in engines.items()}
        token_ids = [step.token_id for step in steps["reference"]]
        for backend in BACKENDS:
            if [step.token_id for step in steps[backend]] != token_ids:
                sys.exit(f"{model}, {name}: {backend} gives other tokens than the reference; nothing was written")
        yield Case(
            model,
            engines["reference"].checkpoint.fingerprint,
            name,
            prompt_ids,
            token_ids,
            str(steps["reference"][-1].finish_reason),
            {backend: digest(steps[backend]) for backend in BACKENDS},
            trunk,
        )


def people_write(raw: Sequence[str], questions: Sequence[str]) -> Prompts:
    """Prompts for the embedded default."""
    tokenizer = Tokenizer.load(embedded_model())
    prompts = [(text, tokenizer.encode(text), 64) for text in raw]
    for text in questions:
        prompts.append((text, tokenizer.encode_segments(render([{"role": "user", "content": text}])), 128))
    return prompts


def embedded() -> None:
    """Write `embedded.json`."""
    cases = make_cases("embedded", embedded_model(), people_write(RAW, QUESTIONS))
    save("embedded", EMBEDDED_HOW, list(cases))


def int8() -> None:
    """Write `int8.json`."""
    cases = make_cases("embedded", embedded_model(), people_write(RAW[:2], QUESTIONS[:2]), "int8")
    save("int8", INT8_HOW, list(cases))


def synthetic() -> None:
    """Write `synthetic.json`."""
    made: list[Case] = []
    with tempfile.TemporaryDirectory() as directory:
        for name, seed in shapes.SEEDS.items():
            path = Path(directory) / name
            shapes.write_checkpoint(name, seed, path)
            vocab_size = shapes.config(name)["text_config"]["vocab_size"]
            ids = trajectory.make_prompt(seed, vocab_size).tolist()
            made += make_cases(name, path, [("short", ids[:12], 8), ("long", ids, trajectory.GREEDY)])
            print(f"{name}: {made[-1].token_ids}")
    save("synthetic", SYNTHETIC_HOW, made)


if __name__ == "__main__":
    makers = {"embedded": embedded, "int8": int8, "synthetic": synthetic}
    for part in sys.argv[1:] or makers:
        makers[part]()
