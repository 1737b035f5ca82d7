"""What the operating system gives: files, processes, threads, logs."""
