"""Learners on a stream, each sample predicted before it is learned (test-then-train)."""
