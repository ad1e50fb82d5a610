"""An engine's loop: match a prompt, read what is held, compute the rest, put it. Checks every byte.

python examples/engine_loop.py
"""

import numpy as np

import kvstore

SPEC = kvstore.BlockSpec(model="toy", dtype="float16", layers=2, kv_heads=4, head_dim=64)
SYSTEM_PROMPT = list(range(1000, 1100))
QUESTIONS = (60, 90, 60, 120)  # tokens; requests of equal length ask the same


def prefill(token_ids, first, kv):
    """Stands for the model: fills `kv` from block `first` on. A block depends on all before it."""
    for i in range(first, len(kv)):
        seen = token_ids[: (i + 1) * SPEC.block_tokens]
        kv[i] = np.random.default_rng(seen).standard_normal(SPEC.block_shape)


def serve(store, token_ids):
    """Blocks reused and blocks of the prompt."""
    keys = store.keys(token_ids)
    kv = np.empty((len(keys), *SPEC.block_shape), np.float16)
    with store.match_prefix(keys) as hit:
        held = hit.read(kv).blocks  # the leading run that came back whole; the rest is untouched
    prefill(token_ids, held, kv)
    result = store.put(keys, kv[held:], skip_blocks=held)
    if not result.ok:  # no room, say: the next request computes these blocks again
        print(result)

    expected = np.empty_like(kv)
    prefill(token_ids, 0, expected)
    assert kv.tobytes() == expected.tobytes()
    return held, len(keys)


def main():
    """Serves four requests that share a system prompt."""
    with kvstore.open(SPEC, dram="64MiB") as store:
        for length in QUESTIONS:
            held, blocks = serve(store, SYSTEM_PROMPT + list(range(length, 2 * length)))
            print(f"{held} of {blocks} blocks reused")


if __name__ == "__main__":
    main()
