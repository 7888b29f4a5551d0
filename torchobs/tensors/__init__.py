"""The user's tensors, models and batches, read without waiting and without harm."""
