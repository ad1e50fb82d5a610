"""Chains, namespaces and ranks: what a key reaches, and what it never reaches."""

import threading
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from builders import ANY, Bytes, block, blocks, is_block, names, opened

import kvstore
from kvstore import BlockSpec, Status

GEOMETRY: dict[str, Any] = {"layers": 2, "kv_heads": 2, "head_dim": 32}
TOKENS = list(range(100, 260))  # ten blocks of 16


def numbered(count: int, spec: BlockSpec, first: int = 0) -> Bytes:
    assert spec.block_bytes is not None
    return blocks(range(first, first + count), spec.block_bytes)


def test_only_full_blocks_are_matched() -> None:
    with opened() as store:
        assert store.put(store.keys(TOKENS[:100]), blocks(range(6), 512)).stored == 6
        for tokens, held in [(100, 6), (99, 6), (97, 6), (96, 6), (95, 5), (15, 0), (0, 0)]:
            keys = store.keys(TOKENS[:tokens])
            for skip in range(len(keys) + 1):
                match = store.match_prefix(keys, skip_blocks=skip)
                assert match.blocks == held - skip
                assert match.tokens == 16 * match.blocks
                assert match.by_node == {"local": match.blocks}
        assert store.match_prefix(store.keys([*TOKENS[:80], *range(20)])).blocks == 5


def test_reading_a_match_with_any_skip_gives_the_same_blocks() -> None:
    with opened() as store:
        keys = store.keys(TOKENS)
        assert store.put(keys, blocks(range(10), 3000)).ok
        for skip in range(11):
            got = np.zeros((10 - skip, 3000), np.uint8)
            with store.match_prefix(keys, skip_blocks=skip) as hit:
                assert hit.blocks == store.usage().leased_blocks == 10 - skip
                assert hit.read(list(got)).ok
            assert all(is_block(got[i], skip + i) for i in range(10 - skip))
            assert store.usage().leased_blocks == 0


def test_skipped_blocks_move_no_bytes() -> None:
    with opened() as store:
        keys = store.keys(TOKENS)
        result = store.put(keys, blocks(range(4, 10), 700), skip_blocks=4)
        assert (len(result), result.stored, result.parent_held) == (6, 6, False)
        assert store.exists(keys).tolist() == [False] * 4 + [True] * 6
        assert store.usage().bytes == 6 * 700
        assert store.match_prefix(keys).blocks == 0  # the head is not held
        assert store.match_prefix(keys, skip_blocks=4).blocks == 6
        got = np.zeros((6, 700), np.uint8)
        with store.match_prefix(keys, skip_blocks=4) as hit:
            assert hit.read(list(got)).ok
        assert all(is_block(got[i], 4 + i) for i in range(6))
        assert store.put(keys[:4], blocks(range(4), 700)).parent_held
        assert store.put(keys, blocks([9], 700), skip_blocks=9).parent_held


def test_shared_start_of_a_larger_block_is_no_match() -> None:
    spec = BlockSpec("m", block_bytes=4096, block_tokens=1152)
    shared = list(range(64))
    with opened(spec) as store:
        keys = store.keys(shared + [7] * 1088)
        assert store.put(keys, numbered(1, spec)).ok
        assert store.match_prefix(store.keys(shared + [8] * 1088)).blocks == 0
        assert store.match_prefix(keys).blocks == 1


@pytest.mark.parametrize(
    ("put_under", "asked_under"),
    [
        (BlockSpec("m", dtype="bfloat16", **GEOMETRY), BlockSpec("m", dtype="int8", **GEOMETRY)),
        (BlockSpec("m", layout="KV", **GEOMETRY), BlockSpec("m", layout="VK", **GEOMETRY)),
    ],
)
def test_other_dtype_same_tokens_is_a_miss(put_under: BlockSpec, asked_under: BlockSpec) -> None:
    with opened(put_under) as store, store.attach(asked_under) as other:
        keys, foreign = store.keys(TOKENS), other.keys(TOKENS)
        assert store.put(keys, numbered(10, put_under).view(np.uint8)).ok
        assert store.match_prefix(keys).blocks == 10
        for asked in (foreign, keys.array):  # nor by the bytes of the other namespace's keys
            assert other.match_prefix(asked).blocks == 0
            assert not other.exists(asked).any()
            out = np.zeros_like(numbered(10, asked_under))
            assert other.get(asked, out).count(Status.MISS) == 10
            assert not out.any()


def test_other_layout_of_equal_size_is_a_miss() -> None:
    specs = [BlockSpec("m", layout=layout, **GEOMETRY) for layout in ("", "KV", "VK")]
    assert len({spec.block_bytes for spec in specs}) == 1
    test_other_dtype_same_tokens_is_a_miss(specs[0], specs[1])
    test_other_dtype_same_tokens_is_a_miss(specs[1], specs[2])


def test_salted_keys_match_only_their_salt() -> None:
    tenant_a, tenant_b = (BlockSpec("m", block_bytes=64, tenant=t) for t in "AB")
    with opened(tenant_a) as store, store.attach(tenant_b) as other:
        held = store.keys(TOKENS, salt=b"A")
        assert store.put(held, numbered(10, tenant_a)).ok
        asked = [store.keys(TOKENS, salt=b"B"), store.keys(TOKENS), other.keys(TOKENS, salt=b"A")]
        for keys in [each.array for each in asked]:  # whoever asks for them
            assert store.match_prefix(keys).blocks == other.match_prefix(keys).blocks == 0
            assert not store.exists(keys).any()
            assert store.get(keys, np.zeros((10, 64), np.uint8)).count(Status.MISS) == 10
        assert other.list() == []
        assert {item.key for item in store.list()} == set(held)


def test_clear_empties_one_namespace_and_leaves_others() -> None:
    spec = BlockSpec("other", block_bytes=1000)
    with opened() as store, store.attach(spec) as other:
        old = store.keys(TOKENS)
        kept = other.keys(TOKENS)
        assert store.put(old, blocks(range(10), 1000)).ok
        assert other.put(kept, numbered(10, spec)).ok
        taken = store.usage().taken_bytes
        assert store.clear() == 2
        usage = store.usage()
        assert (usage.blocks, usage.bytes, usage.version) == (0, 0, 2)
        assert usage.taken_bytes == taken // 2
        assert store.match_prefix(old).blocks == 0
        assert store.list() == []
        got = np.zeros((10, 1000), np.uint8)
        assert other.get(kept, got).ok
        assert all(is_block(got[i], i) for i in range(10))
        with pytest.raises(kvstore.StaleKeys):
            store.put(old, blocks(range(10), 1000))
        assert store.put(store.keys(TOKENS), blocks(range(10), 1000, 1)).stored == 10


def sharded(spec: BlockSpec, world_size: int) -> list[BlockSpec]:
    return [spec.with_rank(rank, world_size) for rank in range(world_size)]


def test_match_over_ranks_is_the_shortest_of_them() -> None:
    specs = sharded(BlockSpec("m", layers=2, kv_heads=8, head_dim=32), 4)
    with opened(specs[0]) as first, ExitStack() as stack:
        stores = [first, *(stack.enter_context(first.attach(spec)) for spec in specs[1:])]
        for rank, store in enumerate(stores):
            assert store.put(store.keys(TOKENS), numbered(10, specs[rank], 100 * rank)).ok
        for store in stores:
            assert store.match_prefix(store.keys(TOKENS), ranks=4).blocks == 10
        assert stores[0].remove(stores[2].keys(TOKENS)[5:6]) == 1
        for rank, store in enumerate(stores):
            keys = store.keys(TOKENS)
            assert store.match_prefix(keys, ranks=4).blocks == 5
            assert store.match_prefix(keys, skip_blocks=2, ranks=4).blocks == 3
            assert store.match_prefix(keys).blocks == (5 if rank == 2 else 10)


def test_ranks_holding_different_blocks_match_their_common_run() -> None:
    specs = sharded(BlockSpec("m", block_bytes=100), 2)
    with opened(specs[0]) as store:
        for rank, held in enumerate([(0, 2), (0, 1)]):
            keys = store.keys(TOKENS[:48]).with_rank(rank, 2)
            for i in held:
                assert store.put(keys[i : i + 1], numbered(1, specs[rank], i)).ok
        assert store.match_prefix(store.keys(TOKENS[:48]), ranks=2).blocks == 1


def test_ranks_may_hold_shards_of_unequal_size() -> None:
    rows = [34, 33, 33]
    with opened(ANY.with_rank(0, 3)) as store:
        keys = store.keys(TOKENS)
        for rank, count in enumerate(rows):
            shards = blocks(range(10), 128 * count, rank)
            assert store.put(keys.with_rank(rank, 3), shards).ok
        assert store.match_prefix(keys, ranks=3).blocks == 10
        for rank, count in enumerate(rows):
            got = np.zeros((10, count, 128), np.uint8)
            assert store.get(keys.with_rank(rank, 3), got).ok
            assert all(is_block(got[i].ravel(), i, rank) for i in range(10))


# ---- versions, names, pins -----------------------------------------------------------------------


def test_keys_made_before_a_clear_are_stale_for_every_put() -> None:
    with opened() as store:
        old = store.keys(TOKENS)
        given = blocks(range(10), 100)
        store.clear()
        with pytest.raises(kvstore.StaleKeys, match="make them again"):
            store.put(old, given)
        with pytest.raises(kvstore.StaleKeys):
            store.put_async(old, given).wait(10)
        with pytest.raises(kvstore.StaleKeys), store.writing(old, block_bytes=100) as writing:
            writing.part(0, given)
        assert not store.exists(old).any()
        assert store.put(np.asarray(old), given).ok  # plain arrays carry no version
        assert store.match_prefix(old).blocks == 10  # and asking is never stale


def test_a_clear_between_writing_and_its_end_leaves_nothing() -> None:
    with opened() as store:
        writing = store.writing(["k"], block_bytes=100)
        writing.part(0, blocks([1], 100))
        store.clear()
        with pytest.raises(kvstore.StaleKeys):
            writing.commit()
        assert store.usage().slots == 0


def test_a_clear_during_writing_is_stale_for_held_blocks_too() -> None:
    with opened() as store:
        assert store.put(["k"], [block(1, 100)]).ok
        writing = store.writing(["k"], block_bytes=100)
        writing.part(0, blocks([1], 100))
        store.clear()
        with pytest.raises(kvstore.StaleKeys):
            writing.commit()
        assert not store.exists(["k"]).any()


def test_a_clear_in_one_handle_counts_for_all_of_its_namespace() -> None:
    with opened() as store, store.attach(ANY) as twin:
        assert store.put(["k"], [b"x"]).ok
        assert twin.exists(["k"]).all()
        old = twin.keys(TOKENS)
        store.clear()
        assert not twin.exists(["k"]).any()
        with pytest.raises(kvstore.StaleKeys):
            twin.put(old, blocks(range(10), 100))
        assert twin.keys(TOKENS).version == store.keys(TOKENS).version == 2


def test_keys_may_be_any_rows_of_32_bytes() -> None:
    rows = np.random.default_rng(1).integers(0, 256, (8, 32), np.uint8)
    forms = [rows, np.asfortranarray(rows), np.repeat(rows, 2, axis=0)[::2], kvstore.Keys(rows)]
    with opened() as store:
        for number, keys in enumerate(forms):
            put = store.put(keys[:4], blocks(range(4), 100), chain=False)
            assert put.stored == (4 if number == 0 else 0)
            assert store.exists(keys).tolist() == [True] * 4 + [False] * 4
        assert {item.key for item in store.list()} == {row.tobytes() for row in rows[:4]}


def test_names_are_listed_with_their_text() -> None:
    given: list[str | bytes] = ["a/b", "\u00e9", "e\u0301", "n\0ul", b"\xff\xfe", "x" * 512]
    with opened() as store:
        assert store.put(given, [b"x" * (i + 1) for i in range(6)], chain=False).ok
        chain = store.keys(TOKENS[:16])
        assert store.put(chain, [b"chain"]).ok
        assert store.pin(["a/b"]) == 1
        listed = {item.text: item for item in store.list()}
        assert {*listed} == {*given, None}
        assert [listed[text].length for text in given] == [1, 2, 3, 4, 5, 6]
        assert listed[None].key == chain[0]
        assert [text for text, item in listed.items() if item.pinned] == ["a/b"]
        assert store.exists(["\u00e9".encode(), "\u00e9", "e\u0301"]).all()
        assert store.remove(["\u00e9"]) == 1
        assert store.exists(["\u00e9", "e\u0301"]).tolist() == [False, True]


def test_pins_are_counted_and_end_with_the_block() -> None:
    with opened() as store:
        assert store.put(names(3), blocks(range(3), 100)).ok
        assert store.pin([*names(3), "absent"]) == 3
        assert store.pin(["b0", "b0"]) == 2
        assert store.usage().pinned_blocks == 3
        assert [store.unpin(["b0"]) for _ in range(5)] == [1, 1, 1, 0, 0]
        assert store.usage().pinned_blocks == 2
        assert store.unpin(["absent"]) == 0
        assert store.remove(["b1"]) == 1  # pinned or not
        assert store.usage().pinned_blocks == 1
        assert store.put(["b1"], [block(1, 100)]).ok
        assert store.unpin(["b1"]) == 0  # another block, never pinned
        store.clear()
        assert store.usage().pinned_blocks == 0
        assert store.unpin(["b2"]) == 0


def test_touch_and_prefetch_count_what_is_held() -> None:
    with opened() as store:
        assert store.put(names(4), blocks(range(4), 100)).ok
        assert store.touch(names(6)) == store.prefetch(names(6)) == 4
        assert (store.touch([]), store.prefetch([])) == (0, 0)


def test_readers_keep_what_they_lease_when_it_is_removed_and_put_again() -> None:
    with opened() as store:
        assert store.put(["k"], [block(1, 5000)]).ok
        with store.match_prefix(["k"]) as hit:
            assert store.remove(["k"]) == 1
            assert store.put(["k"], [block(1, 5000, generation=2)]).stored == 1
            got = np.zeros(5000, np.uint8)
            assert hit.read([got]).ok
            assert is_block(got, 1)
            assert store.get(["k"], [got]).ok
            assert is_block(got, 1, generation=2)
            assert store.usage().slots == 2
        assert store.usage().slots == 1


def test_wait_returns_when_the_last_key_is_put() -> None:
    with opened() as store:
        assert store.put(["b0"], [b"x"]).ok
        assert store.wait(["b0"], 0)
        assert not store.wait(names(2), 0.05)
        later = threading.Timer(0.1, store.put, (["b1"], [b"y"]))
        later.start()
        assert store.wait(names(2), 20)
        later.join()


def test_attach_shares_memory_and_closes_alone() -> None:
    with opened() as store:
        with store.attach(BlockSpec("other", block_bytes=None)) as other:
            assert other.put(["k"], [block(1, 1000)]).ok
            assert other.usage().blocks == 1
            assert store.usage().blocks == 0
            assert store.usage().slots == 1
        with pytest.raises(kvstore.StoreClosed):
            other.exists(["k"])
        with store.attach(BlockSpec("other", block_bytes=None)) as again:
            got = np.zeros(1000, np.uint8)
            assert again.get(["k"], [got]).ok  # blocks belong to the namespace, not the handle
            assert is_block(got, 1)
