"""Sealed values open for exactly whom they were sealed for, and their format is the one of docs/sealing.md."""

from __future__ import annotations

import itertools
import json
import re
import string
import traceback

import pytest
from conftest import REPO, command
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from reactor import sealing
from reactor.errors import Misuse, ReactorError
from reactor.sealing import KeyMissing, Keys, SealBroken, _info, generate, key_id_of, seal

PRIVATE, PUBLIC = generate()
KEYS = Keys.parse(PRIVATE)
BOUND = {"tenant_id": "acme", "integration": "instagram", "account": "ana", "purpose": "access_token"}
CANARY = "canary-IGQVJ-8d1f"

texts = st.text(st.characters(codec="utf-8"))
bounds = st.fixed_dictionaries(
    {
        "tenant_id": texts,
        "integration": texts,
        "account": texts,
        "purpose": st.sampled_from(["access_token", "refresh_token", "journal"]),
    }
)
# What a person or a program could mistake for one another: the same letters, cut elsewhere.
alike = st.fixed_dictionaries(
    {
        "tenant_id": st.text('a",\\', max_size=3),
        "integration": st.text('a",\\', max_size=3),
        "account": st.text('a",\\', max_size=3),
        "purpose": st.sampled_from(["access_token", "refresh_token", "journal"]),
    }
)


@settings(deadline=None)
@given(value=texts, bound=bounds)
def test_any_text_comes_back_from_a_producer_that_holds_only_the_public_key(value, bound):
    assert KEYS.open(seal(PUBLIC, value, **bound), **bound) == value


@pytest.mark.parametrize("value", ["", "\0", "a\0b", "é 🔑", "x" * 100_000])
def test_empty_nul_and_long_values_are_values_like_others(value):
    assert KEYS.open(KEYS.seal(value, **BOUND), **BOUND) == value


@settings(deadline=None)
@given(one=alike, other=alike)
def test_what_was_sealed_for_one_opens_for_no_other(one, other):
    assume(one != other)
    sealed = KEYS.seal("value", **one)
    assert KEYS.open(sealed, **one) == "value"  # remembered from here on

    with pytest.raises(SealBroken):
        KEYS.open(sealed, **other)


@settings(deadline=None)
@given(one=bounds | alike, other=bounds | alike)
def test_distinct_tuples_never_give_the_same_info(one, other):
    assert (_info(**one) == _info(**other)) == (one == other)


SEALED = KEYS.seal(CANARY, **BOUND)


def test_any_flipped_bit_of_the_text_does_not_open():
    for position, bit in itertools.product(range(len(SEALED)), range(7)):
        flipped = SEALED[:position] + chr(ord(SEALED[position]) ^ 1 << bit) + SEALED[position + 1 :]

        with pytest.raises((SealBroken, KeyMissing)):
            KEYS.open(flipped, **BOUND)


def test_one_text_alone_stands_for_a_sealed_value_spare_bits_included():
    assert len(SEALED.rpartition(".")[2]) % 4 == 3  # the last letter carries two bits that mean nothing

    for letter in set(string.ascii_letters + string.digits + "-_") - {SEALED[-1]}:
        with pytest.raises(SealBroken):
            KEYS.open(SEALED[:-1] + letter, **BOUND)


@pytest.mark.parametrize(
    "text",
    ["", CANARY, "hpke1.", SEALED + "=", SEALED + "\n", SEALED[:-1], SEALED.rpartition(".")[0] + ".AAAA", SEALED[:60]],
)
def test_what_is_no_whole_sealed_text_is_broken_and_not_quoted(text):
    with pytest.raises(SealBroken) as caught:
        KEYS.open(text, **BOUND)

    assert isinstance(caught.value, ReactorError)
    assert CANARY not in str(caught.value)


def test_a_value_sealed_by_others_that_is_no_utf8_is_broken_and_no_error_carries_it():
    public = X25519PublicKey.from_public_bytes(sealing._decoded(PUBLIC.partition(".")[2]))
    body = sealing._suite().encrypt(CANARY.encode() + b"\xff", public, _info(**BOUND))

    with pytest.raises(SealBroken) as caught:
        KEYS.open(f"hpke1.{KEYS.key_id}.{sealing._encoded(body)}", **BOUND)

    assert caught.value.__context__ is None


def test_a_value_of_a_key_that_is_gone_names_that_key():
    _, gone = generate()
    sealed = seal(gone, CANARY, **BOUND)

    with pytest.raises(KeyMissing) as caught:
        KEYS.open(sealed, **BOUND)

    assert caught.value.key_id == key_id_of(sealed) != KEYS.key_id
    assert isinstance(caught.value, ReactorError)


@pytest.mark.parametrize("where", ["value", "tenant_id", "integration", "account"])
def test_a_lone_surrogate_is_refused_without_quoting_anything(where):
    arguments = {"value": CANARY, **BOUND, where: CANARY + "\ud83d"}

    with pytest.raises(ValueError, match="lone surrogate") as caught:
        seal(PUBLIC, arguments.pop("value"), **arguments)

    assert caught.value.__context__ is None  # a UnicodeEncodeError would hold the text
    assert CANARY not in str(caught.value)


@pytest.mark.parametrize("where", ["tenant_id", "integration", "account"])
@pytest.mark.parametrize("wrong", [None, 7])
def test_a_missing_account_is_refused_and_not_bound_as_null(where, wrong):
    with pytest.raises(TypeError, match="are texts"):
        seal(PUBLIC, CANARY, **BOUND | {where: wrong})


def test_an_unknown_purpose_is_refused():
    with pytest.raises(Misuse, match="purpose of a seal is one of access_token, refresh_token, journal"):
        KEYS.seal(CANARY, **BOUND | {"purpose": "acess_token"})


def test_the_first_key_seals_and_all_of_them_open():
    new_private, _ = generate()
    old, both, turned = KEYS, Keys.parse(f"{PRIVATE} ,\n{new_private}"), Keys.parse(f"{new_private},{PRIVATE}")

    by_old, by_new = both.seal("value", **BOUND), turned.seal("value", **BOUND)

    assert [keys.open(by_old, **BOUND) for keys in (old, both, turned)] == ["value"] * 3
    assert [keys.open(by_new, **BOUND) for keys in (both, turned)] == ["value"] * 2
    assert [both.is_current(by_old), both.is_current(by_new)] == [True, False]
    assert [turned.is_current(by_old), turned.is_current(by_new)] == [False, True]
    assert not turned.is_current("a plain token")
    assert (both.public, both.key_id) == (PUBLIC, key_id_of(by_old))


def test_an_opened_value_is_remembered_and_the_257th_other_one_pushes_it_out(monkeypatch):
    keys = Keys.parse(PRIVATE)
    decrypted = []
    suite = sealing._suite()
    counting = type("Counting", (), {
        "encrypt": suite.encrypt,
        "decrypt": lambda _self, body, key, info: decrypted.append(body) or suite.decrypt(body, key, info),
    })  # fmt: skip
    monkeypatch.setattr("reactor.sealing._suite", counting)
    sealed = [seal(PUBLIC, str(number), **BOUND) for number in range(257)]

    for text in [sealed[0], sealed[0], *sealed[1:256], sealed[0]]:
        keys.open(text, **BOUND)
    assert len(decrypted) == 256

    keys.open(sealed[256], **BOUND)  # the oldest goes, which is now the second
    keys.open(sealed[0], **BOUND)
    assert len(decrypted) == 257
    assert keys.open(sealed[1], **BOUND) == "1"
    assert len(decrypted) == 258


def test_keys_show_their_ids_only():
    new_private, _ = generate()
    both = Keys.parse(f"{PRIVATE},{new_private}")

    assert re.fullmatch(r"Keys\([0-9a-f]{8}, [0-9a-f]{8}\)", repr(both))
    assert repr(both).startswith(f"Keys({KEYS.key_id}, ")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "key 1 of 1 is not a whole reactor-private-1"),
        (PRIVATE + ",", "key 2 of 2 is not a whole reactor-private-1"),
        (PRIVATE[:-1], "key 1 of 1 is not a whole"),
        (PRIVATE + "A", "key 1 of 1 is not a whole"),
        (PRIVATE.removeprefix("reactor-private-1."), "key 1 of 1 is not a whole"),
        (f"{PRIVATE},{PUBLIC}", "key 2 of 2 is a public key"),
        (f"{PRIVATE},{PRIVATE}", f"key 2 of 2 has the id {KEYS.key_id} of one before it"),
        (f"{PRIVATE};{PRIVATE}", "key 1 of 1 is not a whole"),
    ],
)
def test_a_wrong_token_key_is_one_clear_line_that_quotes_none_of_it(text, sentence):
    with pytest.raises(Misuse) as caught:
        Keys.parse(text)

    message = str(caught.value)
    assert message.startswith("REACTOR_TOKEN_KEY: ")
    assert sentence in message
    assert "\n" not in message
    assert PRIVATE[20:40] not in "".join(traceback.format_exception(caught.value, chain=True))


@pytest.mark.parametrize("key", [PRIVATE, PUBLIC[:-2], "", "reactor-public-1." + "A" * 43])
def test_sealing_with_what_is_no_public_key_is_refused_and_quotes_none_of_it(key):
    with pytest.raises(Misuse, match="the public key is not") as caught:
        seal(key, CANARY, **BOUND)

    assert PRIVATE[20:40] not in str(caught.value)
    assert CANARY not in str(caught.value)


def test_every_vector_of_the_docs_holds():
    page = (REPO / "docs" / "sealing.md").read_text("utf-8")
    [block] = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    said = json.loads(block)
    keys = Keys.parse(said["private"])

    assert (keys.public, keys.key_id) == (said["public"], said["key_id"])
    assert [len(vector["sealed"]) for vector in said["vectors"]] == [2, 2]
    for vector in said["vectors"]:
        bound = {name: vector[name] for name in BOUND}
        assert _info(**bound) == vector["info"].encode()
        for sealed in vector["sealed"]:
            assert keys.open(sealed, **bound) == vector["value"]


def test_keygen_prints_a_pair_that_works_and_words_apart():
    done = command("keygen")

    assert done.returncode == 0
    private, public = done.stdout.splitlines()
    keys = Keys.parse(private.removeprefix("REACTOR_TOKEN_KEY="))
    assert public == f"# public, for producers: {keys.public}"
    assert "environment of every reactor" in done.stderr
    assert private.partition("=")[2] not in done.stderr


def test_keygen_as_json_names_both_keys_and_their_id():
    done = command("keygen", "--json")

    pair = json.loads(done.stdout)
    keys = Keys.parse(pair["private"])
    assert pair == {"private": pair["private"], "public": keys.public, "key_id": keys.key_id}
    assert pair["public"] != KEYS.public
