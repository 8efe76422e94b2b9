"""The SQL store: the source of truth for tasks, trajectories, rewards, steps and receipts."""
