"""Network definitions, shared by engine and trainer: one folder per family, one path from hidden state to logprob.

Tokens are flat: a model sees T tokens and their positions, and whoever calls it decides what attends to what. Importing
this package loads no torch; its modules do.
"""
