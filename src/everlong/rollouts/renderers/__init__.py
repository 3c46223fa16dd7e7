"""Between messages and token ids. A prompt is rendered once; afterwards only what is new is ever encoded."""
