"""torchobs for an image that lacks it: copied onto a volume of the pod, begun by the import of torch."""
