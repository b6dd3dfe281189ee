"""What every layer uses and that imports nothing of it: clocks, the compiled core, documents, threads, calls."""
