"""Learners of streams that are fed by files and pipes: what ``upgd learn`` does."""
