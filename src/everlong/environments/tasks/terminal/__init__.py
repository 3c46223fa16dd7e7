"""Terminal tasks made by the thousand: short instructions, real files, a verifier each, and an oracle of short commands.

Every task is a valid Harbor folder. The train split, held-out variants of the same kinds and held-out kinds never share an
instruction.
"""
