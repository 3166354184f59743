"""What every loader shares: order, workers, random states, samples of no use, cached folders."""
