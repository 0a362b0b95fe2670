"""The prefix index: equal digests mean equal content, and one block per digest."""

from __future__ import annotations

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from polymux.core.cache.prefix import DIGEST_BYTES, LatestChain, PrefixIndex, chain_digests, root_digest

SIZE = 4
blocks = st.lists(st.integers(0, 2**31 - 1), min_size=SIZE, max_size=SIZE)


@given(blocks, blocks, st.binary(max_size=3), st.binary(max_size=3))
def test_digests_tell_content_apart(one: list[int], other: list[int], extra: bytes, more: bytes) -> None:
    """The same parent, tokens and extra give the same digest; anything else another one."""
    root = root_digest("model", "salt")
    [first], [second] = (
        chain_digests(root, one, SIZE, lambda _: extra),
        chain_digests(root, other, SIZE, lambda _: more),
    )
    assert (first == second) == ((one, extra) == (other, more))
    assert len(first) == DIGEST_BYTES


@given(blocks)
def test_a_digest_depends_on_everything_before(tokens: list[int]) -> None:
    assert chain_digests(root_digest("a"), tokens, SIZE) != chain_digests(root_digest("b"), tokens, SIZE)


@given(st.lists(blocks, max_size=4), st.lists(blocks, max_size=4), st.integers(0, SIZE - 1))
def test_digests_may_be_made_in_pieces(head: list[list[int]], tail: list[list[int]], rest: int) -> None:
    """A row that grows goes on where it stopped; what does not fill a block has no digest yet."""
    root = root_digest("a")
    head_tokens, tail_tokens = [*chain(*head)], [*chain(*tail), *[7] * rest]
    first = chain_digests(root, head_tokens, SIZE)
    second = chain_digests(first[-1] if first else root, tail_tokens, SIZE)
    assert first + second == chain_digests(root, head_tokens + tail_tokens, SIZE)
    assert len(first + second) == len(head) + len(tail)


@given(st.lists(st.tuples(st.sampled_from([b"", b"a"]), st.lists(st.integers(0, 1), max_size=5 * SIZE)), max_size=5))
def test_what_prompts_have_in_common_is_looked_at_once(
    prompts: list[tuple[bytes, list[int]]],
) -> None:
    latest = LatestChain()
    for root, tokens in prompts:
        assert latest.make(root, tokens, SIZE) == chain_digests(root, tokens, SIZE)


def test_parts_of_the_root_do_not_run_together() -> None:
    """A tenant cannot spell another's model and salt."""
    assert root_digest("ab", "c") != root_digest("a", "bc")


def test_the_first_block_of_a_digest_keeps_it() -> None:
    index = PrefixIndex()
    index.publish(b"x", 1)
    index.publish(b"x", 2)
    index.publish(b"y", 1)
    assert index.find(b"x") == 1
    assert index.find(b"y") is None
    assert 2 not in index
    index.forget(2)
    assert index.find(b"x") == 1
    index.forget(1)
    assert index.find(b"x") is None
    assert len(index) == 0


def test_a_chain_is_followed_up_to_the_first_missing_block() -> None:
    """What is indexed behind a gap belongs to a prefix that nobody has whole."""
    index = PrefixIndex()
    chain = chain_digests(b"", list(range(16)), 4)
    assert index.follow(chain) == []
    for block in (0, 1, 3):
        index.publish(chain[block], 10 + block)
    assert index.follow(chain) == [10, 11]
    assert index.follow(chain[:2]) == [10, 11]
    index.forget(10)
    assert index.follow(chain) == []
