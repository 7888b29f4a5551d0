"""The live page: what a person sees of a run in a browser, rendered here and kept up to date by server-sent events."""
