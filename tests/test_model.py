"""Random calls against a dict: whatever is got is what was put, and nothing held is ever missing.

Two namespaces share a pool of 8 MiB; blocks have 1 byte to 3 MB. Eviction may take what nobody
holds, so the dict says which bytes a key has *if* it is held; what is pinned, leased or viewed must
be. The store's own accounts are checked after every step. Nothing drawn depends on what the store
answered, as that may differ from run to run.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from builders import ANY, MIB, Bytes, assert_idle, block
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

import kvstore
from kvstore import BlockSpec, Status

WORDS = block(1, 8 * MIB)
POOL = 8 * MIB
VIEW_SHARE = 3 * MIB

Name = tuple[int, str]  # namespace, text

SPACES = st.integers(0, 1)
TEXTS = st.sampled_from([f"k{i}" for i in range(5)])
CHAINS = st.lists(TEXTS, min_size=1, max_size=5)  # a key may come twice
EDGES = [1, 63, 64, 65, 4096, 65_536, MIB - 1, MIB, 2 * MIB - 1, 2 * MIB, 2 * MIB + 1, 3_000_000]
SMALL = st.one_of(st.integers(1, 300), st.integers(1, 300_000))
SIZES = st.one_of(SMALL, SMALL, st.sampled_from(EDGES))
PICK = st.integers(0, 7)  # of a list, modulo its length


@dataclass(frozen=True)
class Content:
    """A slice of words at a place of its own: every put gets another one."""

    size: int
    place: int

    @property
    def data(self) -> Bytes:
        return WORDS[self.place : self.place + self.size]


@dataclass(eq=False)
class Held:
    """An open hit and what it shows."""

    hit: kvstore.Hit
    names: list[Name]
    contents: list[Content]
    views: list[list[memoryview]] | None = None
    arrays: list[Any] = field(default_factory=list)


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        first = kvstore.open(
            ANY, dram=POOL, view_fraction=VIEW_SHARE / POOL, timeout_s=0.02, lease_s=3600
        )
        self.stores = [first, first.attach(BlockSpec("other", block_bytes=None))]
        assert first.settle()
        self.known: dict[Name, Content] = {}  # what a key has, if it is held
        self.pins: Counter[Name] = Counter()
        self.hits: list[Held] = []
        self.left: list[Held] = []  # closed, but arrays made from their views are alive
        self.writing: tuple[kvstore.Writing, Name, Content, bool] | None = None
        self.num_puts = 0
        self.num_evictions = 0

    def teardown(self) -> None:
        for held in self.hits:
            self.leave(held)
        self.hits.clear()
        self.left.clear()
        if self.writing:
            self.writing[0].abort()
        for name, count in self.pins.items():
            for _ in range(count):
                assert self.stores[name[0]].unpin([name[1]]) == 1
        for store in self.stores:
            assert_idle(store)
        for store in self.stores:
            store.close()

    # ---- the model

    def new_content(self, size: int) -> Content:
        self.num_puts += 1
        return Content(size, self.num_puts * 7919 % (len(WORDS) - size))

    def must_be_held(self, name: Name) -> bool:
        if name not in self.known:
            return False
        leased = any(
            (name, self.known[name]) in zip(held.names, held.contents, strict=True)
            for held in self.hits + self.left
        )
        return leased or self.pins[name] > 0

    def anything_held(self) -> bool:
        return bool(self.pins.total() or self.hits or self.left or self.writing)

    def forget(self, name: Name) -> None:
        self.known.pop(name, None)
        self.pins.pop(name, None)

    def check_put(self, names: list[Name], given: list[Content], result: Any, chain: bool) -> None:
        allowed = {Status.OK, Status.EXISTS, Status.OUT_OF_SPACE, Status.CANCELLED}
        refused = False
        for name, content, status in zip(names, given, result, strict=True):
            assert status in allowed
            if status is Status.OK:
                assert not self.must_be_held(name)
                assert not (chain and refused)
                self.known[name] = content
                self.pins.pop(name, None)
            elif status is Status.EXISTS:
                assert name in self.known
            else:
                refused = True
        if len(names) == 1 and not self.anything_held():
            assert not refused, result

    def check_get(self, names: list[Name], out: list[Bytes], result: Any) -> None:
        for i, (name, status) in enumerate(zip(names, result, strict=True)):
            if status is Status.OK:
                content = self.known[name]
                assert result.nbytes[i] == content.size
                assert np.array_equal(out[i], content.data)
            else:
                assert status in (Status.MISS, Status.CANCELLED)
                assert status is Status.CANCELLED or not self.must_be_held(name)
                assert result.nbytes[i] == 0

    def targets(self, names: list[Name]) -> list[Bytes]:
        return [
            np.zeros(self.known[name].size if name in self.known else 5, np.uint8) for name in names
        ]

    # ---- put and get

    @rule(space=SPACES, texts=CHAINS, sizes=st.lists(SMALL, min_size=5, max_size=5))
    def put_chain(self, space: int, texts: list[str], sizes: list[int]) -> None:
        self.put(space, texts, sizes, chain=True)

    @rule(space=SPACES, texts=CHAINS, sizes=st.lists(SIZES, min_size=5, max_size=5))
    def put_apart(self, space: int, texts: list[str], sizes: list[int]) -> None:
        self.put(space, texts, sizes, chain=False)

    def put(self, space: int, texts: list[str], sizes: list[int], *, chain: bool) -> None:
        given = [self.new_content(size) for size in sizes[: len(texts)]]
        data = [content.data for content in given]
        result = self.stores[space].put(texts, data, chain=chain)
        self.check_put([(space, text) for text in texts], given, result, chain)

    @rule(space=SPACES, texts=CHAINS)
    def get(self, space: int, texts: list[str]) -> None:
        names = [(space, text) for text in texts]
        out = self.targets(names)
        self.check_get(names, out, self.stores[space].get(texts, out))

    @rule(
        space=SPACES,
        puts=st.lists(st.tuples(TEXTS, SIZES, st.booleans()), max_size=3, unique_by=lambda p: p[0]),
        gets=st.lists(st.tuples(TEXTS, st.booleans()), max_size=3),
    )
    def in_the_background(
        self, space: int, puts: list[tuple[str, int, bool]], gets: list[tuple[str, bool]]
    ) -> None:
        """Puts in one namespace beside gets of the other, some of them cancelled."""
        store, other = self.stores[space], self.stores[1 - space]
        putting, getting = [], []
        for text, size, cancel in puts:
            content = self.new_content(size)
            transfer: Any = store.put_async([text], [content.data], timeout=0.05)
            putting.append(([(space, text)], [content], transfer))
            if cancel:
                transfer.cancel()
        for text, cancel in gets:
            names = [(1 - space, text)]
            out = self.targets(names)
            transfer = other.get_async([text], out, timeout=10)
            getting.append((names, out, transfer))
            if cancel:
                transfer.cancel()
        for names, out, transfer in getting:
            self.check_get(names, out, transfer.wait(10))
        for names, given, transfer in putting:
            result = transfer.wait(10)
            assert len(result) == 1
            if len(puts) > 1 or result[0] is Status.CANCELLED:  # then room may be short for a while
                self.check_put([*names] * 2, [*given] * 2, [result[0], Status.OUT_OF_SPACE], True)
            else:
                self.check_put(names, given, result, True)
        assert {transfer.id for transfer in store.drain()} == set()

    @rule(space=SPACES, text=TEXTS, size=SIZES, commit=st.booleans())
    def begin_or_end_writing(self, space: int, text: str, size: int, commit: bool) -> None:
        if self.writing is not None:
            self.end_writing(commit)
            return
        known_before = (space, text) in self.known
        writing = self.stores[space].writing([text], block_bytes=size)
        self.writing = writing, (space, text), self.new_content(size), known_before

    def end_writing(self, commit: bool) -> None:
        assert self.writing is not None
        writing, name, content, known_before = self.writing
        self.writing = None
        for start in reversed(range(0, content.size, MIB)):
            writing.part(start // MIB, [content.data[start : start + MIB]])
        if not commit:
            writing.abort()
            return
        with suppress(kvstore.StaleKeys):  # it was cleared meanwhile
            result = writing.commit()
            if result[0] is Status.EXISTS:  # at the beginning, or by now
                assert known_before or name in self.known
            else:
                self.check_put([name], [content], result, True)

    # ---- one by one

    def counted(self, names: list[Name], call: Callable[[Any], int]) -> int:
        """A call that counts what is held; checks the bounds, and gives the count."""
        count = call([text for _, text in names])
        least = sum(self.must_be_held(name) for name in names)
        assert least <= count <= sum(name in self.known for name in names)
        return count

    @rule(
        space=SPACES, text=TEXTS, call=st.sampled_from(["pin", "pin", "unpin", "touch", "remove"])
    )
    def one_by_one(self, space: int, text: str, call: str) -> None:
        store, name = self.stores[space], (space, text)
        if call == "pin":
            self.pins[name] += self.counted([name], store.pin)
        elif call == "unpin":
            pinned = self.pins[name] > 0
            assert store.unpin([text]) == pinned
            self.pins[name] -= pinned
        elif call == "touch":
            self.counted([name, name, (space, "k0")], store.touch)
        else:
            self.counted([name], store.remove)
            self.forget(name)

    @rule(space=SPACES, dice=st.integers(0, 3))
    def clear(self, space: int, dice: int) -> None:
        if dice < 3:  # seldom, or there is never much to see
            return
        self.stores[space].clear()
        for name in [name for name in self.known if name[0] == space]:
            self.forget(name)

    # ---- leases and views

    @rule(space=SPACES, texts=CHAINS, skip=st.sampled_from([0, 0, 0, 1, 2]))
    def match(self, space: int, texts: list[str], skip: int) -> None:
        if len(self.hits) == 3:
            return
        skip = min(skip, len(texts))
        match = self.stores[space].match_prefix(texts, skip_blocks=skip)
        hit = match.__enter__()
        names = [(space, text) for text in texts[skip:]]
        run = [self.must_be_held(name) for name in [*names, (space, "never put")]].index(False)
        assert run <= hit.blocks <= len(names)
        contents = [self.known[name] for name in names[: hit.blocks]]
        assert hit.lengths == [content.size for content in contents]
        self.hits.append(Held(hit, names[: hit.blocks], contents))

    @rule(pick=PICK, call=st.sampled_from(["read", "view", "view", "leave", "keep array"]))
    def use_a_hit(self, pick: int, call: str) -> None:
        if not self.hits:
            return
        held = self.hits[pick % len(self.hits)]
        if call == "read":
            out = [np.zeros(content.size, np.uint8) for content in held.contents]
            assert held.hit.read(out).ok
            for got, content in zip(out, held.contents, strict=True):
                assert np.array_equal(got, content.data)
            assert set(held.hit.verify()) <= {Status.OK}
        elif call == "view":
            self.view(held)
        else:
            self.hits.remove(held)
            if call == "keep array" and held.views:
                held.arrays = [np.frombuffer(view, np.uint8) for view in held.views[0]]
                self.left.append(held)
            self.leave(held)

    def view(self, held: Held) -> None:
        mine = sum(content.size for content in held.contents)
        fits = held.views is not None or self.view_bytes() + mine <= VIEW_SHARE
        try:
            held.views = held.hit.views()
        except kvstore.ViewsRefused:
            assert not fits
            return
        assert fits
        for extents, content in zip(held.views, held.contents, strict=True):
            assert b"".join(extents) == content.data.tobytes()

    @rule(pick=PICK)
    def drop_array(self, pick: int) -> None:
        if self.left:
            self.left.pop(pick % len(self.left))

    def leave(self, held: Held) -> None:
        held.views = None
        with suppress(BufferError):
            held.hit.close()
            assert not held.arrays
        assert held.hit.held

    def view_bytes(self) -> int:
        return sum(
            content.size
            for held in self.hits + self.left
            for content in held.contents
            if held.views is not None or held.arrays
        )

    # ---- always

    @invariant()
    def accounts_agree(self) -> None:
        first = self.stores[0]
        assert first.settle()
        first.audit()
        usage = first.usage()
        open_hits = self.hits + self.left
        assert usage.leased_blocks == sum(len(held.contents) for held in open_hits)
        assert usage.view_bytes == self.view_bytes() <= usage.view_bytes_max
        assert usage.pinned_blocks == sum(count > 0 for count in self.pins.values())
        assert usage.granted_blocks <= 1
        assert usage.taken_bytes + usage.free_bytes <= usage.capacity_bytes == POOL
        assert usage.corrupt == 0

    @invariant()
    def what_is_held_is_there(self) -> None:
        num_gone = 0
        for space, store in enumerate(self.stores):
            names = [name for name in self.known if name[0] == space]
            held = store.exists([text for _, text in names])
            there = {name for name, is_held in zip(names, held, strict=True) if is_held}
            assert there >= {name for name in names if self.must_be_held(name)}
            listed = {(space, str(item.text)): item for item in store.list()}
            assert set(listed) == there
            for name, item in listed.items():
                assert item.length == self.known[name].size
                assert item.pinned == (self.pins[name] > 0)
            for name in set(names) - there:  # evicted: it may be put again with other bytes
                self.forget(name)
                num_gone += 1
        evictions = self.stores[0].usage().evictions
        assert num_gone <= evictions - self.num_evictions  # nothing else takes a block away
        self.num_evictions = evictions

    @invariant()
    def arrays_keep_their_words(self) -> None:
        for held in self.left:
            assert b"".join(held.arrays) == held.contents[0].data.tobytes()


def run(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        StoreMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.timeout(600)  # a failure takes its time to shrink
def test_store_agrees_with_a_dict() -> None:
    run(examples=120, steps=50)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_store_agrees_with_a_dict_for_long() -> None:
    run(examples=3000, steps=80)
