"""What there is to say of a run: one judgement and one narrator for the page, `top`, `inspect` and `torchobs run`."""
