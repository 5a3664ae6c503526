"""Who does the work: processes of this machine, or the workers of a Dask or Ray cluster."""
