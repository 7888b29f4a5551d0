"""Traces a loss or gradient that is not finite to the operator, parameter or input where it was born."""
