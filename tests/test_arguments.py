"""What callers pass by mistake or in another form: read as meant, or refused with what to do."""

import asyncio
import os
import pickle
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import ANY, blocks, is_block, opened

import kvstore
from kvstore import BlockKey, BlockSpec, InvalidArgument, Keys, SpecMismatch, Status

GEOMETRY: dict[str, Any] = {"layers": 2, "kv_heads": 4, "head_dim": 32}
TOKENS = list(range(48))  # three blocks of 16
SPEC = BlockSpec("m", dtype="float16", **GEOMETRY)
SHAPE = (2, 2, 4, 16, 32)
SIZE = SPEC.block_bytes or 0


# ---- single keys ---------------------------------------------------------------------------------


def test_single_keys_are_keys_wherever_keys_are_taken() -> None:
    with opened(SPEC) as store:
        keys = store.keys(TOKENS)
        for single in (list(keys), tuple(keys), [keys[0], keys[1], keys[2]], [*keys[:2], keys[-1]]):
            assert store.put(single, blocks(range(3), SIZE)).ok
            assert store.match_prefix(single).blocks == 3
            out = np.zeros((3, SIZE), np.uint8)
            assert store.get(single, out).ok
            assert all(is_block(out[i], i) for i in range(3))
            assert store.usage().blocks == 3
        listed = [each.key for each in store.list()]
        assert set(listed) == set(keys)
        assert store.exists(listed).all()
        assert [each.text for each in store.list()] == [None] * 3
        assert store.remove(listed) == 3


def test_plain_bytes_of_32_are_a_name() -> None:
    with opened(SPEC) as store:
        keys = store.keys(TOKENS)
        assert store.put(keys, blocks(range(3), SIZE)).ok
        assert not store.exists([bytes(key) for key in keys]).any()


def test_single_keys_and_names_do_not_mix() -> None:
    with opened() as store:
        key = store.keys(TOKENS)[0]
        for mixed in ([key, "name"], ["name", key], [key, bytes(key)]):
            with pytest.raises(
                InvalidArgument, match="1 of 2 keys are BlockKeys, the others names"
            ):
                store.exists(mixed)


def test_a_single_key_is_its_32_bytes() -> None:
    with opened() as store:
        key = store.keys(TOKENS)[0]
    assert isinstance(key, BlockKey)
    assert key == bytes(key)
    assert repr(key) == f"BlockKey({key.hex()})"
    copy = pickle.loads(pickle.dumps(key))
    assert (copy, type(copy)) == (key, BlockKey)
    for bad in (b"", bytes(31), bytes(33), "x" * 32, 32):
        with pytest.raises(InvalidArgument, match="a key is 32 bytes"):
            BlockKey(bad)


def test_one_key_where_several_belong_is_refused_with_the_slice_to_pass() -> None:
    with opened(SPEC) as store:
        keys = store.keys(TOKENS)
        with pytest.raises(InvalidArgument, match=r"keys are one BlockKey.*pass keys\[i:i\+1\]"):
            store.put(keys[0], np.zeros(SHAPE, np.float16))
        assert store.put(keys[0:1], np.zeros((1, *SHAPE), np.float16)).ok


@pytest.mark.parametrize("name", ["short", b"\x00\xff", "x" * 500, b"\xff" * 500, "\\" * 39])
def test_one_name_is_shown_whole_or_not_at_all(name: Any) -> None:
    with opened() as store, pytest.raises(InvalidArgument) as raised:
        store.exists(name)
    assert str(raised.value).endswith((f", [{name!r}]", ", [name]"))


# ---- rows of keys --------------------------------------------------------------------------------


def test_keys_are_indexed_as_arrays_are() -> None:
    with opened(SPEC) as store:
        keys = store.keys(TOKENS)
        picked = Keys(keys.array[[0, 2]], keys.version)
        for index in ([0, 2], np.array([0, 2]), np.array([True, False, True]), [True, False, True]):
            assert keys[index] == picked
            assert keys[index].namespace_id == SPEC.namespace_id
        assert len(keys[[]]) == 0
        assert keys[np.int64(1)] == keys[1] == keys[-2]
        assert isinstance(keys[np.int64(1)], BlockKey)
        for outside in (3, -4, [3]):
            with pytest.raises(IndexError):
                keys[outside]


def test_keys_of_another_spec_are_refused() -> None:
    other = BlockSpec("another", dtype="float16", **GEOMETRY)
    with opened(SPEC) as store, store.attach(other) as stranger:
        keys = stranger.keys(TOKENS)
        forms = [keys, keys[:2], keys[[0, 1]], Keys(keys), pickle.loads(pickle.dumps(keys))]
        for foreign in [*forms, keys.with_rank(1, 2)]:
            with pytest.raises(SpecMismatch, match=r"another spec.*store.keys\(ids\)"):
                store.match_prefix(foreign)
        assert not store.exists(keys.array).any()  # an array is of no spec
        assert not stranger.exists(keys).any()


def test_ranks_share_their_keys() -> None:
    with opened(SPEC.with_rank(0, 2)) as store, store.attach(SPEC.with_rank(1, 2)) as sibling:
        keys = store.keys(TOKENS)
        assert not sibling.exists(keys).any()
        assert sibling.put(keys.with_rank(1, 2), blocks(range(3), SIZE // 2)).ok
        assert store.exists(sibling.keys(TOKENS)).all()


# ---- shapes --------------------------------------------------------------------------------------


def calls_with(store: Any, keys: Keys) -> list[Callable[[Any], object]]:
    def read(out: Any) -> object:
        with store.match_prefix(keys) as hit:
            return hit.read(out)

    return [
        lambda given: store.put(keys, given),
        lambda given: store.put_async(keys, given).wait(10),
        lambda given: store.get(keys, given),
        lambda given: store.get_async(keys, given).wait(10),
        read,
    ]


@pytest.mark.parametrize(
    "shape", [(2, 2, 16, 4, 32), (2, 2, 2, 32, 32), (2, 2, 4, 32, 16), (2, 2, 4, 16, 16)]
)
def test_blocks_of_another_shape_are_refused_with_both_shapes(shape: tuple[int, ...]) -> None:
    with opened(SPEC) as store:
        keys = store.keys(TOKENS)
        assert store.put(keys, blocks(range(3), SIZE)).ok
        for call in calls_with(store, keys):
            given = np.zeros((3, *shape), np.float16)
            for form in (given, list(given)):
                with pytest.raises(SpecMismatch) as raised:
                    call(form)
                assert ", ".join(map(str, shape)) in str(raised.value)
                assert ", ".join(map(str, SHAPE)) in str(raised.value)
                assert "layout=" in str(raised.value)


def test_flat_blocks_and_views_of_the_shape_are_taken() -> None:
    with opened(SPEC) as store:
        keys = store.keys(TOKENS)
        flat = blocks(range(3), SIZE)
        shaped = flat.view(np.float16).reshape(3, *SHAPE)
        tokens_first = np.ascontiguousarray(shaped.transpose(0, 1, 2, 4, 3, 5))
        forms = [flat, flat.view(np.float16), shaped, shaped.reshape(3, 4, -1), flat.reshape(-1)]
        forms += [shaped.view(np.uint8), tokens_first.transpose(0, 1, 2, 4, 3, 5)]
        for form in [*forms, list(shaped), list(flat), [each.tobytes() for each in flat]]:
            assert store.put(keys, form).stored == 3
            out = np.zeros_like(shaped)
            assert store.get(keys, out).ok
            assert np.array_equal(out.view(np.uint8).reshape(3, -1), flat)
            store.remove(keys)


def test_a_named_layout_has_any_shape() -> None:
    spec = BlockSpec("m", dtype="float16", layout="token, head", **GEOMETRY)
    with opened(spec) as store:
        given = np.zeros((3, 2, 2, 16, 4, 32), np.float16)
        assert store.put(store.keys(TOKENS), given).ok


# ---- what to do instead --------------------------------------------------------------------------


def test_token_ids_given_as_keys_are_told_from_keys() -> None:
    with opened() as store:
        for ids in (TOKENS, tuple(TOKENS), range(9), np.array(TOKENS), [np.int32(7)], 7):
            with pytest.raises(InvalidArgument, match=r"token ids\?.*store\.keys\(ids\)"):
                store.match_prefix(ids)


def test_too_few_sources_hint_at_skipping() -> None:
    with opened(SPEC) as store:
        keys = store.keys(TOKENS)
        for few in (blocks(range(2), SIZE), list(blocks(range(2), SIZE)), bytes(2 * SIZE)):
            with pytest.raises(InvalidArgument, match=r"skip_blocks=match\.blocks"):
                store.put(keys, few)
            assert store.put(keys, few, skip_blocks=1).ok
        for many in (blocks(range(4), SIZE), bytes(4 * SIZE)):
            with pytest.raises(InvalidArgument, match=r"expected 3") as raised:
                store.put(keys, many)
            assert "skip_blocks" not in str(raised.value)
        with pytest.raises(InvalidArgument, match="expected 3") as raised:
            store.get(keys, np.zeros((2, SIZE), np.uint8))
        assert "skip_blocks" not in str(raised.value)


@pytest.mark.parametrize("size", ["1GB", "4 gb", "512M", "1.5TB", "8k"])
def test_decimal_units_are_refused_with_the_binary_one(size: str) -> None:
    unit = size.lstrip("0123456789. ")
    with pytest.raises(InvalidArgument, match=f"{unit} is not accepted.*{unit[0].upper()}iB"):
        kvstore.open(ANY, dram=size)


def test_what_holds_no_tokens_is_told_what_to_pass() -> None:
    with opened() as store:
        for nothing in (iter(TOKENS), None, 7, (token for token in TOKENS), {1, 2}):
            with pytest.raises(InvalidArgument, match="pass a list or array of integers"):
                store.keys(nothing)


# ---- matches -------------------------------------------------------------------------------------


def test_a_match_is_told_from_a_hit() -> None:
    with opened() as store:
        match: Any = store.match_prefix(["k"])
        for call in ("read", "views", "ticket", "read_layer"):
            with pytest.raises(AttributeError, match=rf"with match as hit: hit\.{call}\(\.\.\.\)"):
                getattr(match, call)
        with pytest.raises(AttributeError, match=r"hit\.lengths`"):
            match.lengths  # noqa: B018 - reading it is what raises
        with pytest.raises(AttributeError, match="no attribute 'surprise'"):
            match.surprise  # noqa: B018 - reading it is what raises


def test_a_match_is_entered_by_a_plain_with() -> None:
    async def enter(match: Any) -> None:
        async with match:
            pass

    with opened() as store, pytest.raises(TypeError, match="use plain `with match as hit`"):
        asyncio.run(enter(store.match_prefix(["k"])))


def test_matches_of_opaque_blocks_count_no_tokens() -> None:
    with opened() as store:
        assert store.put(["k"], [b"x"]).ok
        assert repr(store.match_prefix(["k"])) == "Match(1 blocks)"
    with opened(SPEC) as store:
        assert repr(store.match_prefix(store.keys(TOKENS))) == "Match(0 blocks, 0 tokens)"


# ---- statuses ------------------------------------------------------------------------------------


def test_statuses_are_their_names_and_true_where_nothing_is_left_to_do() -> None:
    assert f"{Status.MISS} {Status.OUT_OF_SPACE!s:>14}" == "miss   out_of_space"
    assert [str(status) for status in Status] == [status.name.lower() for status in Status]
    assert [status for status in Status if status] == [Status.OK, Status.EXISTS]


def test_results_have_no_truth_of_their_own() -> None:
    with opened() as store:
        assert store.put(["b", "c"], [b"xx"] * 2, chain=False).blocks == 2
        put = store.put(["a", "b"], [b"x", b"xx"])
        assert (put.ok, put.blocks, put.stored) == (True, 2, 1)
        got = store.get(["a", "absent"], [bytearray(1), bytearray(1)])
        assert (got.ok, got.blocks) == (False, 1)
        for result in (put, got):
            with pytest.raises(TypeError, match=r"use \.ok \(all\) or \.blocks \(leading run\)"):
                bool(result)


# ---- the source tree -----------------------------------------------------------------------------


def import_without_extension(folder: Path, extension: bytes | None) -> str:
    shutil.copytree(
        Path(kvstore.__file__).parent, folder / "kvstore", ignore=shutil.ignore_patterns("*.so")
    )
    if extension is not None:
        (folder / f"kvstore/_core{sysconfig.get_config_var('EXT_SUFFIX')}").write_bytes(extension)
    command = [sys.executable, "-c", "import kvstore"]
    environment = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


def test_a_source_tree_without_its_extension_says_so(tmp_path: Path) -> None:
    said = import_without_extension(tmp_path, None)
    assert said.startswith(f"ImportError: {tmp_path / 'kvstore'} is kvstore's source tree without")
    assert "run from another folder" in said
    assert "pip install -e ." in said


def test_an_extension_that_does_not_load_says_why(tmp_path: Path) -> None:
    said = import_without_extension(tmp_path, b"no library")
    assert "ImportError" in said
    assert "source tree" not in said
