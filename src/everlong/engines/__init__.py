"""Token ids in, token ids out: a scripted engine (the fake that ships, no torch) and one embedded in the worker.

Invariants: what is answered is exactly what was sampled, nothing appended and nothing cut; a token's random number is
named by run, episode, turn and position, so a request's tokens depend on no neighbour; every token carries the version
that sampled it; keys and values of one version never serve another's prompt. Importing this package loads no torch.
"""
