"""What every layer puts out, at level extreme: statistics by layer."""
