"""Device kernels. Nothing here is imported unless it is used."""
