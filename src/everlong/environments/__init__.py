"""What the agent faces: tasks, the sandboxes its commands run in, and the grading of what it leaves behind."""
