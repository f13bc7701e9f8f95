"""Text is cleaned for Postgres, folded for comparing, and cut without losing a character."""

import itertools
import json
import math
import time
import unicodedata
from enum import StrEnum

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reactor.text import Chunk, chunk, clean, clean_json, is_blank, normalise_query

ANY_TEXT = st.text(st.characters())  # lone surrogates and NUL included


@given(ANY_TEXT)
def test_cleaned_text_is_valid_utf_8_without_nul_and_cleaning_it_again_changes_nothing(text):
    cleaned = clean(text)

    assert "\0" not in cleaned
    assert cleaned.encode().decode() == cleaned
    assert clean(cleaned) == cleaned


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
def test_text_that_postgres_can_hold_is_untouched(text):
    assert clean(text) is text


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("a\0b\0", "ab"),
        ("olá\ud83d", "olá\ufffd"),
        ("\ude00\ud83d", "\ufffd\ufffd"),
        ("\ud800x\udfff\0y", "\ufffdx\ufffdy"),
        ("\ud83d\ude00 ok", "😀 ok"),
        ("", ""),
    ],
)
def test_nul_goes_lone_surrogates_are_marked_and_the_halves_of_a_pair_meet(text, cleaned):
    assert clean(text) == cleaned


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(ANY_TEXT, inner, max_size=4),
    max_leaves=15,
)


@settings(max_examples=150, deadline=None)
@given(JSON)
def test_cleaned_json_is_json_that_jsonb_accepts(value):
    written = json.dumps(clean_json(value), ensure_ascii=False, allow_nan=False)

    assert "\\u0000" not in written.replace("\\\\", "")
    written.encode()
    assert clean_json(json.loads(written)) == json.loads(written)


def test_json_is_cleaned_at_every_depth_and_the_original_stays():
    value = {
        "a\0": ["x\0", {"b": math.nan, "c": [math.inf, -math.inf, 1.5]}],
        "n": [None, True, 10**30],
        "t": ("\ud800",),
    }

    assert clean_json(value) == {
        "a": ["x", {"b": None, "c": [None, None, 1.5]}],
        "n": [None, True, 10**30],
        "t": ["\ufffd"],
    }
    assert "a\0" in value


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (object(), r"\$: object"),
        ({"a": [1, {"b": {1, 2}}]}, r"\$\.a\[1\]\.b: set"),
        ({"a": {1: "x"}}, r"\$\.a: "),
        ([b"bytes"], r"\$\[0\]: bytes"),
    ],
)
def test_what_is_not_json_is_refused_by_its_path(value, path):
    with pytest.raises(TypeError, match=path):
        clean_json(value)


def test_json_nested_beyond_reason_is_refused_in_words():
    value: list = []
    value.append(value)

    with pytest.raises(ValueError, match="deep"):
        clean_json(value)


@pytest.mark.parametrize(
    "text",
    ["", " ", "\t\r\n", "\u00a0\u3000\u2028", "\u200b\u200c\u200d\u2060", "\ufeff", "\0\x07\x1b", "\u0301\u0308", "\ufe0f",
     "\u00ad", "\u202e \u2066", "\u180e", "\u3164\u115f\u2800", " \u200b" * 500, "\u034f", "\U000e0041"],
)  # fmt: skip
def test_a_text_in_which_nobody_sees_anything_is_blank(text):
    assert is_blank(text)


@pytest.mark.parametrize(
    "text",
    ["a", " . ", "0", "😀", "❤️", "👨‍👩‍👧", "🇧🇷", "e\u0301", "\u200bx", "日", "\ufffd", " " * 500 + "é", "\u200b" * 500 + "🔥", "\U0001fae8"],
)  # fmt: skip
def test_a_text_in_which_somebody_sees_something_is_not_blank(text):
    assert not is_blank(text)


@settings(max_examples=300, deadline=None)
@given(
    ANY_TEXT | st.text(st.sampled_from("aÉ #@+é\u0301\ufdfa😀\u200d\ufe0f_-$ß İ㎯がｶﾞ"), max_size=40),
    st.sampled_from([1, 150, 700]),
)
@example("\ufdfa", 2000)
@example("x #\ufdfa" * 30, 60)
@example("㎯#", 1000)
@example("a" * 1999 + " #b", 1)
@example("é" * 1999 + "#b", 1)
@example("é" * 1999 + " #b", 1)
def test_normalising_twice_is_normalising_once(query, repeats):
    once = normalise_query(query * repeats)

    assert normalise_query(once) == once
    assert len(once) <= 2000
    assert once == " ".join(once.split())
    once.encode()
    assert "\0" not in once


def test_every_character_is_normalised_once_and_for_all():
    unstable = [code for code in range(0x30000) if (once := normalise_query(f"a{chr(code)}b")) != normalise_query(once)]

    assert unstable == []


@pytest.mark.parametrize(
    ("query", "key"),
    [
        ("Qual o MELHOR horário?", "qual o melhor horario"),
        ("  horário \t\n de\u00a0postagem ", "horario de postagem"),
        ("“Ação” — promoção…", "acao promocao"),
        ("ac\u0327a\u0303o", "acao"),
        ("ＦＵＬＬ ｗｉｄｔｈ ﬁm ①", "full width fim 1"),
        ("Straße, STRASSE", "strasse strasse"),
        ("İstanbul", "istanbul"),
        ("guarda-chuva d'água", "guarda chuva d agua"),
        ("zero\u200bwidth \ufeffmark so\u00adft", "zerowidth mark soft"),
        ("nul\0 in\x07side", "nul in side"),
        ("half \ud83d", "half \ufffd"),
        ("#Promoção @Maria, a@b.com", "#promocao @maria a@b com"),
        ("C# e C++ # @ + ##", "c# e c++"),
        ("R$ 1.000", "r$ 1 000"),
        ("Top 🔥🔥 ❤️", "top 🔥🔥 ❤"),
        ("👨‍👩‍👧 👍🏽 🇧🇷", "👨‍👩‍👧 👍🏽 🇧🇷"),
        ("?!... ---", ""),
        ("", ""),
    ],
)
def test_questions_of_equal_meaning_share_a_key(query, key):
    assert normalise_query(query) == key


@pytest.mark.parametrize(
    ("one", "other"),
    [("か", "が"), ("ดี", "ดู"), ("हिन्दी", "हन्द"), ("c", "c#"), ("maria", "@maria"), ("🔥", "❤"), ("👍🏽", "👍🏿"), ("🇧🇷", "🇵🇹"), ("$5", "€5")],
)  # fmt: skip
def test_questions_of_different_meaning_keep_their_own_keys(one, other):
    assert normalise_query(one) != normalise_query(other)


@given(ANY_TEXT)
def test_case_and_normal_form_of_a_question_do_not_matter(query):
    portuguese = "".join(c for c in query if c in "abcdefghijklmnopqrstuvwxyzáâãàçéêíóôõúü ,.!?") + "é"

    expected = normalise_query(portuguese)

    assert normalise_query(portuguese.upper()) == expected
    assert normalise_query(unicodedata.normalize("NFD", portuguese)) == expected


def test_only_the_first_2000_characters_of_a_question_count():
    assert normalise_query("é" * 100_000) == "e" * 2000
    assert normalise_query("a" * 2000 + "b") == normalise_query("a" * 2000 + "c")


PIECES = st.sampled_from(
    ["a", "word ", "Uma frase. ", "parágrafo\n\n", "\r\n", "\r", "\n\n\n", "  ", "\t", "e\u0301", "\u0301", "👨‍👩‍👧‍👦", "🇧🇷", "\u200d",
     "日本語", "สวัสดี", "x" * 40, "\u0301" * 40, " " * 40, "\n" * 40, "\0", "\ud83d", "؟ مرحبا", "\u2028", "-", "🔥" * 15]
)  # fmt: skip
TEXTS = st.one_of(
    st.lists(PIECES, max_size=60).map("".join),
    st.text(max_size=200),
    ANY_TEXT,
    st.tuples(PIECES, st.integers(1, 60)).map(lambda pair: pair[0] * pair[1]),
)
SHAPES = st.integers(1, 60).flatmap(lambda size: st.tuples(st.just(size), st.integers(0, size - 1)))


@settings(max_examples=400, deadline=None)
@given(text=TEXTS, shape=SHAPES)
def test_chunks_give_the_text_back_within_the_size(text, shape):
    size, overlap = shape

    chunks = chunk(text, size=size, overlap=overlap)

    assert "".join(c.content[c.overlap :] for c in chunks) == text
    assert all(0 < len(c.content) <= size for c in chunks)
    assert bool(chunks) == bool(text)
    assert all(c.overlap == 0 for c in chunks[:1])
    for before, after in itertools.pairwise(chunks):
        assert 0 <= after.overlap <= overlap
        assert after.overlap < len(after.content)
        assert before.content.endswith(after.content[: after.overlap])


@settings(max_examples=200, deadline=None)
@given(text=TEXTS, shape=SHAPES)
def test_a_blank_chunk_stays_only_where_no_neighbour_has_room(text, shape):
    size, overlap = shape
    chunks = chunk(text, size=size, overlap=overlap)

    for before, after in itertools.pairwise(chunks):
        if is_blank(before.content) or is_blank(after.content[after.overlap :]):
            assert len(before.content) + len(after.content) - after.overlap > size


def test_a_text_within_the_size_is_one_chunk_as_it_stands():
    text = "  olá\r\n\r\n" + "a" * 1490

    assert chunk(text) == [Chunk(text, 0)]
    assert chunk("") == []
    assert chunk(" ") == [Chunk(" ", 0)]


def test_prose_is_cut_between_sentences_and_says_the_end_of_one_chunk_again_in_the_next():
    sentence = "Publicar às nove rende mais do que publicar à noite. "

    chunks = chunk(sentence * 200)

    assert len(chunks) > 5
    assert all(c.content.startswith("Publicar") and c.content.endswith(". ") for c in chunks)
    assert all(c.overlap == 2 * len(sentence) for c in chunks[1:])


def test_what_the_splitter_loses_or_overruns_is_made_good(monkeypatch):
    class Careless:
        def __init__(self, size, *, overlap, trim):
            pass

        def chunk_indices(self, text):
            return [piece for piece in [(3, text[3:90]), (95, text[95:97])][: len(text) % 3] if piece[1]]

    monkeypatch.setattr("semantic_text_splitter.TextSplitter", Careless)
    text = "".join(map(chr, range(300, 900)))

    for size in range(10, 40):
        chunks = chunk(text, size=size, overlap=5)

        assert "".join(c.content[c.overlap :] for c in chunks) == text
        assert all(0 < len(c.content) <= size for c in chunks)


@pytest.mark.parametrize(("size", "overlap"), [(10, 10), (10, -1), (0, 0)])
def test_a_shape_that_cannot_advance_is_refused(size, overlap):
    with pytest.raises(ValueError, match="overlap"):
        chunk("text", size=size, overlap=overlap)


@pytest.mark.parametrize("stretch", ["Uma frase qualquer. ", "a", " ", "sem ponto nenhum ", "👨‍👩‍👧‍👦"])
def test_a_million_characters_are_cut_quickly_even_where_no_sentence_ends(stretch):
    text = (stretch * 1_000_000)[:1_000_000]
    began = time.perf_counter()

    chunks = chunk(text)

    assert time.perf_counter() - began < 3  # 0.01 to 0.1 s; without the window 10 s
    assert sum(len(c.content) - c.overlap for c in chunks) == len(text)


def test_members_of_a_text_enum_are_text():
    class Kind(StrEnum):
        POST = "post"

    assert json.dumps(clean_json({"kind": Kind.POST})) == '{"kind": "post"}'
