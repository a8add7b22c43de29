"""Files to arrays. Types are recognised by their first bytes, sizes are read from headers before anything is decoded."""
