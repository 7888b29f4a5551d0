"""torch.compile: compilations, recompilations and graph breaks."""
