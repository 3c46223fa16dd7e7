"""A vLLM server behind the engine port: requests, versions and the server's life on our side, one plugin inside vLLM.

`engine` is the port, `protocol` turns records into HTTP bodies and back (pure), `client` sends them, `server` starts the
process and `launcher` keeps it from outliving us; `restarts` decides when a lost server is started again (pure). `plugin`
alone is imported by vLLM, in an environment of its own, and is the one place that imports it. No torch elsewhere.
"""
