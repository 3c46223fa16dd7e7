"""From turns to batches: the tree of an episode, credit, admission, packing. Numpy at most."""
