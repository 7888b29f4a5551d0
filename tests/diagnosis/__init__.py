"""Sicknesses planted in real trainings, and what is said of them."""
