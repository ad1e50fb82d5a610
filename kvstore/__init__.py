"""A store for the KV cache of LLM inference: put, get, prefix match.

    import kvstore
    spec = kvstore.BlockSpec(model="llama-3-8b", layers=32, kv_heads=8, head_dim=128)
    with kvstore.open(spec, dram="4GiB") as store:
        keys = store.keys(token_ids)                 # a key names a block and all before it
        match = store.match_prefix(keys)             # how many leading blocks are held: a hint
        with match as hit:                           # leases: their memory is not reused
            held = hit.read(kv).blocks               # checked while it is copied
        ...                                          # compute the others, kv[held:]
        store.put(keys, kv[held:], skip_blocks=held)

`kvstore.connect(address, spec)` is the same store in a process of its own, a `kvstore node`.

How it is built, from the top down. Imports point down only.

    cli, sim                 the command line; traces and their replay; measurements
    node                     a node's process: options, signals, log
    store, hit, transfer     put / get / match_prefix; leases and views; background calls
    arguments                what callers pass → keys, block memories
    spec, keys               BlockSpec → namespace → keys of token blocks
    types, errors, config    values, exceptions, options
    _core (C++, cpp/)
      bindings*              arguments and results, nothing else
      transfers              background workers
      transport_local        put: reserve → write → commit; get: lookup → read → release
      node                   the clock, the threads, the waits
      session                grants and leases of one user of the node
      blocks, evict, policy  the table: what is held; room; who goes first
      pool, segment          slots in frames of 2 MiB; the memory itself
      copier, memory, crc32c, chain, sha256   copies with checksum; callers' memory; digests

What holds, always: a read returns exactly what was put under the key, or says why not. A key enters
the table by commit only. Memory under a lease is not reused. A parent is never evicted before its
child. Every wait has a deadline. `store.audit()` checks the accounts.
"""

import importlib.util

try:
    from kvstore import _core
except ImportError as error:
    if importlib.util.find_spec("kvstore._core") is not None:  # it is there, but does not load
        raise
    raise ImportError(
        f"{__path__[0]} is kvstore's source tree without its built extension: run from another "
        "folder, where the installed package is found, or `pip install -e .` in the tree",
        name="kvstore._core",
    ) from error
from kvstore.config import ConnectOptions, StoreOptions
from kvstore.errors import (
    AuditFailed,
    BlockTooLarge,
    BufferBusy,
    CannotListen,
    ForkedStore,
    InvalidArgument,
    KvstoreError,
    LeaseRevoked,
    NodeRefused,
    NodeUnavailable,
    NotEnoughMemory,
    SpecMismatch,
    StaleKeys,
    StoreClosed,
    ViewsRefused,
)
from kvstore.hit import Hit, Match, Writing
from kvstore.keys import Keys
from kvstore.spec import BlockSpec
from kvstore.store import Store, connect, open  # noqa: A004 - `kvstore.open` is the name
from kvstore.transfer import Transfer
from kvstore.types import BlockKey, GetResult, Listed, PutResult, Status, Usage

__version__: str = _core.__version__

__all__ = [
    "AuditFailed",
    "BlockKey",
    "BlockSpec",
    "BlockTooLarge",
    "BufferBusy",
    "CannotListen",
    "ConnectOptions",
    "ForkedStore",
    "GetResult",
    "Hit",
    "InvalidArgument",
    "Keys",
    "KvstoreError",
    "LeaseRevoked",
    "Listed",
    "Match",
    "NodeRefused",
    "NodeUnavailable",
    "NotEnoughMemory",
    "PutResult",
    "SpecMismatch",
    "StaleKeys",
    "Status",
    "Store",
    "StoreClosed",
    "StoreOptions",
    "Transfer",
    "Usage",
    "ViewsRefused",
    "Writing",
    "__version__",
    "connect",
    "open",
]
