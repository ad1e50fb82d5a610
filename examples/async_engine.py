"""Transfers beside an engine's steps: submit, go on, drain when the event descriptor is readable.

python examples/async_engine.py
"""

import selectors

import numpy as np

import kvstore

SPEC = kvstore.BlockSpec(model="toy", dtype="float16", layers=4, kv_heads=8, head_dim=128)
REQUESTS = 8
BLOCKS = 10


def run_steps(store, selector, pending):
    """The engine's steps until the transfers in `pending` (by id) have ended, and their number."""
    steps = 0
    while pending:
        steps += 1  # a step of the model would run here
        if selector.select(timeout=0.01):
            for transfer in store.drain():
                result = transfer.wait()  # it is done: this only hands out the result, or raises
                assert result.ok, result
                del pending[transfer.id]  # from here on its memory is ours again
    return steps


def main():
    """Puts the KV of some requests and gets it back, all in the background."""
    rng = np.random.default_rng(0)
    shape = (BLOCKS, *SPEC.block_shape)
    with kvstore.open(SPEC, dram="64MiB") as store, selectors.DefaultSelector() as selector:
        selector.register(store.event_fd(), selectors.EVENT_READ)
        prompts = [[n] * BLOCKS * SPEC.block_tokens for n in range(REQUESTS)]
        keys = [store.keys(prompt) for prompt in prompts]
        made = [rng.standard_normal(shape).astype(np.float16) for _ in prompts]
        got = [np.empty_like(kv) for kv in made]

        puts = [store.put_async(*call) for call in zip(keys, made, strict=True)]
        print(f"{REQUESTS} puts in {run_steps(store, selector, {t.id: t for t in puts})} steps")
        gets = [store.get_async(*call) for call in zip(keys, got, strict=True)]
        print(f"{REQUESTS} gets in {run_steps(store, selector, {t.id: t for t in gets})} steps")
        for kv, back in zip(made, got, strict=True):
            assert kv.tobytes() == back.tobytes()
        print(f"{REQUESTS * BLOCKS} blocks came back byte for byte")


if __name__ == "__main__":
    main()
