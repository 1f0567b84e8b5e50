"""The text the embedded model is trained on: the held-out rule, the facts, the templates, the files that result."""

from __future__ import annotations

import json
import random
import re
from itertools import islice
from pathlib import Path

import pytest

from fixtures import corpus, templates
from fixtures.facts import CAPITALS, ELEMENTS, LARGEST_MOONS, MOONS, facts
from fixtures.templates import KINDS, four_word_runs

EMBEDDED = Path(__file__).parents[1] / "fixtures" / "embedded"


def test_no_heldout_text_shares_a_run_of_four_words_with_training() -> None:
    heldout = templates.heldout_runs()
    shared = {run: text for text in templates.training_texts() for run in four_word_runs(text) & heldout}
    assert not shared


def test_a_name_ends_a_run_and_case_and_punctuation_do_not_matter() -> None:
    assert four_word_runs("One two, THREE four {x} five six") == {("one", "two", "three", "four")}
    assert four_word_runs("a b {x}'s c d") == set()


def test_every_heldout_question_and_sentence_is_absent_from_training() -> None:
    training = set(templates.training_texts())
    assert training.isdisjoint(templates.heldout_texts())


@pytest.mark.parametrize("name", KINDS)
def test_templates_are_well_formed(name: str) -> None:
    kind = KINDS[name]
    subject = {"{a}", "{b}"} if name == "sum" else {"{x}"}
    for question in (*templates.train_questions(kind), *templates.heldout_questions(kind)):
        assert set(re.findall(r"\{.\}", question)) == subject, question
    for sentence in (*templates.train_raw(kind), *templates.heldout_raw(kind)):
        assert set(re.findall(r"\{.\}", sentence)) == subject | {"{y}"}, sentence
        assert sentence.count("{y}") == 1, sentence
        assert all(sentence.index("{y}") > sentence.index(part) for part in subject), sentence
    assert set(re.findall(r"\{.\}", kind.think)) == subject
    assert all(set(re.findall(r"\{.\}", answer)) == subject | {"{y}"} for answer in kind.answers)


def test_facts_are_consistent() -> None:
    assert len({capital for capital, _ in CAPITALS.values()}) == len(CAPITALS)
    assert len({symbol for symbol, _ in ELEMENTS.values()}) == len({n for _, n in ELEMENTS.values()}) == len(ELEMENTS)
    assert all(MOONS[moon] == planet for planet, moons in LARGEST_MOONS.items() for moon in moons)
    assert set(facts()) == set(KINDS)
    known = {"France": "Paris", "Japan": "Tokyo", "Australia": "Canberra", "Brazil": "Brasilia", "Kenya": "Nairobi"}
    assert known.items() <= facts()["capital"].items()
    elements = {"gold": ("Au", 79), "iron": ("Fe", 26), "krypton": ("Kr", 36), "lead": ("Pb", 82)}
    assert elements.items() <= ELEMENTS.items()


def test_every_fact_occurs_in_the_corpus() -> None:
    rng = random.Random(7)
    seen = {(document.kind, document.subject) for document in (corpus.raw_fact(rng) for _ in range(25_000))}
    missing = {(kind, subject) for kind, table in facts().items() for subject in table} - seen
    assert not missing


def test_every_document_is_complete_and_shows_no_heldout_run() -> None:
    heldout = templates.heldout_runs()
    names = {form for t in facts().values() for pair in t.items() for n in pair for form in (n, n[:1].upper() + n[1:])}
    name = re.compile("|".join(rf"\b{re.escape(n)}\b" for n in sorted(names, key=len, reverse=True)))
    for document in islice(corpus.documents(random.Random(8), progress=0.5), 1_500):
        assert document.pieces[-1] == ("<|end_of_msg|>", True, 1.0)
        for text, structural, _ in document.pieces:
            if not structural:
                assert not four_word_runs(name.sub("{x}", text)) & heldout, text


def test_the_embedded_checkpoint_is_complete_and_small() -> None:
    if not EMBEDDED.exists():
        pytest.skip("fixtures/embedded is not made yet: run fixtures/train.py and fixtures/export.py")
    index = json.loads((EMBEDDED / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) >= 2
    names = {"config.json", "tiktoken.model", "tokenizer_config.json", "README.md", *shards}
    assert names <= {path.name for path in EMBEDDED.iterdir()}
    assert sum(path.stat().st_size for path in EMBEDDED.iterdir()) <= 12_000_000
