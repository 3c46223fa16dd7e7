"""Several engines behind one port: who takes a request, who is trusted, and the little that carries it out."""
