"""Windows on their way to a rank: by Ray Data actors, or by threads of the worker; same order, same bits."""
