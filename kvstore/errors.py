"""Every exception `kvstore` raises on purpose.

A class exists only where a caller would do something different:

    KvstoreError
    ├── InvalidArgument (also ValueError)   the call is wrong; nothing was done
    │   ├── SpecMismatch                    an array's dtype or shape, or keys, of another spec
    │   └── BlockTooLarge                   a block that can never fit the pool
    ├── StaleKeys                           the namespace was cleared after the keys were made
    ├── StoreClosed                         the store (or the lease) was closed
    ├── ForkedStore                         a handle of the parent process used in a child
    ├── BufferBusy                          memory lent to a transfer that is not done
    ├── LeaseRevoked                        a lease ran out and its memory was needed
    ├── ViewsRefused                        too many bytes are held by views; `read` works
    ├── AuditFailed                         the store's own accounts disagree: a bug in it
    ├── NodeUnavailable                     the node cannot be reached; try again later
    ├── NodeRefused                         the node does not want this client; ask who runs it
    ├── CannotListen                        an address or a socket's path a node cannot have
    └── NotEnoughMemory (also MemoryError)  memory, cgroup or memlock too small at start

What can happen to one item of a batch is no exception but a `kvstore.Status`.
"""


class KvstoreError(Exception):
    """Base of all."""


class InvalidArgument(KvstoreError, ValueError):
    """The call is wrong; the message says what was, its value, and what to do. Nothing was done."""


class SpecMismatch(InvalidArgument):
    """Bytes of one format, or keys of one namespace, offered where the spec says another."""


class BlockTooLarge(InvalidArgument):
    """A block larger than the whole pool, or than the limit on blocks."""


class StaleKeys(KvstoreError):
    """The namespace was cleared after these keys were made; make them again with `store.keys`."""


class StoreClosed(KvstoreError):
    """The store or the lease was closed before."""


class ForkedStore(KvstoreError):
    """The handle belongs to the parent process; open a store of your own in the child."""


class BufferBusy(KvstoreError):
    """The memory is lent to a transfer that is not done; wait for it or use other memory."""


class LeaseRevoked(KvstoreError):
    """The lease passed its deadline and its memory was needed; match again."""


class ViewsRefused(KvstoreError):
    """Views hold as many bytes as they may (`view_fraction`); use `read`, or close views."""


class AuditFailed(KvstoreError):
    """Table, allocator and counts disagree. A bug in the store: please report it."""


class NodeUnavailable(KvstoreError):
    """The node cannot be reached, or the connection was lost; try again later."""


class NodeRefused(KvstoreError):
    """The node, or this client, refused: wrong token, no version in common, no such namespace, too
    many connections, stopping. The message says which.
    """


class CannotListen(KvstoreError):
    """A node cannot listen there: an address in use, a port without permission, a bad path."""


class NotEnoughMemory(KvstoreError, MemoryError):
    """The machine, the cgroup or the limit on locked memory is too small for the pool."""
