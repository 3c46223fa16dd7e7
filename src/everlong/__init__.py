"""everlong trains language-model agents by online reinforcement learning when one episode lasts hours."""

__version__ = "0.1.0"
