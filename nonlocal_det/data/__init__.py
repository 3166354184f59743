"""What every loader shares: order, workers, random states, samples that cannot be used, cached folders."""
