"""What rooms say to each other: records, per-token columns, ports and errors. No torch; imports nothing of ours."""
