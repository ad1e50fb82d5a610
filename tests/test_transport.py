"""One suite for every way to a store: what is put is what is got, and each answer says what it is.

The same functions run in process, over shared memory, over TCP (IPv4, IPv6, a unix socket, a relay
that slows and splits the stream), and step by step with each step late. Whatever `kvstore.open`
does, `kvstore.connect` does too.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import pytest
from builders import ANY, MIB, Bytes, block, blocks, is_block, names
from ways import LATE, PLAIN, SEED, WAYS, Way

import kvstore
from kvstore import BlockSpec, Status

every_way = pytest.mark.parametrize("way", WAYS, indirect=True)
every_way_and_late = pytest.mark.parametrize("way", [*WAYS, *LATE], indirect=True)
plain_ways = pytest.mark.parametrize("way", PLAIN, indirect=True)

SIZES = (1, 63, 64, 65, 4095, 4096, 65535, 65536, 65537, MIB - 1, MIB, MIB + 1, 2 * MIB - 1)
POOL = 66 * MIB
LARGE = (2 * MIB, 2 * MIB + 1, 5 * MIB + 3)
TOKENS = list(range(100, 260))  # ten blocks of 16


def room_for(given: Any) -> list[Bytes]:
    return [np.full(len(each), 0xAB, np.uint8) for each in given]


# ---- sizes and batches ---------------------------------------------------------------------------


@every_way_and_late
def test_every_size_round_trips_at_odd_addresses(way: Way) -> None:
    with way.opened(dram=POOL) as store:
        for number, size in enumerate(SIZES if way.slow else SIZES + LARGE):
            memory = np.zeros(size + 3, np.uint8)
            memory[3:] = block(number, size)
            assert store.put([f"{size}"], [memory[3:]]).stored == 1
            memory[:] = 0
            around = np.full(size + 8, 0xAB, np.uint8)
            result = store.get([f"{size}"], [around[1 : 1 + size]])
            assert result.ok
            assert result.nbytes.tolist() == [size]
            assert is_block(around[1 : 1 + size], number)
            assert set(around[:1]) | set(around[1 + size :]) == {0xAB}


@plain_ways
def test_64_mib_round_trip(way: Way) -> None:
    size = 64 * MIB
    memory = block(1, size)
    with way.opened(dram=POOL) as store:
        assert store.put(["large"], [memory]).ok
        memory[:] = 0
        assert store.get(["large"], [memory]).nbytes.tolist() == [size]
        assert is_block(memory, 1)
        with store.match_prefix(["large"]) as hit:
            memory[:] = 0
            assert hit.read([memory]).ok
        assert is_block(memory, 1)


@cache
def mixed(count: int) -> tuple[list[int], Bytes]:
    """Sizes of blocks, and their bytes one after the other."""
    sizes = np.exp(np.random.default_rng(SEED).uniform(0, np.log(3000), count)).astype(int)
    sizes[count // 2] = 300_000  # more than goes in one message
    listed = [int(size) for size in sizes]
    return listed, np.concatenate([block(i, size) for i, size in enumerate(listed)])


def cut(flat: Bytes, sizes: list[int]) -> list[Bytes]:
    return np.split(flat, np.cumsum(sizes)[:-1])


@pytest.mark.parametrize("count", [1, 2, 100, 1000, 5000])
@every_way_and_late
def test_batches_of_mixed_sizes_keep_their_order(way: Way, count: int) -> None:
    sizes, flat = mixed(count)
    keys, given = names(count), cut(flat, sizes)
    with way.opened(dram=POOL) as store:
        assert store.put(keys, given).stored == count
        got = np.zeros_like(flat)
        assert store.get(keys, cut(got, sizes)).nbytes.tolist() == sizes
        assert np.array_equal(got, flat)
        got[:] = 0
        backwards = cut(got, sizes)[::-1]
        assert store.get(keys[::-1], backwards).nbytes.tolist() == sizes[::-1]
        assert np.array_equal(got, flat)
        assert store.put(keys, given).count(Status.EXISTS) == count
        got[:] = 0
        with store.match_prefix([*keys, "absent"]) as hit:
            assert hit.lengths == sizes
            assert hit.read(cut(got, sizes)).ok
        assert np.array_equal(got, flat)


@every_way
def test_a_large_batch_round_trips(way: Way) -> None:
    count = 8 if way.slow else 32
    with way.opened(dram=POOL) as store:
        assert store.put(names(count), blocks(range(count), MIB)).ok
        got = np.zeros((count, MIB), np.uint8)
        assert store.get(names(count), list(got)).ok
        assert all(is_block(got[i], i) for i in range(count))


# ---- what an answer says -------------------------------------------------------------------------


@every_way_and_late
@pytest.mark.parametrize("size", [100, 40_000, 200_000])
def test_duplicates_held_and_missing_mixed_in_one_batch(way: Way, size: int) -> None:
    with way.opened() as store:
        twice = store.put(["a", "b", "a"], [block(i, size) for i in range(3)])
        assert list(twice) == [Status.OK, Status.OK, Status.EXISTS]
        assert twice.ok
        mixed = store.put(["b", "c", "a", "d"], [block(i, size, 1) for i in range(4)])
        assert list(mixed) == [Status.EXISTS, Status.OK, Status.EXISTS, Status.OK]
        assert mixed.stored == 2
        asked = ["absent", "a", "b", "none", "c", "a", "d"]
        got = np.full((len(asked), size), 0xAB, np.uint8)
        result = store.get(asked, list(got))
        held = [False, True, True, False, True, True, True]
        assert list(result) == [Status.OK if each else Status.MISS for each in held]
        assert result.nbytes.tolist() == [size * each for each in held]
        assert result.blocks == 0
        assert is_block(got[1], 0)
        assert is_block(got[2], 1)  # the first writer's
        assert is_block(got[4], 1, 1)
        assert is_block(got[5], 0)
        assert is_block(got[6], 3, 1)
        assert (got[[0, 3]] == 0xAB).all()
        assert store.exists(asked).tolist() == held
        assert store.put([], []).ok
        assert store.get([], []).ok


@every_way_and_late
def test_a_target_that_is_too_small_gets_nothing(way: Way) -> None:
    for size in (1000, 200_000):
        with way.opened() as store:
            assert store.put(["a", "b"], blocks(range(2), size)).ok
            got = [np.full(size, 0xAB, np.uint8), np.full(size - 1, 0xAB, np.uint8)]
            with pytest.raises(kvstore.InvalidArgument, match=rf"target 1.*{size - 1}.*{size}"):
                store.get(["a", "b"], got)
            assert all((each == 0xAB).all() for each in got)
            larger = np.full(size + 10, 0xAB, np.uint8)
            assert store.get(["b"], [larger]).nbytes.tolist() == [size]
            assert is_block(larger[:size], 1)


@every_way
def test_a_chain_is_matched_and_skipped_by_its_leading_run(way: Way) -> None:
    with way.opened() as store:
        keys = store.keys(TOKENS)
        result = store.put(keys, blocks(range(4, 10), 700), skip_blocks=4)
        assert (result.stored, result.parent_held) == (6, False)
        assert store.match_prefix(keys).blocks == 0  # the head is not held
        assert store.match_prefix(keys, skip_blocks=4).blocks == 6
        assert store.put(keys[:4], blocks(range(4), 700)).parent_held
        assert store.put(keys, blocks([9], 700), skip_blocks=9).parent_held
        for skip in (0, 3, 10):
            got = np.zeros((10 - skip, 700), np.uint8)
            with store.match_prefix(keys, skip_blocks=skip) as hit:
                assert hit.blocks == store.usage().leased_blocks == 10 - skip
                assert hit.read(list(got)).ok
            assert hit.held
            assert all(is_block(got[i], skip + i) for i in range(10 - skip))
        assert store.remove(keys[6:7]) == 1
        assert store.match_prefix(keys).blocks == 6
        assert list(store.get(keys, room_for(blocks(range(10), 700)))).index(Status.MISS) == 6
        match = store.match_prefix(keys)
        assert match.tokens == 96
        assert list(match.by_node.values()) == [6]
        store.remove(keys[2:3])
        with match as hit:  # a match is a hint
            assert hit.blocks == 2


@every_way
def test_ranks_and_other_world_sizes_are_matched_and_read(way: Way) -> None:
    spec = BlockSpec("m", layers=2, kv_heads=4, head_dim=8, dtype="float32", block_tokens=16)
    ranks = [spec.with_rank(rank, 2) for rank in range(2)]
    assert spec.parts != ranks[0].parts
    with way.opened(spec) as store, store.attach(ranks[0]) as one, store.attach(ranks[1]) as two:
        size = ranks[0].block_bytes
        for rank, each in enumerate((one, two)):
            assert each.put(each.keys(TOKENS), blocks(range(10), size, rank)).ok
        assert one.match_prefix(one.keys(TOKENS), ranks=2).blocks == 10
        assert two.remove(two.keys(TOKENS)[7:8]) == 1
        assert one.match_prefix(one.keys(TOKENS), ranks=2).blocks == 7
        assert store.match_prefix(store.keys(TOKENS)).blocks == 0
        assert store.put(store.keys(TOKENS), blocks(range(10), 2 * size, 2)).ok
        array = np.asarray(store.keys(TOKENS))
        got = np.zeros((10, 2 * size), np.uint8)
        with one.match_prefix(array) as hit:  # put in parts of another size
            assert hit.lengths == [2 * size] * 10
            part = np.zeros((10, ranks[0].parts.part_bytes), np.uint8)
            with pytest.raises(kvstore.SpecMismatch, match="parts of 2048"):
                hit.read_part(0, part)
            assert list(hit.verify()) == [Status.OK] * 10
        assert store.get(array, got).ok
        assert all(is_block(got[i], i, 2) for i in range(10))


# ---- memories ------------------------------------------------------------------------------------


@every_way
def test_strided_arrays_and_pieces_round_trip(way: Way) -> None:
    whole = np.arange(4 * 64 * 128, dtype=np.uint16).reshape(4, 64, 128)
    shapes = {
        "transposed": lambda array: array.transpose(0, 2, 1),
        "every second": lambda array: array[:, :, ::2],
        "backwards": lambda array: array[::-1, :, ::-1],
    }
    with way.opened() as store:
        for name, shape in shapes.items():
            given = shape(whole)
            keys = names(4, name)
            assert store.put(keys, given).ok
            around = np.full(whole.shape, 0xABCD, np.uint16)
            target = shape(around)
            assert store.get(keys, target).ok
            assert np.array_equal(target, given)
            target[:] = 0xABCD
            assert (around == 0xABCD).all()  # neighbours were not touched
        given = block(1, 3 * MIB + 1)
        pieces = [given[:7], (given[7:].ctypes.data, 2 * MIB), b"", given[7 + 2 * MIB :]]
        assert store.put(["pieces"], [pieces]).ok
        got = np.zeros_like(given)
        into = [got[:MIB], (got[MIB:].ctypes.data, 5), got[MIB + 5 :]]
        assert store.get(["pieces"], [into]).ok
        assert is_block(got, 1)
        many = [[row[i : i + 1] for i in range(2000)] for row in blocks(range(3), 2000)]
        assert store.put(names(3, "bytes"), many).ok  # more pieces than one system call takes
        got = np.zeros((3, 2000), np.uint8)
        assert store.get(names(3, "bytes"), [[row[::-1][::-1]] for row in got]).ok
        assert all(is_block(got[i], i) for i in range(3))


@every_way
def test_blocks_written_and_read_in_parts_and_layers(way: Way) -> None:
    spec = BlockSpec("m", dtype="float16", layers=4, kv_heads=2, head_dim=64)
    size, part, layer = 32_768, 2048, 8192
    data = blocks(range(3), size).reshape(3, 4, 4, part)
    with way.opened(spec) as store:
        keys = store.keys(TOKENS[:48])
        assert store.put(keys[:1], data[:1]).ok
        with store.writing(keys) as writing:
            for number in range(4):
                writing.part(number, data[:, 0, number])
            for number in (3, 1):
                writing.layer(number, data[:, number])
            assert store.exists(keys).tolist() == [True, False, False]
            assert store.usage().granted_blocks == 2
            writing.layer(2, data[:, 2])
        assert list(writing.result) == [Status.EXISTS, Status.OK, Status.OK]
        got = np.zeros((3, size), np.uint8)
        assert store.get(keys, got).ok
        assert all(is_block(got[i], i) for i in range(3))
        with store.match_prefix(keys) as hit:
            assert store.remove(keys) == 3  # the lease keeps what it has
            for number in range(4):
                got = np.zeros((3, layer), np.uint8)
                assert hit.read_layer(number, got).nbytes.tolist() == [layer] * 3
                assert np.array_equal(got.reshape(3, 4, part), data[:, number])
            for number in range(16):
                got = np.zeros((3, part), np.uint8)
                assert hit.read_part(number, got).ok
                assert np.array_equal(got, data.reshape(3, 16, part)[:, number])
            got = np.full((3, size), 0xAB, np.uint8)
            assert list(hit.read(got, first=2)) == [Status.OK, Status.MISS, Status.MISS]
            assert is_block(got[0], 2)
        assert store.usage().slots == 0


@every_way
def test_a_writing_that_lacks_parts_or_is_given_up_leaves_nothing(way: Way) -> None:
    size = 5 * MIB // 2
    data = block(1, size)
    with way.opened() as store:
        with (
            pytest.raises(kvstore.InvalidArgument, match="2 of 3 parts"),
            store.writing(["k"], block_bytes=size) as writing,
        ):
            writing.part(1, [data[MIB : 2 * MIB]])
        with pytest.raises(IndexError), store.writing(["k"], block_bytes=size) as writing:
            raise IndexError
        writing = store.writing(["k"], block_bytes=size)
        writing.part(0, [data[:MIB]])
        del writing
        assert (store.usage().slots, store.exists(["k"]).any()) == (0, False)
        with store.writing(["k"], block_bytes=size) as writing:
            for part in (2, 0, 1):
                writing.part(part, [data[part * MIB : (part + 1) * MIB]])
            writing.part(0, [data[:MIB]])  # again
        got = np.zeros(size, np.uint8)
        assert store.get(["k"], [got]).ok
        assert is_block(got, 1)


# ---- one by one ----------------------------------------------------------------------------------


@every_way
def test_names_are_listed_pinned_touched_and_removed(way: Way) -> None:
    with way.opened() as store:
        texts = ["a", "ä" * 200, b"\xff\x00", "b" * 512]
        assert store.put(texts, [bytes([i]) * (i + 1) for i in range(4)]).ok
        assert store.put(np.full((1, 32), 7, np.uint8), [b"raw"]).ok
        assert store.pin(["a", "absent"]) == 1
        listed = {each.text: each for each in store.list()}
        assert set(listed) == {*texts, None}
        assert [listed[text].length for text in texts] == [1, 2, 3, 4]
        assert bytes(listed[None].key) == b"\x07" * 32
        assert [text for text in texts if listed[text].pinned] == ["a"]
        assert (store.touch([*texts, "absent"]), store.prefetch([*texts, "absent"])) == (4, 4)
        assert store.usage().pinned_blocks == 1
        assert store.unpin(texts) == 1
        assert store.unpin(texts) == 0
        assert store.wait(texts, 0)
        assert not store.wait(["absent"], 0.01)
        assert store.remove(["absent", *texts[:2]]) == 2
        usage = store.usage()
        assert (usage.blocks, usage.bytes, usage.slots, usage.pinned_blocks) == (3, 10, 3, 0)
        assert usage.pool_bytes == usage.capacity_bytes == 8 * MIB
        assert store.settle()


@every_way
def test_a_clear_makes_older_keys_stale(way: Way) -> None:
    with way.opened() as store:
        old = store.keys(TOKENS)
        assert old.version == store.usage().version
        for size in (100, 100_000):
            keys = store.keys(TOKENS)
            assert store.put(keys, blocks(range(10), size), chain=False).ok
            assert store.clear() == keys.version + 1
            assert store.match_prefix(keys).blocks == 0
            assert store.list() == []
            with pytest.raises(kvstore.StaleKeys, match="make them again"):
                store.put(keys, blocks(range(10), size))
            with pytest.raises(kvstore.StaleKeys), store.writing(keys, block_bytes=5) as writing:
                writing.part(0, [b"stale"] * 10)
            assert store.put(store.keys(TOKENS), blocks(range(10), size, 1)).stored == 10
            with store.match_prefix(keys) as hit:  # asking is never stale
                assert store.clear() == keys.version + 2
                got = np.zeros((10, size), np.uint8)
                assert hit.read(list(got)).ok  # leased before
                assert all(is_block(got[i], i, 1) for i in range(10))
        with pytest.raises(kvstore.StaleKeys):
            store.put(old, blocks(range(10), 100))


@every_way
def test_counters_count_what_was_asked_and_found(way: Way) -> None:
    with way.opened() as store:
        before = store.usage()
        assert store.put(names(5), blocks(range(5), 1000)).ok
        with store.match_prefix(names(8)) as hit:
            assert hit.read(room_for(blocks(range(5), 1000))).blocks == 5
        store.get(names(6), room_for(blocks(range(6), 1000)))
        store.remove(names(2))
        after = store.usage()
        grown = {
            name: getattr(after, name) - getattr(before, name)
            for name in ("requested", "hits", "commits", "removals", "evictions", "corrupt")
        }
        expected = {"requested": 14, "hits": 10, "commits": 5, "removals": 2}
        assert grown == {**expected, "evictions": 0, "corrupt": 0}


@every_way
def test_a_thousand_blocks_by_eight_threads_on_one_store(way: Way) -> None:
    count, threads, size = 1000, 8, 3000
    words = blocks(range(count), size)
    with way.opened(dram=POOL) as store, ThreadPoolExecutor(threads) as pool:

        def use(thread: int) -> int:
            equal = 0
            for number in range(thread, count, threads):
                assert store.put([f"{number}"], words[number][None]).stored == 1
                other = (number * 7) % (number + 1)  # whoever put it, or puts it yet
                got = np.zeros((2, size), np.uint8)
                result = store.get([f"{number}", f"{other}"], list(got))
                assert result[0] is Status.OK
                assert result[1] in (Status.OK, Status.MISS)
                equal += np.array_equal(got[0], words[number])
                assert result[1] is Status.MISS or np.array_equal(got[1], words[other])
            return equal

        assert sum(pool.map(use, range(threads))) == count
        assert store.usage().blocks == count


@every_way
def test_one_winner_when_many_put_the_same_keys(way: Way) -> None:
    writers, count, size = 4, 20, 5000
    with way.opened() as store, ThreadPoolExecutor(writers) as pool:
        for round_number in range(5):
            keys = names(count, f"{round_number}.")
            given = [blocks(range(count), size, writer) for writer in range(writers)]
            codes = np.stack([r.codes for r in pool.map(lambda b, k=keys: store.put(k, b), given)])
            assert ((codes == Status.OK).sum(axis=0) == 1).all()
            assert ((codes == Status.EXISTS).sum(axis=0) == writers - 1).all()
            got = np.zeros((count, size), np.uint8)
            assert store.get(keys, list(got)).ok
            for i, winner in enumerate((codes == Status.OK).argmax(axis=0)):
                assert is_block(got[i], i, int(winner))


@every_way
def test_wrong_calls_are_refused_alike(way: Way) -> None:
    with way.opened() as store:
        with pytest.raises(kvstore.BlockTooLarge, match="whole pool"):
            store.put(["k"], [np.zeros(8 * MIB + 1, np.uint8)])
        with pytest.raises(kvstore.BlockTooLarge):
            store.writing(["k"], block_bytes=1 << 39)
        with pytest.raises(kvstore.InvalidArgument, match="0 bytes"):
            store.put(["k"], [b""])
        with pytest.raises(kvstore.InvalidArgument, match="16 bytes"):
            store.redeem(b"short")
        with pytest.raises(kvstore.InvalidArgument):
            store.match_prefix(np.zeros((65537, 32), np.uint8))
        with store.attach(ANY) as other:
            assert other.transport == store.transport
        with pytest.raises(kvstore.StoreClosed):
            other.usage()
        assert store.usage().blocks == 0
