"""Diagnosis of a run from its flight files: loading, pure analysis, and findings in words."""
