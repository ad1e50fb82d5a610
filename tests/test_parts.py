"""Blocks written and read in parts and layers, hits read in pieces, and tickets.

The spec: 4 layers of 2 heads, a part of 2 KiB is one head's K or V, so 4 parts a layer, 16 a block.
"""

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from builders import ANY, MIB, Bytes, block, blocks, is_block, names, opened

import kvstore
from kvstore import BlockSpec, InvalidArgument, Status

SPEC = BlockSpec("m", dtype="float16", layers=4, kv_heads=2, head_dim=64)
SIZE, PART, LAYER = 32_768, 2048, 8192
TOKENS = list(range(48))  # three blocks


def given() -> Bytes:
    """(3, 4 layers, 4 parts, 2048)"""
    assert (SPEC.block_bytes, SPEC.parts.part_bytes, SPEC.parts.count(SIZE)) == (SIZE, PART, 16)
    return blocks(range(3), SIZE).reshape(3, 4, 4, PART)


def stored(store: kvstore.Store, keys: Any) -> bool:
    got = np.zeros((3, SIZE), np.uint8)
    return store.get(keys, got).ok and all(is_block(got[i], i) for i in range(3))


# ---- writing -------------------------------------------------------------------------------------


def test_layers_written_in_any_order_appear_together_at_the_end() -> None:
    data = given()
    with opened(SPEC) as store:
        keys = store.keys(TOKENS)
        with store.writing(keys) as writing:
            for layer in (2, 0, 3, 1):
                assert not store.exists(keys).any()
                assert store.match_prefix(keys).blocks == 0
                assert store.usage().granted_blocks == 3
                writing.layer(layer, data[:, layer])
            assert writing.result is None
        assert writing.result is not None
        assert writing.result.stored == 3
        assert stored(store, keys)


def test_parts_and_layers_may_be_mixed() -> None:
    data = given()
    with opened(SPEC) as store:
        keys = store.keys(TOKENS)
        with store.writing(keys) as writing:
            for part in range(4):
                writing.part(part, data[:, 0, part])
            writing.layer(1, [(row.ctypes.data, LAYER) for row in data[:, 1]])
            writing.layer(2, [[row[:1000], row[1000:]] for row in data[:, 2].reshape(3, LAYER)])
            writing.layer(3, data[:, 3].view(np.float16))
        assert stored(store, keys)


def test_missing_parts_leave_nothing() -> None:
    data = given()
    with opened(SPEC) as store:
        keys = store.keys(TOKENS)
        writing = store.writing(keys)
        for part in range(7):
            writing.part(part, data.reshape(3, 16, PART)[:, part])
        writing.layer(3, data[:, 3])
        with pytest.raises(InvalidArgument, match=r"5 of 16 parts were not written \(first: 7\)"):
            writing.__exit__(None, None, None)
        assert writing.result is None
        assert not store.exists(keys).any()
        assert store.usage().slots == 0
        with pytest.raises(InvalidArgument, match="16 of 16"), store.writing(keys):
            pass
        assert store.usage().slots == 0


def test_an_exception_in_the_with_leaves_nothing_and_goes_on() -> None:
    data = given()
    with opened(SPEC) as store:
        keys = store.keys(TOKENS)
        layers = [data[:, 0], data[:, 1], data[:, 2]]
        with pytest.raises(IndexError), store.writing(keys) as writing:  # noqa: PT012 - within
            for layer in range(4):
                writing.layer(layer, layers[layer])
        assert (writing.result, store.usage().slots) == (None, 0)
        assert not store.exists(keys).any()
        with store.writing(keys) as writing:
            writing.layer(0, data[:, 0])
            writing.abort()
            with pytest.raises(kvstore.StoreClosed):
                writing.layer(1, data[:, 1])
        assert (writing.result, store.usage().slots) == (None, 0)
        writing.abort()  # again is no error


def test_a_dropped_writing_leaves_nothing() -> None:
    with opened(SPEC) as store:
        writing = store.writing(store.keys(TOKENS))
        writing.layer(0, given()[:, 0])
        assert store.usage().granted_blocks == 3
        del writing
        assert store.usage().granted_blocks == store.usage().slots == 0


def test_blocks_held_already_are_passed_over() -> None:
    data = given()
    with opened(SPEC) as store:
        keys = store.keys(TOKENS)
        assert store.put(keys[:1], data[:1]).ok
        with store.writing(keys) as writing:
            assert store.usage().granted_blocks == 2
            wrong = data.copy()
            wrong[0] = 0  # is not looked at
            for layer in range(4):
                writing.layer(layer, wrong[:, layer])
            assert store.put(keys[1:2], data[1:2]).stored == 1  # another is quicker
        assert writing.result is not None
        assert list(writing.result) == [Status.EXISTS, Status.EXISTS, Status.OK]
        assert stored(store, keys)
        with store.writing(keys, skip_blocks=1) as writing:
            for layer in range(4):
                writing.layer(layer, data[1:, layer])
        assert list(writing.result) == [Status.EXISTS] * 2
        assert writing.result.parent_held


def test_a_part_of_a_wrong_form_is_refused_and_can_be_written_again() -> None:
    data = given()
    with opened(SPEC) as store:
        keys = store.keys(TOKENS)
        with store.writing(keys) as writing:
            for part in (-1, 16, 1.0, True, "0"):
                with pytest.raises(InvalidArgument, match=r"parts 0 to 15"):
                    writing.part(part, data[:, 0, 0])
            for layer in (-1, 4, None):
                with pytest.raises(InvalidArgument, match=r"layers 0 to 3"):
                    writing.layer(layer, data[:, 0])
            wrong: list[Any] = [data[:2, 0], data[:, 0, :3], data[:, 0].view("f4"), b"", None]
            for blocks_given in wrong:
                with pytest.raises(InvalidArgument):
                    writing.layer(0, blocks_given)
            for layer in range(4):
                writing.layer(layer, data[:, layer])
        assert stored(store, keys)


def test_opaque_blocks_have_parts_of_a_mebibyte_and_no_layers() -> None:
    size = 5 * MIB // 2
    data = block(1, size)
    with opened() as store:
        with pytest.raises(InvalidArgument, match="block_bytes"):
            store.writing(["k"])
        with store.writing(["k"], block_bytes=size) as writing:
            for part in (2, 0, 1):
                writing.part(part, [data[part * MIB : (part + 1) * MIB]])
            with pytest.raises(InvalidArgument, match="no layers"):
                writing.layer(0, [data])
        with store.match_prefix(["k"]) as hit:
            with pytest.raises(InvalidArgument, match="no layers"):
                hit.read_layer(0, [data])
            for part in range(3):
                expected = data[part * MIB : (part + 1) * MIB]
                got = np.zeros(len(expected), np.uint8)
                result = hit.read_part(part, [got])
                assert result.nbytes.tolist() == [len(expected)]
                assert np.array_equal(got, expected)
    with (
        opened(BlockSpec("fixed", block_bytes=10)) as store,
        pytest.raises(InvalidArgument, match="spec says 10"),
    ):
        store.writing(["k"], block_bytes=11)


def test_a_writing_without_room_stores_a_leading_run() -> None:
    data = blocks(range(6), 2 * MIB)
    with opened() as store:
        with store.writing(names(6), block_bytes=2 * MIB, timeout=0.01) as writing:
            for part in range(2):
                writing.part(part, data[:, part * MIB : (part + 1) * MIB])
        assert writing.result is not None
        assert list(writing.result) == [Status.OK] * 4 + [Status.OUT_OF_SPACE] * 2
        assert "pool full" in writing.result.message
        got = np.zeros((4, 2 * MIB), np.uint8)
        assert store.get(names(4), got).ok
        assert all(is_block(got[i], i) for i in range(4))


@pytest.mark.parametrize("how", ["commit", "abort", "close"])
def test_ending_while_another_thread_writes_never_tears_a_block(how: str) -> None:
    parts, versions = 48, [np.full(MIB, fill, np.uint8) for fill in (7, 8)]
    spec = BlockSpec("torn", block_bytes=parts * MIB)

    def write_all(writing: kvstore.Writing, part: Bytes) -> None:
        for number in range(parts):
            writing.part(number, [part])

    with opened(dram=64 * MIB) as other, ThreadPoolExecutor(1) as pool:
        for _ in range(5):
            store = other.attach(spec)
            writing = store.writing(["k"])
            write_all(writing, versions[0])
            rewriting = pool.submit(write_all, writing, versions[1])
            time.sleep(0.002)
            end = {"commit": writing.commit, "abort": writing.abort, "close": store.close}[how]
            with contextlib.suppress(InvalidArgument):  # "still writing": then nothing was done
                end()
            assert isinstance(rewriting.exception(30), kvstore.StoreClosed | None)
            if how != "close" and store.exists(["k"]).any():
                assert store.get(["k"], [np.zeros(parts * MIB, np.uint8)], timeout=10).ok
            writing.abort()
            store.close()
            with other.attach(spec) as again:
                again.clear()
            assert other.usage().slots == 0


# ---- reading a hit -------------------------------------------------------------------------------


def test_parts_and_layers_are_read_under_one_lease() -> None:
    data = given()
    with opened(SPEC) as store:
        keys = store.keys(TOKENS)
        assert store.put(keys, data).ok
        with store.match_prefix(keys) as hit:
            assert store.remove(keys) == 3  # the lease keeps what it has
            for layer in range(4):
                got = np.zeros((3, LAYER), np.uint8)
                result = hit.read_layer(layer, got)
                assert result.nbytes.tolist() == [LAYER] * 3
                assert np.array_equal(got.reshape(3, 4, PART), data[:, layer])
            for part in range(16):
                got = np.zeros((3, PART), np.uint8)
                assert hit.read_part(part, got.view(np.float16)).ok
                assert np.array_equal(got, data.reshape(3, 16, PART)[:, part])
            got = np.full((2, PART), 0xAB, np.uint8)
            assert hit.read_part(5, got).blocks == 2  # of the first two blocks
            with pytest.raises(InvalidArgument, match=r"layers 0 to 3"):
                hit.read_layer(4, got)
            with pytest.raises(InvalidArgument, match=r"parts 0 to 15"):
                hit.read_part(16, got)


def test_a_hit_is_read_from_any_block_into_less_or_more_room() -> None:
    with opened(SPEC) as store:
        keys = store.keys(TOKENS)
        assert store.put(keys, given()).ok
        with store.match_prefix(keys) as hit:
            assert (hit.blocks, hit.tokens, hit.lengths) == (3, 48, [SIZE] * 3)
            for first in range(4):
                for room in range(5):
                    got = np.full((room, SIZE), 0xAB, np.uint8)
                    result = hit.read(got, first=first)
                    read = min(room, 3 - first)
                    assert list(result) == [Status.OK] * read + [Status.MISS] * (room - read)
                    assert result.nbytes.tolist() == [SIZE] * read + [0] * (room - read)
                    assert all(is_block(got[i], first + i) for i in range(read))
                    assert (got[read:] == 0xAB).all()
            for flat in (bytearray(4 * SIZE), np.zeros(2 * SIZE, np.float16)):
                assert hit.read(flat).blocks == 3
                assert is_block(memoryview(flat).cast("B")[SIZE : 2 * SIZE], 1)
    with opened() as store:
        assert store.put(["k"], [b"x"]).ok
        with store.match_prefix(["k"]) as hit, pytest.raises(InvalidArgument, match="list"):
            hit.read(bytearray(1))  # of how many blocks of what size?


def test_a_hit_may_be_shorter_than_its_match() -> None:
    with opened(SPEC) as store:
        keys = store.keys(TOKENS)
        assert store.put(keys, given()).ok
        match = store.match_prefix(keys)
        assert store.remove(keys[1:2]) == 1
        with match as hit:
            assert (match.blocks, hit.blocks) == (3, 1)
            with pytest.raises(InvalidArgument, match="entered already"):
                match.__enter__()
        with match as hit:  # after it was left it can be entered again
            assert hit.blocks == 1


# ---- tickets -------------------------------------------------------------------------------------


def test_a_ticket_leases_the_same_blocks_for_another_handle() -> None:
    with opened(SPEC) as store, store.attach(SPEC.with_rank(0, 1)) as worker:
        keys = store.keys(TOKENS)
        assert store.put(keys, given()).ok
        with store.match_prefix(keys, skip_blocks=1) as hit:
            ticket = hit.ticket()
            assert len(ticket) == 16
            assert hit.ticket() == ticket
            redeemed = worker.redeem(ticket)
            assert redeemed is not None
            assert store.usage().leased_blocks == 4
        assert store.remove(keys) == 3
        assert store.usage().leased_blocks == 2  # each side releases its own
        with redeemed as mine:
            got = np.zeros((2, SIZE), np.uint8)
            assert mine.read(got).ok
            assert is_block(got[0], 1)
            assert is_block(got[1], 2)
            again = store.redeem(mine.ticket())  # one of its own
            assert again is not None
        assert store.usage().slots == 2
        assert again.close()
        assert store.usage().slots == 0


def test_a_ticket_dies_with_its_lease_and_its_namespace() -> None:
    with opened() as store, store.attach(BlockSpec("other", block_bytes=None)) as other:
        assert store.put(["k"], [b"x"]).ok
        with store.match_prefix(["k"]) as hit:
            ticket = hit.ticket()
            assert other.redeem(ticket) is None  # another namespace's
            assert store.redeem(bytes(16)) is None
            assert store.redeem(ticket[:-1] + bytes([ticket[-1] ^ 1])) is None
        assert store.redeem(ticket) is None
    with opened(lease_s=0.01) as store:
        assert store.put(["k"], [bytes(8 * MIB)]).ok
        with store.match_prefix(["k"]) as hit:
            ticket = hit.ticket()
            time.sleep(0.02)
            assert store.put(["new"], [bytes(8 * MIB)], timeout=10).ok  # revokes it
            assert store.redeem(ticket) is None
        assert hit.held is False


def test_tickets_are_never_equal() -> None:
    with opened(ANY) as store:
        assert store.put(["k"], [b"x"]).ok
        hits = [store.match_prefix(["k"]).__enter__() for _ in range(200)]
        assert len({hit.ticket() for hit in hits}) == 200
        assert all(hit.close() for hit in hits)
