"""Reading of flight files: every offset is checked, and a block is accepted only with a valid CRC."""
