"""What everlong is measured against: Hugging Face `generate` and TRL's GRPO trainer, in an environment of their own.

`environment` keeps it, `process` talks to a peer, and the two scripts run in that environment and import nothing of ours.
"""
