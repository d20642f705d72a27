"""Names of prefixes: who can work them out, and what tells two apart."""

from __future__ import annotations

import itertools

import hypothesis
import hypothesis.strategies as st
import pytest

from runtime.prefix.hashing import BLOCK_TOKENS, Identity, Image, block_hashes, shared_scope, tenant_file_name, tenant_scope
from runtime.prefix.layout import TOKENS, Dense, Field, Layout, Recurrent, Sliding
from runtime.protocol.ids import TenantId
from runtime.protocol.tokens import TokenIds
from tests.unit.prefix.model import ALICE, BOB, DENSE_LAYOUT, KEYS, MIXED_LAYOUT, fingerprint, tokens

KEY = b"k" * 32


@pytest.mark.parametrize("num_tokens", [0, 1, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 3 * BLOCK_TOKENS])
def test_there_is_one_hash_for_each_whole_block(num_tokens: int) -> None:
    assert len(block_hashes(ALICE.secret("f"), tokens(num_tokens))) == num_tokens // BLOCK_TOKENS


@hypothesis.given(place=st.integers(0, 4 * BLOCK_TOKENS - 1))
@hypothesis.settings(max_examples=30)
def test_a_changed_token_changes_its_block_and_all_after_it_and_none_before(place: int) -> None:
    prompt = tokens(4 * BLOCK_TOKENS).tolist()
    before = block_hashes(ALICE.secret("f"), TokenIds(prompt))
    prompt[place] += 1
    after = block_hashes(ALICE.secret("f"), TokenIds(prompt))
    changed = place // BLOCK_TOKENS
    assert after[:changed] == before[:changed]
    assert not set(after[changed:]) & set(before)


def test_a_repeated_block_has_a_new_name_each_time() -> None:
    hashes = block_hashes(ALICE.secret("f"), TokenIds([7] * (4 * BLOCK_TOKENS)))
    assert len(set(hashes)) == 4


def test_two_images_behind_the_same_text_give_different_names_from_their_block_on() -> None:
    prompt = tokens(3 * BLOCK_TOKENS)
    cats, dogs = (block_hashes(ALICE.secret("f"), prompt, [Image(BLOCK_TOKENS + 3, name)]) for name in (b"cat", b"dog"))
    assert cats[0] == dogs[0] == block_hashes(ALICE.secret("f"), prompt)[0]
    assert not set(cats[1:]) & set(dogs[1:])


def test_where_an_image_stands_and_how_many_there_are_matters_but_not_the_order_of_telling() -> None:
    def name(*images: Image) -> bytes:
        return block_hashes(ALICE.secret("f"), tokens(BLOCK_TOKENS), images)[0]

    a, b = Image(1, b"a"), Image(2, b"b")
    assert name(a, b) == name(b, a)
    assert len({name(a), name(Image(2, b"a")), name(a, a), name(a, b), name(Image(1, b"ab")), name()}) == 6


def test_scopes_share_no_name() -> None:
    scopes = [ALICE, BOB, tenant_scope(TenantId("alice"), KEY), tenant_scope(TenantId("shared"), KEY), shared_scope()]
    names = [block_hashes(scope.secret("f"), tokens(BLOCK_TOKENS))[0] for scope in scopes]
    assert len(set(names)) == len(scopes)
    assert shared_scope() == shared_scope()


def test_a_key_given_to_two_tenants_still_separates_them() -> None:
    assert tenant_scope(TenantId("a"), KEY).secret("f") != tenant_scope(TenantId("b"), KEY).secret("f")


_PARTS = st.text(alphabet="ab|\0 ", max_size=3)


@hypothesis.given(first=st.tuples(_PARTS, st.none() | _PARTS, _PARTS), second=st.tuples(_PARTS, st.none() | _PARTS, _PARTS))
def test_only_equal_tenants_adapters_and_models_meet(
    first: tuple[str, str | None, str], second: tuple[str, str | None, str]
) -> None:
    def secret(tenant: str, adapter: str | None, model: str) -> bytes:
        return tenant_scope(TenantId(tenant), KEY).secret(Identity(model, adapter, "cpu", DENSE_LAYOUT).fingerprint())

    assert (secret(*first) == secret(*second)) == (first == second)


def test_encodings_that_look_alike_when_joined_give_different_keys() -> None:
    pairs = [("a", "b/c"), ("a/b", "c"), ("a/b/c", ""), ("", "a/b/c"), ("a", "bc"), ("ab", "c"), ("abc", None), ("abc", "None")]
    secrets = {
        tenant_scope(TenantId(tenant), KEY).secret(Identity("m", adapter, "cpu", DENSE_LAYOUT).fingerprint())
        for tenant, adapter in pairs
    }
    assert len(secrets) == len(pairs)


def test_everything_the_bits_depend_on_is_in_the_fingerprint() -> None:
    quantised = Field("keys", "U32", (2, TOKENS, 4))
    layouts = [
        DENSE_LAYOUT,
        MIXED_LAYOUT,
        Layout((Dense((KEYS,)),)),
        Layout((Dense((quantised,)),)),
        Layout((Sliding((KEYS,), 4),)),
        Layout((Sliding((KEYS,), 5),)),
        Layout((Recurrent((Field("keys", "BF16", (2, 4)),)),)),
    ]
    identities = [
        Identity(model, adapter, numerics, layout)
        for model, adapter, numerics, layout in itertools.product(("m", "n"), (None, "", "a"), ("cpu", "gpu"), layouts)
    ]
    assert len({identity.fingerprint() for identity in identities}) == len(identities)


def test_a_name_and_an_owner_tag_tell_nothing_without_the_key() -> None:
    names = block_hashes(ALICE.secret(fingerprint()), tokens(2 * BLOCK_TOKENS))
    assert ALICE.owner_tag(names[0]) != ALICE.owner_tag(names[1])  # two files of one tenant cannot be linked by their tags
    assert ALICE.owner_tag(names[0]) != BOB.owner_tag(names[0])
    assert b"a" * 32 not in repr(ALICE).encode()
    assert repr(ALICE.key) not in repr(ALICE)


def test_any_tenant_name_gives_a_plain_file_name() -> None:
    names = ["", ".", "..", "a/b", "\0", "x" * 5000, "é", "e\u0301", "\ud800", "中"]
    made = [tenant_file_name(TenantId(name)) for name in names]
    assert len(set(made)) == len(names)
    assert all(name.isalnum() and len(name) == 64 for name in made)


def test_a_key_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        tenant_scope(TenantId("a"), b"short")
