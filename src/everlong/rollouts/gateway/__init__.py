"""Between a harness and an engine: sessions that keep every token, and an HTTP server that speaks a known dialect."""
