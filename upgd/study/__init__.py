"""Studies: runs are planned, executed by one runner, selected and forecast."""
