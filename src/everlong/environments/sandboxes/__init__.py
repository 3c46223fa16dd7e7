"""Where an agent's commands run: one file per backend behind `contracts.ports.SandboxBackend`.

`local` runs commands on this machine in Linux namespaces, or without any where the machine refuses them; `gvisor` gives every
sandbox a kernel of its own and can put it on disk, processes included; `scripted` keeps files in memory and starts no process.
`pool` stands before a backend and lets more sandboxes live than fit into memory. `open_backend` chooses by config.
"""
