"""One file per command of `longstraw`; see `longstraw_agents.cli`."""
