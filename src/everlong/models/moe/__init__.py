"""The llama with a mixture of experts in every layer (Mixtral, arXiv:2401.04088): a router sends each token to a few of them."""
