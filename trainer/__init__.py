"""The trainer: capture, score, loss, replay, reverse, step, recapture."""
