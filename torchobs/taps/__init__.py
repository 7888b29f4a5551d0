"""Each seam of torch, touched once."""
