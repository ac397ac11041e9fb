"""Ordinary supervised work as evidence for defaults: tasks, runs of them, what follows."""
