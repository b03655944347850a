"""Seeded simulation of the safety contract: the product's pure cores, driven by discrete events in virtual time.

Everything that a seed does follows from the seed: one PRNG, one thread, no clock, no I/O. The parties run the real
cores (lease holder, borrower, prover, quarantine, lease table, staleness, what etcd's keys mean); engines, memory,
network, NIXL and etcd are models, and the judge stands outside and knows which bytes each block should hold.

    python -m tests.sim --seeds 1000              all must be clean
    python -m tests.sim --seeds 1000 --replicas    the same, every seed with replicas on a store
    python -m tests.sim --seeds 300 --break no_quarantine    must be caught
"""
