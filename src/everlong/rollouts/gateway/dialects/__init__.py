"""What agents speak: bytes of a request to messages, an answer or a refusal to bytes. No server, no session.

How a turn is sampled comes from the run. A body's own sampling settings and its model name are accepted and not used; what
would change the shape or the meaning of the answer is refused by name.
"""
