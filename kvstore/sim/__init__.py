"""Workloads and their replay: traces read or made, driven through a real store, every byte checked.

`workload` and `checkers` are pure (requests and payloads as values). `client` sends them to a
store; `replay` has an embedded one, `processes` a node and clients in processes of their own.
`bench` measures transfers beside what the machine allows.
"""
