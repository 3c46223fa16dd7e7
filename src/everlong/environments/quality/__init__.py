"""Gates that a task must pass before it teaches: the oracle scores 1 and an empty run 0, every time."""
