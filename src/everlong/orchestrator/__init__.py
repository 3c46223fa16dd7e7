"""Who works on what with which policy version: decisions as pure state machines, and the thin loop that carries them out.

The orchestrator reaches engines, trainer and models through ports only, so the control process runs without torch.
"""
