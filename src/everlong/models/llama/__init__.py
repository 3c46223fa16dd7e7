"""The llama family: RMSNorm, rotary positions, grouped-query attention, SwiGLU (Touvron et al. 2023, arXiv:2302.13971)."""
