"""Where an agent's commands run: one file per backend behind `contracts.ports.SandboxBackend`.

`local` runs commands on this machine in Linux namespaces, or without any where the machine refuses them; `scripted` keeps
files in memory and starts no process. `open_backend` chooses by config.
"""
