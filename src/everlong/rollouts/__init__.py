"""Running an agent on a task: renderers, the gateway session, harnesses, and the runner that makes an episode of it."""
