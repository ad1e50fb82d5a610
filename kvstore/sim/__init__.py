"""Workloads and their replay: traces read or made, driven through a real store, every byte checked.

`workload` is pure (requests and payloads as values); `replay` is the shell that owns a store,
clocks and threads; `bench` measures transfers beside what the machine allows.
"""
