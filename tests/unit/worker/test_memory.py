"""What a worker holds of contexts: found by ids within their scope, never over budget, the least recently used gone first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from runtime.protocol.ids import SequenceId
from runtime.protocol.tokens import TokenIds
from runtime.worker.memory import NUM_ERASED_REMEMBERED, Match, Node, PrefixMemory
from tests.unit.worker.contexts import STATE_BYTES, A, B, Z, contents, ids, part, restored

ONE, TWO = SequenceId(1), SequenceId(2)
PLENTY = 1 << 30


def keep(memory: PrefixMemory, tokens: TokenIds, *ends: int, scope: bytes = A, state: bool = False) -> list[Node]:
    """Insert the pieces up to each of `ends` as a worker would: each from where aligned nodes end."""
    nodes = []
    for end in ends:
        start = memory.covered(scope, tokens, end - 1)
        node = memory.insert(scope, tokens, part(tokens, start, end, state=state), has_checkpoint=state)
        assert node is not None
        nodes.append(node)
        memory.validate()
    return nodes


def dense(budget_bytes: int = PLENTY) -> PrefixMemory:
    return PrefixMemory(has_checkpoints=False, budget_bytes=budget_bytes)


def hybrid(budget_bytes: int = PLENTY) -> PrefixMemory:
    return PrefixMemory(has_checkpoints=True, budget_bytes=budget_bytes)


def length(memory: PrefixMemory, tokens: TokenIds, scope: bytes = A) -> int:
    match = memory.match(scope, tokens, at_most=len(tokens))
    if match is None:
        return 0
    assert restored(match) == contents(tokens, 0, match.length)
    return match.length


# -- what is found ----------------------------------------------------------------------------------------


def test_of_a_dense_model_any_length_is_found() -> None:
    memory = dense()
    tokens = ids("abc", 50)
    nodes = keep(memory, tokens, 2 * B, 3 * B, 3 * B + 50)
    assert [(node.start, node.end, node.is_aligned) for node in nodes] == [
        (0, 2 * B, True),
        (2 * B, 3 * B, True),
        (3 * B, 3 * B + 50, False),
    ]
    for asked in (1, 99, B, 2 * B, 2 * B + 1, 3 * B, 3 * B + 49, 3 * B + 50):
        match = memory.match(A, tokens, at_most=asked)
        assert match is not None
        assert match.length == asked
        assert match.path == tuple(node for node in nodes if node.start < asked)
        assert match.is_cut == (asked not in (2 * B, 3 * B, 3 * B + 50))
        assert restored(match) == contents(tokens, 0, asked)
    assert length(memory, ids("abc", 90)) == 3 * B + 50
    assert length(memory, ids("abx")) == 2 * B + 100
    assert length(memory, ids("x")) == 100
    assert length(memory, TokenIds([7])) == 0
    assert memory.match(A, tokens, at_most=0) is None
    assert memory.match(A, TokenIds(), at_most=5) is None


def test_of_a_model_with_checkpoints_only_their_places_are_found() -> None:
    memory = hybrid()
    tokens = ids("abcd", 50)
    keep(memory, tokens, B, state=True)
    keep(memory, tokens, 2 * B)
    keep(memory, tokens, 3 * B, 3 * B + 50, 4 * B, 4 * B + 50, state=True)
    assert [length(memory, tokens[:end]) for end in (B - 1, B, 2 * B, 3 * B + 49, 3 * B + 50, 4 * B - 1, 4 * B, 4 * B + 49)] == [
        *(0, B, B, 3 * B, 3 * B + 50, 3 * B + 50, 4 * B, 4 * B)
    ]
    assert length(memory, ids("abx")) == B


def test_the_longest_of_several_that_share_a_beginning_wins() -> None:
    """Also where a short piece that is continued and a long one lie side by side, in whatever order they came."""
    memory = dense()
    keep(memory, ids("ab"), 2 * B)
    keep(memory, ids("ac"), 2 * B)
    keep(memory, ids("a"), B)
    keep(memory, ids("ade", 7), 3 * B, 3 * B + 7)
    keep(memory, ids("ad", 60), 2 * B + 60)
    for context, expected in (
        (ids("ab"), 2 * B),
        (ids("ac", 9), 2 * B),
        (ids("ax"), B + 100),
        (ids("adx"), 2 * B + 100),
        (TokenIds([*ids("ab")[: B + 150], 999]), B + 150),
        (TokenIds([*ids("ac")[: B + 150], 7]), B + 150),
        (ids("ade", 9), 3 * B + 7),
        (ids("ad", 61), 2 * B + 61),
    ):
        assert length(memory, context) == expected


def test_a_node_that_need_not_be_cut_is_preferred() -> None:
    memory = dense()
    keep(memory, ids("ab"), 2 * B)
    (short,) = keep(memory, ids("a"), B)
    match = memory.match(A, ids("ax"), at_most=B)
    assert match == Match(B, (short,))


def test_nothing_crosses_scopes() -> None:
    memory = dense()
    tokens = ids("ab", 30)
    keep(memory, tokens, 2 * B, 2 * B + 30)
    assert length(memory, tokens, scope=Z) == 0
    assert memory.covered(Z, tokens, 2 * B) == 0
    assert memory.insert(Z, tokens, part(tokens, 2 * B, 2 * B + 30), has_checkpoint=True) is None
    keep(memory, tokens[:B], B, scope=Z)
    assert (length(memory, tokens), length(memory, tokens, scope=Z)) == (2 * B + 30, B)


def test_covered_is_where_whole_aligned_nodes_end() -> None:
    memory = dense()
    tokens = ids("abc", 50)
    keep(memory, tokens, 2 * B, 3 * B, 3 * B + 50)
    assert [memory.covered(A, tokens, end) for end in (0, B, 2 * B, 3 * B - 1, 3 * B, 3 * B + 50)] == [
        *(0, 0, 2 * B, 2 * B, 3 * B, 3 * B)
    ]
    assert memory.covered(A, ids("abx"), 3 * B) == 2 * B


def test_a_node_knows_its_path_and_context() -> None:
    memory = dense()
    tokens = ids("ab", 50)
    first, second, tail = keep(memory, tokens, B, 2 * B, 2 * B + 50)
    assert tail.path() == (first, second, tail)
    assert tail.context() == tokens
    assert tail.tokens == tokens[2 * B :]
    assert tail.scope == A
    assert memory.node(tail.id) is tail
    assert (memory.num_nodes, memory.num_bytes) == (3, 2 * B + 50)


# -- what goes in -----------------------------------------------------------------------------------------


def test_the_same_context_is_held_once_whatever_its_pieces() -> None:
    memory = dense()
    tokens = ids("abcd")
    (whole,) = keep(memory, tokens[: 2 * B], 2 * B)
    (half,) = keep(memory, tokens[:B], B)
    again = memory.insert(A, tokens, part(tokens, B, 2 * B), has_checkpoint=True)
    assert again is whole
    assert memory.insert(A, tokens, part(tokens, 0, B), has_checkpoint=True) is half
    assert memory.num_bytes == 3 * B
    (after,) = keep(memory, tokens, 4 * B)
    assert after.path() == (whole, after)


def test_a_node_needs_an_aligned_path_up_to_its_start() -> None:
    memory = dense()
    tokens = ids("abc", 40)
    keep(memory, tokens, B)
    keep(memory, tokens, B + 40)
    for start, end in ((2 * B, 3 * B), (B + 40, 2 * B), (50, 2 * B)):
        assert memory.insert(A, tokens, part(tokens, start, end), has_checkpoint=True) is None
    other = ids("xbc")
    assert memory.insert(A, other, part(other, B, 2 * B), has_checkpoint=True) is None
    with pytest.raises(ValueError, match=r"256 tokens for a part \[0, 512\)"):
        memory.insert(A, tokens[:B], part(tokens, 0, 2 * B), has_checkpoint=True)
    memory.validate()


def test_of_a_dense_model_a_tail_goes_when_its_path_goes_on() -> None:
    memory = dense()
    tokens = ids("ab", 60)
    keep(memory, tokens, B, B + 40)
    keep(memory, tokens, B + 70)
    assert memory.num_bytes == B + 70
    (tail,) = keep(memory, ids("a", 80), B + 80)
    keep(memory, tokens, 2 * B)
    assert memory.node(tail.id) is None
    assert memory.num_bytes == 2 * B
    (other,) = keep(memory, ids("ac"), 2 * B)
    assert length(memory, ids("ac")) == 2 * B
    assert memory.insert(A, ids("ac"), part(ids("ac"), B, B + 120), has_checkpoint=True) is other
    assert memory.num_bytes == 3 * B


def test_a_tail_that_goes_another_way_stays() -> None:
    memory = dense()
    keep(memory, ids("a"), B)
    keep(memory, TokenIds([*ids("a"), 5, 5, 5]), B + 3)
    keep(memory, ids("ab"), 2 * B)
    assert length(memory, TokenIds([*ids("a"), 5, 5, 5])) == B + 3


def test_a_pinned_tail_stays_when_its_path_goes_on() -> None:
    memory = dense()
    tokens = ids("ab")
    keep(memory, tokens, B)
    (tail,) = keep(memory, tokens, B + 40)
    assert memory.pin(ONE, tail.path()) == B + 40
    keep(memory, tokens, 2 * B)
    assert memory.node(tail.id) is tail


def test_of_a_model_with_checkpoints_a_tail_stays_for_nothing_else_can_be_restored_there() -> None:
    memory = hybrid()
    tokens = ids("abc")
    (_, boundary, _) = keep(memory, tokens, B, B + 40, 3 * B, state=True)
    assert memory.node(boundary.id) is boundary
    assert length(memory, ids("ax")) == B + 40


def test_of_a_model_with_checkpoints_a_tail_without_one_serves_nobody() -> None:
    memory = hybrid()
    tokens = ids("a", 40)
    keep(memory, tokens, B)
    assert memory.insert(A, tokens, part(tokens, B, B + 40), has_checkpoint=False) is None
    assert memory.num_nodes == 1


def test_a_node_gains_the_checkpoint_it_lacked() -> None:
    memory = hybrid()
    tokens = ids("ab")
    (node,) = keep(memory, tokens, 2 * B)
    assert (length(memory, tokens), node.has_checkpoint) == (0, False)
    keep(memory, tokens, B)
    again = memory.insert(A, tokens, part(tokens, B, 2 * B, state=True), has_checkpoint=True)
    assert again is node
    assert (length(memory, tokens), node.has_checkpoint) == (2 * B, True)
    assert node.part == part(tokens, 0, 2 * B, state=True)
    assert memory.num_bytes == 3 * B + STATE_BYTES
    memory.validate()


def test_a_checkpoint_that_does_not_fit_is_not_gained() -> None:
    memory = hybrid(2 * B + STATE_BYTES - 1)
    tokens = ids("ab")
    (node,) = keep(memory, tokens, 2 * B)
    assert memory.insert(A, tokens, part(tokens, 0, 2 * B, state=True), has_checkpoint=True) is node
    assert not node.has_checkpoint
    pinned = hybrid(4 * B + STATE_BYTES)
    (node,) = keep(pinned, tokens, 2 * B)
    assert pinned.pin(ONE, (node,)) == 2 * B
    assert pinned.insert(A, tokens, part(tokens, 0, 2 * B, state=True), has_checkpoint=True) is node
    assert not node.has_checkpoint
    pinned.validate()


# -- what must go -----------------------------------------------------------------------------------------


def test_leaves_go_least_recently_used_first_over_all_scopes() -> None:
    memory = dense(4 * B)
    keep(memory, ids("a"), B)
    keep(memory, ids("b"), B, scope=Z)
    keep(memory, ids("ac"), 2 * B)
    keep(memory, ids("d"), B)
    memory.use(tuple(memory.match(Z, ids("b"), at_most=B).path))  # type: ignore[union-attr]
    keep(memory, ids("e"), B)
    assert (length(memory, ids("ac")), length(memory, ids("b"), scope=Z)) == (B, B)
    keep(memory, ids("f"), B)
    assert length(memory, ids("a")) == 100
    assert [length(memory, ids(letter)) for letter in "def"] == [B] * 3
    keep(memory, ids("g"), B)
    assert [length(memory, ids(letter)) for letter in "defg"] == [100, B, B, B]
    assert length(memory, ids("b"), scope=Z) == B


def test_a_match_alone_is_no_use() -> None:
    memory = dense(2 * B)
    keep(memory, ids("a"), B)
    keep(memory, ids("b"), B)
    assert length(memory, ids("a")) == B
    keep(memory, ids("c"), B)
    assert length(memory, ids("a")) == 100


def test_what_does_not_fit_costs_nobody_anything() -> None:
    memory = dense(3 * B)
    tokens = ids("abcd")
    keep(memory, tokens, 2 * B)
    keep(memory, ids("x"), B)
    assert memory.insert(A, tokens, part(tokens, 2 * B, 4 * B), has_checkpoint=True) is None
    big = ids("yyyy")
    assert memory.insert(A, big, part(big, 0, 4 * B), has_checkpoint=True) is None
    assert memory.num_nodes == 2
    assert memory.insert(A, tokens, part(tokens, 2 * B, 3 * B), has_checkpoint=True) is not None
    assert length(memory, ids("x")) == 100
    memory.validate()


def test_a_budget_of_nothing_keeps_nothing() -> None:
    memory = dense(0)
    assert memory.insert(A, ids("a"), part(ids("a"), 0, B), has_checkpoint=True) is None
    assert (memory.num_nodes, memory.num_bytes) == (0, 0)


def test_a_smaller_budget_holds_at_once() -> None:
    memory = dense()
    keep(memory, ids("abc"), B, 2 * B, 3 * B)
    keep(memory, ids("d"), B)
    memory.set_budget(2 * B)
    memory.validate()
    assert (length(memory, ids("abc")), length(memory, ids("d"))) == (B, B)
    memory.set_budget(0)
    memory.validate()
    assert memory.num_nodes == 0


def test_what_is_gone_can_be_used_or_pinned_without_harm() -> None:
    memory = dense(2 * B)
    tokens = ids("ab")
    nodes = keep(memory, tokens, B, 2 * B)
    keep(memory, ids("c"), B)
    assert memory.node(nodes[1].id) is None
    memory.use(nodes)
    assert memory.pin(ONE, nodes) == B
    memory.validate()
    assert nodes[1].context() == tokens


# -- pins -------------------------------------------------------------------------------------------------


def test_a_pinned_path_stays_until_its_last_owner_lets_go() -> None:
    memory = dense(4 * B)
    nodes = keep(memory, ids("ab"), B, 2 * B)
    assert memory.pin(ONE, nodes) == 2 * B
    assert memory.pin(TWO, nodes[:1]) == B
    assert memory.pin(ONE, nodes) == 2 * B
    assert memory.pinned_bytes == 2 * B
    keep(memory, ids("c"), B)
    keep(memory, ids("de"), 2 * B)
    assert (length(memory, ids("ab")), length(memory, ids("c"))) == (2 * B, 100)
    memory.unpin(ONE)
    memory.unpin(ONE)
    memory.validate()
    assert memory.pinned_bytes == B
    keep(memory, ids("fgh"), 3 * B)
    assert length(memory, ids("ab")) == B
    memory.unpin(TWO)
    keep(memory, ids("ijkl"), 4 * B)
    assert memory.num_nodes == 1


def test_pins_take_at_most_half_of_the_budget() -> None:
    memory = dense(6 * B)
    nodes = keep(memory, ids("abcd"), *(B, 2 * B, 3 * B, 4 * B))
    assert memory.pin(ONE, nodes) == 3 * B
    assert memory.pin(TWO, nodes) == 3 * B
    (other,) = keep(memory, ids("x"), B)
    assert memory.pin(TWO, (other,)) == 0
    assert memory.pin(TWO, ()) == 0
    memory.unpin(ONE)
    assert memory.pin(SequenceId(3), (other,)) == 0
    memory.unpin(TWO)
    assert memory.pin(SequenceId(3), (other,)) == B
    memory.validate()


def test_pins_do_not_hold_more_than_half_of_a_smaller_budget() -> None:
    memory = dense(8 * B)
    older = keep(memory, ids("ab"), B, 2 * B)
    younger = keep(memory, ids("cd"), B, 2 * B)
    memory.pin(ONE, older)
    memory.pin(TWO, younger)
    memory.set_budget(6 * B)
    memory.validate()
    assert [node.num_pins for node in (*older, *younger)] == [1, 1, 1, 0]
    memory.set_budget(2 * B)
    memory.validate()
    assert [node.num_pins for node in (*older, *younger)] == [1, 0, 0, 0]
    memory.unpin(TWO)
    memory.unpin(ONE)
    memory.validate()


# -- erased scopes ----------------------------------------------------------------------------------------


def test_an_erased_scope_is_gone_pinned_or_not_and_takes_nothing_more() -> None:
    memory = dense()
    tokens = ids("ab", 20)
    nodes = keep(memory, tokens, B, 2 * B, 2 * B + 20)
    memory.pin(ONE, nodes[:2])
    keep(memory, tokens, B, scope=Z)
    memory.pin(ONE, memory.match(Z, tokens, at_most=B).path)  # type: ignore[union-attr]
    memory.forget(A)
    memory.forget(A)
    memory.validate()
    assert (memory.num_bytes, memory.pinned_bytes) == (B, B)
    assert [memory.node(node.id) for node in nodes] == [None] * 3
    assert length(memory, tokens) == 0
    assert memory.insert(A, tokens, part(tokens, 0, B), has_checkpoint=True) is None
    assert length(memory, tokens, scope=Z) == B
    memory.unpin(ONE)
    memory.validate()


def test_a_bounded_number_of_erased_scopes_is_remembered() -> None:
    memory = dense()
    memory.forget(A)
    for number in range(NUM_ERASED_REMEMBERED - 1):
        memory.forget(number.to_bytes(4, "little"))
    assert memory.insert(A, ids("a"), part(ids("a"), 0, B), has_checkpoint=True) is None
    memory.forget(Z)
    keep(memory, ids("a"), B)
    assert memory.insert(Z, ids("a"), part(ids("a"), 0, B), has_checkpoint=True) is None


# -- the cost of looking ----------------------------------------------------------------------------------


class CountedBytes(bytes):
    """A key that counts how often it is compared."""

    num_compared = 0

    def __lt__(self, other: object) -> bool:
        type(self).num_compared += 1
        return bytes.__lt__(self, other)  # type: ignore[operator]

    def __gt__(self, other: object) -> bool:
        type(self).num_compared += 1
        return bytes.__gt__(self, other)  # type: ignore[operator]


@pytest.fixture
def num_compared(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[CountedBytes]]:
    from runtime.worker import beginnings

    plain = beginnings.Beginnings.add
    monkeypatch.setattr(beginnings.Beginnings, "add", lambda self, key, value: plain(self, CountedBytes(key), value))
    CountedBytes.num_compared = 0
    yield CountedBytes
    CountedBytes.num_compared = 0


@pytest.mark.parametrize("memory", [dense(), hybrid()], ids=["dense", "hybrid"])
def test_looking_does_not_cost_more_for_each_entry(num_compared: type[CountedBytes], memory: PrefixMemory) -> None:
    """A thousand continuations of one prefix, all the same for a while."""
    keep(memory, ids("a"), B, state=True)
    for number in range(1000):
        tokens = TokenIds([*ids("a", 90), number])
        memory.insert(A, tokens, part(tokens, B, B + 91), has_checkpoint=True)
    num_compared.num_compared = 0
    asked = TokenIds([*ids("a", 90), 500, 1])
    assert length(memory, asked) == B + 91
    assert 0 < num_compared.num_compared < 100
    memory.validate()
