"""Agent loops. A harness talks to a session and a sandbox and says why it stopped."""
