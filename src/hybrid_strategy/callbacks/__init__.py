"""Lightning callbacks: progress, throughput, metrics."""
